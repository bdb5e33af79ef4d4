"""Keys of a dialogue beside roles and contents: flags of which replies are trained, and data that would be lost.

Every key of a turn has to be in one of these tables, or is refused by name; so does every key of a record that applies
to all its turns.

Facts: OpenAI's reference of fine-tuning (`weight` of an assistant message, 0 or 1); axolotl
prompt_strategies/chat_template.py (`train` and `train_detail` of a turn); ms-swift 3 and xtuner (`loss` of a message,
a boolean); torchtune 0.6 data/_messages.py (`masked` of a Message); NeMo's SFT data (`mask` of a record, the role that
is not trained); TRL and LLaMA-Factory (`label` and `kto_tag` of a record, false for a rejected reply).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple


class Flag(NamedTuple):
    """A key that specifies whether a turn is trained: the types of its values, and what each value means."""

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
    "language", "tokens", "token_count", "num_tokens", "length", "tool_call_id",
})  # fmt: skip
"""Keys of a turn that are metadata. A key that a chat template reads is not harmless."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys of a turn that have the model's reasoning before its reply. A template that reads one of them is given the first
two, whatever the key in the record (transformers 5.23.0 utils/chat_template_utils.py, `_alias_reasoning_fields`)."""
RENDERED = ("tool_calls", "tool_call_id", "name", *REASONING)
"""Keys of a turn, beside role and content, that are passed to a chat template that reads them."""
MORE = frozenset({
    "tools", "functions", "documents", "tool_calls", "function_call", *REASONING, "images", "image",
    "audio", "audios", "videos", "video",
})  # fmt: skip
"""Keys of a record or a turn whose content would be lost in the training, unless a chat template reads it."""
ALLOWED: Mapping[str, tuple[Any, ...]] = {
    "weight": (1,), "train": (True,), "loss": (True,), "masked": (False,), "mask": ("User", "user"),
    "train_detail": (), "train_on_input": (False,), "train_on_inputs": (False,), "mask_history": (False,),
    "loss_mask": (), "labels": (), "assistant_masks": (), "completion_mask": (), "kto_tag": (True,),
    "chat_template_kwargs": (), "chat_template": (),
}  # fmt: skip
"""Key of a record that specifies what is trained or how turns are rendered: the values that agree with our training."""
SYSTEM = ("system", "system_prompt", "system_message")
"""Keys of a record that may have the system prompt, which should be a turn."""


class Unclear(Exception):
    """Raised for a key that is not understood. `reason` is one of `records.REASONS`."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason, self.detail = reason, detail


def is_empty(value: Any) -> bool:
    """Whether a field counts as absent, because it is null or empty: tables have every field in every row."""
    return value is None or (isinstance(value, str | list | dict) and not value)


def is_trained(turn: Mapping[str, Any], number: int, own: Collection[str], read: Collection[str]) -> bool | None:
    """Whether the flags of a turn specify that it is trained; None without flags.

    Args:
        turn: the turn with all its keys.
        number: number of the turn, from 1.
        own: the keys of the turn's role and content.
        read: keys that a chat template reads: those in `RENDERED` are passed to it, none of the others is harmless.

    Raises:
        Unclear: a key is not understood, or two flags contradict each other.
    """
    if turn.keys() == set(own):
        return None
    flags: dict[str, bool] = {}
    for key, value in turn.items():
        absent = value is None if key in FLAGS else is_empty(value)
        if key in own or absent or (key in RENDERED if key in read else key in HARMLESS):
            continue
        shown = f"turn {number} has {key!r}"
        if key in MORE:
            raise Unclear("more", shown)
        if key not in FLAGS:
            raise Unclear("unknown", shown)
        flag = FLAGS[key]
        if type(value) not in flag.kinds or value not in flag.trained:
            raise Unclear("weight", f"{shown} {str(value)[:40]!r}")
        flags[key] = flag.trained[value]
    if len(set(flags.values())) > 1:
        raise Unclear("weight", f"turn {number} has {' and '.join(flags)} that contradict each other")
    return next(iter(flags.values()), None)


def check_record(record: Mapping[str, Any], systems: Collection[str], given: Collection[str] = ()) -> None:
    """Refuse keys of a record that apply to its whole dialogue, unless they agree with our training.

    Args:
        record: the record with all its keys.
        systems: contents of the record's system turns.
        given: keys that are passed to a chat template.

    Raises:
        Unclear: a key does not agree with our training.
    """
    for key, value in record.items():
        if value is None or key in given or (key not in FLAGS and is_empty(value)):
            continue
        shown = f"the record has {key!r}"
        if key in MORE:
            raise Unclear("more", shown)
        if key in ALLOWED and not any(type(value) is type(allowed) and value == allowed for allowed in ALLOWED[key]):
            raise Unclear("record", shown)
        if key == "label" and value is False:
            raise Unclear("record", f"{shown} false")
        if key in SYSTEM and value not in systems:
            raise Unclear("record", shown)


def check_text(record: Mapping[str, Any]) -> None:
    """Refuse a record of plain text whose flags exclude it from the training: all of a text is trained.

    A column of the same name may have other data, such as the loss of a filter: only values of a flag's types count.

    Raises:
        Unclear: a flag excludes the record.
    """
    for key, flag in FLAGS.items():
        value = record.get(key)
        if type(value) in flag.kinds and not flag.trained.get(value, False):
            raise Unclear("record", f"the record has {key!r}")
