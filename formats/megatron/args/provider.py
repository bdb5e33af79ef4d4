"""A class of Megatron-Bridge that changes megatron-core's GPTModel in code: its fields, and the settings that they are.

A class has a table of its own: megatron-core has no arguments for what the class adds, and fields of the same name have
another meaning. Fields that are not in the table must not change layout or computation (`fields.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from formats.errors import RefusedError, SourceError, UnsupportedError
from formats.families import family_named
from formats.megatron.args import fields
from formats.megatron.args.args import ALIKE, confirmed
from formats.megatron.args.layers import is_local
from formats.megatron.args.table import values_of
from formats.model.codec import Codec, Context, Row, Spelled, read, write
from formats.model.spec import ModelSpec

TARGET = "_target_"
"""The key of the class name in a file."""
Fields = Mapping[str, Any]


@dataclass(frozen=True)
class Provider:
    """A class of Megatron-Bridge.

    Attributes:
        family: the family of the models of the class.
        target: the name of the class, with its module.
        table: the fields of the class and the settings that they spell.
        defaults: the values of fields that a file does not have.
        releases: the releases of Megatron-Bridge that compute the model as it is written.
        sizes: classes derived from this one, by name without module: their defaults, in which alone they differ.
        tower: the `model_type` of the whole models whose language model the class builds, never without a tower; empty
            if it builds the model alone.
        epsilon: the epsilon of the norms that do not get `layernorm_epsilon`; None if all norms get it.
        accept: the name with which `--accept` accepts that epsilon.
        patch: the line that gives `layernorm_epsilon` to those norms.
        marks: fields of which a file of these releases has one or more, and no file of earlier ones; empty if there
            are no earlier ones, or none is known.
    """

    family: str
    target: str
    table: tuple[Row, ...]
    defaults: Fields
    releases: str
    sizes: Mapping[str, Fields] = field(default_factory=dict)
    tower: str = ""
    epsilon: float | None = None
    accept: str = ""
    patch: str = ""
    marks: Collection[str] = ()

    @property
    def names(self) -> frozenset[str]:
        """The names of the fields in the table."""
        return frozenset(name for row in self.table for names in row.keys for name in names)

    def with_defaults(self, fields_of_file: Fields) -> dict[str, Any] | None:
        """The fields of a file, completed with the defaults of their class.

        None if the file names another class, or an earlier release wrote it.
        """
        if self.marks and fields_of_file.keys().isdisjoint(self.marks):
            return None
        module, _, kind = str(fields_of_file.get(TARGET)).rpartition(".")
        own, _, first = self.target.rpartition(".")
        known = {first: {}, **self.sizes}
        return {**self.defaults, **known[kind], **fields_of_file} if module == own and kind in known else None

    def spec_of(
        self, args: Fields, settings: Fields, base: ModelSpec | None, where: str, accept: Collection[str]
    ) -> ModelSpec:
        """The spec of the model of a run.

        Args:
            args: the fields with their defaults, and all else in the file as arguments of Megatron-LM.
            settings: values that overrule the fields.
            base: the spec of the Hugging Face config that travels with the run, if there is one.
            where: what to call the file in an error.
            accept: arguments and deviations that the user names.

        Raises:
            SourceError: a setting is missing.
            UnsupportedError: the model computes something that has no layout here.
            RefusedError: fields and config contradict each other, or the norms of the model have several epsilons.
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
        """Settings that a config can spell in more ways than the fields, as the config does if both mean the same."""
        known, spelled = values_of(base), dict[str, Any]()
        for row in self.table:
            if row.setting in (*ALIKE, *base.own):
                with suppress(RefusedError):
                    if write([row], values, (), "") == write([row], known, (), ""):
                        spelled[row.setting] = known[row.setting]
        return spelled

    def fields_of(self, spec: ModelSpec, accept: Collection[str]) -> dict[str, Any]:
        """The fields of the class for a model.

        Raises:
            RefusedError: the class does not compute the model.
        """
        self.deviation(spec.norm_epsilon, accept, f"{self.target}, for this {spec.family}")
        return {TARGET: self.target, **write(self.table, values_of(spec), (), ""), "should_pad_vocab": False}

    def deviation(self, epsilon: Any, accept: Collection[str], where: str) -> list[str]:
        """Notes for the user on norms with different epsilons; none if all norms have the same.

        Raises:
            RefusedError: the norms have different epsilons, and the user has not accepted it.
        """
        if self.epsilon in (None, epsilon):
            return []
        what = f"the norms after attention and MLP have an epsilon of {self.epsilon:g} and the others of {epsilon:g}"
        if self.accept in accept:
            return [f"in stock Megatron-Bridge {what}: they are taken as one"]
        raise RefusedError(
            f"{where}: {what}; transformers has one for all",
            f"--accept {self.accept} takes them as one, for a tree of your own with this line: {self.patch}",
        )

    def padded(self, spec: ModelSpec, tp: int) -> int:
        """The rows of a model's embedding, which the class does not pad.

        Raises:
            SourceError: the vocabulary size is not known.
            RefusedError: the rows do not divide over tensor ranks.
        """
        if spec.vocab is None:
            raise SourceError("the size of the true vocabulary is not known", "name it with --vocab-size")
        if spec.vocab % tp:
            raise RefusedError(
                f"{spec.vocab} tokens do not divide over tp = {tp}, and {self.target.rpartition('.')[2]} pads none",
                "take another --tp",
            )
        return spec.vocab


def own_attention(key: str) -> Codec:
    """A codec of the attention backend of a class with an attention of its own, of which a local one takes the place.

    Facts: Megatron-Bridge 0.3 to 0.6 models/gpt_provider.py `GPTModelProvider.provide`.
    """

    def read(spelled: Spelled, context: Context) -> None:
        if is_local(spelled.get(key)):
            raise unsupported_field(
                context.where, f"{key} = local takes megatron-core's attention in the place of that of the class"
            )

    return Codec(read, lambda *_: {})


def refusal(why: str) -> RefusedError:
    """The error that Megatron-Bridge cannot compute a model."""
    return RefusedError(f"Megatron-Bridge cannot compute this model: {why}")


def unsupported_field(where: str, what: str) -> UnsupportedError:
    """The error that a field has a value that is not supported."""
    return UnsupportedError(f"{where}: {what}")
