"""Tensor names that show that a checkpoint is not one plain model: adapters, value heads, several models at once.

Facts: peft 0.21 (`tuners/*/layer.py`, the tensors of each layer beside its `base_layer`; `peft_model.py`, the
`base_model` of every wrapper, and the `prompt_encoder` of a prompt, in which each adapter has its embedding: a Sam of
transformers 5.23.0 has a module of that name too), trl 0.29 `modeling_value_head.py` and `modeling_base.py`,
torchtitan 0.3.0 `components/lora.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

from formats.errors import RefusedError, SourceError, UnsupportedError, UsageError, some
from formats.model.spec import Verbatim

MERGE = "merge it first: PeftModel.from_pretrained(BASE, ADAPTER).merge_and_unload().save_pretrained(OUT)"
LORA = (
    "`convert fsdp2hf` and `zero2hf` take it with --adapter merged, or with --adapter only as a folder of PEFT; one of "
    "`train run` is merged by: train run CONFIG.yml --export OUT"
)
TITAN = "add alpha / rank * lora_b @ lora_a to each weight in torchtitan, whose checkpoints record neither"
KEEP = "no weights can hold it: publish the adapter beside its base model, as PEFT saves it"
VALUE_HEAD = "save the model inside it: model.pretrained_model.save_pretrained(OUT)"
APART = "save the model alone: the policy's own save_pretrained(OUT)"

ROOT = "base_model.model."
"""The prefix that PEFT puts before the names of a model that it wraps."""
OF_LORA = re.compile(
    r"(?P<module>.+)\.(?P<kind>lora_(?:A|B|embedding_A|embedding_B|magnitude_vector))"
    r"(?:\.(?!weight$)(?P<name>[^.]+))?(?P<end>\.weight)?"
)
"""Matches the name of a LoRA tensor in memory, with the adapter's name, which PEFT's files leave out."""
SAVED = re.compile(r"(?P<module>.+)\.modules_to_save\.(?P<name>[^.]+)\.(?P<end>.+)")
REPLACED = re.compile(r"\.(?:base_layer|original_module)(?=\.)")
"""Matches PEFT's names of the original module inside its own module."""
MATRIX = 2
"""Dimensions of a matrix."""
Value = TypeVar("Value")


class Sign(NamedTuple):
    """A pattern of tensor names that shows that a checkpoint is not one plain model.

    Attributes:
        pattern: regular expression that is searched in the names of tensors.
        what: description of such a checkpoint.
        hint: how to make a plain model of such a checkpoint.
        beside: regular expression that another name has to match at its beginning too, if one sign is not enough.
    """

    pattern: str
    what: str
    hint: str
    beside: str = ""


SIGNS = (
    Sign(r"(?:^|\.)lora_embedding_[AB]\b", "a PEFT adapter: LoRA of an embedding", LORA),
    Sign(r"(?:^|\.)lora_E\b|\.ranknum\b", "a PEFT adapter: AdaLoRA", MERGE),
    Sign(r"(?:^|\.)lora_magnitude_vector\b", "a PEFT adapter: DoRA", LORA),
    Sign(r"(?:^|\.)lora_[AB]\b", "a PEFT adapter: LoRA", LORA),
    Sign(r"\.lora_[ab]\.weight$", "a LoRA of torchtitan", TITAN),
    Sign(r"(?:^|\.)ia3_l\b", "a PEFT adapter: IA3", MERGE),
    Sign(r"(?:^|\.)ln_tuning_layers\b", "a PEFT adapter: LN tuning", MERGE),
    Sign(r"(?:^|\.)vera_(?:lambda_[bd]|[AB])\b", "a PEFT adapter: VeRA", MERGE),
    Sign(r"(?:^|\.)boft_[RPs]\b", "a PEFT adapter: BOFT", MERGE),
    Sign(r"(?:^|\.)oft_[rRs]\b", "a PEFT adapter: OFT", MERGE),
    Sign(r"(?:^|\.)hada_[wt]\d(?:_[ab])?\b", "a PEFT adapter: LoHa", MERGE),
    Sign(r"(?:^|\.)lokr_(?:w\d(?:_[ab])?|t\d)\b", "a PEFT adapter: LoKr", MERGE),
    Sign(r"(?:^|\.)fourierft_spectrum\b", "a PEFT adapter: FourierFT", MERGE),
    Sign(r"(?:^|\.)hra_u\b", "a PEFT adapter: HRA", MERGE),
    Sign(r"(?:^|\.)shira_(?:weight|indices)\b", "a PEFT adapter: SHiRA", MERGE),
    Sign(r"(?:^|\.)trainable_tokens_(?:delta|original)\b", "a PEFT adapter: trainable tokens", MERGE),
    Sign(r"(?:^|\.)(?:adaption_(?:prompt|gate))\b", "a PEFT adapter: an adaption prompt", KEEP),
    Sign(
        r"^(?:prompt_encoder\.[^.]+\.(?:embedding\.weight|(?:trainable|frozen)_embedding)|prompt_embeddings)$",
        "a PEFT adapter: a prompt, prefix or p-tuning",
        KEEP,
    ),
    Sign(r"(?:^|\.)modules_to_save\.", "a model with PEFT's modules_to_save", LORA),
    Sign(r"\.base_layer\.", "a PEFT adapter of a method that is not known here", MERGE),
    Sign(r"^base_model\.", "a model inside PEFT's wrapper", MERGE),
    Sign(r"^(?:v_head|value_head)\.", "a model with TRL's value head", VALUE_HEAD),
    Sign(r"^pretrained_model\.", "a model inside TRL's wrapper", VALUE_HEAD),
    Sign(
        r"^(?:policy|actor)(?:_model)?\.",
        "a policy beside other models",
        APART,
        r"(?:ref|reference|critic|value|reward)(?:_model)?\.",
    ),
)
"""The first sign that any name matches applies: methods come before the wrapper that every method has."""


