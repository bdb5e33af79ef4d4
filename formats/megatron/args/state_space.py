"""Megatron's hybrids (MambaModel): each layer is a state space (Mamba2), attention, an MLP or experts.

Facts: megatron-core 0.16.1, ssm/mamba_mixer.py: `in_proj` and `conv1d` are cut over tensor ranks part by part, and
torch_dist stores the parts separately (`sharded_state_dict`), a convolution sees 4 tokens, and the norm after the gate
has an epsilon of its own; ssm/mamba_block.py, whose last norm has another name; models/mamba/mamba_layer_specs.py: only
Transformer Engine's layers. Classic files of 0.19 have other names for the convolution.
"""

from __future__ import annotations

from formats.errors import RefusedError, short
from formats.layout.table import rules
from formats.megatron.args.codecs import epsilon_of, refusal
from formats.model.codec import Context, default, fixed
from formats.model.spec import ModelSpec
from formats.model.values import positive_int

RULES = rules("""
decoder.layers.{layer}.mixer.dt_bias                                state_step_bias: (state_group share)/tp    state
decoder.layers.{layer}.mixer.A_log                                  state_decay: (state_group share)/tp    state
decoder.layers.{layer}.mixer.D                                      state_skip: (state_group share)/tp    state
decoder.layers.{layer}.mixer.in_proj.layer_norm_weight              pre_norm: hidden    state
decoder.layers.{layer}.mixer.in_proj.weight                         (state_gate: (state_group share state_dim)/tp | state_x: (state_group share state_dim)/tp | state_b: (state_group state)/tp | state_c: (state_group state)/tp | state_step: (state_group share)/tp) hidden    state
decoder.layers.{layer}.mixer.{conv1d.weight|conv1d_weight}          (state_x_taps: (state_group share state_dim)/tp | state_b_taps: (state_group state)/tp | state_c_taps: (state_group state)/tp) () tap    state
decoder.layers.{layer}.mixer.{conv1d.bias|conv1d_bias}              (state_x_taps_bias: (state_group share state_dim)/tp | state_b_taps_bias: (state_group state)/tp | state_c_taps_bias: (state_group state)/tp)    state
decoder.layers.{layer}.mixer.norm.weight                            state_norm: (state_group share state_dim)/tp    state
decoder.layers.{layer}.mixer.out_proj.weight                        state_output: hidden (state_group share state_dim)/tp    state
decoder.layers.{layer}.self_attention.linear_qkv.layer_norm_weight  pre_norm: hidden    attention
decoder.layers.{layer}.mlp.linear_fc1.layer_norm_weight             pre_norm: hidden    dense
decoder.layers.{layer}.pre_mlp_layernorm.weight                     pre_norm: hidden    sparse
decoder.final_norm.weight                                           final_norm: hidden    last single
""")
"""The tensors of a state space, and the only norm of every layer."""

SPLIT = rules("""
decoder.layers.{layer}.mixer.in_proj.weight.z    state_gate: (state_group share state_dim)/tp hidden    state
decoder.layers.{layer}.mixer.in_proj.weight.x    state_x: (state_group share state_dim)/tp hidden    state
decoder.layers.{layer}.mixer.in_proj.weight.B    state_b: (state_group state)/tp hidden    state
decoder.layers.{layer}.mixer.in_proj.weight.C    state_c: (state_group state)/tp hidden    state
decoder.layers.{layer}.mixer.in_proj.weight.dt   state_step: (state_group share)/tp hidden    state
decoder.layers.{layer}.mixer.conv1d.weight.x     state_x_taps: (state_group share state_dim)/tp () tap    state
decoder.layers.{layer}.mixer.conv1d.weight.B     state_b_taps: (state_group state)/tp () tap    state
decoder.layers.{layer}.mixer.conv1d.weight.C     state_c_taps: (state_group state)/tp () tap    state
decoder.layers.{layer}.mixer.conv1d.bias.x       state_x_taps_bias: (state_group share state_dim)/tp    state
decoder.layers.{layer}.mixer.conv1d.bias.B       state_b_taps_bias: (state_group state)/tp    state
decoder.layers.{layer}.mixer.conv1d.bias.C       state_c_taps_bias: (state_group state)/tp    state
""")
"""The tensors of torch_dist in place of `in_proj.weight` and `conv1d`."""

SPECS = (
    "megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec",
    "megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec",
    None,
)
"""The values of `--spec` for the same layers: written here, of newer trees, and without one, which 0.19 takes for it
(training/models/hybrid.py)."""
STATES = ("mixer.in_proj", "mixer.out_proj")
"""The modules of a layer whose `_extra_state` a strict load of torch_dist needs."""
LAST_STATES = ("decoder.final_norm", "output_layer")
"""The modules after the layers whose `_extra_state` such a load needs; a GPT model's output layer has none."""
EPSILON, TAPS, EXPANSION = 1e-5, 4, 2
"""Fixed in megatron-core: the epsilon of the norm after the gate, the taps of a convolution, and the inner width as a
multiple of `hidden`, which determines the number of heads if no argument does."""


epsilon = epsilon_of("state spaces", EPSILON)


def _default_heads(context: Context) -> int:
    hidden, dim = (positive_int(context.values[name], name, context.where) for name in ("hidden", "state_dim"))
    return EXPANSION * hidden // dim


heads = default(_default_heads)
taps = fixed(
    TAPS,
    error=lambda value, context: refusal(context, f"its convolutions see {TAPS} tokens, this model's {short(value)}"),
)


def require_topology(spec: ModelSpec, norm: str, tp: int, vpp: int) -> None:
    """Refuse a topology or naming that a hybrid cannot have.

    Raises:
        RefusedError: the options ask for the names of local layers, which hybrids do not have, or for virtual pipeline
            chunks; or the groups of the state spaces do not divide over tensor ranks.
    """
    if spec.mlp_layers is None:
        return
    if norm == "local":
        raise RefusedError(f"megatron-core has the layers of a {spec.family} of Transformer Engine alone", "--norm te")
    if vpp > 1:
        raise RefusedError(f"megatron-core has no virtual pipeline chunks of a {spec.family}", "leave --vpp out")
    groups = spec.state_groups or 1
    if groups % tp:  # heads are a multiple of groups
        sizes = ", ".join(str(ranks) for ranks in range(1, groups + 1) if not groups % ranks)
        raise RefusedError(
            f"{groups} groups of its state spaces do not divide over tp = {tp}",
            f"--tp may be {sizes}, as far as the heads of attention divide",
        )
