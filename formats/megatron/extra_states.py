"""The names of the empty `_extra_state` entries that a strict load of torch_dist by megatron-core requires.

A stack of layers has an entry for each layer; layers that are stored apart have one of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from formats.families import family_named
from formats.layout.table import MTP
from formats.megatron import mtp
from formats.megatron.args import indexer, linear_attention, mla, state_space
from formats.model.spec import ModelSpec

LAYERS = "decoder.layers."
STATES = ("self_attention.linear_qkv", "self_attention.linear_proj")
"""Modules of each layer whose empty `_extra_state` a strict load requires; some layers have more such modules."""
LINEAR = ("linear_fc1", "linear_fc2")
LATENT = ("fc1_latent_proj", "fc2_latent_proj")
TE_STATES = ("self_attention.core_attention",)
"""Of Transformer Engine's attention, required by megatron-core up to 0.14 (transformer_engine.py:1436 at 0.16.1)."""
TE_NORMS = ("self_attention.q_layernorm", "self_attention.k_layernorm")
"""Of Transformer Engine's unfused norms (get_extra_state in transformer_engine/pytorch/ops/op.py at 013e42fc)."""
BRIDGE_NORMS = {
    "output_norm": "self_attention.linear_proj.post_layernorm",
    "down_norm": "mlp.linear_fc2.post_layernorm",
}
"""Logical tensor: the module of Megatron-Bridge that holds it and has an `_extra_state`."""


def names(spec: ModelSpec, norm: str) -> Iterator[str]:
    """Yield the `_extra_state` names that megatron-core requires, for local or Transformer Engine layers (`norm`)."""
    te, family = norm == "te", family_named(spec.family)
    latent = mla.states(spec, te=te) if "latent" in family.traits else STATES
    attention = [*latent, *(TE_STATES if te else ()), *(TE_NORMS if te and "qk_norm" in family.traits else ())]
    added = {tensor: [name] for tensor, name in BRIDGE_NORMS.items() if tensor in spec.tensors}
    attention += added.get("output_norm", [])
    recurrent = [f"self_attention.{name}" for name in (*linear_attention.STATES, "out_norm")]
    indexing = [f"{indexer.INDEXER}.{name}" for name in indexer.STATES]
    mixers = {"recurrent": recurrent, "state": state_space.STATES, "attention": attention, "indexing": indexing}
    sparse = ["pre_mlp_layernorm"] if te else []
    sparse += [f"mlp.shared_experts.{name}" for name in LINEAR] if "shared_experts" in family.traits else []
    sparse += [f"mlp.{name}" for name in LATENT] if spec.expert_latent else []
    mlps = {"sparse": sparse, "dense": [*(f"mlp.{name}" for name in LINEAR), *added.get("down_norm", [])]}
    for layer, kinds in enumerate(spec.layer_kinds):
        own_names, further = spec.mixed or MTP in kinds, f"mtp.layers.{layer - spec.layers}."
        place, number = (f"{LAYERS}{layer}.", "0_1") if own_names else (LAYERS, f"{layer}_{spec.layers}")
        if MTP in kinds:
            place = f"{further}{mtp.BLOCK}."
            yield from (
                f"{further}{name}._extra_state/shard_0_1" for name in (*mtp.STATES, *(mtp.TE_STATES if te else ()))
            )
        experts = "sparse" in kinds
        for module in [name for kind, names in (mixers | mlps).items() if kind in kinds for name in names]:
            yield f"{place}{module}._extra_state/shard_{number}"
        for name, expert in product(LINEAR, range(spec.experts or 0)) if experts else ():
            shard = f"{expert}_{spec.experts}" if own_names else f"{layer}.{expert}_{spec.layers}.{spec.experts}"
            yield f"{place}mlp.experts.experts.{name}._extra_state/shard_{shard}"
    last = [] if not te else ["decoder.final_layernorm"] if spec.mlp_layers is None else state_space.LAST_STATES
    yield from (f"{module}._extra_state/shard_0_1" for module in last)
