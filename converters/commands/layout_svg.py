"""`convert explain --svg`: draw the same logical tensors in several formats side by side, as blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from textwrap import wrap
from typing import NamedTuple

from formats.deepspeed.neox.tables import TABLES as NEOX
from formats.errors import RefusedError, UsageError
from formats.families import family_named
from formats.layout.leaves import Leaf, Span
from formats.layout.lowering import rows, shape
from formats.layout.table import ALWAYS, Rule
from formats.megatron.tables import MCORE
from formats.model.spec import ModelSpec

WIDTH, MARGIN, GAP = 640, 16, 20
"""Pixels: width of the picture, margin, and gap between columns."""
LINE, LEAST, HEIGHT = 17, 17, 420
"""Pixels: height of a line of text, of the smallest block, and roughly of a column's blocks."""
MOST = 26
"""Most blocks of a bar; of a longer bar those in the middle are replaced by their number."""
MOST_TENSORS = 6
TOGETHER = ("group", "expert")
"""Axes whose coordinates are drawn as blocks of their own, even where they are contiguous."""
NAMES = {"query": "q", "key": "k", "value": "v"}
"""Tensor: the letter that stands for it in blocks."""

STYLE = """\
text{font:13px ui-sans-serif,system-ui,"Segoe UI",sans-serif;fill:#1b1f24}
.h{font-weight:600;font-size:15px}.s{font-size:12px;fill:#57606a}.b{font-size:12px;fill:#111;text-anchor:middle;paint-order:stroke;stroke:#fff9;stroke-width:3px}
.bg{fill:#fff}rect.k{stroke:#333;stroke-width:.7}
.c0{fill:#9ecbf0}.c1{fill:#f5c26b}.c2{fill:#8fd6bd}.c3{fill:#e6b3d0}.c4{fill:#e9e27f}.c5{fill:#d5c7f2}
.cf{fill:#e4e4e4}
@media (prefers-color-scheme:dark){.bg{fill:#0d1117}text{fill:#e6edf3}.s{fill:#9198a1}.b{fill:#111}}"""
HATCHES = """\
<defs><pattern id="h1" width="8" height="8" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">\
<path d="M0 0V8" stroke="#0004" stroke-width="2"/></pattern>\
<pattern id="h2" width="7" height="7" patternUnits="userSpaceOnUse">\
<circle cx="2" cy="2" r="1.2" fill="#0005"/></pattern>\
<pattern id="h3" width="6" height="6" patternUnits="userSpaceOnUse"><path d="M0 3H6" stroke="#0004"/></pattern>\
<pattern id="h4" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(-45)">\
<path d="M0 0V7" stroke="#0004"/></pattern><pattern id="h5" width="6" height="6" patternUnits="userSpaceOnUse">\
<path d="M3 0V6" stroke="#0004"/></pattern></defs>"""
"""The hatches of tensors, so that the picture can be read without colour."""


class Block(NamedTuple):
    """Contiguous rows of a physical tensor: the logical tensor (empty for padding), the label, and how many rows."""

    tensor: str
    text: str
    size: int


class Bar(NamedTuple):
    """A physical tensor on one rank, as blocks."""

    title: str
    blocks: list[Block]


class Column(NamedTuple):
    """A format, and the physical tensors in which it holds the drawn tensors; or why it cannot hold them."""

    title: str
    bars: list[Bar]
    refusal: str = ""


def columns(spec: ModelSpec, tensors: Sequence[str], tp: int) -> list[Column]:
    """The column of each format that has the tensors."""
    family = family_named(spec.family)
    kinds = frozenset[str]().union(*spec.layer_kinds[: spec.layers])
    shared = {"mha" if spec.heads == spec.kv_heads else "gqa"}
    tables = {
        "Hugging Face": (family.tensors, 1, "separate"),
        f"Megatron, TP {tp}": (() if family.only_here else MCORE, tp, "separate"),
        f"GPT-NeoX, TP {tp}": (NEOX[family.neox] if family.neox else (), tp, "fused"),
    }
    known = ALWAYS - {"copy", "optional"} | kinds | spec.conditions | shared | {"first", "last"}
    drawn = []
    for title, (table, ranks, written) in tables.items():
        rules = [rule for rule in table if _is_drawn(rule, spec, tensors) and rule.conditions <= {*known, written}]
        if rules:
            try:
                bars = [bar for rank in range(ranks) for bar in _bars(rules, spec, rank, ranks)]
                drawn.append(Column(title, bars))
            except RefusedError as error:
                drawn.append(Column(title, [], str(error)))
    return drawn


