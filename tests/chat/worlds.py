"""Tiny real tokenizers and the folders of models around them, as transformers 4 and 5 lay them out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

TEXTS = ["How many are 2 and 3?", "That makes 5.", "user assistant system hello world", "Ünï çödé 你好 🙂"] * 3
BASIC = ("<s>", "</s>", "<pad>")
NEEDED = {
    "control": ("<|user|>", "<|assistant|>"),
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
}


def tokenizer(*extra: str | AddedToken) -> Tokenizer:
    """A byte-level BPE whose last ids are the extra special tokens."""
    built = Tokenizer(models.BPE())
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    built.train_from_iterator(
        TEXTS,
        trainers.BpeTrainer(vocab_size=300, special_tokens=list(BASIC), initial_alphabet=alphabet, show_progress=False),
    )
    for token in extra:
        if isinstance(token, AddedToken):
            built.add_tokens([token])
        else:
            built.add_special_tokens([token])
    return built


def length(built: Tokenizer) -> int:
    return built.get_vocab_size(with_added_tokens=True)


def folder(path: Path, built: Tokenizer, style: int = 5, rows: int | None = None, **changes: dict[str, Any]) -> Path:
    """A model folder without weights.

    Args:
        path: where.
        made: its tokenizer.
        style: 4 or 5, the major version of transformers that might have written it.
        rows: vocab_size of the config, by default that of the tokenizer.
        changes: to `config`, `generation` and `tokenizer_config`; a value of None deletes a key.
    """
    path.mkdir(parents=True)
    built.save(str(path / "tokenizer.json"))
    files: dict[str, dict[str, Any]] = {
        "config": {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": rows or length(built),
            "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
            "num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 1,
        },
        "generation": {"_from_model_config": True, "bos_token_id": 0, "eos_token_id": 1},
        "tokenizer_config": {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"} | STYLES[style],
    }  # fmt: skip
    if style == 4:
        decoder = {str(number): vars_of(token) for number, token in sorted(built.get_added_tokens_decoder().items())}
        files["tokenizer_config"] |= {"added_tokens_decoder": decoder, "chat_template": "{{ messages[0]['content'] }}"}
    for name, settings in files.items():
        values = {key: value for key, value in (settings | changes.get(name, {})).items() if value is not None}
        file = path / {"generation": "generation_config.json"}.get(name, f"{name}.json")
        file.write_text(json.dumps(values, indent=2) + "\n")
    return path


STYLES: dict[int, dict[str, Any]] = {
    4: {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False},
    5: {"tokenizer_class": "TokenizersBackend", "backend": "tokenizers"},
}


def vars_of(token: AddedToken) -> dict[str, Any]:
    names = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
    return {name: getattr(token, name) for name in names}


def entry(special: bool) -> dict[str, dict[str, Any]]:
    return {"700": vars_of(AddedToken("<new>", special=special))}


OUTSIDE: list[tuple[str, dict[str, Any]]] = [
    ("tokenizer_config.json", {"additional_special_tokens": ["<new>"]}),
    ("tokenizer_config.json", {"extra_special_tokens": ["<new>"]}),
    ("tokenizer_config.json", {"extra_special_tokens": {"image_token": "<new>"}}),
    ("tokenizer_config.json", {"mask_token": {"__type": "AddedToken", **entry(True)["700"]}}),
    ("tokenizer_config.json", {"added_tokens_decoder": entry(True)}),
    ("tokenizer_config.json", {"added_tokens_decoder": entry(False)}),
    ("tokenizer_config.json", {"added_tokens_decoder": entry(False), "unk_token": "<new>"}),
    ("special_tokens_map.json", {"additional_special_tokens": ["<new>"]}),
    ("special_tokens_map.json", {"cls_token": {"content": "<new>", "lstrip": False}}),
    ("added_tokens.json", {"<new>": 700}),
]
"""Files beside a tokenizer.json that lacks `<new>`, which they name in ways that transformers heeds."""


def naming(path: Path, file: str, said: dict[str, Any]) -> Path:
    """A model folder with settings in a file beside its tokenizer.json."""
    made = folder(path, tokenizer())
    before = json.loads((made / file).read_text()) if (made / file).is_file() else {}
    (made / file).write_text(json.dumps(before | said))
    return made
