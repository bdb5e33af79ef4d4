"""Settings come back from every framework's spelling of them, or are refused: read(write(spec)) == spec.

A writer may refuse a model that its format cannot hold. What it writes, its reader has to read, and as what it was.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.internal.conjecture import providers

from formats.checkpoint import Settings
from formats.deepspeed.mds import args as mds_args
from formats.deepspeed.mds import bloom
from formats.deepspeed.mds.tables import FAMILIES as FAMILIES_OF_MDS
from formats.deepspeed.neox import yml as neox_args
from formats.deepspeed.neox.yml_file import dump_yml
from formats.errors import RefusedError, UnsupportedError
from formats.families import FAMILIES, family_named
from formats.families.family import Family
from formats.huggingface.config import from_huggingface, to_huggingface
from formats.huggingface.nanotron import model_config as nanotron
from formats.huggingface.rope import PARTIAL, SCALING
from formats.megatron import megatron_llm
from formats.megatron.args.args import from_megatron
from formats.megatron.args.options import CORE, Options, namespace
from formats.megatron.args.providers import EARLIER, PROVIDERS, of_args, of_spec
from formats.megatron.args.releases import CORE_OF_FIRST
from formats.megatron.classic import topology_of
from formats.model.accepted import EPSILON
from formats.model.spec import ModelSpec
from tests.property.specs import specs

Spoken = dict[str, Any]
"""What a format says of a model."""
NO_CONSTANTS = type(providers._local_constants)()
providers._get_local_constants = lambda: NO_CONSTANTS  # of the modules that are loaded, which depends on other tests
BOUNDED = settings(max_examples=25, derandomize=True, database=None, suppress_health_check=[*HealthCheck])


class Format(NamedTuple):
    """A format whose settings name no family. Its reader is given the config that travels with it, or none."""

    write: Callable[[ModelSpec], Spoken]
    read: Callable[[Spoken, ModelSpec | None], ModelSpec]
    may_hold: Callable[[Family], bool]
    examples: int


def write_megatron(spec: ModelSpec) -> Spoken:
    """The args of a classic checkpoint."""
    padded = topology_of(spec, Options())[1]
    return namespace(spec, ["BF16"], Options(), padded, {}, None)


def write_megatron_llm(spec: ModelSpec) -> Spoken:
    """The args of Megatron-LLM."""
    options = Options(dialect=megatron_llm.NAME)
    padded = topology_of(spec, options)[1]
    return megatron_llm.namespace(spec, ["BF16"], options, padded, {}, None)


def write_neox(spec: ModelSpec) -> Spoken:
    """The yml of GPT-NeoX, and what of the model its weights alone tell."""
    yml = dump_yml(neox_args.to_neox(spec, 1, 0, 128, {}))
    biases = "output_bias" in family_named(spec.family).holds
    return {"config": yaml.safe_load(yml), "ffn": spec.ffn, "vocab": spec.vocab, "biases": biases}


def write_bridge(spec: ModelSpec, version: str | None) -> Spoken:
    """The fields of a class of Megatron-Bridge, where megatron-core does not compute the model.

    `version` is that of the megatron-core with which it runs; None for that of the newest release.
    """
    provider = of_spec(spec, "bridge", version)
    if provider is None:
        raise UnsupportedError("a GPTModel does")
    return provider.fields_of(spec, (EPSILON,))


def read_bridge(said: Spoken, base: ModelSpec | None) -> ModelSpec:
    """The model of such fields."""
    provider = of_args(said)
    assert provider
    return provider.spec_of(said, {}, base, "its fields", (EPSILON,))


def read_mds(stored: Spoken, base: ModelSpec | None) -> ModelSpec:
    """The model of Megatron-DeepSpeed's arguments, in either tree."""
    args, vocab = stored["args"], stored["vocab"]
    if bloom.holds(args):
        return bloom.from_args(args, Settings(vocab), base, Path(), "args")
    return from_megatron(mds_args.translated(args, "args"), {"vocab": vocab}, base, "args", settled=True)