def _is_drawn(rule: Rule, spec: ModelSpec, tensors: Sequence[str]) -> bool:
    inside = set(rule.pattern.tensors)
    return inside <= set(spec.tensors) and not inside.isdisjoint(tensors)


def _bars(table: Iterable[Rule], spec: ModelSpec, rank: int, ranks: int) -> Iterator[Bar]:
    """The bars of one rank; tensors that are the same on every rank are drawn for the first alone."""
    unit = 128 * ranks
    sizes = spec.sizes(-(-(spec.vocab or 0) // unit) * unit if ranks > 1 else spec.vocab)
    mesh = {"tp": (rank, ranks), "etp": (rank, ranks), "ep": (0, 1)}
    for rule in table:
        cut = not rule.pattern.meshes.isdisjoint({"tp", "etp"})
        if rank and not cut:
            continue
        name = rule.spellings[0].replace("{layer}", "0").replace("{expert}", "0").removesuffix(".weight")
        where = f" · rank {rank}" if cut and ranks > 1 else " · every rank" if ranks > 1 else ""
        along = _drawn_dimension(rule, sizes, mesh)
        side = ", columns" if along else ""
        blocks = _blocks(rows(rule.pattern, along, sizes, mesh), shape(rule.pattern, sizes, mesh)[along])
        yield Bar(f"{name.rpartition('.')[2]}{side}{where}", blocks)


def _drawn_dimension(rule: Rule, sizes: dict[str, int], mesh: dict[str, tuple[int, int]]) -> int:
    """The first dimension in which tensors are fused or cut."""
    for dim in range(len(rule.pattern.dims)):
        leaves = rows(rule.pattern, dim, sizes, mesh)
        whole = all(leaf.numel == sizes[leaf.spans[0].axis] for leaf in leaves if len(leaf.spans) == 1)
        if len(leaves) > 1 or not whole or any(len(leaf.spans) > 1 for leaf in leaves):
            return dim
    return 0


def _blocks(leaves: Iterable[Leaf], size: int) -> list[Block]:
    """The blocks of a dimension in the order of addresses, with padding between and after them."""
    blocks, end = list[Block](), 0
    pieces = (piece for leaf in leaves for piece in _pieces(leaf))
    for piece in sorted(pieces, key=lambda part: part.base):
        if piece.base > end:
            blocks.append(Block("", "padding", piece.base - end))
        blocks.append(Block(piece.tensor, _text(piece), piece.numel))
        end = piece.base + piece.width
    return [*blocks, Block("", "padding", size - end)] if size > end else blocks


def _pieces(leaf: Leaf) -> Iterator[Leaf]:
    """The contiguous parts of a leaf, with one part for each key/value group or expert."""
    outer = max(leaf.spans, key=lambda span: (span.size > 1, span.stride), default=None)
    if outer is None or outer.size == 1 or (leaf.numel == leaf.width and outer.axis not in TOGETHER):
        yield leaf
        return
    for index in range(outer.size):
        index_span = Span(outer.axis, outer.start + index, outer.start + index + 1, outer.stride)
        spans = tuple(index_span if span is outer else span for span in leaf.spans)
        yield from _pieces(Leaf(leaf.tensor, spans, leaf.base + index * outer.stride))


def _text(leaf: Leaf) -> str:
    """The label of a block: its tensor, and the axes along which it has one coordinate, or a range of an axis."""
    alone = [f"{span.axis} {span.start}" for span in leaf.spans if span.size == 1]
    if alone:
        return " · ".join((NAMES.get(leaf.tensor, leaf.tensor), *alone))
    first = max(leaf.spans, key=lambda span: span.stride)
    return f"{leaf.tensor} · {first.axis} {first.start}..{first.stop - 1}"


def picture(spec: ModelSpec, tensors: Sequence[str], tp: int) -> str:
    """An SVG that draws logical tensors in every format that holds them.

    Args:
        spec: the model whose sizes are drawn.
        tensors: the logical tensors.
        tp: tensor parallel size of the formats that have ranks.

    Raises:
        UsageError: the model has none of the tensors, or there are too many for one picture.
    """
    tensors = [name for name in tensors if name in spec.tensors]
    if not 0 < len(tensors) <= MOST_TENSORS:
        raise UsageError(
            f"one picture shows 1 to {MOST_TENSORS} tensors, these are {len(tensors)}", "name a longer key"
        )
    drawn = columns(spec, tensors, tp)
    every = [name for column in drawn for bar in column.bars for name in (block.tensor for block in bar.blocks) if name]
    colours = {name: number for number, name in enumerate(dict.fromkeys([*tensors, *every]))}
    smallest = min(block.size for column in drawn for bar in column.bars for block in bar.blocks)
    longest = max(sum(block.size for bar in column.bars for block in bar.blocks) for column in drawn)
    scale = max(LEAST / smallest, HEIGHT / longest)
    width = (WIDTH - 2 * MARGIN - GAP * (len(drawn) - 1)) / len(drawn)
    body, bottom = list[str](), 0.0
    for number, column in enumerate(drawn):
        lines, end = _column(column, MARGIN + number * (width + GAP), width, scale, colours)
        body += lines
        bottom = max(bottom, end)
    heads = f"{spec.kv_heads} key/value groups, {spec.heads // spec.kv_heads} query heads in each"
    about = f"{', '.join(tensors)} of a {spec.family} ({heads}): where the rows of one layer are"
    legend, end = _legend(colours, bottom + LINE)
    height = round(end + MARGIN)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
            f'style="max-width:100%;height:auto" role="img" aria-label="{escape(about)}">',
            f"<title>{escape(about)}</title><style>{STYLE}</style>{HATCHES}",
            f'<rect class="bg" width="{WIDTH}" height="{height}"/>',
            *body,
            *legend,
            "</svg>\n",
        ]
    )


