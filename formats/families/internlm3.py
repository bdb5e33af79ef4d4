"""InternLM3: the tensors of Llama without biases, and the class of Llama (transformers models/internlm3, 5.23.0).

The class has two names for each of its switches of biases, `qkv_bias` for `attention_bias` and `bias` for `mlp_bias`.
No released model has biases.
"""

from formats.families.blocks import ATTENTION, GATED_MLP, HEAD, NORMS
from formats.families.family import Family

FAMILY = Family(
    name="internlm3",
    architecture="LlamaForCausalLM",
    divided=True,
    hub_class="InternLM3ForCausalLM",
    table=ATTENTION + GATED_MLP + NORMS + HEAD,
    requires={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "qkv_bias": False, "bias": False},
    nulls=("head_dim", "num_key_value_heads"),
    head_dim=128,
    defaults={"kv_heads": 2, "norm_epsilon": 1e-5},
)
