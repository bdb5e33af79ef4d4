"""Guess the logical tensors in a tensor from its name, and the order of its axes from its sizes.

A line of `ROLES` is the end of a key (a regular expression, without `.weight`), and the logical tensors that a tensor
of that name may be. A plus joins logical tensors that follow one another in one tensor. Sizes decide between several.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, pairwise, permutations
from math import prod

from formats.layout.tensors import TENSORS

ROLES = """
embed_tokens|wte|embed_in|word_embeddings|tok_embeddings|embeddings    embedding
wpe|embed_positions|position_embeddings                    positions
lm_head|embed_out|output                                   head
q_proj|wq|query                                            query  latent_query
k_proj|wk|key                                              key
v_proj|wv|value                                            value
qkv_proj|wqkv|Wqkv|c_attn|query_key_value                  query+key+value
o_proj|wo|out_proj|attn.c_proj|attention.dense             output
q_a_proj                                                   query_down
q_a_(?:layer)?norm                                         query_latent_norm
q_b_proj                                                   query_up
kv_a_proj_with_mqa                                         latent_down
kv_a_(?:layer)?norm                                        latent_norm
kv_b_proj                                                  latent_up
(?:q|query)_(?:layer)?norm                                 query_norm  query_width_norm
(?:k|key)_(?:layer)?norm                                   key_norm  key_width_norm
sinks                                                      sinks
(?:gate|router|gate.wg)                                    router
e_score_correction_bias|expert_bias                        router_bias
shared_expert_gate                                         shared_router
gate_proj|w1                                               gate
up_proj|w3|c_fc|fc1|fc_in|dense_h_to_4h                    up
down_proj|w2|mlp.c_proj|fc2|fc_out|dense_4h_to_h           down
gate_up_proj|gate_and_up_proj                              gate+up
final_(?:layer_?)?norm|norm|ln_f|norm_f                    final_norm
"""
LINES = [re.split(r"\s{2,}", line, maxsplit=1) for line in ROLES.strip().splitlines()]
OF_MODEL = {"embedding", "positions", "head", "final_norm"}
NORM = re.compile(r"(?:norm|ln)(?:_?\w*)?$")
"""The end of the name of a norm."""
COMMON = ("expert", "hidden")
"""The axes that parts of one tensor share."""


def roles_of(key: str) -> list[tuple[str, ...]]:
    """The possible roles of a tensor of this name: each is the logical tensors that follow one another in it."""
    stem = re.sub(r"\.weight$|(?<!correction)(?<!expert)[._]bias$", "", key)
    kind = "_bias" if key.endswith("bias") and stem != key else ""
    prefix = "shared_" if "shared" in stem else "expert_" if "experts" in stem else ""
    roles = []
    for ends, words in LINES:
        if not re.search(rf"(?:^|\.)(?:{ends})$", stem):
            continue
        for word in words.split():
            parts = tuple(word.split("+"))
            parts = tuple(f"{prefix}{part}" if part in ("gate", "up", "down") else part for part in parts)
            named = tuple(
                f"{part}{kind}".replace("router_bias", "router_score_bias" if kind else "router_bias") for part in parts
            )
            layered = all(part in TENSORS and (part in OF_MODEL) == ("{layer}" not in key) for part in parts)
            if layered and all(part in TENSORS for part in named):
                roles.append(named)
    return roles


def patterns(
    tensors: Sequence[str],
    shapes: Sequence[Sequence[int]],
    sizes: Sequence[Mapping[str, int]],
    key: str,
    *,
    turned: bool,
) -> Iterator[str]:
    """The patterns of some logical tensors that have the shapes of a tensor, the likeliest first.

    Args:
        tensors: the logical tensors, which follow one another in the tensor.
        shapes: the shape of the tensor in each tiny model.
        sizes: the size of each axis in each tiny model.
        key: the key of the tensor, with `{layer}` and possibly `{expert}` in it.
        turned: whether matrices are input-major.
    """
    outside = {"layer"} | ({"expert"} if "{expert}" in key else set())
    axes = [[axis for axis in TENSORS[tensor] if axis not in outside] for tensor in tensors]
    if len(tensors) == 1:
        for dims in _runs(axes[0], len(shapes[0]), turned=turned):
            if all(
                [prod(known[axis] for axis in dim) for dim in dims] == [*shape] for known, shape in pairs(sizes, shapes)
            ):
                yield f"{tensors[0]}: {' '.join(map(_text, dims))}"
        return
    common = [axis for axis in COMMON if all(axis in tensor for tensor in axes)]
    own = [[axis for axis in tensor if axis not in common] for tensor in axes]
    orders = sorted(permutations([*common, ""]), key=lambda order: (order[-1] == "") != turned and "hidden" in order)
    for order in orders:
        if all(
            [known.get(axis) or sum(prod(known[a] for a in part) for part in own) for axis in order] == [*shape]
            for known, shape in pairs(sizes, shapes)
        ):
            for joined in _joined(tensors, own):
                yield " ".join(axis or joined for axis in order)


def pairs(
    sizes: Sequence[Mapping[str, int]], shapes: Sequence[Sequence[int]]
) -> Iterator[tuple[Mapping[str, int], Sequence[int]]]:
    """The sizes of each tiny model, paired with the shape of a tensor in that model."""
    return zip(sizes, shapes, strict=True)


def _runs(axes: Sequence[str], count: int, *, turned: bool) -> Iterator[tuple[tuple[str, ...], ...]]:
    """The ways to divide axes, in their order, among `count` dimensions; outputs first, or inputs first if `turned`."""
    for cuts in combinations(range(1, len(axes)), count - 1):
        bounds = [0, *cuts, len(axes)]
        runs = [tuple(axes[low:high]) for low, high in pairwise(bounds)]
        yield from (tuple(order) for order in ([*permutations(runs)][:: -1 if turned else 1]))
    if count == len(axes) + 1:  # such as a gate of one output
        yield ((), *((axis,) for axis in axes))


def _joined(tensors: Sequence[str], own: Sequence[Sequence[str]]) -> Iterator[str]:
    """The texts of logical tensors in one dimension: one after the other, or one after the other in each group."""
    yield "(" + " | ".join(f"{name}: {' '.join(axes)}" for name, axes in zip(tensors, own, strict=True)) + ")"
    if all(axes[:1] == ["group"] for axes in own):
        inner = " | ".join(f"{name}: {' '.join(axes[1:])}" for name, axes in zip(tensors, own, strict=True))
        yield f"(group ({inner}))"


def _text(axes: Sequence[str]) -> str:
    return axes[0] if len(axes) == 1 else f"({' '.join(axes)})"
