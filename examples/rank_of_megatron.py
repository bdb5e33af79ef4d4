"""What rank 1 of 2 would load of Megatron's, without a conversion: `rank_of_megatron.py ANY`."""

import sys

import vitruvian

shard = vitruvian.open(sys.argv[1]).as_("megatron", tp=(1, 2))
for name, tensor in list(shard.items())[:8]:
    print(f"{tensor.dtype:5} {list(tensor.shape)!s:12} {name}")
rows = shard["embedding.word_embeddings.weight"][:4]
print(f"its first rows of the embedding: {rows.shape} {rows.dtype}")
