"""Falcon 2 (11B): the grouped queries of Falcon 40B, the one norm of Falcon 7B (transformers models/falcon, 5.23.0)."""

from dataclasses import replace

from formats.families import falcon, falcon_40b

FAMILY = replace(
    falcon_40b.FAMILY,
    name="falcon_11b",
    marks={"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1},
    table=falcon.TABLE,
)
