"""A class of Megatron-Bridge that changes megatron-core's GPTModel in code: which of its fields is which setting.

Its tables are of its own: megatron-core's arguments have no words for what it adds, and fields of the same name mean
something else to it. What the rows do not name has to leave layout and computation alone (`fields.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from formats.errors import RefusedError, SourceError, UnsupportedError
from formats.families import family_named
from formats.megatron.args import fields
from formats.megatron.args.args import ALIKE, confirmed
from formats.megatron.args.table import values_of
from formats.model.codec import Row, read, write
from formats.model.spec import ModelSpec

TARGET = "_target_"
"""What names the class in a file."""
Fields = Mapping[str, Any]


@dataclass(frozen=True)
class Provider:
    """One class.

    Attributes:
        family: the family of its models.
        target: the class, with its module.
        table: its fields and the settings that they spell.
        defaults: what its fields are where a file does not say them.
        sizes: the classes derived from it that have other defaults and nothing else, by their last name.
        epsilon: that of the norms which do not get `layernorm_epsilon`.
        accept: the deviation that their epsilon is.
        patch: the line that gives it to them.
    """

    family: str
    target: str
    table: tuple[Row, ...]
    defaults: Fields
    sizes: Mapping[str, Fields]
    epsilon: float
    accept: str
    patch: str

    @property
    def names(self) -> frozenset[str]:
        """The fields of the table."""
        return frozenset(name for row in self.table for names in row.keys for name in names)

    def given(self, said: Fields) -> dict[str, Any] | None:
        """The fields of a file with the defaults of their class; None if that is another."""
        module, _, kind = str(said.get(TARGET)).rpartition(".")
        own, _, first = self.target.rpartition(".")
        known = {first: {}, **self.sizes}
        return {**self.defaults, **known[kind], **said} if module == own and kind in known else None

    def spec_of(
        self, args: Fields, settings: Fields, base: ModelSpec | None, where: str, accept: Collection[str]
    ) -> ModelSpec:
        """The model of a run.

        Args:
            args: the fields with their defaults, and what else the file says as arguments of Megatron-LM.
            settings: values that overrule them.
            base: the spec of the Hugging Face config that travels with the run, if there is one.
            where: what to call the file in an error.
            accept: arguments and deviations that the user names.

        Raises:
            SourceError: a setting is missing.
            UnsupportedError: the model computes something that has no layout here.
            RefusedError: fields and config contradict each other, or its norms have several epsilons.
        """
        others = {name: value for name, value in args.items() if name not in {*self.names, TARGET}}
        notes = fields.require_understood(others, where, accept=accept)
        values = read(self.table, args, (), where, known={"family": self.family})
        values["vocab"] = values["vocab"] or (base.vocab if base else None)
        if base:
            values |= self._as_in_config(values, base)
        values = {**values, **settings, "notes": [*notes, *self.deviation(values["norm_epsilon"], accept, where)]}
        own = {key: values[key] for key in family_named(self.family).own}
        return confirmed({**values, "own": own}, settings, base, where)

    def _as_in_config(self, values: Fields, base: ModelSpec) -> dict[str, Any]:
        """The settings that a config spells in more ways than the fields, as it does where both mean the same."""
        known, spelled = values_of(base), dict[str, Any]()
        for row in self.table:
            if row.setting in (*ALIKE, *base.own):
                with suppress(RefusedError):
                    if write([row], values, (), "") == write([row], known, (), ""):
                        spelled[row.setting] = known[row.setting]
        return spelled

    def fields_of(self, spec: ModelSpec, accept: Collection[str]) -> dict[str, Any]:
        """The fields of a model.

        Raises:
            RefusedError: the class does not compute it.
        """
        self.deviation(spec.norm_epsilon, accept, f"{self.target}, for this {spec.family}")
        return {TARGET: self.target, **write(self.table, values_of(spec), (), ""), "should_pad_vocab": False}

    def deviation(self, epsilon: Any, accept: Collection[str], where: str) -> list[str]:
        """What the user should know of the epsilons of its norms, if there are several and that was accepted.

        Raises:
            RefusedError: it was not.
        """
        if epsilon == self.epsilon:
            return []
        what = f"the norms after attention and MLP have an epsilon of {self.epsilon:g} and the others of {epsilon:g}"
        if self.accept in accept:
            return [f"in stock Megatron-Bridge {what}: they are taken as one"]
        raise RefusedError(
            f"{where}: {what}; transformers has one for all",
            f"--accept {self.accept} takes them as one, for a tree of your own with this line: {self.patch}",
        )

    def padded(self, spec: ModelSpec, tp: int) -> int:
        """The rows of its embedding, which it does not pad.

        Raises:
            SourceError: the vocabulary is not known.
            RefusedError: they do not divide over tensor ranks.
        """
        if spec.vocab is None:
            raise SourceError("the size of the true vocabulary is not known", "name it with --vocab-size")
        if spec.vocab % tp:
            raise RefusedError(
                f"{spec.vocab} tokens do not divide over tp = {tp}, and {self.target.rpartition('.')[2]} pads none",
                "take another --tp",
            )
        return spec.vocab


def cannot(why: str) -> RefusedError:
    """Why Megatron-Bridge has no such model."""
    return RefusedError(f"Megatron-Bridge cannot compute this model: {why}")


def strange(where: str, what: str) -> UnsupportedError:
    """What a field says that no model here has."""
    return UnsupportedError(f"{where}: {what}")
