"""Megatron's linear attention (Gated DeltaNet, as in Qwen3-Next): its tensors, and the topologies that it allows.

Facts: megatron-core 0.16.1, ssm/gated_delta_net.py: `in_proj` and `conv1d` are cut over tensor ranks part by part, and
torch_dist has a tensor for each part (`sharded_state_dict`); models/gpt/experimental_attention_variant_module_specs.py:
only Transformer Engine's layers have linear attention, and attention beside it. 0.19.2 is the same in both. If Megatron
stores a norm minus 1, all its norms are stored so; no other format stores the norm of linear attention so.
"""

from __future__ import annotations

from formats.errors import RefusedError
from formats.layout.table import rules
from formats.model.spec import ModelSpec

RULES = rules("""
decoder.layers.{layer}.self_attention.dt_bias                       linear_step_bias: (key_head spread)/tp    recurrent
decoder.layers.{layer}.self_attention.A_log                         linear_decay: (key_head spread)/tp    recurrent
decoder.layers.{layer}.self_attention.in_proj.layer_norm_weight     input_norm: hidden    recurrent
decoder.layers.{layer}.self_attention.in_proj.weight                (linear_query: (key_head key_dim)/tp | linear_key: (key_head key_dim)/tp | linear_value: (key_head spread value_dim)/tp | linear_gate: (key_head spread value_dim)/tp | linear_beta: (key_head spread)/tp | linear_alpha: (key_head spread)/tp) hidden    recurrent
decoder.layers.{layer}.self_attention.conv1d.weight                 (linear_query_taps: (key_head key_dim)/tp | linear_key_taps: (key_head key_dim)/tp | linear_value_taps: (key_head spread value_dim)/tp) () tap    recurrent
decoder.layers.{layer}.self_attention.out_norm.weight               linear_norm: value_dim    recurrent centred
decoder.layers.{layer}.self_attention.out_proj.weight               linear_output: hidden (key_head spread value_dim)/tp    recurrent
decoder.layers.{layer}.self_attention.linear_qkv.weight             (group (query: head half pair | query_gate: head dim | key: half pair | value: dim))/tp hidden    attention query_gate
""")
"""Linear attention, and the gated attention of the other layers: in each group all queries, then all gates."""

SPLIT = rules("""
decoder.layers.{layer}.self_attention.in_proj.weight.query    linear_query: (key_head key_dim)/tp hidden    recurrent
decoder.layers.{layer}.self_attention.in_proj.weight.key      linear_key: (key_head key_dim)/tp hidden    recurrent
decoder.layers.{layer}.self_attention.in_proj.weight.value    linear_value: (key_head spread value_dim)/tp hidden    recurrent
decoder.layers.{layer}.self_attention.in_proj.weight.z        linear_gate: (key_head spread value_dim)/tp hidden    recurrent
decoder.layers.{layer}.self_attention.in_proj.weight.beta     linear_beta: (key_head spread)/tp hidden    recurrent
decoder.layers.{layer}.self_attention.in_proj.weight.alpha    linear_alpha: (key_head spread)/tp hidden    recurrent
decoder.layers.{layer}.self_attention.conv1d.weight.query     linear_query_taps: (key_head key_dim)/tp () tap    recurrent
decoder.layers.{layer}.self_attention.conv1d.weight.key       linear_key_taps: (key_head key_dim)/tp () tap    recurrent
decoder.layers.{layer}.self_attention.conv1d.weight.value     linear_value_taps: (key_head spread value_dim)/tp () tap    recurrent
""")
"""The tensors of torch_dist in place of `in_proj.weight` and `conv1d.weight`."""

STATES = ("in_proj", "out_proj")
"""The modules whose `_extra_state` a strict load of torch_dist needs."""


def require_topology(spec: ModelSpec, norm: str, tp: int) -> None:
    """Refuse a topology or naming that a model with linear attention cannot have.

    Raises:
        RefusedError: the heads of linear attention do not divide over tensor ranks; or the options ask for the names of
            local layers, which have no linear attention.
    """
    if not spec.recurrent_layers:
        return
    if norm == "local":
        raise RefusedError(
            f"megatron-core has the linear attention of a {spec.family} in Transformer Engine's layers alone",
            "--norm te",
        )
    keys, values = spec.linear_key_heads or 0, spec.linear_value_heads or 0
    if keys % tp:  # value heads are a multiple of key heads
        sizes = ", ".join(str(ranks) for ranks in range(1, keys + 1) if not keys % ranks)
        raise RefusedError(
            f"{keys} key heads and {values} value heads of linear attention do not divide over tp = {tp}",
            f"--tp may be {sizes}, as far as the heads of attention divide",
        )
