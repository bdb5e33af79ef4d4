"""Nemotron 3 Nano and Super: each layer is a state space (Mamba2), attention, an MLP or experts.

Facts: as `nemotron_h_dense.py`. Experts have no gate; in Nemotron 3 Super their input is a latent, but not that of
shared experts.
"""

from dataclasses import replace

from formats.families import nemotron_h_dense as dense
from formats.families.blocks import ROUTER_DEFAULTS
from formats.families.nemotron_h_dense import COMMON, DEFAULTS, FINAL, HEAD, KEYS, in_both_namings

EXPERTS = """
backbone.layers.{layer}.mixer.experts.{expert}.up_proj.weight      expert_up: expert_ffn hidden      sparse separate wide
backbone.layers.{layer}.mixer.experts.{expert}.down_proj.weight    expert_down: hidden expert_ffn    sparse separate wide
backbone.layers.{layer}.mixer.experts.{expert}.up_proj.weight      latent_expert_up: expert_ffn expert_latent      sparse separate narrow
backbone.layers.{layer}.mixer.experts.{expert}.down_proj.weight    latent_expert_down: expert_latent expert_ffn    sparse separate narrow
model.layers.{layer}.mixer.experts.up_proj                         expert_up: expert expert_ffn hidden      sparse fused wide
model.layers.{layer}.mixer.experts.down_proj                       expert_down: expert hidden expert_ffn    sparse fused wide
model.layers.{layer}.mixer.experts.up_proj                         latent_expert_up: expert expert_ffn expert_latent      sparse fused narrow
model.layers.{layer}.mixer.experts.down_proj                       latent_expert_down: expert expert_latent expert_ffn    sparse fused narrow
"""
ROUTER = """
model.layers.{layer}.mixer.gate.weight                      router: expert hidden    sparse
model.layers.{layer}.mixer.gate.e_score_correction_bias     router_bias: expert      sparse
model.layers.{layer}.mixer.shared_experts.up_proj.weight      shared_up: shared_ffn hidden    sparse
model.layers.{layer}.mixer.shared_experts.down_proj.weight    shared_down: hidden shared_ffn    sparse
model.layers.{layer}.mixer.fc1_latent_proj.weight             experts_in: expert_latent hidden    sparse narrow
model.layers.{layer}.mixer.fc2_latent_proj.weight             experts_out: hidden expert_latent    sparse narrow
"""

FAMILY = replace(
    dense.FAMILY,
    name="nemotron_h",
    model_type="",
    blocks=("E", "moe"),
    table=in_both_namings(COMMON) + EXPERTS.lstrip() + in_both_namings(ROUTER + FINAL) + HEAD,
    keys={
        **KEYS,
        "dense_layers": dense.BLOCKS,
        "experts": "n_routed_experts num_local_experts",
        "top_k": "num_experts_per_tok",
        "expert_ffn": "moe_intermediate_size",
        "expert_latent": "moe_latent_size",
        "shared_ffn": "moe_shared_expert_intermediate_size",
        "router_normalized": "norm_topk_prob",
        "router_scale": "routed_scaling_factor",
        "router_groups": "n_group",
        "router_top_groups": "topk_group",
    },
    defaults={
        **DEFAULTS,
        "experts": 8,
        "top_k": 2,
        "expert_ffn": 7688,
        "shared_ffn": 7688,
        **ROUTER_DEFAULTS,
    },
    nulls=("moe_latent_size",),
    router="sigmoid",
)
