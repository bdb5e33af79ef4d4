"""The plan of a base model with a LoRA adapter merged into it: W + scale * B @ A, tile by tile."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from converters.assets.token_files import SAYING, TOKENIZER_FILES
from converters.plan import names
from converters.plan.parts import Part, parts_of
from converters.plan.plan import Input, Job, Norms, Plan, Term, without_records
from converters.plan.request import Request
from formats.checkpoint import Checkpoint
from formats.disk.safetensors import FLOATS, Fragment, Product, row_major
from formats.errors import RefusedError, SourceError, UnsupportedError, short, some
from formats.huggingface import adapter as peft
from formats.huggingface import lora_config
from formats.huggingface.folder import model_slots
from formats.layout.placed import Placed
from formats.layout.slots import Slot
from formats.layout.table import MTP
from formats.model.lora import AS_EXPERTS
from formats.model.spec import Verbatim
from formats.model.vocab_rows import EMBEDDING, HEAD, grown, rows

NAME = "peft adapter"
SHOWN = ("r", "lora_alpha", "use_rslora", "use_dora")
"""Settings of an adapter that the manifest keeps."""
Key = tuple[str, int | None]
"""Name and layer of a logical tensor."""
CONV1D = {"clvp", "decision_transformer", "gpt2", "imagegpt", "openai-gpt"}
"""Models of transformers 5.23 with `Conv1D`, whose weights are [in, out], beside `Linear`."""
INPUT_MAJOR_EXPERTS = {"gpt_oss"}
"""Families whose experts PEFT takes for [in, out]: their class says `is_transposed` (transformers 5.23,
modeling_gpt_oss.py). Those of all others it takes for [out, in], also where they are not, as in Llama 4 (peft 0.21.2
tuners/lora/layer.py `ParamWrapper`)."""
NOT_LINEAR = {"embedding", "head", "positions", "layer_embedding", "router"}
"""Logical tensors in matrices that PEFT's `all-linear` leaves out: embeddings, router parameters, the output head."""


UNTOLD = (
    "no table tells which matrices of the base are linear layers: routers of experts are in some classes of "
    "transformers, and in others not"
)
"""Of transformers 5.23 with peft 0.21.2: JetMoE's and Doge's routers are in it, those of Jamba and Aria are not."""
LOST_BIASES = (
    ", or PEFT up to 0.20 saved it, which left out the biases of lora_only (peft#3306): with bias = none in "
    "adapter_config.json those of the base are kept"
)


@dataclass
class Changes:
    """The changes that an adapter makes to one logical tensor.

    Attributes:
        whole: parts that replace the tensor.
        added: parts that are added to the tensor.
        norms: the norms that the rows of the tensor get.
    """

    whole: list[Part] = field(default_factory=list)
    added: list[Part] = field(default_factory=list)
    norms: list[Norms] = field(default_factory=list)

    @property
    def edge(self) -> str:
        """The names of the changes, for the plan."""
        named = {"weights of the adapter": self.whole, "LoRA added": self.added, "norms of DoRA": self.norms}
        return ", ".join(name for name, present in named.items() if present)


