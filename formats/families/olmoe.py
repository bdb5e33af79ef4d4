"""OLMoE: Llama with experts, and norms over all queries and all keys (transformers models/olmoe, 5.23.0)."""

from formats.families.blocks import ATTENTION, EXPERTS, HEAD, NORMS, ROUTER, WIDTH_NORMS
from formats.families.family import Family

TABLE = ATTENTION + WIDTH_NORMS + ROUTER + EXPERTS + NORMS + HEAD

FAMILY = Family(
    name="olmoe",
    architecture="OlmoeForCausalLM",
    table=TABLE,
    requires={"hidden_act": "silu", "attention_bias": False, "sliding_window": None},
    mha=True,
    keys={
        "experts": "num_experts num_local_experts",
        "top_k": "num_experts_per_tok",
        "router_normalized": "norm_topk_prob",
    },
    defaults={"experts": 64, "top_k": 8, "router_normalized": False},
    own={"clip_qkv": None},
    only_here="megatron-core has no norms over all heads of a token, and clips neither queries nor keys nor values",
    router="softmax",
    tokens={"eos_token_id": 50279},
)
