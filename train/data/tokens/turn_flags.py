"""What a dialogue says beside roles and contents: which replies are trained, and what would be lost without a word.

Every key of a turn is in one of these tables, or is refused by its name. So is what a record says of all its turns.

Facts: OpenAI's reference of fine-tuning (`weight` of an assistant message, 0 or 1); axolotl
prompt_strategies/chat_template.py (`train` and `train_detail` of a turn); ms-swift 3 and xtuner (`loss` of a message,
a boolean); torchtune 0.6 data/_messages.py (`masked` of a Message); NeMo's SFT data (`mask` of a record, the role that
is not trained); TRL and LLaMA-Factory (`label` and `kto_tag` of a record, false for a reply that is not wanted).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple


class Flag(NamedTuple):
    """A key that says whether a turn is trained: the types and the values that it may have."""

    kinds: tuple[type, ...]
    trained: Mapping[Any, bool]


YES = Flag((bool,), {True: True, False: False})
FLAGS: Mapping[str, Flag] = {
    "weight": Flag((int, float), {1: True, 0: False}),
    "train": YES,
    "loss": YES,
    "masked": Flag((bool,), {True: False, False: True}),
}
HARMLESS = frozenset({
    "id", "uuid", "message_id", "parent_id", "turn_id", "index", "idx", "turn", "name", "author", "user_id",
    "timestamp", "created_at", "create_time", "update_time", "date", "time", "model", "source", "url", "lang",
    "language", "tokens", "token_count", "num_tokens", "length",
})  # fmt: skip
"""Keys of a turn that tell where it comes from. A chat template that reads one of them makes it no longer harmless."""
MORE = frozenset({
    "tools", "functions", "documents", "tool_calls", "tool_call_id", "function_call", "thinking", "reasoning",
    "reasoning_content", "images", "image", "audio", "audios", "videos", "video",
})  # fmt: skip
"""What a record or a turn may hold beside role and content that no model would be trained on here."""
ALLOWED: Mapping[str, tuple[Any, ...]] = {
    "weight": (1,), "train": (True,), "loss": (True,), "masked": (False,), "mask": ("User", "user"),
    "train_detail": (), "train_on_input": (False,), "train_on_inputs": (False,), "mask_history": (False,),
    "loss_mask": (), "labels": (), "assistant_masks": (), "completion_mask": (), "kto_tag": (True,),
    "chat_template_kwargs": (), "chat_template": (),
}  # fmt: skip
"""Key of a record of dialogues that says what is trained, or how it is written: values that say what is done anyway."""
SYSTEM = ("system", "system_prompt", "system_message")
"""Keys of a record that may hold what its first turn should say."""


class Unclear(Exception):
    """A key that is not understood. `reason` is one of `records.REASONS`."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason, self.detail = reason, detail


def is_empty(value: Any) -> bool:
    """Whether a key says nothing: tables have every field in every row."""
    return value is None or (isinstance(value, str | list | dict) and not value)


def told(turn: Mapping[str, Any], number: int, own: Collection[str], read: Collection[str]) -> bool | None:
    """Whether a turn says of itself that it is trained; None if it does not say.

    Args:
        turn: with all its keys.
        number: of the turn, from 1.
        own: the keys of its role and its content.
        read: keys that a chat template reads, none of which is harmless.

    Raises:
        Unclear: a key is not understood, or two of them say different things.
    """
    if turn.keys() == set(own):
        return None
    found: dict[str, bool] = {}
    for key, value in turn.items():
        absent = value is None if key in FLAGS else is_empty(value)
        if key in own or absent or (key in HARMLESS and key not in read):
            continue
        shown = f"turn {number} has {key!r}"
        if key in MORE:
            raise Unclear("more", shown)
        if key not in FLAGS:
            raise Unclear("unknown", shown)
        flag = FLAGS[key]
        if type(value) not in flag.kinds or value not in flag.trained:
            raise Unclear("weight", f"{shown} {str(value)[:40]!r}")
        found[key] = flag.trained[value]
    if len(set(found.values())) > 1:
        raise Unclear("weight", f"turn {number} has {' and '.join(found)} that contradict each other")
    return next(iter(found.values()), None)


def check_record(record: Mapping[str, Any], systems: Collection[str]) -> None:
    """Refuse what a record says of its dialogue as a whole, unless it is what is done anyway.

    Args:
        record: with all its keys.
        systems: contents of its turns of the system.

    Raises:
        Unclear: it says something else.
    """
    for key, value in record.items():
        if value is None or (key not in FLAGS and is_empty(value)):
            continue
        shown = f"the record has {key!r}"
        if key in MORE:
            raise Unclear("more", shown)
        if key in ALLOWED and not any(type(value) is type(one) and value == one for one in ALLOWED[key]):
            raise Unclear("record", shown)
        if key == "label" and value is False:
            raise Unclear("record", f"{shown} false")
        if key in SYSTEM and value not in systems:
            raise Unclear("record", shown)


def check_text(record: Mapping[str, Any]) -> None:
    """Refuse a record of plain text that is not to be trained, or not like the others; all of a text is trained.

    A column of the same name may hold something else, such as the loss of a filter: only the types of flags count.

    Raises:
        Unclear: it says so.
    """
    for key, flag in FLAGS.items():
        value = record.get(key)
        if type(value) in flag.kinds and not flag.trained.get(value, False):
            raise Unclear("record", f"the record has {key!r}")
