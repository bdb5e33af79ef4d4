"""Random settings of every model family, drawn from its table: a new family needs nothing here.

A draw is any model that the family allows, whether or not a format can hold it: refusing the rest is the writer's work.
What most formats can hold is drawn more often, so that they write enough of each family.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd
from typing import Any

from hypothesis import strategies as st

from formats.families.family import Family
from formats.huggingface.layers import FULL, SLIDING
from formats.huggingface.settings_table import LINES, USUAL
from formats.model.checks import checked
from formats.model.settings import CHOICES, LISTS, TYPES
from formats.model.spec import ModelSpec

SIZE = st.integers(1, 300)
FACTOR = st.sampled_from([4.0, 8.0, 1.5])
POSITIONS = st.sampled_from([4096, 32, 77])
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def scaling(kind: str, more: Mapping[str, st.SearchStrategy[Any]], **needed: Any) -> st.SearchStrategy[dict[str, Any]]:
    """A rope scaling of a kind, as transformers has it: the parameters that it needs, and those that it may have."""
    fields = {name: value if isinstance(value, st.SearchStrategy) else st.just(value) for name, value in needed.items()}
    return st.fixed_dictionaries({"rope_type": st.just(kind), **fields}, optional=dict(more))


SCALINGS = (
    scaling("linear", {"finetuned": st.booleans()}, factor=FACTOR),
    scaling("llama3", {}, factor=FACTOR, **LLAMA3),
    scaling("llama3", {}, factor=FACTOR, **{name: 2 * value for name, value in LLAMA3.items()}),
    scaling("llama3", {}, factor=FACTOR, **{**LLAMA3, "high_freq_factor": 3.0}),
    scaling("yarn", {"truncate": st.booleans()}, factor=FACTOR, original_max_position_embeddings=POSITIONS),
    scaling(
        "yarn",
        {"beta_fast": st.just(16.0), "beta_slow": st.just(0.5), "mscale": st.just(1.0), "finetuned": st.booleans()},
        factor=FACTOR,
        original_max_position_embeddings=POSITIONS,
    ),
    scaling("yarn", {}, factor=FACTOR, original_max_position_embeddings=POSITIONS, mscale=0.7, mscale_all_dim=0.4),
    scaling("yarn", {}, factor=FACTOR, original_max_position_embeddings=POSITIONS, attention_factor=1.5),
    scaling("longrope", {}, short_factor=[1.0] * 4, long_factor=[2.0] * 4, original_max_position_embeddings=32),
    scaling("dynamic", {}, factor=FACTOR),
)
BETA = "llama_4_scaling_beta"
GROWING = scaling(
    "yarn",
    {"truncate": st.booleans(), "beta_slow": st.just(0.5)},
    factor=FACTOR,
    original_max_position_embeddings=POSITIONS,
    **{BETA: 0.1},
)
"""Of the families whose queries grow with their position."""
ACTIVATIONS = ("relu2", "gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast", "relu")
OF_TYPE = {"int": SIZE, "float": st.sampled_from([1.0, 0.5, 0.25]), "bool": st.booleans()}
OFTEN: Mapping[str, st.SearchStrategy[Any]] = {
    "experts": st.sampled_from([4, 8, 12]),
    "top_k": st.sampled_from([4, 2, 4, 1, 3]),
    "router_normalized": st.sampled_from([True, True, False]),
    "router_scale": st.sampled_from([1.0, 1.8, 2.5]),
    "router_groups": st.sampled_from([2, 4, 1]),
    "query_rank": st.none() | SIZE,
    "rope_dim": SIZE.map(lambda half: 2 * half),
    "expert_latent": st.none() | SIZE,
    "state_groups": st.sampled_from([1, 2, 4]),
    "taps": st.sampled_from([4, 4, 3]),
    "linear_key_heads": st.sampled_from([1, 2, 3]),
    "linear_value_heads": st.sampled_from([1, 2, 4]),
}
"""Settings that only some families have, of which not any value of their type will do."""
BOUNDED = ("router_top_groups", *LISTS)
"""Those that others bound."""


def some_of(layers: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Some layers: the first ones, all but every n-th, or any."""
    numbers = range(layers)
    first = st.integers(0, layers).map(lambda count: tuple(numbers[:count]))
    apart = st.integers(1, layers).map(lambda step: tuple(number for number in numbers if (number + 1) % step))
    return first | apart | st.sets(st.sampled_from(numbers)).map(lambda some: tuple(sorted(some)))


