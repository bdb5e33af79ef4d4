"""Read a family of the user's own from a TOML file, which has the fields and the grammar of a file in `families/`.

    name = "my_model"                      # model_type of its config.json
    architecture = "MyModelForCausalLM"
    rope_theta = 10000.0                   # or "none"
    table = '''
    model.embed_tokens.weight    embedding: vocab hidden
    ...
    '''
    [requires]
    hidden_act = "silu"

TOML has no null: the string "none" stands for it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields
from itertools import product
from pathlib import Path
from typing import Any

from formats.errors import RefusedError, UsageError, short
from formats.families import FAMILIES
from formats.families.family import Family
from formats.huggingface.mtp import JOIN
from formats.huggingface.rope import ORIGINAL, SCALING
from formats.huggingface.settings_table import USUAL
from formats.layout.lowering import lower
from formats.layout.pattern import PatternError
from formats.layout.table import BIASES, CONDITIONS, DISTINGUISHED_KINDS, MTP, Rule, model_tensors, rules
from formats.layout.tensors import TENSORS
from formats.model.settings import CHOICES, LISTS
from formats.model.spec import MIXERS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

KINDS = {
    "str": (str,),
    "bool": (bool,),
    "int": (int,),
    "float": (float, int, str),
    "Mapping": (dict,),
    "tuple": (list,),
}
OURS = ("neox", "native", "scalings", "elsewhere", "file")
FIELDS = {field.name: KINDS[re.split(r"\W", str(field.type))[0]] for field in fields(Family) if field.name not in OURS}
"""Field of a `Family`: its types in TOML. Fields that only a family of the project has are left out."""
APART = ("rope_theta", "drops", "nulls", "blocks", "full_until", "biases")
REQUIRED = ("name", "architecture", "table", "rope_theta")
SETTINGS = (*USUAL, *CHOICES, "rope_theta")
"""The settings that `keys` and `defaults` may name."""
OF_LAYERS = {"dense", "sparse"}
OF_MIXERS = {"attention", *MIXERS.values()}
OF_QUERIES = {"compressed", "uncompressed"}
OF_EXPERTS = {"wide", "narrow"}
OF_KEYS = {"fused", "separate"}
ALLOWED = {
    "tied", "untied", "parallel", "serial", "optional", "indexing", MTP,
    *OF_KEYS, *OF_LAYERS, *OF_QUERIES, *OF_MIXERS, *OF_EXPERTS, *BIASES, *DISTINGUISHED_KINDS, "fed",
}  # fmt: skip
"""The conditions of layout that are possible in a Hugging Face folder."""
ROUTERS = ("softmax", "sigmoid")
SILU = {"silu", "swish", "swiglu"}
"""Names of SiLU, the only activation of a gated MLP that Megatron has."""
SIZES = {axis: 2 for axes in TENSORS.values() for axis in axes if axis != "layer"}
NONE = "none"
MOST_BYTES = 1 << 18
MOST_LINES = 500
MOST_SPELLINGS = 4
"""Most bars in a key; each doubles the number of its spellings."""
MOST_CHARACTERS = 300
MOST_BRANCHES = 8
"""Most bars in a pattern; each may double the number of its leaves."""


def load(path: Path) -> Family:
    """Read a family from a TOML file.

    Raises:
        UsageError: the file cannot be read, or describes no family; the message names the field, or the line of the
            table and the character in it.
    """
    values = _parsed(path)
    for name, kinds in FIELDS.items():
        if name in REQUIRED and name not in values:
            raise UsageError(f"{path} does not say {name}", f"it has to: {', '.join(REQUIRED)}")
        if name in values and (
            not isinstance(values[name], kinds) or isinstance(values[name], bool) is not (bool in kinds)
        ):
            raise UsageError(f"{path}: {name} = {short(values[name])} is of the wrong kind")
    unknown = sorted(set(values) - set(FIELDS))
    if unknown:
        raise UsageError(f"{path}: a family has no {short(unknown[0])}", f"it has {', '.join(FIELDS)}")
    if not re.fullmatch(r"[\w.-]{1,100}", values["name"]) or values["name"] in FAMILIES:
        taken = "is taken" if values["name"] in FAMILIES else "is no name"
        raise UsageError(f"{path}: name = {short(values['name'])} {taken}", "name it apart, and say its model_type")
    for name in ("requires", "marks", "defaults", "own"):
        values[name] = {key: _plain(value, f"{path}: {name}.{key}") for key, value in values.get(name, {}).items()}
    for key, token in values.get("tokens", {}).items():
        if type(token) is not int or token < 0:
            raise UsageError(f"{path}: tokens.{key} = {short(token)} is no id of a token")
    usual = values["defaults"]
    usual |= {name: tuple(usual[name]) for name in LISTS if isinstance(usual.get(name), list)}
    _check_lines(values["table"], path)
    family = Family(
        **{name: value for name, value in values.items() if name not in APART},
        drops=tuple(_drops(values.get("drops", []), path)),
        nulls=_keys("nulls", values, path),
        blocks=_keys("blocks", values, path),
        rope_theta=_theta(values["rope_theta"], path),
        full_until=_full_until(values.get("full_until"), path),
        biases={key: _bias(value, f"{path}: biases.{key}") for key, value in values.get("biases", {}).items()},
        file=path,
    )
    _check_settings(family, path)
    _check_table(family, path)
    _check_orders(family, path)
    _check_megatron(family, path)
    return family


def _parsed(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise UsageError(f"{path} has more than {MOST_BYTES} bytes, too many for a family")
        return dict(tomllib.loads(content.decode()))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # of TOML, of UTF-8, or too deep
        raise UsageError(f"{path} is not valid TOML: {error}") from None


def _plain(value: Any, where: str) -> Any:
    """A value as it is in config.json: "none" becomes None (UsageError: no config has such a value)."""
    if isinstance(value, dict) and where.endswith((f".{SCALING}", ".full_layers")):
        return {key: _plain(item, f"{where}.{key}") for key, item in value.items()}
    if not isinstance(value, bool | int | float | str | list):
        raise UsageError(f"{where} is {short(value)}, and no value of a config here")
    return None if value == NONE else value


def _theta(value: float | str, path: Path) -> float | None:
    if value == NONE:
        return None
    if isinstance(value, str) or not 0 < value < 1e30:
        raise UsageError(f"{path}: rope_theta = {short(value)} is neither a number above 0 nor {NONE!r}")
    return float(value)


def _full_until(value: list[Any] | None, path: Path) -> tuple[str, int] | None:
    match value:
        case None:
            return None
        case [str(key), int(layers)]:
            return key, layers
    raise UsageError(f"{path}: full_until = {short(value)} is no config key with a number of layers")


def _bias(value: Any, where: str) -> tuple[str, bool]:
    match value:
        case [str(names), bool(usual)] if names and set(names.split()) <= BIASES:
            return names, usual
    raise UsageError(f"{where} = {short(value)} is not what biases, of {', '.join(sorted(BIASES))}, and true or false")


def _drops(values: list[Any], path: Path) -> Iterator[str]:
    for value in values:
        try:
            re.compile(value)
        except (TypeError, re.error, RecursionError, OverflowError) as error:
            raise UsageError(f"{path}: drops holds {short(value)}, which is no regular expression: {error}") from None
        yield value


def _keys(name: str, values: Mapping[str, Any], path: Path) -> tuple[str, ...]:
    keys = values.get(name, [])
    if others := [key for key in keys if not isinstance(key, str)]:
        raise UsageError(f"{path}: {name} holds {short(others[0])}, which is no config key")
    return tuple(keys)


# --- the table -------------------------------------------------------------------------------------------------------


def _check_lines(table: str, path: Path) -> None:
    """Check each line of a table by itself (UsageError: a line is no valid rule, or the lines are too many)."""
    lines = table.splitlines()
    if len(lines) > MOST_LINES:
        raise UsageError(f"{path}: its table has {len(lines)} lines, more than {MOST_LINES}")
    for number, line in enumerate(lines, 1):
        if line.strip():
            _check_line(line.strip(), f"{path}, line {number} of its table")


def _check_line(line: str, where: str) -> None:
    columns = re.split(r"\s{2,}", line)
    names = {name for column in columns[2:] for name in column.split()}
    if len(columns) < 2:
        raise UsageError(f"{where} is no key and pattern with two spaces between them: {short(line)}")
    if not names <= ALLOWED:
        known = ", ".join(f"{name} ({CONDITIONS[name]})" for name in sorted(ALLOWED))
        raise UsageError(f"{where}: there is no condition {short(min(names - ALLOWED))}", f"conditions: {known}")
    key = columns[0]
    numbered = key.replace("{layer}", "", 1).replace("{depth}", "", 1).replace("{expert}", "", 1)
    if re.search(r"[{}]", re.sub(r"\{[^{}|]*(?:\|[^{}|]*)+\}", "", numbered)):
        raise UsageError(
            f"{where}: {short(key)} has braces around something else than {{layer}}, {{depth}}, {{expert}} or "
            "{{one|other}}"
        )
    if key.count("|") > MOST_SPELLINGS:
        raise UsageError(f"{where}: {short(key)} has too many spellings")
    if len(columns[1]) > MOST_CHARACTERS or columns[1].count("|") > MOST_BRANCHES:
        raise UsageError(f"{where}: no pattern is so long: {short(columns[1])}")
    try:
        (rule,) = rules(line)
        _check_rule(rule, where)
    except (PatternError, RefusedError) as error:
        raise UsageError(f"{where}: {error}", f"axes: {', '.join(SIZES)}") from None
    except ValueError:
        hint = f"tensors: {', '.join(TENSORS)}"
        raise UsageError(f"{where} names a tensor that there is not: {columns[1]}", hint) from None


def _check_rule(rule: Rule, where: str) -> None:
    """Check that a rule has each axis of each of its tensors exactly once (UsageError)."""
    pattern = rule.pattern
    if pattern.meshes or pattern.filled:
        raise UsageError(f"{where}: a Hugging Face folder has neither ranks (/) nor padding (~): {pattern.text}")
    leaves = lower(pattern, SIZES, {})
    for tensor in pattern.tensors:
        axes_of = [sorted(span.axis for span in leaf.spans) for leaf in leaves if leaf.tensor == tensor]
        first, *rest = TENSORS[tensor]
        axes = rest if first == "layer" else [first, *rest]
        if rule.of_expert and "expert" in axes:
            axes = [axis for axis in axes if axis != "expert"]
        elif rule.of_expert:
            raise UsageError(f"{where}: {tensor} is no tensor of one expert")
        second = MTP in rule.conditions  # keys of MTP layers need no number, and may hold copies of the model's tensors
        if (first == "layer") is not ("{layer}" in rule.key) and not second:
            raise UsageError(f"{where}: {tensor} is a tensor of {'each layer' if first == 'layer' else 'the model'}")
        if axes_of != [sorted(axes)]:
            raise UsageError(
                f"{where}: {tensor} has the axes {', '.join(axes)}, each once; the pattern is {pattern.text}"
            )
    if len(leaves) != len(pattern.tensors):
        raise UsageError(f"{where}: a part of the pattern belongs to no tensor: {pattern.text}")


def _check_orders(family: Family, path: Path) -> None:
    """Check that all tensors of a table have `half` and `pair`, and `group` and `head`, in one order (UsageError).

    Queries are multiplied by keys, and the outputs of heads by the output projection.
    """
    for outer, inner in (("half", "pair"), ("group", "head")):
        orders = _orders(family, outer, inner)
        if len(orders) > 1:
            expected, reverse = f"`{outer} {inner}`", f"`{inner} {outer}`"
            raise UsageError(
                f"{path}: its table has {orders[True]} in the order {expected}, {orders[False]} in {reverse}"
            )


def _orders(family: Family, outer: str, inner: str) -> dict[bool, str]:
    """One tensor for each order of two axes in a table, by whether axis `outer` is the outer one."""
    orders: dict[bool, str] = {}
    for leaf in (leaf for rule in family.tensors for leaf in lower(rule.pattern, SIZES, {})):
        strides = {span.axis: span.stride for span in leaf.spans}
        if outer in strides and inner in strides:
            orders[strides[outer] > strides[inner]] = leaf.tensor
    return orders


def _check_table(family: Family, path: Path) -> None:
    """Check that for every choice of settings each tensor and each key is in the table exactly once (UsageError)."""
    residuals = [{"parallel"}, {"serial"}] if "parallel_residual" in family.keys else [set[str]()]
    used = {name for rule in family.tensors for name in rule.conditions}
    if used & {"parallel", "serial"} and residuals == [set()]:
        raise UsageError(f"{path}: lines that are {used & {'parallel', 'serial'}} need the key parallel_residual")
    alone = "mlp_layers" in family.keys
    if not ("moe" in family.traits or alone) and used & OF_LAYERS:
        raise UsageError(f"{path}: without a router no line can be {min(used & OF_LAYERS)}")
    named = [{name} for name in ("fused", "separate")]
    mlps = [{kinds} for kinds in (("dense", "sparse") if "moe" in family.traits else ("dense",))]
    if "query_rank" not in family.keys and used & OF_QUERIES:
        raise UsageError(f"{path}: without the key query_rank no line can be {min(used & OF_QUERIES)}")
    queries = [{kinds} for kinds in sorted(OF_QUERIES)] if "query_rank" in family.keys else [set[str]()]
    known = {"attention", *(kind for name, kind in MIXERS.items() if name in family.keys)}
    mixing = OF_MIXERS & used
    if lacking := [(key, kind) for key, kind in MIXERS.items() if kind in mixing - known]:
        raise UsageError(f"{path}: without the key {lacking[0][0]} no line can be {lacking[0][1]}")
    if mixing and known == {"attention"}:
        raise UsageError(f"{path}: without one of the keys {', '.join(MIXERS)} no line can be attention")
    mixers = [{kinds} for kinds in sorted(known)]
    layers_of = [*mixers, *mlps] if alone else [kinds | other for kinds, other in product(mixers, mlps)]
    experts = [{"wide"}, {"narrow"}] if "expert_latent" in family.keys else [{"wide"}]
    conditional = {name for names, _ in family.biases.values() for name in names.split()}
    if used & BIASES != conditional:
        raise UsageError(f"{path}: biases has {sorted(conditional)}, the lines of its table {sorted(used & BIASES)}")
    biases = [conditional, set[str]()] if conditional else [conditional]
    parts = [set[str](), {MTP}] if MTP in used else [set[str]()]
    heads = ({"tied"}, {"untied"})
    for residual, head, part, *rest in product(residuals, heads, parts, named, layers_of, experts, queries, biases):
        kind = set[str]().union(*rest, part)
        layers = [rule for rule in family.tensors if (MTP in rule.conditions) == bool(part)]
        kind_rules = [rule for rule in layers if rule.conditions <= {*residual, *head, *kind, "optional"}]
        keys = [key for rule in kind_rules for key in rule.spellings]
        names = [name for rule in kind_rules if "optional" not in rule.conditions for name in rule.pattern.tensors]
        for what, every in (("the key ", keys), ("", names)):
            if twice := [name for name in every if every.count(name) > 1]:
                where = ", ".join(sorted({*residual, *head, *kind}))
                raise UsageError(f"{path}: its table has {what}{twice[0]} twice ({where})")
        first = {JOIN} if part else {"embedding", *model_tensors(kind_rules, {*residual, *head, *kind})}
        missing = first - set(names)
        if missing:
            raise UsageError(f"{path}: its table has no {min(missing)}, or an optional one alone")


# --- the settings ----------------------------------------------------------------------------------------------------


def _check_settings(family: Family, path: Path) -> None:
    """Check that `keys` and `defaults` name settings, and those that the table needs (UsageError)."""
    for name, known in (("keys", SETTINGS), ("defaults", (*SETTINGS, SCALING, ORIGINAL))):
        unknown = sorted(set(getattr(family, name)) - set(known))
        if unknown:
            raise UsageError(
                f"{path}: {name} names no setting with {short(unknown[0])}", f"settings: {', '.join(known)}"
            )
    for key, setting in family.copied.items():
        if setting not in [*USUAL, *family.keys]:
            raise UsageError(f"{path}: copied.{key} = {short(setting)} is no setting with a key")
    for name, key in family.keys.items():
        if not isinstance(key, str) or (not key and name not in ("kv_heads", "head_dim")):
            raise UsageError(f"{path}: keys.{name} = {short(key)} is no key of a config")
    if "moe" in family.traits and not ({"experts", "top_k"} <= set(family.keys) and family.router in ROUTERS):
        raise UsageError(
            f"{path}: a mixture of experts needs keys.experts, keys.top_k and router = {' or '.join(ROUTERS)}"
        )
    if "rotary_fraction" in family.keys and "rotary_fraction" not in family.defaults:
        raise UsageError(f"{path}: keys has rotary_fraction, and defaults has none")
    if "rotary_fraction" in family.keys and False in _orders(family, "half", "pair"):
        raise UsageError(f"{path}: a head that rotates in part is `half pair`, no table can turn it into `pair half`")
    if "learned" in family.traits and family.rope_theta is not None:
        raise UsageError(f"{path}: its positions are learned, so rope_theta has to be {NONE!r}")


def _check_megatron(family: Family, path: Path) -> None:
    """Check that Megatron can hold a family without `only_here`: it has the tensors of a family of the project.

    Raises:
        UsageError: Megatron cannot hold the family.
    """
    if family.only_here:
        return
    known = {member.holds: set(member.own) for member in FAMILIES.values() if not member.only_here}
    own, ungated = known.get(family.holds, set()), "ungated" in family.traits
    reasons = {
        "no family that Megatron has is made of these tensors": family.holds not in known,
        "nothing rotates and no position is learned": (
            family.rope_theta is None and not {"learned", "state"} & family.traits
        ),
        "no other format has the keys in own": bool(set(family.own) - own),
        f"its own lacks {', '.join(sorted(own))}": bool(own - set(family.own)),
        f"requires does not say that its activation is {' or '.join(sorted(SILU))}": (
            not ungated and not SILU & {value for value in family.requires.values() if isinstance(value, str)}
        ),
        "keys does not say what its activation is called": ungated and "activation" not in family.keys,
        "its norms are stored minus 1, and its MLP has a gate": (
            family.centred and not ungated and "recurrent" not in family.traits
        ),
        "its MLP has a gate, and keys leaves its activation open": not ungated and "activation" in family.keys,
    }
    for reason, holds in reasons.items():
        if holds:
            raise UsageError(f"{path}: {reason}", 'if Megatron cannot hold it, say why: only_here = "..."')