def plan_merge(base: Checkpoint, saved: peft.Saved, request: Request, planned: Callable[[Checkpoint], Plan]) -> Plan:
    """A plan that writes a model with an adapter of PEFT merged into it.

    Sums are in float64 and rounded once, to the element type of the base or that of the cast.

    Args:
        base: the opened base model, of any format.
        saved: the adapter.
        request: what the user asked for.
        planned: makes the plan of a base without the adapter.

    Raises:
        SourceError: the adapter is not complete, or does not fit the base.
        UnsupportedError: the adapter cannot be merged, or the target renames tensors that the adapter changes.
        RefusedError: the adapter changes an embedding that the output head shares, in a model without a table.
    """
    before = rows(base.spec)
    adapter, slots, base = fitted(saved, base)
    if separate := _trained_apart(adapter, slots, base):
        base = untied(base)
        adapter, slots = opened(saved, base)
    plan = planned(base)
    changes = _changes(adapter, slots, base)
    if unused := sorted(name for name, _ in changes.keys() - {(job.tensor, job.layer) for job in plan.jobs}):
        raise UnsupportedError(
            f"{adapter.root} changes {len(unused)} tensors that have other names in the output: {some(unused, 3)}",
            "convert the base to Hugging Face first, take an adapter out of a checkpoint with --adapter only, then "
            "convert merge",
        )
    jobs = tuple(
        _merged(job, changes[job.tensor, job.layer], request.limits.replicas)
        if (job.tensor, job.layer) in changes
        else job
        for job in plan.jobs
    )
    adapter_source = Checkpoint(saved.root, saved.root, NAME, base.spec, (), (), saved.files)
    shown = {name: adapter.config[name] for name in SHOWN if adapter.config.get(name)}
    inputs = (Input(base, {}), Input(adapter_source, shown))
    notes = [f"{separate} was trained apart from what shares it: the output head gets weights of its own"] * bool(
        separate
    )
    if rows(base.spec) != before:
        notes.append(
            f"the vocabulary has {rows(base.spec)} rows, as the adapter was trained with, and {before} in the base"
        )
    texts = (*plan.notes, *notes, *_notes(adapter, base))
    return replace(without_records(plan), jobs=jobs, inputs=inputs, notes=texts)


def fitted(saved: peft.Saved, base: Checkpoint) -> tuple[peft.Adapter, Mapping[str, Slot], Checkpoint]:
    """The parsed adapter, the base's slots as `opened` gives them, and the base, with the adapter's vocabulary rows.

    Raises:
        SourceError: the adapter is not complete, contradicts its config, or does not fit the base.
        UnsupportedError: a tensor of the adapter is none of LoRA's.
    """
    adapter, slots = opened(saved, base)
    resized = _resized(adapter, slots, base)
    if rows(resized.spec) != rows(base.spec):
        adapter, slots = opened(saved, resized)
    for key, fragment in adapter.whole.items():
        if fragment.shape != slots[key].shape:
            raise SourceError(
                f"{adapter.root}: {key} is {list(fragment.shape)}, and {list(slots[key].shape)} in {base.root}",
                "it was trained on another model, or on one whose vocabulary had grown",
            )
    for module, lora in adapter.added.items():
        key = module if module in slots else f"{module}.weight"
        _require_fit(key, lora, slots[key], adapter, base)
    return adapter, slots, resized


def _notes(adapter: peft.Adapter, base: Checkpoint) -> Iterator[str]:
    """Notes for the user on the base and the tokenizer of an adapter."""
    named = str(adapter.config.get("base_model_name_or_path") or "")
    if Path(named).name.lower() not in str(base.root.resolve()).lower():
        yield f"the adapter says that its base is {short(named)}; only names and shapes were compared with {base.root}"
    if any((adapter.root / name).is_file() for name in (*TOKENIZER_FILES, *SAYING)):
        yield f"the tokenizer is that of the base; the adapter's: convert assets OUT --from {adapter.root}"
    yield from filter(None, [peft.unmatched_note(adapter)])