FORMATS = {
    CORE: Format(
        write_megatron,
        lambda args, base: from_megatron(args, {}, base, "args", settled=True),
        lambda family: not family.only_here,
        examples=25,
    ),
    megatron_llm.NAME: Format(
        write_megatron_llm,
        lambda args, base: megatron_llm.from_args(args, Settings(), base, None, False, "args"),
        lambda family: not family.only_here and not megatron_llm.unsupported_reason(family, ()),
        examples=60,
    ),
    "megatron_deepspeed": Format(
        lambda spec: {"args": mds_args.spelled(spec), "vocab": spec.vocab},  # its files say it beside the args
        read_mds,
        lambda family: family.name in FAMILIES_OF_MDS,
        examples=100,
    ),
    "nanotron": Format(
        lambda spec: nanotron.written_config(spec, spec.vocab or 0, {}),
        lambda config, base: nanotron.read_config(config, Settings(), base, "model_config.json")[0],
        lambda family: family.name in nanotron.MAY_HAVE,
        examples=60,
    ),
    "megatron_bridge": Format(
        lambda spec: write_bridge(spec, None),
        read_bridge,
        lambda family: family.name in PROVIDERS,
        examples=100,
    ),
    "megatron_bridge, 0.3.1": Format(
        lambda spec: write_bridge(spec, CORE_OF_FIRST),
        read_bridge,
        lambda family: family.name in EARLIER,
        examples=100,
    ),
    "neox": Format(
        write_neox,
        lambda stored, base: neox_args.from_neox(
            **stored, settings={}, where="the yml", family=base.family if base else None
        ),
        lambda family: bool(family.neox),
        examples=100,
    ),
}
SETTINGS = ("rope_theta", "rope_scaling", "tied", "norm_epsilon", "activation", "own", "rotary_fraction")
"""Settings that any two models of a family can have of each other."""
ALIKE = {"family", "biases", "own", "activation", "rope_scaling", "notes"}
"""What a format that names no family may tell otherwise without a config, if it computes the same."""


def written(form: Format, spec: ModelSpec) -> Spoken | None:
    """What a format says of a model; None where it refuses it."""
    with suppress(RefusedError, UnsupportedError):
        return form.write(spec)
    return None


# --- what comes back -------------------------------------------------------------------------------------------------


def configs(spec: ModelSpec, other: ModelSpec) -> Iterator[Spoken]:
    """The config of a model: made of nothing, and of that of another model of its family, old and new."""
    with suppress(RefusedError):
        yield to_huggingface(spec, {})
        base = to_huggingface(replace(other, own=spec.own), {})
        yield to_huggingface(spec, base)
        if spec.rope_theta is not None:
            yield to_huggingface(spec, in_version_5(base, FAMILIES[spec.family]))


def alike(ours: Mapping[str, Any] | None, theirs: Mapping[str, Any] | None) -> bool:
    """Whether two rope scalings agree in what both say; of llama3 three numbers count by their ratios alone."""
    if not ours or not theirs:
        return bool(ours) == bool(theirs)
    common = {"rope_type", "factor"} if ours["rope_type"] == "llama3" else ours.keys() & theirs.keys()
    return all(ours[name] == theirs[name] for name in common)


def in_version_5(config: Spoken, family: Family) -> Spoken:
    """A config of transformers 4 with the rotary settings of version 5."""
    theta = family.keys.get("rope_theta", "rope_theta").split()[0]
    old = {SCALING, theta, family.keys.get("rotary_fraction")}
    parameters = {"rope_theta": config[theta]}
    parameters |= config[SCALING] or {"rope_type": "default"}
    if "rotary_fraction" in family.keys:
        parameters[PARTIAL] = config[family.keys["rotary_fraction"]]
    return {name: value for name, value in config.items() if name not in old} | {"rope_parameters": parameters}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_from_hugging_face(name):
    @BOUNDED
    @given(spec=specs(FAMILIES[name]), other=specs(FAMILIES[name]))
    def comes_back(spec: ModelSpec, other: ModelSpec) -> None:
        for config in configs(spec, other):
            assert from_huggingface(json.loads(json.dumps(config)), {}, "config.json") == spec

    comes_back()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "name"), [(form, name) for form in FORMATS for name in FAMILIES if FORMATS[form].may_hold(FAMILIES[name])]
)
def test_from_other_formats(form, name):
    """With the config that travels along, the same; without one, a model that is written the same."""

    @settings(BOUNDED, max_examples=FORMATS[form].examples)
    @given(spec=specs(FAMILIES[name]))
    def comes_back(spec: ModelSpec) -> None:
        stored = written(FORMATS[form], spec)
        if stored is None:
            return
        assert FORMATS[form].read(stored, spec) == spec
        bare = FORMATS[form].read(stored, None)
        with suppress(RefusedError):
            assert from_huggingface(to_huggingface(bare, {}), {}, "its config") == bare
        if spec.experts and len(spec.sparse_layers) == spec.layers:  # `ffn` is the width of nothing
            bare = replace(bare, ffn=spec.ffn)
        assert FORMATS[form].write(bare) == stored
        for field in fields(ModelSpec):
            ours, theirs = getattr(spec, field.name), getattr(bare, field.name)
            assert field.name in ALIKE or ours == theirs or None in (ours, theirs), field.name
        assert alike(bare.rope_scaling, spec.rope_scaling)

    comes_back()


