"""Solar Open: the experts of dots.llm1 in every layer, the attention of Llama.

Facts: transformers models/solar_open/modeling_solar_open.py, 5.23.0: no layer is dense, so that `intermediate_size` has
no effect, and its class has no such key.
"""

from formats.families import dots1
from formats.families.blocks import ATTENTION, BIASED_ROUTER, EXPERTS, HEAD, NORMS, ROUTER_DEFAULTS, SHARED_EXPERTS
from formats.families.family import Family

TABLE = ATTENTION + EXPERTS + BIASED_ROUTER + SHARED_EXPERTS + NORMS + HEAD

FAMILY = Family(
    name="solar_open",
    architecture="SolarOpenForCausalLM",
    table=TABLE,
    requires={"hidden_act": "silu", "attention_bias": False, "use_qk_norm": False, "first_k_dense_replace": 0},
    rope_theta=1000000.0,
    head_dim=128,
    keys={
        "ffn": "moe_intermediate_size",
        **{name: key for name, key in dots1.FAMILY.keys.items() if name != "dense_layers"},
    },
    defaults={
        "experts": 128,
        "top_k": 8,
        "expert_ffn": 1280,
        "ffn": 1280,
        "shared_ffn": 1,
        **ROUTER_DEFAULTS,
    },
    router="sigmoid",
)
