"""`convert explain`: draw a rule of a layout as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from formats.errors import RefusedError, UsageError
from formats.families.family import Family
from formats.layout.leaves import Leaf
from formats.layout.lowering import lower, rows, shape
from formats.layout.table import Rule
from formats.model.spec import ModelSpec
from formats.registry import FORMATS

EXAMPLE = ModelSpec(
    family="llama", layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336, vocab=128256,
    max_positions=8192, norm_epsilon=1e-5, rope_theta=500000.0, rope_scaling=None, sliding_window=None, tied=False,
    experts=8, expert_ffn=14336, shared_ffn=14336,
)  # fmt: skip
"""The default model: Llama-3 8B, with experts as in Mixtral for rules that have some."""


LEGEND = """\
group  key/value group             head  query head within its group    dim  a head that nothing permutes
half   half of a rotary head       pair  index within that half         ~    fill that belongs to no tensor
/tp    an even split over tensor ranks; /etp and /ep those of experts
%interleave  interleaved by so many rows where the training said so, else one after the other"""
"""The meaning of the names in a pattern."""


HOLDERS = (
    "huggingface", "fsdp", "zero", "megatron", "megatron_dist", "megatron_fsdp", "megatron-llm", "neox",
    "megatron_deepspeed", "mistral", "nanotron", "maxtext",
)  # fmt: skip
"""The layouts that can hold a model: the formats, and Megatron-LLM's dialect."""


def held_by(family: Family) -> list[str]:
    """The layouts that can hold models of a family."""
    holds = {name: holds for form in FORMATS.values() for name, holds in form.reader.holders(family).items()}
    return [name for name in HOLDERS if holds[name]]


def tables(format_name: str) -> Mapping[str, tuple[Rule, ...]]:
    """The layout tables of a format, by their displayed names.

    Raises:
        UsageError: there is no such format, or it has no tables.
    """
    if format_name not in FORMATS:
        raise UsageError(f"there is no format {format_name!r}", f"formats: {', '.join(FORMATS)}")
    layouts = FORMATS[format_name].reader.tables()
    if not layouts:
        cut = "it cuts the tensors of Hugging Face or GPT-NeoX in flat parts"
        raise UsageError(f"{format_name} has no layout of its own: {cut}")
    return layouts


def matching(format_name: str, text: str) -> list[tuple[str, Rule]]:
    """(names of tables, rule) for each rule whose key contains a text; equal rules of several tables are one.

    Raises:
        UsageError: no key contains the text.
    """
    by_line: dict[tuple[str, str], tuple[list[str], Rule]] = {}
    for name, table in tables(format_name).items():
        for rule in table:
            if text in rule.key:
                names, _ = by_line.setdefault((rule.key, rule.pattern.text), ([], rule))
                if name not in names:
                    names.append(name)
    if not by_line:
        raise UsageError(f"no key of {format_name} contains {text!r}", f"`convert explain {format_name}` lists all")
    prefix = f", {format_name} "
    return [(", ".join(names).replace(prefix, ", "), rule) for names, rule in by_line.values()]


def draw(rule: Rule, spec: ModelSpec, tp: int) -> Iterator[str]:
    """The lines that draw one rule for a model, on the first and the last tensor parallel rank."""
    unit = 128 * tp  # Megatron's default padding
    sizes = spec.sizes(-(-(spec.vocab or 0) // unit) * unit)
    yield rule.key
    yield f"    {rule.pattern.text}"
    if rule.conditions:
        yield f"    {', '.join(sorted(rule.conditions))}"
    whole = dict.fromkeys(("tp", "etp", "ep"), (0, 1))
    axes = {span.axis for leaf in lower(rule.pattern, sizes, whole) for span in leaf.spans}
    yield "    " + ", ".join(f"{axis} = {sizes[axis]}" for axis in sizes if axis in axes)
    if not all(sizes[axis] for axis in axes):
        yield "  no such tensor in this model: --model SRC draws the sizes of another"
        return
    cut = not rule.pattern.meshes.isdisjoint({"tp", "etp"})
    ranks = sorted({0, tp - 1}) if cut else [0]
    for rank in ranks:
        mesh = {"tp": (rank, tp), "etp": (rank, tp), "ep": (0, 1)}
        try:
            where = f" on tp rank {rank} of {tp}" if cut else (f" on each of {tp} tp ranks" if tp > 1 else "")
            yield f"  shape {list(shape(rule.pattern, sizes, mesh))}{where}"
        except RefusedError as error:
            yield f"  refused for tp = {tp}: {error}"
            return
        for dim in range(len(rule.pattern.dims)):
            leaves = rows(rule.pattern, dim, sizes, mesh)
            if len(leaves) > 1 or any(len(leaf.spans) > 1 for leaf in leaves):
                yield f"    dimension {dim}"
                yield from _lines(leaves)


def _lines(leaves: list[Leaf], limit: int = 12) -> Iterator[str]:
    """The lines of address ranges along one dimension, with nested axes unrolled where they interleave."""
    lines = sorted(line for leaf in leaves for line in _unrolled(leaf))
    width = len(str(lines[-1][1]))
    for low, high, text in lines[:limit]:
        yield f"      {low:>{width}} .. {high:>{width}}  {text}"
    if len(lines) > limit:
        yield f"      {'':>{width}}  … {len(lines) - limit} more like these"


def _unrolled(leaf: Leaf) -> Iterator[tuple[int, int, str]]:
    dense = leaf.numel == leaf.width
    outer = leaf.spans[0] if leaf.spans else None
    if dense or outer is None or outer.size == 1:
        inside = " ".join(
            f"{span.axis} {span.start}" if span.size == 1 else f"{span.axis} {span.start}..{span.stop - 1}"
            for span in leaf.spans
        )
        yield leaf.base, leaf.base + leaf.width - 1, f"{leaf.tensor:<12} {inside}"
        return
    for index in range(outer.size):
        span = outer._replace(start=outer.start + index, stop=outer.start + index + 1)
        yield from _unrolled(Leaf(leaf.tensor, (span, *leaf.spans[1:]), leaf.base + index * outer.stride))
