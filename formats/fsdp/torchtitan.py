"""The native names of torchtitan, which are those of Meta's own Llama files too.

Facts: pytorch/torchtitan at v0.1.0, v0.2.0, v0.2.2 and b5bcd76c, `state_dict_adapter.py` and `model.py` of
models/llama3 and models/qwen3. w1 is the gate, w3 is up, w2 is down. Llama rotates neighbouring rows of a head
(`pair half`), Qwen3 rotates halves as Hugging Face does.
"""

from formats.layout.table import rules

LLAMA = rules("""
tok_embeddings.weight                                    embedding: vocab hidden
layers.{layer}.attention.{wq|qkv_linear.wq}.weight       query: (group head pair half) hidden
layers.{layer}.attention.{wk|qkv_linear.wk}.weight       key: (group pair half) hidden
layers.{layer}.attention.{wv|qkv_linear.wv}.weight       value: (group dim) hidden
layers.{layer}.attention.wo.weight                       output: hidden (group head dim)
layers.{layer}.feed_forward.w1.weight                    gate: ffn hidden
layers.{layer}.feed_forward.w3.weight                    up: ffn hidden
layers.{layer}.feed_forward.w2.weight                    down: hidden ffn
layers.{layer}.attention_norm.weight                     input_norm: hidden
layers.{layer}.ffn_norm.weight                           post_norm: hidden
norm.weight                                              final_norm: hidden
{output|lm_head}.weight                                  head: vocab hidden          untied
{output|lm_head}.weight                                  embedding: vocab hidden     tied optional
""")

QWEN3 = rules("""
tok_embeddings.weight                                    embedding: vocab hidden
layers.{layer}.attention.{wq|qkv_linear.wq}.weight       query: (group head half pair) hidden
layers.{layer}.attention.{wk|qkv_linear.wk}.weight       key: (group half pair) hidden
layers.{layer}.attention.{wv|qkv_linear.wv}.weight       value: (group dim) hidden
layers.{layer}.attention.wo.weight                       output: hidden (group head dim)
layers.{layer}.attention.q_norm.weight                   query_norm: (half pair)
layers.{layer}.attention.k_norm.weight                   key_norm: (half pair)
layers.{layer}.feed_forward.w1.weight                    gate: ffn hidden
layers.{layer}.feed_forward.w3.weight                    up: ffn hidden
layers.{layer}.feed_forward.w2.weight                    down: hidden ffn
layers.{layer}.attention_norm.weight                     input_norm: hidden
layers.{layer}.ffn_norm.weight                           post_norm: hidden
norm.weight                                              final_norm: hidden
{output|lm_head}.weight                                  head: vocab hidden          untied
{output|lm_head}.weight                                  embedding: vocab hidden     tied optional
""")

TITAN = {"llama": LLAMA, "qwen3": QWEN3}
"""Family: layout."""

FIRST = "tok_embeddings.weight"
"""The key that gives these names away."""

DROPS = (r"freqs_cis",)