TAKEN = {"max_positions", "ffn"}
"""Settings that a reader takes from the config: a limit of what rotates, and the width of no MLP."""


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FAMILIES if FORMATS[CORE].may_hold(FAMILIES[name])])
def test_with_the_config_of_another_model_it_is_refused_or_the_same(name):
    """What is read is never another model than the one that was written, whatever config travels along."""

    @BOUNDED
    @given(spec=specs(FAMILIES[name]), other=specs(FAMILIES[name]))
    def never_another(spec: ModelSpec, other: ModelSpec) -> None:
        args = written(FORMATS[CORE], spec)
        for setting in SETTINGS if args else ():
            base = replace(spec, **{setting: getattr(other, setting)})
            with suppress(RefusedError):
                back = replace(FORMATS[CORE].read(args or {}, base), **{name: getattr(spec, name) for name in TAKEN})
                assert FORMATS[CORE].write(back) == args, setting

    never_another()


# --- the strategy ----------------------------------------------------------------------------------------------------


@cache
def sample(name: str) -> tuple[ModelSpec, ...]:
    """Models of a family, always the same."""
    drawn: list[ModelSpec] = []

    @settings(BOUNDED, max_examples=64, phases=[Phase.generate])
    @given(spec=specs(FAMILIES[name]))
    def draw(spec: ModelSpec) -> None:
        drawn.append(spec)

    draw()
    return tuple(drawn)


@cache
def values(name: str, setting: str) -> frozenset[str]:
    """What the models of a sample say of a setting."""
    return frozenset(repr(getattr(spec, setting)) for spec in sample(name))


def free(family: Family) -> set[str]:
    """The settings that a family leaves open."""
    names = {"layers", "hidden", "heads", "head_dim", "ffn", "vocab", "max_positions", "norm_epsilon", "tied"}
    names |= {"rope_theta", "rope_scaling"} if family.rope_theta is not None else set()
    names |= {"sliding_window"} if family.window else set()
    names |= {"biases"} if family.biases else set()
    names -= {"tied"} if "tie_word_embeddings" in family.requires else set()
    return names | {name for name, key in family.keys.items() if key and key not in family.requires}


@pytest.mark.slow
def test_every_setting_takes_several_values():
    """Of each family those that it leaves open, and its config keys that no other format has; in all, every one."""
    constant = [
        f"{name} of {family}" for family in FAMILIES for name in free(FAMILIES[family]) if len(values(family, name)) < 2
    ]
    constant += [
        f"{key} of {name}"
        for name, family in FAMILIES.items()
        for key in family.own
        if len({repr(spec.own[key]) for spec in sample(name)}) < 2
    ]
    names = {field.name for field in fields(ModelSpec)} - {"family", "notes", "mtp_layers"}  # the last no config says
    constant += [name for name in names if all(len(values(family, name)) < 2 for family in FAMILIES)]
    assert sorted(constant) == []


@pytest.mark.slow
def test_every_format_writes_some_models_of_the_families_that_it_may_hold_and_no_others():
    """Some formats have heads of hidden / heads elements alone, which few models of a sample happen to have."""
    for form, name in product(FORMATS, FAMILIES):
        drawn = sample(name)
        drawn += tuple(
            replace(spec, head_dim=spec.hidden // spec.heads) for spec in drawn if spec.hidden % spec.heads == 0
        )
        count = sum(written(FORMATS[form], spec) is not None for spec in drawn)
        assert (count >= 2) == FORMATS[form].may_hold(FAMILIES[name]), f"{form} writes {count} of {name}"
