"""CWM: the tensors of Llama, and a sliding window in most layers (transformers models/cwm, 5.23.0)."""

from formats.families.blocks import ATTENTION, GATED_MLP, HEAD, NORMS
from formats.families.family import Family

FAMILY = Family(
    name="cwm",
    architecture="CwmForCausalLM",
    divided=True,
    table=ATTENTION + GATED_MLP + NORMS + HEAD,
    requires={"hidden_act": "silu", "mlp_bias": False},
    rope_theta=1000000.0,
    head_dim=128,
    window="sliding_window",
    window_default=8192,
    keys={"full_layers": "layer_types"},
    defaults={
        "rope_scaling": {
            "rope_type": "llama3",
            "rope_theta": 1000000.0,
            "factor": 16.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
        }
    },
)
