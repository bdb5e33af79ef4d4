"""Self-check before the first step: packed documents do not see each other, and our logits are those of the model.

Two layers of the model run on the real device, in the compute dtype, with the attention and kernels of the training.
"""

from __future__ import annotations

import copy
from math import inf
from typing import Any

import torch

from formats.errors import UnsupportedError, UsageError, VerificationError
from formats.huggingface.layers import BLOCKS
from train.data.parts import rank_part
from train.data.rows import Flat
from train.distributed import World
from train.model import kernels
from train.model.attention import BACKENDS, forward_kwargs, keep_apart, named
from train.model.context import gathered
from train.model.parts import decoder_of
from train.model.rope import is_turned_apart, turned_alike
from train.model.trainee import adjusted

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Largest allowed difference of hidden states, relative to the largest, between a packed and an unpacked document.

In bf16 sdpa and eager on CPUs have 0.003 to 0.010 (llama, qwen3, mistral, gpt_neox, 256 to 4096 wide).
"""
TRIES = 3
"""Number of draws of weights and tokens. A real leak between documents shows in every draw; but in bf16 rounding alone
may route a token to another expert (0.035 with OLMoE's sizes, once in three draws)."""
LENGTHS = (5, 1, 17, 32, 2)
NARROW = 8
"""Size of the sliding window in the check of attention across ranks."""
CHOSEN = ("index_topk", "keep_window_size")
"""Config keys of sparse attention: the number of tokens of a row that a layer selects. The check has fewer tokens."""
LOUD = 100.0
"""The largest logit in the check of the logits: large enough that a softcap of 30 or 50 changes it."""


def self_check(
    config: Any,
    device: torch.device,
    backend: str,
    dtype: torch.dtype,
    kernel: str = "torch",
    world: World | None = None,
) -> float:
    """Run two layers of the model on packed documents, and on each document separately.

    Args:
        config: the model's configuration, of transformers.
        device: where the model will run.
        backend: a key of `attention.BACKENDS`.
        dtype: dtype of the computation.
        kernel: torch or liger.
        world: the ranks; if they share rows, the packed documents are computed across them.

    Returns:
        The largest difference of hidden states, relative to the largest hidden state.

    Raises:
        UnsupportedError: the attention does not run, or the model's logits differ from ours.
        VerificationError: packed documents see each other.
    """
    try:
        with torch.no_grad():
            for seed in range(TRIES):
                difference = _apart(config, device, backend, dtype, kernel, seed, world)
                if difference <= TOLERANCE[dtype]:
                    break
    except (RuntimeError, ImportError, ValueError, KeyError) as error:  # of kernels, their libraries, and transformers
        raise UnsupportedError(
            f"{config.model_type} cannot be computed with the attention {backend} in {str(dtype)[6:]} on "
            f"{device.type}: {' '.join(str(error).split())[:200]}",
            "choose another one: --model.attention eager",
        ) from error
    if not difference <= TOLERANCE[dtype]:
        raise VerificationError(
            f"documents of a row see each other with the attention {backend} on {device.type}: hidden states differ by "
            f"{difference:.2g} of the largest, {TOLERANCE[dtype]:g} is allowed",
            f"choose another one: --model.attention {'|'.join(BACKENDS)}",
        )
    return difference


def _apart(
    config: Any,
    device: torch.device,
    backend: str,
    dtype: torch.dtype,
    kernel: str,
    seed: int,
    world: World | None,
) -> float:
    requested, shared = backend, world if world is not None and world.context > 1 else None
    model, tokens = _small(config, device, "eager" if shared else named(backend), dtype, seed, narrow=bool(shared))
    if kernel == "liger":
        kernels.replace(model)
    decoder = decoder_of(model)
    if decoder is model or decoder is model.get_output_embeddings():  # ModernBERT of transformers 5.23.0
        raise UnsupportedError(
            f"{type(model).__name__} does not separate its decoder from its head: it cannot be trained"
        )
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    ends = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32)
    flat = Flat(tokens.numpy(), tokens.numpy(), positions.numpy(), ends.numpy(), max(LENGTHS), 0)
    keep_apart(model)
    backend = "eager" if shared else backend
    kwargs = forward_kwargs(flat, device, backend)
    packed = decoder(**kwargs).last_hidden_state[0]
    _require_logits(model, packed, kwargs)
    if shared is not None:
        packed = _across(config, shared, requested, flat, dtype, seed)
    alone = [
        decoder(**forward_kwargs(_one(tokens[low:high]), device, backend)).last_hidden_state[0]
        for low, high in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)
    ]
    return float((packed.float() - torch.cat(alone).float()).abs().max() / packed.float().abs().max())


