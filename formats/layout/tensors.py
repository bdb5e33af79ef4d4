"""The catalogue of logical tensors, and their axes.

Axes are the finest split that any format needs. Their order is the canonical order of elements, in which digests are
computed. A tensor with a `layer` axis is handled layer by layer.

    group   key/value group            head    query head within its group
    half    half of a rotary head      pair    index within that half (rotary turns (0, pair) into (1, pair))
    dim     a head that nothing permutes, such as the value's

A layer that predicts a token after the next (MTP) has a norm of the next token's embedding, a norm of the hidden state
before it, and a matrix that joins both; the rest is a layer like all others, with a final norm of its own.

A router scores experts. `router_bias` is added to the scores when experts are chosen, and nowhere else;
`router_score_bias` is added to the scores themselves; `router_choice_bias` is like `router_bias`, but is a parameter,
which no training changes. Experts may work on a latent of their layer: one matrix projects to the latent, another back.
Shared experts get every token; `shared_router` gates their output where a model has one. An attention sink is one
learned logit of a head, which attends to no token. The activation xIELU has two trained numbers, one for each sign, and
two that are not trained.

Multi-head latent attention (MLA): `latent_down` projects to the latent of keys and values, and to the rotary part of
keys; `latent_up` projects from the latent to each head. Queries may have a latent of their own, or `latent_query`
projects to them directly.

An indexer scores the tokens before each token, by queries of several heads, made of the query latent, and one key, with
a weight for each head; attention sees the tokens of the highest scores. The first elements of the indexer's heads
rotate, in halves or by neighbours. An indexer of blocks scores tokens by queries and one key of its own, each with a
norm, and attention sees the blocks of the best tokens.

A query gate weights the output of attention, element by element. The value heads of linear attention are in the order
of the key heads that they belong to, `spread` value heads for each key head. Beta determines how much the state of
linear attention takes from a token; alpha, decay and step bias determine how much the state forgets. Taps are the
weights of a convolution over tokens. Linear attention that forgets channel by channel (KDA) computes its forgetting,
and its gate, through a latent each.

A state space (Mamba2) has heads, `share` of each group: x is the input of a head's state, b determines how x enters
the state, and c how the state is read, both for a group. Step and decay determine how much the state forgets, skip how
much of x bypasses it, and a gate weights the output. `pre_norm` is the only norm of a layer that is one block. In a
short convolution b and c are gates of x.

Each layer may get an input of its own for a token, made by an embedding for all layers and a projection of the main
embedding: a gate and a matrix lead to this input and back. A layer may scale its output. The output of its MLP, and the
input and the output of its experts, may have a norm each; its router scales its input, and the output of each expert.

A LoRA adds the product of two factors to a matrix: `lora_b`, with the axes of the output, times `lora_a`, with the axes
of the input. A shard, a half of a shard (`fold`) and a chunk of that half are the rows of an MLP, or of shared experts,
as Megatron-Bridge divides them. The factors of each expert are its own, of a rank that experts have for themselves.

Where only a part of a head rotates, `half pair` is just its order; no layout may change it to `pair half`.
"""

from __future__ import annotations

from collections.abc import Mapping

