"""The classes of Megatron-Bridge that compute models which megatron-core alone does not, and why others have none.

Facts: Megatron-Bridge 0.3.1 to 0.6.2, models/ (of 0.3.1 gemma2_provider.py
`Gemma2DotProductAttention`: a window where layer_number, which begins with 1, is even); transformers 5.23.0,
models/gemma2/configuration_gemma2.py: a window in the first layer, and in every second layer after it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from formats.errors import UnsupportedError
from formats.families import family_named
from formats.megatron.args import gemma3, ministral3
from formats.megatron.args.provider import TARGET, Provider
from formats.megatron.args.releases import FIRST_RELEASE, NEWEST, is_first
from formats.model.spec import ModelSpec

PROVIDERS: Mapping[str, Provider] = {provider.family: provider for provider in (gemma3.PROVIDER, ministral3.PROVIDER)}
"""The class that computes the models of a family, in the newest release, by family."""
EARLIER: Mapping[str, Provider] = {"gemma3_text": gemma3.FIRST}
"""The class in Megatron-Bridge 0.3.1; those of all other families are of later releases alone."""
ALL = (*PROVIDERS.values(), *EARLIER.values())
OPPOSITE = (
    "Megatron-Bridge's Gemma2ModelProvider has its windows in the second layer and every other one after it, and "
    "transformers in the first"
)
LACKING: Mapping[str, str] = {"gemma2": OPPOSITE}
"""Why no class computes the models of a family though a class claims to, by family."""
FAULTY = {r"megatron\.bridge\.models\.gemma\.gemma2_provider\.Gemma2ModelProvider\w*": OPPOSITE}
"""Why transformers does not compute the models of a class, by pattern of the class name."""
BRIDGE = "--format torch_dist --for bridge"
WAY = f"{BRIDGE} writes it for Megatron-Bridge, whose {{}} computes it"


def of_fields(fields: Mapping[str, Any], where: str) -> tuple[Provider, dict[str, Any]] | None:
    """The class that a file names, and its fields with their defaults; None if it is not one of `ALL`.

    Raises:
        UnsupportedError: transformers computes something else than the class.
    """
    for kind, why in FAULTY.items():
        if re.fullmatch(kind, str(fields.get(TARGET))):
            raise UnsupportedError(f"{where}: {why}")
    given = ((provider, provider.with_defaults(fields)) for provider in ALL)
    return next(((provider, known) for provider, known in given if known is not None), None)


def of_args(args: Mapping[str, Any]) -> Provider | None:
    """The class that args name; None if it is not one of `ALL`."""
    return next((provider for provider in ALL if provider.with_defaults(args) is not None), None)


def _of(family: str, version: str | None) -> Provider | None:
    """The class of a family in the release that runs with a megatron-core; None for that of the newest release."""
    return (EARLIER if is_first(version) else PROVIDERS).get(family)


def of_spec(spec: ModelSpec, trainer: str | None, version: str | None) -> Provider | None:
    """The class that is to compute a model; None if megatron-core computes it.

    Args:
        spec: the model.
        trainer: `bridge` if the files are for Megatron-Bridge.
        version: the megatron-core with which it runs; None for that of the newest release.

    Raises:
        UnsupportedError: neither megatron-core nor a class computes the model, or only a class of Megatron-Bridge does
            and the files are not for Bridge.
    """
    reason, provider = family_named(spec.family).only_here, _of(spec.family, version)
    if not reason:
        return None
    if provider and trainer:
        return provider
    why = f"a {spec.family} has no Megatron layout: {reason}"
    if trainer:
        none = (
            f"Megatron-Bridge's {FIRST_RELEASE} does not compute it"
            if is_first(version)
            else f"no release of Megatron-Bridge known here (up to {NEWEST}) computes it"
        )
        raise UnsupportedError(f"{why}; {LACKING.get(spec.family, none)}", "see `convert formats`")
    alone = provider is not None and not provider.tower
    raise UnsupportedError(why, WAY.format(_name(provider)) if provider and alone else "see `convert formats`")


def require_tower(provider: Provider | None, model: ModelSpec) -> None:
    """Refuse a language model alone whose class builds it with a tower.

    Raises:
        UnsupportedError: it is such a class.
    """
    if provider and provider.tower:
        raise UnsupportedError(
            f"Megatron-Bridge's {_name(provider)} builds a {model.family} with a tower alone",
            f"write the whole model, a {provider.tower}",
        )


def require_no_adapter(provider: Provider | None, where: str) -> None:
    """Refuse an adapter of a model of such a class.

    Gemma 3's has a norm between a layer and the output of its LoRA, which PEFT has not (Megatron-Bridge 0.3.1,
    peft/lora_layers.py); of the others no adapter was seen.

    Raises:
        UnsupportedError: there is a provider.
    """
    if provider and provider.tower:
        raise UnsupportedError(f"{where}: no adapter of Megatron-Bridge's {_name(provider)} is known here")
    if provider and not provider.tower:
        raise UnsupportedError(
            f"{where}: in Megatron-Bridge's {_name(provider)} a norm is between a layer and what LoRA adds, not in PEFT"
        )


def remarks(spec: ModelSpec, version: str | None) -> tuple[str, ...]:
    """Notes for the user on files that only a class of `ALL` computes; `version` is that of `of_spec`."""
    provider = _of(spec.family, version)
    if not provider:
        return ()
    reason = family_named(spec.family).only_here
    only = f"these files are for Megatron-Bridge's {_name(provider)} alone: {reason}"
    return (only, f"they are for its {provider.releases}")


def _name(provider: Provider) -> str:
    return provider.target.rpartition(".")[2]