def opened(saved: peft.Saved, base: Checkpoint) -> tuple[peft.Adapter, Mapping[str, Slot]]:
    """The parsed adapter, and the base's slots by the tensor names that the adapter uses: in memory, or in files.

    Raises:
        SourceError: the adapter has tensors that the base lacks, lacks some that its config names, or has a LoRA of
            modules that its config leaves out.
    """
    in_memory, on_hub = (
        {key: slot for slot in model_slots(base.spec, memory=memory) for key in slot.keys} for memory in (True, False)
    )
    adapter = peft.parse(saved, [*in_memory])
    of_parameters, unknown = saved.config.get("target_parameters"), adapter.keys(in_memory) - in_memory.keys()
    if isinstance(base.spec, Verbatim) and base.config and (of_parameters or unknown):
        named = names.slots_by_name_in_memory(base, in_memory)
        in_memory = named or in_memory
        adapter = peft.parse(saved, [*in_memory], ordered=named is not None)
    separate = any(key in on_hub and key not in in_memory for key in adapter.keys({*on_hub, *in_memory}))
    slots = on_hub if separate else in_memory
    peft.require_consumed(adapter, slots, base.root, only=base.settings.only)
    trainable = [slot for slot in slots.values() if not _is_further(slot)]
    lacking = _lacking(adapter, trainable, base)
    if lacking and isinstance(base.spec, Verbatim) and base.config and not separate:
        parts = names.parts_in_memory(base)
        lacking = _lacking(adapter, [slot for slot in trainable if parts.isdisjoint(slot.keys)], base)
    if lacking:
        some_trained = ", or not all linear layers were trained: then name those that were in target_modules"
        lost_biases = LOST_BIASES if adapter.config.get("bias") == "lora_only" else ""
        all_linear, untold = peft.is_all_linear(adapter.config), isinstance(base.spec, Verbatim)
        raise SourceError(
            f"{saved.root} has nothing of {len(lacking)} modules or tensors that its config names: {some(lacking, 3)}"
            + (f" ({UNTOLD})" if all_linear and untold else ""),
            "the file is not complete, or the base is another model" + (some_trained if all_linear else lost_biases),
        )
    if beyond := peft.surplus(adapter, _modules(trainable)):
        raise SourceError(
            f"{saved.root} has a LoRA of {len(beyond)} modules that its config leaves out: {some(beyond, 3)}",
            "PEFT would not load all of them: take adapter_config.json from where the file comes from",
        )
    return adapter, slots


def _modules(slots: Iterable[Slot]) -> list[list[str]]:
    """The names of each module that has a matrix."""
    matrices = dict.fromkeys(slot.keys for slot in slots if len(slot.shape) == 2)
    return [[key.removesuffix(".weight") for key in keys] for keys in matrices if keys[0].endswith(".weight")]


def _lacking(adapter: peft.Adapter, slots: Sequence[Slot], base: Checkpoint) -> list[str]:
    """The modules and tensors among some that the adapter's config names, and that the adapter has nothing of."""
    linear = {slot.keys[0].removesuffix(".weight") for slot in slots if _is_linear(slot, base)}
    return peft.missing(adapter, _modules(slots), dict.fromkeys(slot.keys for slot in slots), linear)


def _is_further(slot: Slot) -> bool:
    """Whether a tensor is of a layer that predicts further tokens: transformers loads none, so PEFT trains none."""
    return MTP in slot.rule.conditions


def _is_linear(slot: Slot, base: Checkpoint) -> bool:
    """Whether a matrix is in PEFT's `all-linear`. Without a table each matrix in a layer of the model is."""
    spec = base.spec
    if isinstance(spec, Verbatim):
        return re.search(r"\.\d+\.", slot.keys[0]) is not None
    excluded = NOT_LINEAR | (AS_EXPERTS if spec.experts else set())
    return excluded.isdisjoint(slot.rule.pattern.tensors)


def _changes(
    adapter: peft.Adapter, slots: Mapping[str, Slot], base: Checkpoint
) -> dict[tuple[str, int | None], Changes]:
    """The changes that the adapter makes, by logical tensor and layer."""
    by_tensor: dict[Key, Changes] = {}

    def places(key: str, fragment: Fragment) -> Iterator[tuple[Changes, list[Part]]]:
        for name, copies in parts_of([Placed(key, slots[key], fragment)]).items():
            yield by_tensor.setdefault(name, Changes()), [part for parts in copies.values() for part in parts]

    for key, fragment in adapter.whole.items():
        for changes, parts in places(key, fragment):
            changes.whole += parts
    for module, lora in adapter.added.items():
        key = module if module in slots else f"{module}.weight"
        product = _product(key, lora, slots[key], adapter, base)
        for changes, parts in places(key, _computed(product, slots[key])):
            changes.added += parts
            if lora.magnitude is not None:
                changes.norms.append(Norms(lora.magnitude, tuple(parts), lora.right.shape[1], product.transposed))
    return by_tensor


