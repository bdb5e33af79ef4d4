"""Random dialogues with random keys, flags and damage through `train tokenize`; judged from outside.

Which tokens are trained is computed here once more, from the records as they are meant: ids and replies by
transformers' own `apply_chat_template`, or by the sentencepiece library turn by turn. Exit code 0 is right only if each
record became the document with these tokens and this mask, or was dropped and counted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "tests/golden/data/1_sft/model.model"
WORDS = [
    "saule",
    "upe",
    "lūdzu",
    "paldies",
    "thanks",
    "a:b",
    '"quoted": text',
    "two\nlines",
    "end\\",
    "x  y",
    "½",
    "日本",
]
COUNTS = ("documents", "tokens", "untrained_replies", "output")
KEEP, DROP, STOP = "keep", "drop", "stop"
"""What has to become of a record: a document, a counted drop, the end of the work."""
NO_FLAG = ({}, {"name": "x"}, {"id": 7}, {"weight": None}, {"train": None, "timestamp": "2026"}, {"tool_calls": []})
ON = ({"weight": 1}, {"weight": 1.0}, {"train": True}, {"loss": True}, {"masked": False}, {"weight": 1, "train": True})
OFF = ({"weight": 0}, {"weight": 0.0}, {"train": False}, {"loss": False}, {"masked": True}, {"weight": 0, "id": "b"})
NO_SENSE = (
    {"weight": 0.5}, {"weight": 2}, {"weight": -1}, {"weight": "0"}, {"weight": True}, {"weight": [0]},
    {"weight": 10**30}, {"train": 0}, {"train": "false"}, {"loss": 1}, {"masked": 0}, {"weight": 1, "train": False},
    {"train_detail": [{"begin_offset": 0, "end_offset": 1, "train": False}]}, {"train_on_input": False},
    {"Weight": 0}, {"trainable": False}, {"eot": False}, {"label": "bad"},
)  # fmt: skip
OF_ALL = ({"weight": 0}, {"train": False}, {"loss_mask": [0, 1]}, {"train_on_inputs": True}, {"mask": "Assistant"},
          {"kto_tag": False}, {"label": False}, {"system": "be kind"}, {"chat_template_kwargs": ["a"]})  # fmt: skip


class Case(NamedTuple):
    """A line, what has to become of it, and its turns with what is trained of each."""

    line: bytes
    fate: str
    turns: list[tuple[str, str]]
    trained: list[bool]


class Kind(NamedTuple):
    """How the records are tokenized: the arguments, and what gives tokens and mask of a record."""

    words: list[str]
    tokens: Any
    names: dict[str, str]
    field: str


@lru_cache(1)
def _fast() -> tuple[str, Any]:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([*WORDS, "user assistant system\n"] * 5, trainer)
    tokens = ["<|im_start|>", "<|im_end|>", "<|end|>"]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in tokens])
    return tokenizer.to_str(), tokenizer


def attack(seed: int, folder: Path) -> str:
    """One file of records; the word is right, refused or empty (no record became a document)."""
    random = Random(seed)
    kind = random.choice([_template, _control])(folder, random)
    cases = [_case(random, kind) for _ in range(random.randint(1, 8))]
    if random.random() < 0.4:
        cases = [case for case in cases if case.fate != STOP] or cases
    end = random.choice([b"\n", b"\r\n"])
    head = random.choice([b"", b"", b"\xef\xbb\xbf"])
    (folder / "in.jsonl").write_bytes(head + end.join(case.line for case in cases) + random.choice([b"", end]))
    argv = [*kind.words, "--input", str(folder / "in.jsonl"), "--output-prefix", str(folder / "P")]
    argv += ["--max-drop-rate", "1", "--workers", "1", "--json", "-q"]
    program = "from train.cli import main; main()"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", program, "tokenize", *argv],
        env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    about = f"seed {seed}: {ran.returncode} {ran.stderr}\n{(folder / 'in.jsonl').read_bytes()!r}"
    assert "Traceback" not in ran.stderr, about
    assert ran.returncode in (0, 2, 3, 5), about
    kept = [case for case in cases if case.fate == KEEP]
    if ran.returncode:
        assert json.loads(ran.stderr)["exit_code"] == ran.returncode, about
        assert not list(folder.glob("P_*.idx")), about
        assert not kept or any(case.fate == STOP for case in cases), f"refused although right: {about}"
        return "refused" if kept else "empty"
    assert all(case.fate != STOP for case in cases), f"accepted what nobody understands: {about}"
    _judge(folder, kind, cases, json.loads(ran.stdout), about)
    return "right"


def _judge(folder: Path, kind: Kind, cases: list[Case], counts: dict[str, Any], about: str) -> None:
    from train.data.tokens.documents import open_documents

    kept = [case for case in cases if case.fate == KEEP]
    documents = open_documents(folder / "P_text_document")
    assert len(documents.indexed) == len(kept) == counts["documents"], about
    lost = sum(
        number for name, number in counts.items() if name not in ("documents", "tokens", "untrained_replies", "output")
    )
    assert lost == len(cases) - len(kept), f"{lost} are counted as dropped: {about}"
    for number, case in enumerate(kept):
        ids, mask = kind.tokens(case)
        assert documents.indexed[number].tolist() == ids, f"document {number}: {about}"
        assert documents.trained(number, number + 1).tolist() == [False, *mask[1:]], f"mask of {number}: {about}"


def _template(folder: Path, random: Random) -> Kind:
    from transformers import PreTrainedTokenizerFast

    text, tokenizer = _fast()
    place = folder / "tokenizer"
    place.mkdir()
    (place / "tokenizer.json").write_text(text)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    (place / "tokenizer_config.json").write_text(json.dumps(config))
    real = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    template = (ROOT / "converters/assets/templates/chatml.jinja").read_text()
    eod, append_eod = tokenizer.token_to_id("<|end|>"), random.random() < 0.5

    def tokens(case: Case) -> tuple[list[int], list[bool]]:
        messages = [{"role": role, "content": content} for role, content in case.turns]
        encoded = real.apply_chat_template(
            messages, chat_template=template, return_dict=True, return_assistant_tokens_mask=True
        )
        ids, mask = list(encoded["input_ids"]), [bool(flag) for flag in encoded["assistant_masks"]]
        for number, trained in enumerate(case.trained):
            if not trained:
                low, high = (
                    len(real.apply_chat_template(messages[: number + more], chat_template=template)["input_ids"])
                    if number + more
                    else 0
                    for more in (0, 1)
                )
                mask[low:high] = [False] * (high - low)
        last = max(place for place, (role, _) in enumerate(case.turns) if role == "assistant")
        return ([*ids, eod], [*mask, case.trained[last]]) if append_eod else (ids, mask)

    return _spoken(
        ["--tokenizer", str(place), "--chat-template", "chatml", *["--append-eod"] * append_eod], tokens, random
    )


def _control(folder: Path, random: Random) -> Kind:
    from sentencepiece import SentencePieceProcessor

    del folder
    model = SentencePieceProcessor(str(MODEL))
    append_eod = random.random() < 0.5

    def tokens(case: Case) -> tuple[list[int], list[bool]]:
        ids: list[int] = []
        mask: list[bool] = []
        for (role, content), trained in zip(case.turns, case.trained, strict=True):
            mark, inside = model.piece_to_id(f"<|{role}|>"), model.encode(content)
            ids += [mark, *inside, mark]
            mask += [False, *[trained] * (len(inside) + 1)]
        if not append_eod:
            return ids, mask
        last = max(place for place, (role, _) in enumerate(case.turns) if role == "assistant")
        any_off = any(role == "assistant" and not on for (role, _), on in zip(case.turns, case.trained, strict=True))
        return [*ids, model.piece_to_id("<|endoftext|>")], [*mask, case.trained[last] if any_off else True]

    return _spoken(["--vocab-file", str(MODEL), *["--append-eod"] * append_eod], tokens, random)


def _spoken(options: list[str], tokens: Any, random: Random) -> Kind:
    shared = random.random() < 0.3
    names = {"role": "from", "content": "value"} if shared else {"role": "role", "content": "content"}
    form = "sharegpt" if shared else "conversations"
    return Kind([*options, "--format", form], tokens, names, random.choice(["messages", "conversations"]))


def _case(random: Random, kind: Kind) -> Case:
    """A record that is right, or has one thing that is not."""
    turns, flags, trained = [], [], []
    for number in range(2 * random.randint(1, 3)):
        role = "assistant" if number % 2 else "user"
        turns.append((role, " ".join(random.choices(WORDS, k=random.randint(1, 4))).strip()))
        on = random.random() < 0.7
        plain = random.random() < 0.4
        flags.append(dict(random.choice(NO_FLAG if plain else ON if on and number % 2 else OFF)))
        trained.append(bool(number % 2) and (plain or on))
    fate = KEEP if any(trained) else DROP
    record: dict[str, Any] = {}
    messages = [
        {kind.names["role"]: role, kind.names["content"]: content, **flag}
        for (role, content), flag in zip(turns, flags, strict=True)
    ]
    damage = random.choice(DAMAGE) if random.random() < 0.5 else None
    if damage is not None:
        fate = damage(random, record, messages, kind.names)
    record[kind.field] = messages
    line = json.dumps(record, ensure_ascii=random.random() < 0.5).encode()
    if damage in (_key_twice, _not_json):
        line = _TEXT[damage](line, random)
    return Case(line, fate, turns, trained)


def _flag(random: Random, record: Any, messages: Any, names: Any) -> str:
    messages[random.randrange(len(messages))].update(random.choice(NO_SENSE))
    return STOP


def _asked(random: Random, record: Any, messages: Any, names: Any) -> str:
    messages[0].clear()
    messages[0].update({names["role"]: "user", names["content"]: "saule"} | random.choice(ON[:4]))
    return STOP


def _of_all(random: Random, record: Any, messages: Any, names: Any) -> str:
    record.update(random.choice(OF_ALL))
    return STOP


def _both(random: Random, record: Any, messages: Any, names: Any) -> str:
    record.update({"messages": messages[:1], "conversations": messages[:1]})
    return STOP


def _more(random: Random, record: Any, messages: Any, names: Any) -> str:
    key = random.choice(["tool_calls", "reasoning_content", "images", "function_call"])
    random.choice([record, messages[-1]])[key] = [{"name": "f"}]
    return DROP


def _content(random: Random, record: Any, messages: Any, names: Any) -> str:
    wrong = [None, 7, True, ["saule"], [{"type": "image", "text": "a"}], "", "  ", {}]
    messages[random.randrange(len(messages))][names["content"]] = random.choice(wrong)
    return DROP


def _role(random: Random, record: Any, messages: Any, names: Any) -> str:
    message, role = random.choice(messages), random.choice(["tool", "Assistant", "", None, 1, []])
    for key in message.keys() - set(names.values()):
        del message[key]
    message[names["role"]] = role
    return DROP


def _key_twice(random: Random, record: Any, messages: Any, names: Any) -> str:
    return STOP


def _not_json(random: Random, record: Any, messages: Any, names: Any) -> str:
    return DROP


DAMAGE = (_flag, _flag, _flag, _asked, _of_all, _both, _more, _content, _role, _key_twice, _not_json)


def _doubled(line: bytes, random: Random) -> bytes:
    """A key once more, the first time with something else, in the record or in a turn."""
    if random.random() < 0.5:
        return b'{"messages": [], ' + line[1:] if b'"messages"' in line else b'{"conversations": null, ' + line[1:]
    return line.replace(b"[{", b'[{"role": "user", "value": "", "role": "assistant", "value": "b", ', 1)


def _broken(line: bytes, random: Random) -> bytes:
    return random.choice([
        line[:-3], line + b"x", b"\xff" + line, b"7", b"null", b'"text"',
        line.replace(b"{", b'{"score": NaN, ', 1), b"\x00" + line, b'{"a":' * 2000, line.replace(b"a", b"\\ud800", 1),
    ])  # fmt: skip


_TEXT = {_key_twice: _doubled, _not_json: _broken}