def require_plain(keys: Iterable[str], where: Path) -> None:
    """Check that tensor names are those of one model without a wrapper, an adapter or another model.

    Args:
        keys: the names of all tensors.
        where: the checkpoint.

    Raises:
        UnsupportedError: a name belongs to an adapter, a value head or a second model.
    """
    names = {re.sub(r"\.\d+(?=\.)", ".0", key): key for key in keys}  # the layers of a large model have the same names
    for sign in SIGNS:
        matching = next((key for name, key in names.items() if re.search(sign.pattern, name)), None)
        if matching and (not sign.beside or any(re.match(sign.beside, name) for name in names)):
            raise UnsupportedError(f"{where} holds {sign.what} ({matching})", sign.hint)


def is_of_adapter(key: str) -> bool:
    """Whether a tensor in memory is part of a LoRA, or replaces a tensor of the base."""
    return (OF_LORA.fullmatch(key) or SAVED.fullmatch(key)) is not None


def base_name(key: str) -> str:
    """The name of a tensor of the base, by the name that it has inside PEFT's wrapper."""
    return REPLACED.sub("", key).removeprefix(ROOT)


def select(keys: Mapping[str, Value], adapter: str | None, where: Path) -> dict[str, Value]:
    """The tensors of a training checkpoint that are to be read, by their names in files.

    Where no name has that of an adapter, PEFT made the names for a file (`get_peft_model_state_dict`, which accelerate
    1.15 saves with FSDP, utils/fsdp_utils.py `_get_model_state_dict`): all tensors are the adapter's, those that
    replace the base's too.

    Args:
        keys: the values of all tensors, by the tensors' names in memory.
        adapter: `only` for the adapter, by the names in PEFT's files; `merged` for the base model that the adapter is
            merged into; None for a training without an adapter.
        where: the checkpoint.

    Raises:
        UnsupportedError: a tensor belongs to an adapter although `adapter` is None, or to an adapter that is no LoRA.
        UsageError: the checkpoint has no adapter.
        RefusedError: the checkpoint has several adapters.
        SourceError: two tensors have one name in files, such as that of a module in its wrapper and one without.
    """
    if adapter is None:
        require_plain(keys, where)
        return dict(keys)
    base, own, names = dict[str, Value](), dict[str, Value](), dict[str, None]()
    first, twice = dict[tuple[bool, str], str](), list[str]()
    for key, value in keys.items():
        lora, saved = OF_LORA.fullmatch(key), SAVED.fullmatch(key)
        if lora:
            other_kind = lora["kind"] not in ("lora_A", "lora_B")
            part, name = own, f"{lora['module']}.{lora['kind']}{'' if other_kind else lora['end'] or ''}"
        elif saved:
            part, name = own, f"{saved['module']}.{saved['end']}"
        else:
            part, name = base, base_name(key)
        if (other := first.setdefault((part is own, name), key)) != key:
            twice.append(f"{name} twice: {other} and {key}")
        part[name] = value
        names |= {match["name"]: None for match in (lora, saved) if match and match["name"]}
    if own and not names and all(key.startswith(ROOT) for key in keys):  # as in PEFT's files, which hold no base
        base, own, twice = {}, dict(keys), []
    require_plain(base, where)
    if not own:
        raise UsageError(f"{where} holds no adapter", "leave --adapter out")
    if len(names) > 1:
        raise RefusedError(f"{where} holds {len(names)} adapters: {some([*names], 4)}", "save them apart with PEFT")
    if twice:
        raise SourceError(f"{where} holds {twice[0]}", "it is no save of one training: copy the checkpoint again")
    return own if adapter == "only" else base


@dataclass(frozen=True, kw_only=True)
class AdapterSpec(Verbatim):
    """An adapter as a model of its own, whose tensors have PEFT's names.

    Attributes:
        base: the shapes of the base's tensors beside the adapter, by their names in memory.
    """

    base: Mapping[str, tuple[int, ...]]

    @property
    def holds_base(self) -> bool:
        """Whether the base is beside the adapter: a save of what was trained has at most its buffers."""
        return any(key.endswith(".weight") and len(shape) == MATRIX for key, shape in self.base.items())


def spec_of(shapes: Mapping[str, tuple[int, ...]], base: Mapping[str, tuple[int, ...]]) -> AdapterSpec:
    """The spec of an adapter as a model of its own, and the shapes of its base's tensors beside it."""
    return AdapterSpec(family="peft", shapes=shapes, tied=False, vocab=None, why="it is an adapter", base=base)
