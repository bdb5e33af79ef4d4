"""IQuest-Coder: the tensors and the class of Llama (transformers models/iquestcoder, 5.23.0)."""

from formats.families.family import Family
from formats.families.llama import TABLE

FAMILY = Family(
    name="iquestcoder",
    architecture="LlamaForCausalLM",
    divided=True,
    hub_class="IQuestCoderForCausalLM",
    table=TABLE,
    requires={"hidden_act": "silu", "use_sliding_window": False, "clip_qkv": None},
    nulls=("head_dim", "num_key_value_heads"),
    biases={"attention_bias": ("qkv_bias output_bias", False), "mlp_bias": ("mlp_bias", False)},
    head_dim=128,
    defaults={"kv_heads": 8, "norm_epsilon": 1e-5},
)
