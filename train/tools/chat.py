"""Chats with a model in a Hugging Face folder, to try a trained model.

Prompts are encoded like training data (`train/data/tokens/template_encoder.py`): text never becomes a control token,
which it may with transformers' `apply_chat_template`. An answer ends at the tokens of `generation_config.json`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from formats.errors import RefusedError, SourceError, UnsupportedError, UsageError
from train.data.tokens.records import Malformed, Record
from train.data.tokens.template_encoder import TemplateEncoder, probed
from train.data.tokens.tokenizers import Fast
from train.start.start_weights import TO_FOLDER


class Sampling(NamedTuple):
    """How tokens are sampled; the sampling settings of generation_config.json are not used.

    Attributes:
        most: maximum number of tokens of an answer.
        temperature: temperature of sampling; 0 is greedy.
        seed: random seed of sampling.
    """

    most: int
    temperature: float = 0.0
    seed: int = 1234


Generate = Callable[[list[int], list[int], Sampling], list[int]]
"""(prompt ids, stop ids, sampling) -> ids of the answer, including the stop id that ended the answer."""


class Answer(NamedTuple):
    """The answer of a model.

    Attributes:
        prompt: token ids of the prompt.
        ids: token ids of the answer, including the token that ended the answer.
        text: the text of the answer without that token.
        ending: the token that ended the answer, None if the answer was cut off.
    """

    prompt: list[int]
    ids: list[int]
    text: str
    ending: str | None


@dataclass(frozen=True)
class Chat:
    """A loaded model with its tokenizer and chat template.

    Attributes:
        vocabulary: the tokenizer.
        encoder: encodes prompts with the chat template.
        stops: ids of the tokens that end an answer.
        room: maximum number of tokens of prompt and answer together, None if config.json does not specify it.
        generate: runs the model.
        notes: notes for the user.
    """

    vocabulary: Fast
    encoder: TemplateEncoder
    stops: list[int]
    room: int | None
    generate: Generate
    notes: tuple[str, ...]

    def answer(self, roles: Sequence[str], contents: Sequence[str], sampling: Sampling) -> Answer:
        """Continue a conversation.

        Raises:
            UsageError: a turn is not valid text.
            RefusedError: the template refuses the turns, contents cannot be told apart from the template's tokens, or
                the conversation is too long.
        """
        prompt = self._prompt(roles, contents)
        most = sampling.most if self.room is None else min(sampling.most, self.room - len(prompt))
        if most < 1:
            raise RefusedError(f"the conversation has {len(prompt)} tokens, the model has room for {self.room}")
        ids = self.generate(prompt, self.stops, sampling._replace(most=most))
        ended = bool(ids) and ids[-1] in self.stops
        text = self.vocabulary.decode(ids[: len(ids) - ended])
        return Answer(prompt, ids, text, self.vocabulary.pieces(ids[-1:])[0] if ended else None)

    def _prompt(self, roles: Sequence[str], contents: Sequence[str]) -> list[int]:
        try:
            for text in contents:
                text.encode()
            return self.encoder.prompt(Record(roles, contents))
        except UnicodeEncodeError as error:
            raise UsageError(f"a turn is not UTF-8: {error.reason} at character {error.start + 1}") from None
        except Malformed as error:
            raise RefusedError(str(error.__cause__ or error)) from None


def open_chat(folder: Path, backend: str) -> Chat:
    """Load a model, its tokenizer and its chat template.

    Args:
        folder: a Hugging Face folder, as `save_pretrained` or `convert` writes it.
        backend: one of `BACKENDS`.

    Raises:
        UsageError: the folder is a checkpoint of another format, or has no tokenizer.json or no chat template.
        SourceError: the folder is not a checkpoint, or is damaged.
        RefusedError: tokenizer, template and weights are not of one model.
        UnsupportedError: the backend is not installed, or cannot load the model.
    """
    from converters.assets.token_files import CONFIG, eos_ids, held_template
    from converters.hub.preflight import embedding_rows
    from formats.disk.json_file import read_json

    _require_model(folder)
    if not (folder / "tokenizer.json").is_file():
        raise UsageError(f"{folder} has no tokenizer.json", "convert tokenizer MODEL OUT makes one of tokenizer.model")
    vocabulary = Fast(folder / "tokenizer.json")
    template = held_template(vocabulary.beside)
    if template is None:
        raise UsageError(f"{folder} has no chat template", f"convert assets {folder} --chat-template chatml")
    rows, stops = embedding_rows(folder), eos_ids(vocabulary.beside)
    if vocabulary.known.lacks(rows, template):
        raise RefusedError(f"the tokenizer of {folder} has {vocabulary.size} entries, the embedding {rows} rows")
    _, ending = probed(vocabulary, template)
    never = ending is None or vocabulary.ids.get(ending) not in stops
    note = f"replies end with {ending or 'no token of their own'}, at which generation does not stop: {stops}"
    room = read_json(folder / CONFIG).get("max_position_embeddings")
    return Chat(
        vocabulary, TemplateEncoder(vocabulary, template, None), stops, room if type(room) is int else None,
        BACKENDS[backend](folder), (note,) if never else (),
    )  # fmt: skip


def _require_model(folder: Path) -> None:
    from formats.huggingface import folder as huggingface
    from formats.registry import open_checkpoint

    if huggingface.detect(folder):
        return
    kind = open_checkpoint(folder).format
    raise UsageError(
        f"{folder} is a checkpoint of the format {kind}, not a Hugging Face folder",
        f"convert {TO_FOLDER[kind]} {folder} OUT",
    )


def _transformers(folder: Path) -> Generate:
    """Load the model in transformers, on the available accelerator or the CPU, and return a generator."""
    import torch
    import transformers

    library: Any = transformers  # these functions are missing in its type stubs
    library.logging.set_verbosity_error()
    library.logging.disable_progress_bar()
    try:
        model, info = library.AutoModelForCausalLM.from_pretrained(
            folder, dtype="auto", local_files_only=True, trust_remote_code=False, output_loading_info=True,
            ignore_mismatched_sizes=True,
        )  # fmt: skip
    except (OSError, ValueError, ImportError) as error:
        why = " ".join(str(error).split()).partition(". ")[0]
        raise UnsupportedError(f"transformers cannot load {folder}: {why[:300]}") from None
    missing = sorted([*info["missing_keys"], *(key[0] for key in info["mismatched_keys"])])
    if missing:
        raise SourceError(
            f"{folder} lacks {len(missing)} tensors of its model, or their sizes differ, such as {missing[0]}"
        )
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    model.to(device).eval()

    def generate(prompt: list[int], stops: list[int], sampling: Sampling) -> list[int]:
        model.generation_config = library.GenerationConfig(  # replaces the model's own generation config
            max_new_tokens=sampling.most, eos_token_id=stops or None, pad_token_id=stops[0] if stops else 0,
            do_sample=sampling.temperature > 0, temperature=sampling.temperature or 1.0, top_k=0, top_p=1.0,
        )  # fmt: skip
        torch.manual_seed(sampling.seed)
        ids = torch.tensor([prompt], device=device)
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=torch.ones_like(ids))
        answer_ids: list[int] = out[0, len(prompt) :].tolist()
        return answer_ids

    return generate


def _vllm(folder: Path) -> Generate:
    """Load the model in vLLM, and return a generator. vLLM gets token ids, so that it does not tokenize."""
    try:
        import vllm
    except ImportError:
        raise UnsupportedError("vLLM is not installed here", "pip install vllm, where there is a GPU") from None
    model = vllm.LLM(model=str(folder))

    def generate(prompt: list[int], stops: list[int], sampling: Sampling) -> list[int]:
        chosen = vllm.SamplingParams(
            max_tokens=sampling.most, temperature=sampling.temperature, seed=sampling.seed, stop_token_ids=stops
        )
        (out,) = model.generate([{"prompt_token_ids": prompt}], chosen, use_tqdm=False)
        return list(out.outputs[0].token_ids)

    return generate


BACKENDS: dict[str, Callable[[Path], Generate]] = {"transformers": _transformers, "vllm": _vllm}
