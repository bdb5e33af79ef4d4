"""Patterns: how a physical tensor is laid out over the axes of logical tensors.

A pattern is a row of terms, one for each physical dimension:

    hidden                      an axis
    (group head dim)            a row-major product: one physical dimension made of three axes
    (gate: ffn | up: ffn)       a sum: a concatenation; a label names the logical tensor of its branch
    (ffn (gate: | up:))         one element of each in turn: a branch is nothing but its tensor
    (gate: ffn | up: ffn)%interleave  alternating, `interleave` elements of each; concatenated where that is absent or 0
    ~padding                    fill: addresses that belong to no tensor
    (...)/tp                    an even split of a dimension over a mesh axis: rank r of n has the r-th of n parts
    query: (group head) hidden  a label in front names the logical tensor of the whole pattern

so that, for example, Megatron's fused projection is

    (group (query: head half pair | key: half pair | value: dim))/tp hidden

The addresses that a pattern means are computed in `lowering.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from formats.errors import VitruvianError


class PatternError(VitruvianError):
    """Raised for a pattern that does not parse; the message points at the character."""

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
    """Terms in row-major order: the last term varies fastest."""

    terms: tuple[Term, ...]


@dataclass(frozen=True)
class Sum:
    """Branches, concatenated. A label names the logical tensor that a branch belongs to."""

    branches: tuple[tuple[str | None, Product], ...]


@dataclass(frozen=True)
class Interleaved:
    """The branches of a sum, interleaved in blocks of `size` elements of each, or concatenated where the size is 0."""

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
    label: str | None = field(compare=False)  # in the text, as are the terms
    dims: tuple[Term, ...] = field(compare=False)

    @cached_property
    def tensors(self) -> tuple[str, ...]:
        """The logical tensors that this physical tensor is made of, in order of appearance."""
        labels = [self.label] if self.label else [label for label, _ in _branches(self.dims) if label]
        return tuple(dict.fromkeys(labels))

    @cached_property
    def meshes(self) -> frozenset[str]:
        """The mesh axes that split this physical tensor. Over every other mesh axis it is replicated."""
        return frozenset(axis for term in self.dims for axis in splits(term))

    @cached_property
    def filled(self) -> bool:
        """Whether some addresses of the physical tensor may belong to no logical tensor."""
        return any(isinstance(term, Fill) for dim in self.dims for term in _walk(dim))

    def renamed(self, old: str, new: str) -> Pattern:
        """The same layout, of another logical tensor."""
        return parse(re.sub(rf"\b{old}\b(?=\s*:)", new, self.text))

    def apart(self) -> tuple[Pattern, ...]:
        """The pattern of each branch as a tensor of its own, where a dimension is a sum; otherwise this pattern."""
        for dim, term in enumerate(self.dims):
            whole = term.term if isinstance(term, Interleaved) else term
            if isinstance(whole, Sum):
                before, after = self.dims[:dim], self.dims[dim + 1 :]
                return tuple(
                    parse(f"{label}: {' '.join(map(text_of, (*before, body, *after)))}")
                    for label, body in whole.branches
                )
        return (self,)


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


def axes_of(term: Term) -> frozenset[str]:
    """The names of the axes in a term."""
    return frozenset(inner.name for inner in _walk(term) if isinstance(inner, Axis))


def text_of(term: Term) -> str:
    """The text of a term, as it is written in a pattern."""
    match term:
        case Axis(name):
            return name
        case Fill(name):
            return f"~{name}"
        case Split(inner, name):
            return f"{text_of(inner)}/{name}"
        case Interleaved(inner, name):
            return f"{text_of(inner)}%{name}"
        case Product((inner,)):
            return text_of(inner)
        case Product(terms):
            return f"({' '.join(map(text_of, terms))})"
        case Sum(branches):
            return f"({' | '.join(f'{label}: ' * bool(label) + text_of(body) for label, body in branches)})"


def splits(term: Term) -> tuple[str, ...]:
    """The mesh axis of each split in a physical dimension: two where gate and up are each split by themselves."""
    return tuple(inner.mesh for inner in _walk(term) if isinstance(inner, Split))


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
        terms = []
        while self.peek() == "(" or self.peek() == "~" or self.peek().isidentifier():
            if self.peek(1) == ":":
                raise self.fail(f"the label {self.peek()!r} must stand at the start of a branch")
            terms.append(self.term())
        return tuple(terms)

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
