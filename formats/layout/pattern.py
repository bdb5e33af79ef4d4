"""The layout algebra: how a physical tensor is laid out over the axes of logical tensors.

A pattern is a row of terms, one for each physical dimension:

    hidden                      an axis
    (group head dim)            a row-major product: one physical dimension that holds three axes
    (gate: ffn | up: ffn)       a sum: a concatenation; a label names the logical tensor of its branch
    (ffn (gate: | up:))         one element of each in turn: nothing is left to a branch but its tensor
    (gate: ffn | up: ffn)%interleave  alternating, `interleave` elements of each; concatenated where that is absent or 0
    ~padding                    fill: addresses that belong to no tensor
    (...)/tp                    an even split of a dimension over a mesh axis: rank r of n holds the r-th n-th
    query: (group head) hidden  a label in front names the logical tensor of the whole pattern

so that, for example, Megatron's fused projection is

    (group (query: head half pair | key: half pair | value: dim))/tp hidden

A pattern *lowers* to leaves. A leaf is an affine map over a box of coordinates of one logical tensor,

    address = base + sum(stride * (coordinate - start))

in elements of the physical tensor. Two layouts of the same logical tensor are maps from the same coordinates, so
nothing else is needed to move data between them, in any direction: there are no inverses to write.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from math import prod
from typing import NamedTuple

from formats.errors import RefusedError, VitruvianError
from formats.layout.boxes import Box

Sizes = Mapping[str, int]
Mesh = Mapping[str, tuple[int, int]]
"""Mesh axis name to (rank, number of ranks)."""


class PatternError(VitruvianError):
    """A pattern that does not parse; the message points at the character."""

    def __init__(self, text: str, at: int, problem: str) -> None:
        super().__init__(f"{problem} in pattern at character {at + 1}:\n    {text}\n    {' ' * at}^")


# --- the syntax tree -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Axis:
    """One atomic axis of a logical tensor."""

    name: str


@dataclass(frozen=True)
class Fill:
    """Addresses that hold no element of any tensor, such as vocabulary padding."""

    name: str


@dataclass(frozen=True)
class Product:
    """Terms in row-major order: the last one varies fastest."""

    terms: tuple[Term, ...]


@dataclass(frozen=True)
class Sum:
    """Branches one after another. A label names the logical tensor that a branch belongs to."""

    branches: tuple[tuple[str | None, Product], ...]


@dataclass(frozen=True)
class Interleaved:
    """The branches of a sum, interleaved by so many elements of each, or one after another where that is 0."""

    term: Sum
    size: str


@dataclass(frozen=True)
class Split:
    """An even split of a term over a mesh axis."""

    term: Term
    mesh: str


Term = Axis | Fill | Product | Sum | Interleaved | Split


@dataclass(frozen=True)
class Pattern:
    """A parsed pattern: one term for each physical dimension; `label` names the tensor unless the terms do."""

    text: str
    label: str | None = field(compare=False)  # the text says it, and the terms
    dims: tuple[Term, ...] = field(compare=False)

    @cached_property
    def tensors(self) -> tuple[str, ...]:
        """The logical tensors that this physical tensor holds, in order of appearance."""
        found = [self.label] if self.label else [label for label, _ in _branches(self.dims) if label]
        return tuple(dict.fromkeys(found))

    @cached_property
    def meshes(self) -> frozenset[str]:
        """The mesh axes that split this physical tensor. Over every other mesh axis it is replicated."""
        return frozenset(axis for term in self.dims for axis in splits(term))

    @cached_property
    def filled(self) -> bool:
        """Whether some of its addresses may belong to no tensor."""
        return any(isinstance(term, Fill) for dim in self.dims for term in _walk(dim))


def _branches(terms: Sequence[Term]) -> Iterator[tuple[str | None, Product]]:
    for term in terms:
        if isinstance(term, Split | Interleaved):
            yield from _branches([term.term])
        elif isinstance(term, Product):
            yield from _branches(term.terms)
        elif isinstance(term, Sum):
            for label, body in term.branches:
                yield label, body
                yield from _branches(body.terms)


def _walk(term: Term) -> Iterator[Term]:
    """A term and every term inside it."""
    yield term
    match term:
        case Split(inner) | Interleaved(inner):
            yield from _walk(inner)
        case Product(terms):
            yield from (each for inner in terms for each in _walk(inner))
        case Sum(branches):
            yield from (each for _, body in branches for each in _walk(body))


# --- the parser ------------------------------------------------------------------------------------------------------

_TOKEN = re.compile(r"\s*(?:(?P<name>[a-z_][a-z0-9_]*)|(?P<mark>[()|:/~%]))")


class _Parser:
    """Recursive descent over the grammar in the module's docstring."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens: list[tuple[str, int]] = []
        position, end = 0, len(text.rstrip())
        while position < end:
            match = _TOKEN.match(text, position)
            if match is None:
                at = position + len(text[position:]) - len(text[position:].lstrip())
                raise PatternError(text, at, f"unexpected {text[at]!r}")
            self.tokens.append((match[match.lastgroup or 0], match.start(match.lastgroup or 0)))
            position = match.end()
        self.tokens.append(("", end))
        self.next = 0

    def peek(self, ahead: int = 0) -> str:
        return self.tokens[min(self.next + ahead, len(self.tokens) - 1)][0]

    def fail(self, problem: str) -> PatternError:
        return PatternError(self.text, self.tokens[self.next][1], problem)

    def take(self, expected: str) -> None:
        if self.peek() != expected:
            raise self.fail(f"expected {expected!r}, found {self.peek() or 'the end'!r}")
        self.next += 1

    def name(self, what: str) -> str:
        if not self.peek().isidentifier():
            raise self.fail(f"expected {what}, found {self.peek() or 'the end'!r}")
        self.next += 1
        return self.tokens[self.next - 1][0]

    def label(self) -> str | None:
        if self.peek(1) != ":":
            return None
        label = self.name("a tensor name")
        self.take(":")
        return label

    def terms(self) -> tuple[Term, ...]:
        found = []
        while self.peek() == "(" or self.peek() == "~" or self.peek().isidentifier():
            if self.peek(1) == ":":
                raise self.fail(f"the label {self.peek()!r} must stand at the start of a branch")
            found.append(self.term())
        return tuple(found)

    def term(self) -> Term:
        term: Term
        if self.peek() == "(":
            self.take("(")
            term = self.sum()
            self.take(")")
        elif self.peek() == "~":
            self.take("~")
            term = Fill(self.name("the name of the fill's size"))
        else:
            term = Axis(self.name("an axis"))
        if self.peek() == "%":
            self.take("%")
            if not isinstance(term, Sum):
                raise self.fail("only branches can be interleaved")
            term = Interleaved(term, self.name("the size of an interleaved block"))
        if self.peek() == "/":
            self.take("/")
            term = Split(term, self.name("a mesh axis"))
        return term

    def sum(self) -> Term:
        branches = [(self.label(), Product(self.terms()))]
        while self.peek() == "|":
            self.take("|")
            branches.append((self.label(), Product(self.terms())))
        if len(branches) == 1 and branches[0][0] is None:
            return branches[0][1]
        return Sum(tuple(branches))