def config_value(key: str, default: Any, layers: int) -> st.SearchStrategy[Any]:
    """A value of a config key that no other format has: mostly the default, or another one of its type."""
    if key == "layer_types":
        return st.none() | st.lists(st.sampled_from([SLIDING, FULL]), min_size=layers, max_size=layers)
    other = not default if isinstance(default, bool) else 3 if default is None else 2 * default
    return st.sampled_from([default, default, default, other])


@st.composite
def specs(draw: st.DrawFn, family: Family) -> ModelSpec:
    """A model of a family."""
    keys, traits = {**USUAL, **family.keys}, family.traits
    mixed = "recurrent" in traits  # of linear attention and attention, both of which it then has
    layers, groups = draw(st.integers(2 if mixed else 1, 6)), draw(st.sampled_from([2, 1, 4]))
    heads = groups if "latent" in traits else groups * draw(st.sampled_from([1, 2, 3]))
    if not keys["kv_heads"]:
        groups = family.defaults.get("kv_heads", heads)
    head_dim = 2 * draw(st.integers(1, 32))
    usual = not keys["head_dim"] or family.square or draw(st.sampled_from([True, True, False]))
    each = heads if family.divided else 1  # transformers builds no other such model
    biased = draw(st.sampled_from([None, None, True, False]))
    often = {**OFTEN, "activation": st.sampled_from([family.defaults.get("activation", "gelu"), *ACTIVATIONS])}
    epsilon = 1e-5 if "state" in traits else family.defaults.get("norm_epsilon", 1e-6)
    values: dict[str, Any] = {
        "family": family.name,
        "layers": layers,
        "hidden": heads * head_dim if usual else each * max(1, draw(SIZE) // each),
        "heads": heads,
        "kv_heads": groups,
        "head_dim": head_dim,
        "ffn": draw(SIZE),
        "vocab": draw(SIZE),
        "max_positions": draw(POSITIONS),
        "norm_epsilon": draw(st.sampled_from([*[epsilon] * 3, 1e-5, 3e-4])),
        "tied": draw(st.sampled_from([False, False, True])),
        "sliding_window": draw(SIZE | st.none() | SIZE.map(lambda size: 2 * size)) if family.window else None,
        "biases": family.biases_of({key: draw(st.booleans()) if biased is None else biased for key in family.biases}),
        "own": {key: draw(config_value(key, default, layers)) for key, default in family.own.items()},
    }
    if family.rope_theta is not None:
        values["rope_theta"] = draw(st.sampled_from([10000.0, 5e5, 1234.5]))
        growing = BETA in (family.defaults.get("rope_scaling") or {})
        every = GROWING if growing and draw(st.booleans()) else st.one_of(SCALINGS)
        taken = every.filter(family.takes) if family.scalings else every
        values["rope_scaling"] = draw(taken) if growing or draw(st.booleans()) else None
    needed = {*family.keys, *(("experts", "top_k") if "moe" in traits else ())}
    free = (name for name in CHOICES if name in needed and name not in BOUNDED)
    values |= {name: draw(often[name] if name in often else OF_TYPE[TYPES[name]]) for name in free}
    if "router_top_groups" in keys:
        least = 2 if family.router == "sigmoid" else 1  # experts that a group is ranked by
        if values["experts"] < least * values["router_groups"]:
            values["router_groups"] = 1
        most, group = values["router_groups"], values["experts"] // values["router_groups"]
        needed_groups = -(-values["top_k"] // group)
        usual_groups = max(needed_groups, min(most, values["top_k"] // least))
        values["router_top_groups"] = draw(st.sampled_from([*[usual_groups] * 3, most, needed_groups]))
    for name in LISTS:
        if name in keys:
            values[name] = draw(some_of(layers))
    if mixed:
        values["recurrent_layers"] = values["recurrent_layers"][: layers - 1] or (draw(st.integers(0, layers - 1)),)
        values["linear_value_heads"] *= values["linear_key_heads"]
    if "mlp_layers" in keys:  # each layer is one block
        mlps = values["mlp_layers"] = values["mlp_layers"] or (draw(st.integers(0, layers - 1)),)
        values["state_layers"] = tuple(layer for layer in values["state_layers"] if layer not in mlps)
        if "moe" in traits:
            values["dense_layers"] = tuple(layer for layer in mlps[1:] if layer in values["dense_layers"])
    elif len(values.get("dense_layers", ())) == layers:
        values["dense_layers"] = ()
    if values["sliding_window"] is None:
        values |= {"full_layers": tuple(range(layers))} if "full_layers" in keys else {}
        values["own"] |= {"layer_types": [FULL] * layers} if "layer_types" in family.own else {}
    return checked(tied_together(values, family), "the draw")


def tied_together(values: dict[str, Any], family: Family) -> dict[str, Any]:
    """The values, where the table ties them: to the only one that it supports, or to another setting."""
    keys, first = {**USUAL, **family.keys}, dict[str, str]()
    if keys.get("rotary_fraction") in family.requires:
        values["head_dim"] *= 2  # half of it is even too
    if {"mamba_expand", "expand"} & values["own"].keys():  # times the hidden size: the width of all heads
        key = "mamba_expand" if "mamba_expand" in values["own"] else "expand"
        values |= {"hidden": values["heads"] * values["head_dim"], "state_heads": values["heads"]}
        values["state_dim"] = values["head_dim"] * values["own"][key]
        if keys["state_dim"] == keys["head_dim"]:
            values["head_dim"] = values["state_dim"]
    for name, key in keys.items():
        if key in family.requires and name in values:
            values[name] = family.requires[key]
        if key and name in values and name not in LISTS and first.setdefault(key, name) != name:
            values[name] = values[first[key]]  # one key for both
    _, codec = LINES.get(("shared_ffn", keys.get("shared_ffn", "")), ("", ""))
    if codec == "n * expert_ffn":
        values["shared_ffn"] = values["expert_ffn"] * (1 + values["shared_ffn"] % 3)
    if (
        "index_dim" in keys and "query_rank" in keys
    ):  # whose queries have a latent, and whose first layer has an indexer
        values["query_rank"], values["index_dim"] = values["query_rank"] or 24, values["index_dim"] + values["rope_dim"]
        shared = values.get("shared_index_layers")
        values |= {} if shared is None else {"shared_index_layers": tuple(filter(None, shared))}
    if "window_kv_heads" in keys:
        values |= {"window_kv_heads": 2 * values["kv_heads"], "heads": 2 * values["heads"]}
    if int(values["head_dim"] * values.get("rotary_fraction", 1.0)) % 2:
        values["rotary_fraction"] = 1.0  # of an odd number of elements frameworks disagree
    if "full_head_dim" in keys:
        values["full_head_dim"] *= 2
        values["full_kv_heads"] = values["kv_heads"] if values["keys_as_values"] else None
    if "reusing_layers" in keys:  # those at the end, before which there is one of each kind
        full, count = {*values["full_layers"]}, values["layers"]
        kinds = [layer in full for layer in range(count)]
        least = max(kinds.index(kind) for kind in {*kinds}) + 1
        values["reusing_layers"] = tuple(range(max(least, count - len(values["reusing_layers"])), count))
        values["reusing_ffn"] = 2 * values["ffn"] if values["reusing_ffn"] % 2 else None
    if "layer_width" in keys:
        values["layer_width"] = values["layer_width"] if values["layer_width"] % 2 else None
    if "mamba_d_ssm" in values["own"]:
        values["own"]["mamba_d_ssm"] = values["state_heads"] * values["state_dim"]
    if "state_groups" in keys:
        values["state_groups"] = gcd(values["state_heads"], values["state_groups"])
    return values
