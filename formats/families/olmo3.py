"""OLMo 3: OLMo 2 with a sliding window in three of four layers, and scaled rotary embeddings only in the others.

Facts: transformers models/olmo3/modeling_olmo3.py and configuration_olmo3.py, 5.23.0. Where the config has a single
rotary base, it is that of the layers without a window.
"""

from dataclasses import replace

from formats.families import olmo2

FAMILY = replace(
    olmo2.FAMILY,
    name="olmo3",
    architecture="Olmo3ForCausalLM",
    rope_theta=500000.0,
    window="sliding_window",
    window_default=4096,
    own={"layer_types": None, "rope_local_base_freq": 500000.0},
)