def _resized(adapter: peft.Adapter, slots: Mapping[str, Slot], base: Checkpoint) -> Checkpoint:
    """The base with the vocabulary rows of the adapter, if the adapter replaces every tensor that has such rows."""
    whole = {key: part for key, part in adapter.whole.items() if EMBEDDING.fullmatch(key) or HEAD.fullmatch(key)}
    counts = {fragment.shape[0] for fragment in whole.values() if fragment.shape}
    if len(counts) != 1 or counts == {rows(base.spec)}:
        return base
    spec, names = grown(base.spec, counts.pop()), {key: slots[key].rule.pattern.tensors for key in whole}
    resized = {key: slot for memory in (True, False) for slot in model_slots(spec, memory=memory) for key in slot.keys}
    changed = {slot.rule.pattern.tensors for key, slot in slots.items() if resized.get(key, slot).shape != slot.shape}
    if changed != {*names.values()}:
        return base
    unchanged = [placed for placed in base.tensors if placed.slot.rule.pattern.tensors not in changed]
    places = {slot.rule.pattern.tensors: slot for slot in resized.values() if not slot.replica}  # also of a tied head
    own = {names[key]: Placed(key, places[names[key]], part) for key, part in whole.items()}
    copies = [
        Placed(placed.key, resized[placed.key], own[placed.slot.rule.pattern.tensors].fragment)
        for placed in base.tensors
        if placed.slot.rule.pattern.tensors in changed and placed.key in resized and _is_further(placed.slot)
    ]
    settings = replace(base.settings, values={**base.settings.values, "vocab": rows(spec)})
    return replace(base, spec=spec, tensors=(*unchanged, *own.values(), *copies), settings=settings)


def _trained_apart(adapter: peft.Adapter, slots: Mapping[str, Slot], base: Checkpoint) -> str:
    """The key of the first tensor that embedding and output head share and the adapter changes; empty if there is none.

    PEFT trains one of both, or a copy of it, and leaves the other as it was (peft 0.21.2, where a merge changes both).

    Raises:
        RefusedError: no table tells what else the shared tensor is.
    """
    spec = base.spec
    shared = {"embedding"} if spec.tied else set()
    if isinstance(spec, Verbatim):
        shared = {*spec.copies.values(), *names.tied_names(base, spec)}
    changed = sorted(adapter.keys(slots)) if shared else []
    shared_keys = (key for key in changed if slots[key].replica or shared.intersection(slots[key].rule.pattern.tensors))
    key = next(shared_keys, "")
    if key and isinstance(spec, Verbatim):
        raise RefusedError(
            f"{adapter.root} changes {key}, which embedding and output head of {base.root} share: merged into both it "
            "would be another model than the one that was trained",
            "untie the base first: save it with tie_word_embeddings=False, its lm_head a copy of the embedding",
        )
    return key


def untied(base: Checkpoint) -> Checkpoint:
    """The checkpoint of a tied model, untied: its output head has weights of its own, read from the embedding."""
    heads = []
    for placed in base.tensors:
        rule = placed.slot.rule
        if rule.pattern.tensors == ("embedding",) and not placed.slot.replica.shared:
            named = replace(rule, pattern=rule.pattern.renamed("embedding", "head"))
            heads.append(placed._replace(slot=placed.slot._replace(rule=named)))
    summands = (placed for placed in base.tensors if not placed.slot.replica.shared)
    settings = replace(base.settings, values={**base.settings.values, "tied": False})
    spec = replace(base.spec, tied=False)
    return replace(base, spec=spec, tensors=(*summands, *heads), settings=settings)


def _product(key: str, lora: peft.Lora, slot: Slot, adapter: peft.Adapter, base: Checkpoint) -> Product:
    """The product of lora_B and lora_A that is added to a tensor, which they fit.

    Raises:
        UnsupportedError: the matrices fit a tensor stored as [out, in] and as [in, out], and nothing tells which it is.
    """
    fits = _fits(lora, slot)
    transposed = fits[1] if fits[0] != fits[1] else _input_major(slot, adapter, base)
    return Product(lora.left, lora.right, lora.scale, transposed, key, _matrices(slot))


def _matrices(slot: Slot) -> int:
    """How many matrices a tensor holds, such as one of each expert."""
    return slot.shape[0] if len(slot.shape) == 3 else 1


def _fits(lora: peft.Lora, slot: Slot) -> tuple[bool, bool]:
    """Whether the matrices of a LoRA fit a tensor stored as [out, in], and one stored as [in, out]."""
    out, wide = lora.left.shape[0], lora.right.shape[1]
    return slot.shape[-2:] == (out, wide) and not lora.embedding, slot.shape[-2:] == (wide, out)


