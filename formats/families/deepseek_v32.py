"""DeepSeek-V3.2: DeepSeek-V3 whose attention sees only the tokens that an indexer chooses (DSA).

Facts: transformers 5.23.0, models/deepseek_v32/modeling_deepseek_v32.py and configuration_deepseek_v32.py: queries
always have a latent, from which the indexer computes its own queries; the norm of the indexer has an epsilon of 1e-6;
the first elements of the indexer's heads rotate, in halves; `head_dim` is the number of elements that rotate, whatever
the config specifies. The layer that predicts a second token (MTP) has an indexer too.
"""

from dataclasses import replace

from formats.families import deepseek_v3
from formats.families.blocks import HEAD, INDEXER, MIXTURE, NORMS, SECOND, second
from formats.families.deepseek_v2 import LATENT_ATTENTION

ATTENTION = "".join(line for line in LATENT_ATTENTION.splitlines(keepends=True) if "uncompressed" not in line)
BLOCK = ATTENTION + INDEXER + MIXTURE + NORMS
TABLE = BLOCK + HEAD + second(BLOCK) + SECOND

FAMILY = replace(
    deepseek_v3.FAMILY,
    name="deepseek_v32",
    architecture="DeepseekV32ForCausalLM",
    table=TABLE,
    requires={**deepseek_v3.FAMILY.requires, "mlp_bias": False, "indexer_rope_interleave": False},
    native={},
    copied={},
    keys={
        **deepseek_v3.FAMILY.keys,
        "dense_layers": "mlp_layer_types",
        "index_heads": "index_n_heads",
        "index_dim": "index_head_dim",
        "index_top_k": "index_topk",
    },
    defaults={
        **deepseek_v3.FAMILY.defaults,
        "index_heads": 64,
        "index_dim": 128,
        "index_top_k": 2048,
    },
)