def _across(config: Any, world: World, backend: str, flat: Flat, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """The hidden states of the same small model, of which each rank of a group computes its part."""
    model, _ = _small(config, world.device, named(backend, world.context), dtype, seed, narrow=True)
    kwargs = forward_kwargs(rank_part(flat, world), world.device, backend, world.sharing)
    hidden = decoder_of(model)(**kwargs).last_hidden_state[0]
    return gathered(hidden, world.sharing)[: len(flat.labels)]


def _small(
    config: Any, device: torch.device, attention: str, dtype: torch.dtype, seed: int, *, narrow: bool = False
) -> tuple[Any, torch.Tensor]:
    """A model of the first two layers with randomly initialised weights, and tokens for it.

    Args:
        config: the configuration of the whole model.
        device: where the small model is.
        attention: name of the attention in transformers.
        dtype: dtype of the weights.
        seed: seed of weights and tokens.
        narrow: whether sliding windows are so narrow that a document of the check is longer.
    """
    from transformers import AutoModelForCausalLM

    small = copy.deepcopy(config)
    small.num_hidden_layers, small.use_cache = min(2, config.num_hidden_layers), False
    if narrow and getattr(small, "sliding_window", None):
        small.sliding_window = NARROW
    if getattr(small, "num_kv_shared_layers", 0):  # of the last layers, which the small model lacks
        small.num_kv_shared_layers = 0
    if getattr(small, "layer_types", None):
        small.layer_types = small.layer_types[: small.num_hidden_layers]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokens = torch.randint(0, min(1000, config.vocab_size), (sum(LENGTHS),))
        with torch.device(device):
            model: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                small, dtype=dtype, attn_implementation=attention
            )
    return model.eval(), tokens


def _one(tokens: torch.Tensor) -> Flat:
    """A single document, not packed, as a row."""
    ends = torch.tensor([0, len(tokens)], dtype=torch.int32)
    return Flat(tokens.numpy(), tokens.numpy(), torch.arange(len(tokens)).numpy(), ends.numpy(), len(tokens), 0)


def _require_logits(model: Any, hidden: torch.Tensor, kwargs: dict[str, Any]) -> None:
    """Compare the model's own logits with ours, for the same hidden states, scaled up to large logits.

    Args:
        model: the model of two layers.
        hidden: output of the two layers, [n, hidden].
        kwargs: the arguments of the model's forward.

    Raises:
        UnsupportedError: the logits differ.
    """
    head = model.get_output_embeddings()
    loud = hidden * (LOUD / head(hidden).abs().max())

    def louder(_: Any, __: Any, out: Any) -> Any:
        out.last_hidden_state = loud[None]
        return out

    hook = decoder_of(model).register_forward_hook(louder)
    theirs = model(**kwargs).logits[0].float()
    hook.remove()
    ours = adjusted(head(loud).float(), model.config)
    difference = float((ours - theirs).abs().max() / theirs.abs().max())
    if not difference <= TOLERANCE[hidden.dtype]:
        raise UnsupportedError(
            f"{model.config.model_type} does something with its logits that is not known here: they differ by "
            f"{difference:.2g} of the largest from those of its head",
            "its loss would be wrong: it cannot be trained here",
        )


def require_masks(config: Any, length: int, rows: int = 1, context: int = 1) -> None:
    """Refuse models whose layers would see more than one document of a packed row.

    Args:
        config: the model's configuration, of transformers.
        length: maximum number of tokens of a row.
        rows: number of rows that are flattened into one sequence.
        context: number of ranks that share a row.

    Raises:
        UsageError: layers carry a recurrent state over a row, which positions do not reset; or they chunk or select the
            tokens of a row instead of a document (transformers 5.23.0 models/llama4/modeling_llama4.py and
            doge/modeling_doge.py), and a row is longer than that limit; or the longest document sets the rotary
            frequencies of all (modeling_rope_utils.py) in a way that `rope.turn_apart` does not change.
        UnsupportedError: the model is multimodal.
    """
    if config.get_text_config() is not config:
        raise UnsupportedError(
            f"{config.model_type} is a model of more than text ({config.get_text_config().model_type} in it)",
            "only a model of text can be trained here",
        )
    kinds = {str(kind) for kind in getattr(config, "layer_types", None) or ()}
    if BLOCKS in kinds:
        raise UsageError(
            f"{config.model_type} divides a row into blocks of keys, not a document ({BLOCKS})",
            "documents of a row would see each other: such a model cannot be trained packed",
        )
    strange = sorted(kind for kind in kinds if "attention" not in kind or "linear" in kind)
    if strange or any(hasattr(config, name) for name in ("mamba_d_state", "ssm_state_size", "state_size")):
        what = ", ".join(strange) or "state space"
        raise UsageError(
            f"{config.model_type} has layers that carry a state from token to token ({what})",
            "documents of a row would see each other: such a model cannot be trained packed",
        )
    if getattr(config, "alibi", False):
        raise UsageError(
            f"{config.model_type} with alibi counts the tokens of a row, not of a document",
            "documents of a row would see each other's length: such a model cannot be trained packed",
        )
    most = min(turned_alike(config).values(), default=inf)
    if length > most and (context > 1 or not is_turned_apart(config)):
        raise UsageError(
            f"{config.model_type} turns all documents of a row by the longest, if that has more than {most:.0f} tokens",
            f"--data.seq_length {most:.0f}",
        )
    limits = [int(getattr(config, name)) for name in CHOSEN if getattr(config, name, None)]
    if "chunked_attention" in kinds:
        limits += [config.attention_chunk_size, *([config.floor_scale - 1] if hasattr(config, "floor_scale") else [])]
    if limits and length * rows > min(limits):
        raise UsageError(
            f"{config.model_type} counts the tokens of a row, not of a document: those after {min(limits)} differ",
            f"--data.seq_length {min(limits)} --batch.micro 1",
        )


def require_sharable(config: Any) -> None:
    """Refuse models that cannot share rows between ranks, beside those that the attention refuses.

    Raises:
        UnsupportedError: the router's losses are means over whole rows.
    """
    if getattr(config, "output_router_logits", False):
        raise UnsupportedError(
            f"{config.model_type} says output_router_logits, and such a loss is of a whole row", "--parallel.context 1"
        )