def _require_fit(key: str, lora: peft.Lora, slot: Slot, adapter: peft.Adapter, base: Checkpoint) -> None:
    """Refuse a LoRA whose matrices do not fit a tensor, or are not of the rank in its config.

    Raises:
        SourceError: it is such a LoRA.
    """
    (out, rank), wide, matrices = lora.left.shape, lora.right.shape[1], _matrices(slot)
    if rank != lora.rank * matrices:
        each = f" of each of {matrices} matrices" if matrices > 1 else ""
        raise SourceError(
            f"{adapter.root}: lora_B and lora_A of {key} are {[out, rank]} and {[rank, wide]}, and "
            f"{lora_config.CONFIG} says r = {lora.rank}{each}",
            f"take {lora_config.CONFIG} and {peft.WEIGHTS} from one save",
        )
    if len(slot.shape) not in (2, 3) or not any(_fits(lora, slot)):
        raise SourceError(
            f"{adapter.root}: lora_B and lora_A of {key} are {[out, rank]} and {[rank, wide]}, which fit no tensor of "
            f"{list(slot.shape)}, as in {base.root}",
            f"it was trained on {short(adapter.config.get('base_model_name_or_path'))}: is that the base?",
        )
    if lora.magnitude is not None and lora.magnitude.shape != (out,):
        raise SourceError(
            f"{adapter.root}: lora_magnitude_vector of {key} is {list(lora.magnitude.shape)}, and lora_B {[out, rank]}"
        )


def _computed(product: Product, slot: Slot) -> Fragment:
    """A fragment in the shape of a slot whose elements are those of a product."""
    return Fragment(product.left.path, 0, "F64", slot.shape, row_major(slot.shape), product=product)


def _input_major(slot: Slot, adapter: peft.Adapter, base: Checkpoint) -> bool:
    """Whether PEFT takes a square matrix for [in, out]. The axes of a table's tensors begin with the output.

    `fan_in_fan_out` of an adapter's config tells nothing of one module: PEFT keeps what the last one had.

    Raises:
        UnsupportedError: no table tells, and the model has matrices of both kinds.
    """
    if isinstance(base.spec, Verbatim):
        if len(slot.shape) == 3 or adapter.config.get("fan_in_fan_out") or base.spec.family in CONV1D:
            raise UnsupportedError(
                f"{slot.keys[0]} of {base.root} is {list(slot.shape)}: no table tells whether it is [out, in] or "
                "[in, out]",
                lora_config.PEFT_MERGES,
            )
        return False
    if len(slot.shape) == 3:
        return base.spec.family in INPUT_MAJOR_EXPERTS
    spans = [span for span in slot.leaves()[0].spans if span.size > 1]
    return spans[0].stride < spans[-1].stride


def _merged(job: Job, changes: Changes, policy: str) -> Job:
    """A job with the changes that the adapter makes to its tensor.

    Raises:
        UnsupportedError: the tensor holds no floating point numbers.
    """
    if job.source_dtype not in FLOATS:
        raise UnsupportedError(f"{job.label} of the base is {job.source_dtype}, to which nothing can be added")
    centred = (False, job.centred[1])
    alone = replace(job, sources=(), replicas={}, twins={}, partial=False, targets=(), centred=centred)

    def reading(parts: list[Part], rows: int | None) -> Job:
        dtype = parts[0].fragment.dtype
        return replace(alone, sources=tuple(parts), source_dtype=dtype, dtype=dtype, rows=rows, finite=True)

    if changes.whole:
        terms = [Term(reading(changes.whole, job.rows))]
    else:
        terms = [Term(replace(job, targets=(), dtype=job.source_dtype), policy=policy)]
    if changes.added:
        terms.append(Term(reading(changes.added, None)))
    return replace(
        alone, targets=job.targets, source_dtype=job.dtype, rows=None, terms=tuple(terms), norms=tuple(changes.norms),
        edge=f"{changes.edge}, in float64, rounded once to {job.dtype}",
    )  # fmt: skip