TENSORS: Mapping[str, tuple[str, ...]] = {
    name: tuple(axes)
    for name, *axes in map(
        str.split,
        """
        embedding    vocab hidden
        embedding_norm  hidden
        embedding_norm_bias  hidden
        positions    position hidden
        input_norm   layer hidden
        input_norm_bias  layer hidden
        query        layer group head half pair hidden
        query_bias   layer group head half pair
        query_norm   layer half pair
        query_width_norm  layer group head half pair
        query_gate   layer group head dim hidden
        key          layer group half pair hidden
        key_bias     layer group half pair
        key_norm     layer half pair
        key_width_norm  layer group half pair
        value        layer group dim hidden
        value_bias   layer group dim
        latent_query  layer group query_dim hidden
        query_down   layer query_rank hidden
        query_latent_norm  layer query_rank
        query_up     layer group query_dim query_rank
        latent_down  layer joint_dim hidden
        latent_norm  layer latent_rank
        latent_up    layer group up_dim latent_rank
        index_query  layer index_head index_dim query_rank
        index_key    layer index_dim hidden
        index_norm   layer index_dim
        index_norm_bias  layer index_dim
        index_weights  layer index_head hidden
        block_query  layer index_head index_dim hidden
        block_key    layer index_dim hidden
        block_query_norm  layer index_dim
        block_key_norm  layer index_dim
        linear_query  layer key_head key_dim hidden
        linear_key   layer key_head key_dim hidden
        linear_value  layer key_head spread value_dim hidden
        linear_gate  layer key_head spread value_dim hidden
        linear_beta  layer key_head spread hidden
        linear_alpha  layer key_head spread hidden
        linear_query_taps  layer key_head key_dim tap
        linear_key_taps  layer key_head key_dim tap
        linear_value_taps  layer key_head spread value_dim tap
        linear_step_bias  layer key_head spread
        linear_decay  layer key_head spread
        linear_norm  layer value_dim
        linear_output  layer hidden key_head spread value_dim
        linear_forget_down  layer channel_rank hidden
        linear_forget_up  layer key_head key_dim channel_rank
        linear_forget_bias  layer key_head key_dim
        linear_gate_down  layer channel_rank hidden
        linear_gate_up  layer key_head spread value_dim channel_rank
        pre_norm     layer hidden
        state_gate   layer state_group share state_dim hidden
        state_x      layer state_group share state_dim hidden
        state_b      layer state_group state hidden
        state_c      layer state_group state hidden
        state_step   layer state_group share hidden
        state_x_taps  layer state_group share state_dim tap
        state_b_taps  layer state_group state tap
        state_c_taps  layer state_group state tap
        state_x_taps_bias  layer state_group share state_dim
        state_b_taps_bias  layer state_group state
        state_c_taps_bias  layer state_group state
        state_step_bias  layer state_group share
        state_decay  layer state_group share
        state_skip   layer state_group share
        state_norm   layer state_group share state_dim
        state_output  layer hidden state_group share state_dim
        short_b      layer channel hidden
        short_c      layer channel hidden
        short_x      layer channel hidden
        short_taps   layer channel tap
        short_output  layer hidden channel
        sinks        layer group head
        output       layer hidden group head dim
        output_bias  layer hidden
        output_norm  layer hidden
        post_norm    layer hidden
        post_norm_bias  layer hidden
        gate         layer ffn hidden
        gate_bias    layer ffn
        up           layer ffn hidden
        up_bias      layer ffn
        down         layer hidden ffn
        down_bias    layer hidden
        down_norm    layer hidden
        mlp_norm     layer hidden
        experts_norm  layer hidden
        experts_down_norm  layer hidden
        layer_scalar  layer unit
        layer_input_gate  layer layer_width hidden
        layer_input_up  layer hidden layer_width
        layer_input_norm  layer hidden
        xielu_positive  layer unit
        xielu_negative  layer unit
        xielu_beta   layer
        xielu_eps    layer
        router       layer expert hidden
        router_bias  layer expert
        router_score_bias  layer expert
        router_choice_bias  layer expert
        router_input_scale  layer hidden
        router_expert_scale  layer expert
        expert_gate  layer expert expert_ffn hidden
        expert_up    layer expert expert_ffn hidden
        expert_down  layer expert hidden expert_ffn
        expert_gate_bias  layer expert expert_ffn
        expert_up_bias  layer expert expert_ffn
        expert_down_bias  layer expert hidden
        experts_in   layer expert_latent hidden
        experts_out  layer hidden expert_latent
        latent_expert_up  layer expert expert_ffn expert_latent
        latent_expert_down  layer expert expert_latent expert_ffn
        shared_gate  layer shared_ffn hidden
        shared_up    layer shared_ffn hidden
        shared_down  layer hidden shared_ffn
        shared_router  layer hidden
        mtp_embedding_norm  layer hidden
        mtp_hidden_norm  layer hidden
        mtp_join     layer hidden joined
        mtp_final_norm  layer hidden
        query_lora_a  layer rank hidden
        query_lora_b  layer group head half pair rank
        key_lora_a   layer rank hidden
        key_lora_b   layer group half pair rank
        value_lora_a  layer rank hidden
        value_lora_b  layer group dim rank
        output_lora_a  layer rank group head dim
        output_lora_b  layer hidden rank
        gate_lora_a  layer rank hidden
        gate_lora_b  layer shard fold chunk rank
        up_lora_a    layer rank hidden
        up_lora_b    layer shard fold chunk rank
        down_lora_a  layer rank ffn
        down_lora_b  layer hidden rank
        expert_gate_lora_a  layer expert expert_rank hidden
        expert_gate_lora_b  layer expert expert_ffn expert_rank
        expert_up_lora_a  layer expert expert_rank hidden
        expert_up_lora_b  layer expert expert_ffn expert_rank
        expert_down_lora_a  layer expert expert_rank expert_ffn
        expert_down_lora_b  layer expert hidden expert_rank
        shared_gate_lora_a  layer rank hidden
        shared_gate_lora_b  layer shard fold shared_chunk rank
        shared_up_lora_a  layer rank hidden
        shared_up_lora_b  layer shard fold shared_chunk rank
        shared_down_lora_a  layer rank shared_ffn
        shared_down_lora_b  layer hidden rank
        layer_embedding  layer_vocab every_layer layer_width
        layer_projection  every_layer layer_width hidden
        layer_projection_norm  layer_width
        final_norm   hidden
        final_norm_bias  hidden
        head         vocab hidden
        """.strip().splitlines(),
    )
}


BUFFERS = frozenset({"router_bias", "layer_scalar", "xielu_beta", "xielu_eps"})
"""Tensors that are in the files of a model, but are no parameters."""


UNTRAINED = BUFFERS | {"router_choice_bias"}
"""Tensors that no optimizer updates."""


EXACT = frozenset({"router_bias", "router_choice_bias"})
"""Tensors that no framework rounds to a lower precision."""
