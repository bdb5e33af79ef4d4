"""Command A and R7B: attention and MLP in parallel after one norm; only layers with a sliding window rotate.

Facts: transformers models/cohere2/modeling_cohere2.py and configuration_cohere2.py, 5.23.0. The LayerNorms have no
biases, and the rotary embedding rotates adjacent elements. Where `layer_types` is missing, every
`sliding_window_pattern`-th layer has no window, or every fourth if that key is missing too.
"""

from formats.families.blocks import GATED_MLP, HEAD, PAIRED_ATTENTION
from formats.families.family import Family

NORM = """
model.layers.{layer}.input_layernorm.weight     input_norm: hidden
"""

FAMILY = Family(
    name="cohere2",
    architecture="Cohere2ForCausalLM",
    table=PAIRED_ATTENTION + GATED_MLP + NORM + HEAD,
    requires={"hidden_act": "silu", "attention_bias": False},
    mha=True,
    window="sliding_window",
    window_default=4096,
    keys={"head_dim": "", "norm_epsilon": "layer_norm_eps"},
    defaults={"norm_epsilon": 1e-5, "tied": True},
    own={"layer_types": None, "sliding_window_pattern": None, "logit_scale": 0.0625},
    only_here="its attention and MLP read the same residual, those of megatron-core follow one another",
    tokens={"eos_token_id": 255001},
)