def _column(
    column: Column, left: float, width: float, scale: float, colours: dict[str, int]
) -> tuple[list[str], float]:
    """The SVG lines of a column, and the y coordinate of its end."""
    top = float(MARGIN + LINE)
    lines = [f'<text class="h" x="{left:.0f}" y="{top - 6:.0f}">{escape(column.title)}</text>']
    for text in wrap(column.refusal, int(width / 7)):
        top += LINE
        lines.append(f'<text class="s" x="{left:.0f}" y="{top - 3:.0f}">{escape(text)}</text>')
    for bar in column.bars:
        top += LINE
        lines.append(f'<text class="s" x="{left:.0f}" y="{top - 5:.0f}">{escape(bar.title)}</text>')
        for block in _fewer(bar.blocks):
            high = max(LEAST, min(block.size * scale, 4.0 * LEAST))
            colour = colours.get(block.tensor)
            kind, hatch = ("cf", 0) if colour is None else (f"c{colour}", colour)
            place = f'x="{left:.0f}" y="{top:.1f}" width="{width:.0f}" height="{high:.1f}"'
            lines.append(f'<rect class="k {kind}" {place}/>')
            if hatch:
                lines.append(f'<rect fill="url(#h{hatch})" {place}/>')
            lines.append(
                f'<text class="b" x="{left + width / 2:.0f}" y="{top + high / 2 + 4:.1f}">{escape(block.text)}</text>'
            )
            top += high
        top += LINE / 2
    return lines, top


def _fewer(blocks: Sequence[Block]) -> list[Block]:
    """The blocks of a bar, with those in the middle replaced by one if there are many."""
    if len(blocks) <= MOST:
        return list(blocks)
    ends = MOST // 2
    middle = blocks[ends:-ends]
    return [*blocks[:ends], Block("", f"… {len(middle)} blocks more", 1), *blocks[-ends:]]


def _legend(colours: dict[str, int], top: float) -> tuple[list[str], float]:
    """The SVG lines of the legend, and the y coordinate of its end."""
    lines, left = list[str](), float(MARGIN)
    for name, number in colours.items():
        text = f"{name} ({NAMES[name]})" if name in NAMES else name
        if left + 44 + 8 * len(text) > WIDTH:
            left, top = float(MARGIN), top + 1.3 * LINE
        place = f'x="{left:.0f}" y="{top:.1f}" width="22" height="14"'
        lines.append(f'<rect class="k c{number}" {place}/>')
        if number:
            lines.append(f'<rect fill="url(#h{number})" {place}/>')
        lines.append(f'<text x="{left + 28:.0f}" y="{top + 12:.1f}">{escape(text)}</text>')
        left += 44 + 8 * len(text)
    return lines, top + LINE


def drawn_tensors(rules: Iterable[Rule]) -> list[str]:
    """The logical tensors of some rules, in the order of the rules."""
    return list(dict.fromkeys(name for rule in rules for name in rule.pattern.tensors))