def parse(text: str) -> Pattern:
    """Parse a pattern.

    Raises:
        PatternError: with a message that points at the offending character.
    """
    parser = _Parser(text)
    label = parser.label()
    dims = parser.terms()
    if parser.peek():
        raise parser.fail(f"unexpected {parser.peek()!r}")
    pattern = Pattern(text.strip(), label, dims)
    if not pattern.tensors:
        raise PatternError(text, 0, "no label names a logical tensor")
    if label and any(inner for inner, _ in _branches(dims)):
        raise PatternError(text, 0, f"the label {label!r} and labels inside contradict each other")
    return pattern


# --- leaves ----------------------------------------------------------------------------------------------------------


class Span(NamedTuple):
    """Coordinates [start, stop) of an axis, `stride` elements apart in the physical tensor."""

    axis: str
    start: int
    stop: int
    stride: int

    @property
    def size(self) -> int:
        """How many coordinates there are."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Leaf:
    """An affine map from a box of a logical tensor to addresses of a physical one.

    `base` is the address of the box's first corner. Leaves that `lower` makes are nested: sorted by stride, each
    stride is at least as wide as all that lies below it. `clip` relies on that and keeps it.
    """

    tensor: str
    spans: tuple[Span, ...]
    base: int = 0

    @property
    def numel(self) -> int:
        """How many elements the leaf holds."""
        return prod(span.size for span in self.spans)

    @property
    def width(self) -> int:
        """Distance from the first address to behind the last one."""
        return sum(span.stride * (span.size - 1) for span in self.spans) + 1


def clip(leaf: Leaf, low: int, high: int) -> Iterator[Leaf]:
    """The parts of a leaf whose addresses lie in [low, high). At most 2k - 1 boxes for k axes.

    This is how any cut flows through: a tensor-parallel cut inside an attention group, an interval of a flat
    optimizer partition, a rectangle.
    """
    if not leaf.numel or high <= leaf.base or low >= leaf.base + leaf.width:
        return
    if low <= leaf.base and leaf.base + leaf.width <= high:
        yield leaf
        return
    outer = max(range(len(leaf.spans)), key=lambda i: (leaf.spans[i].size > 1, leaf.spans[i].stride))
    span = leaf.spans[outer]

    def part(start: int, stop: int) -> Leaf:
        spans = list(leaf.spans)
        spans[outer] = span._replace(start=span.start + start, stop=span.start + stop)
        return replace(leaf, spans=tuple(spans), base=leaf.base + start * span.stride)

    inner = leaf.width - span.stride * (span.size - 1)
    first = max(0, -((leaf.base - low) // span.stride))  # ceil((low - base) / stride)
    last = min(span.size, (high - inner - leaf.base) // span.stride + 1)
    touched_first = max(0, (low - leaf.base) // span.stride)
    touched_last = min(span.size, -(-(high - leaf.base) // span.stride))
    if first >= last:
        for index in range(touched_first, touched_last):
            yield from clip(part(index, index + 1), low, high)
        return
    for index in range(touched_first, first):
        yield from clip(part(index, index + 1), low, high)
    yield part(first, last)
    for index in range(last, touched_last):
        yield from clip(part(index, index + 1), low, high)


def cut(leaves: Iterable[Leaf], low: int, high: int) -> list[Leaf]:
    """What of some leaves lies at addresses [low, high), addressed from there on."""
    return [replace(piece, base=piece.base - low) for leaf in leaves for piece in clip(leaf, low, high)]


# --- lowering --------------------------------------------------------------------------------------------------------


def _size(sizes: Sizes, name: str) -> int:
    if name not in sizes:
        raise RefusedError(f"the model has no size for the axis {name!r}")
    return sizes[name]


def _lower(term: Term, sizes: Sizes, mesh: Mesh) -> tuple[int, list[Leaf]]:
    """Size of one physical dimension, and its leaves, addressed along that dimension alone."""
    if isinstance(term, Axis):
        size = _size(sizes, term.name)
        return size, [Leaf("", (Span(term.name, 0, size, 1),))]
    if isinstance(term, Fill):
        return _size(sizes, term.name), []
    if isinstance(term, Product):
        return _product([_lower(inner, sizes, mesh) for inner in term.terms])
    if isinstance(term, Sum):
        total, leaves = 0, []
        for label, body in term.branches:
            size, inside = _lower(body, sizes, mesh)
            leaves += [replace(leaf, tensor=label or leaf.tensor, base=leaf.base + total) for leaf in inside]
            total += size
        return total, leaves
    if isinstance(term, Interleaved):
        return _interleaved(term, sizes, mesh) if sizes.get(term.size) else _lower(term.term, sizes, mesh)
    size, inside = _lower(term.term, sizes, mesh)
    rank, ranks = mesh[term.mesh]
    if size % ranks:
        raise RefusedError(f"{size} rows do not divide over {term.mesh} = {ranks}")
    part = size // ranks
    return part, cut(inside, rank * part, (rank + 1) * part)


def _interleaved(term: Interleaved, sizes: Sizes, mesh: Mesh) -> tuple[int, list[Leaf]]:
    """Interleaved branches: a leaf for each block of each."""
    total, leaves, step, every = 0, [], sizes[term.size], len(term.term.branches)
    for place, (label, body) in enumerate(term.term.branches):
        size, inside = _lower(body, sizes, mesh)
        if size % step:
            raise RefusedError(f"{size} rows do not divide into blocks of {step}")
        for block in range(size // step):
            base = (block * every + place) * step
            pieces = cut(inside, block * step, (block + 1) * step)
            leaves += [replace(leaf, tensor=label or leaf.tensor, base=leaf.base + base) for leaf in pieces]
        total += size
    return total, leaves


def _product(factors: Sequence[tuple[int, list[Leaf]]]) -> tuple[int, list[Leaf]]:
    sizes = [size for size, _ in factors]
    strides = [prod(sizes[i + 1 :]) for i in range(len(sizes))]
    return prod(sizes), _combine([leaves for _, leaves in factors], strides)


def _combine(factors: Sequence[list[Leaf]], strides: Sequence[int]) -> list[Leaf]:
    """Leaves of a product, given the leaves of each factor and the stride of each factor."""
    combined = []
    for choice in product(*factors):
        labels = {leaf.tensor for leaf in choice if leaf.tensor}
        if len(labels) > 1:
            raise RefusedError(f"one address would belong to {' and '.join(sorted(labels))}")
        spans = tuple(
            span._replace(stride=span.stride * stride)
            for leaf, stride in zip(choice, strides, strict=True)
            for span in leaf.spans
        )
        base = sum(leaf.base * stride for leaf, stride in zip(choice, strides, strict=True))
        combined.append(Leaf(labels.pop() if labels else "", spans, base))
    return combined


def lower(
    pattern: Pattern, sizes: Sizes, mesh: Mesh, strides: Sequence[int] | None = None, box: Box | None = None
) -> list[Leaf]:
    """The leaves of a physical tensor on one rank of a mesh.

    Args:
        pattern: the layout.
        sizes: the size of each axis and fill, in coordinates.
        mesh: (rank, ranks) of each mesh axis that the pattern splits over.
        strides: strides of the physical tensor in elements, when it is not stored row-major.
        box: the part of it that is stored, when it is not the whole.

    Raises:
        RefusedError: a split does not divide, or an axis has no size.
    """
    factors = [_lower(term, sizes, mesh) for term in pattern.dims]
    if box is not None:
        ranges = zip(factors, box, strict=True)
        factors = [(high - low, cut(leaves, low, high)) for (_, leaves), (low, high) in ranges]
    if strides is None:
        _, leaves = _product(factors)
    else:
        leaves = _combine([leaves for _, leaves in factors], strides)
    return [replace(leaf, tensor=pattern.label or leaf.tensor) for leaf in leaves]


def shape(pattern: Pattern, sizes: Sizes, mesh: Mesh) -> tuple[int, ...]:
    """The shape of a physical tensor on one rank of a mesh."""
    return tuple(_lower(term, sizes, mesh)[0] for term in pattern.dims)


def splits(term: Term) -> tuple[str, ...]:
    """The mesh axis of each evenly split run of a physical dimension: two where gate and up are each cut by itself."""
    return tuple(inner.mesh for inner in _walk(term) if isinstance(inner, Split))


def rows(pattern: Pattern, dim: int, sizes: Sizes, mesh: Mesh) -> list[Leaf]:
    """The leaves along one physical dimension alone, in address order: what `convert explain` draws."""
    leaves = _lower(pattern.dims[dim], sizes, mesh)[1]
    return sorted((replace(leaf, tensor=pattern.label or leaf.tensor) for leaf in leaves), key=lambda leaf: leaf.base)
