"""The model: made without memory, and filled from a Hugging Face folder, each rank its own pieces.

No rank ever holds a whole tensor that is sharded: a rank reads the rows of its shard out of the safetensors file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from formats.errors import SourceError, UnsupportedError
from formats.families import find_family
from train.data.rows import CHUNK, IGNORED, Flat, Rows
from train.model.attention import forward_words, keep_apart, named
from train.model.fused_experts import Fused, keys_of
from train.model.parts import decoder_of
from train.start.start_weights import MAKE

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
FILED: Mapping[str, Mapping[str, str]] = {"gpt_neox": {"lm_head.weight": "embed_out.weight"}}
"""Model type: names in memory that are others in its files (transformers 5.23.0 conversion_mapping.py)."""
LEARNED = ("biogpt", "gpt2", "gpt_bigcode", "gpt_neo", "openai-gpt", "opt")
"""Model types with an embedding of positions (transformers 5.23.0)."""
ADAPTERS = (".lora_A.", ".lora_B.")
"""In the names of tensors that peft adds to a model (peft 0.21.2 tuners/lora/layer.py)."""


class Trainee(nn.Module):
    """A causal language model with its loss.

    The loss is inside because FSDP gathers the head's weights for one forward of the root only, and it is the head's
    because ZeRO-3 gathers them for each call of the head: ranks have different numbers of chunks, and would wait for
    each other without end.
    """

    def __init__(self, model: Any, backend: str, kernels: str = "torch") -> None:
        super().__init__()
        self.model, self.backend, self.kernels = model, backend, kernels
        keep_apart(model)
        head = model.get_output_embeddings()
        head.forward = _with_loss(head.forward, model.config)

    def forward(
        self,
        flat: Flat,
        device: torch.device,
        noise: torch.Tensor | None = None,
        predicted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The sum of the losses of all trained labels, float32; `predicted` as in `summed_loss`."""
        words = forward_words(flat, device, self.backend)
        if noise is not None:
            embedded = self.model.get_input_embeddings()(words.pop("input_ids"))
            words["inputs_embeds"] = embedded + noise.to(embedded.dtype)
        hidden = decoder_of(self.model)(**words).last_hidden_state[0]
        labels = torch.from_numpy(flat.labels).to(device)
        loss: torch.Tensor = self.model.get_output_embeddings()(hidden, labels, predicted)
        return loss


def adjusted(logits: torch.Tensor, config: Any) -> torch.Tensor:
    """What a model makes of the logits of its head: granite divides them, gemma2 caps them (transformers 5.23.0).

    `selfcheck.py` refuses models that make something else of them.
    """
    scale, cap = getattr(config, "logits_scaling", 1.0), getattr(config, "final_logit_softcapping", None)
    logits = logits if scale == 1.0 else logits / scale
    return logits if cap is None else torch.tanh(logits / cap) * cap


def _with_loss(head: Callable[[torch.Tensor], torch.Tensor], config: Any) -> Callable[..., torch.Tensor]:
    """A head that gives the sum of losses, if it gets labels, and its own logits otherwise."""

    def forward(
        hidden: torch.Tensor, labels: torch.Tensor | None = None, predicted: torch.Tensor | None = None
    ) -> torch.Tensor:
        if labels is None:
            return head(hidden)
        return summed_loss(hidden, labels, lambda states: adjusted(head(states).float(), config), predicted)

    return forward


def summed_loss(
    hidden: torch.Tensor,
    labels: torch.Tensor,
    head: Callable[[torch.Tensor], torch.Tensor],
    predicted: torch.Tensor | None = None,
) -> torch.Tensor:
    """Cross entropy, a chunk of tokens at a time, whose logits are computed again for the gradient.

    Args:
        hidden: [n, hidden].
        labels: int64[n].
        head: from hidden states to logits.
        predicted: int64[n], filled with the most likely token at each place; None where nobody wants to know.

    Returns:
        The sum over trained labels, float32; 0 if there is none.
    """

    def loss_of(states: torch.Tensor, wanted: torch.Tensor, begin: int) -> torch.Tensor:
        logits = head(states).float()
        if predicted is not None:
            predicted[begin : begin + len(states)] = logits.argmax(-1)
        return nn.functional.cross_entropy(logits, wanted, ignore_index=IGNORED, reduction="sum")

    total = hidden.new_zeros((), dtype=torch.float32)
    for place, (states, wanted) in enumerate(zip(torch.split(hidden, CHUNK), torch.split(labels, CHUNK), strict=True)):
        total = total + checkpoint(loss_of, states, wanted, place * CHUNK, use_reentrant=False)
    return total


def open_config(path: Path) -> Any:
    """The configuration of a model in a Hugging Face folder, of transformers.

    Raises:
        SourceError: transformers cannot read it.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        told = " ".join(str(error).split())[:200]
        raise SourceError(f"transformers cannot read {path / 'config.json'}: {told}") from error


def fitted(rows: Rows, path: Path) -> Rows:
    """Rows for a model: ids and positions that it has not are refused. Raises as `open_config` does."""
    made = open_config(path).get_text_config()
    positions, learned = getattr(made, "max_position_embeddings", None), made.model_type in LEARNED
    return replace(rows, vocabulary=int(made.vocab_size)).within(positions, learned)


def make(made: Any, backend: str, dtype: torch.dtype = torch.float32) -> Any:
    """A model of transformers without memory.

    Args:
        made: its configuration.
        backend: a key of `attention.BACKENDS`.
        dtype: of all its weights.

    Raises:
        UnsupportedError: the configuration asks for another loss beside that of the labels.
    """
    from transformers import AutoModelForCausalLM

    if getattr(made, "output_router_logits", False):
        raise UnsupportedError(
            "its config.json says output_router_logits, which adds a loss of the router that is not trained here",
            "set it to false",
        )
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            made, dtype=dtype, attn_implementation=named(backend)
        )
    model.config.use_cache = False
    _keep_exact(model)
    return model


def _keep_exact(model: Any) -> None:
    """Make buffers of frozen parameters, and all that files have float32: nothing trains them, so nothing may round.

    Such is the bias by which a router chooses: ERNIE's is a parameter (transformers 5.23.0), and in bf16 neighbours of
    MiniMax-M2's are one number.
    """
    for module in model.modules():
        for name, tensor in [*module.named_parameters(recurse=False)]:
            if not tensor.requires_grad:
                delattr(module, name)
                module.register_buffer(name, tensor.data)
    for name, buffer in [*_stored_buffers(model)]:
        if buffer.is_floating_point():
            path, _, last = name.rpartition(".")
            setattr(model.get_submodule(path), last, buffer.float())


def recompute(held: Iterable[Any]) -> None:
    """Activation checkpointing: keep the inputs of these layers, and compute the rest again for the gradient."""
    for layer in held:
        layer.forward = _twice(layer.forward)


def _twice(forward: Any) -> Any:
    def again(*args: Any, **words: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **words)

    return again


def fill_buffers(model: Any, device: torch.device) -> None:
    """Give buffers that no checkpoint has the values that their class computes: frequencies, scales of embeddings.

    Raises:
        UnsupportedError: the class computes none, and what it computes with them would be chance.
    """
    stored = model.state_dict().keys()
    lacking = [name for name, _ in model.named_buffers() if name not in stored]
    if not lacking:
        return
    computed = dict(_computed(model.config).named_buffers())
    for name in lacking:
        value = computed.get(name)
        if value is None or value.is_meta:
            raise UnsupportedError(f"{model.config.model_type} has a buffer {name} that nothing fills")
        path, _, last = name.rpartition(".")
        setattr(model.get_submodule(path), last, value.to(device))


def _computed(config: Any) -> Any:
    """A model whose parameters have no memory and whose buffers are real, as its class makes them."""
    register = nn.Module.register_parameter

    def without_memory(module: nn.Module, name: str, tensor: nn.Parameter | None) -> None:
        if tensor is not None:
            tensor = nn.Parameter(tensor.to("meta"), tensor.requires_grad)
        register(module, name, tensor)

    from transformers import AutoModelForCausalLM

    with mock.patch.object(nn.Module, "register_parameter", without_memory), torch.random.fork_rng(devices=[]):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]


# --- weights ---------------------------------------------------------------------------------------------------------


def weights(model: Any) -> dict[str, torch.Tensor]:
    """The model's own tensors by the names that they have in its files, each once: a tied head is the embedding."""
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *_stored_buffers(model)]:
        if id(tensor) not in seen and not any(adapter in name for adapter in ADAPTERS):
            seen.add(id(tensor))
            found[filed(name, model.config.model_type)] = tensor
    return found


def filed(name: str, kind: str) -> str:
    """The name that a tensor has in the files of a model, whether or not peft has put its layer into another one.

    Args:
        name: in memory.
        kind: the model's type, of transformers.
    """
    name = name.replace(".base_layer.", ".")
    return FILED.get(kind, {}).get(name, name)


def _stored_buffers(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    stored = model.state_dict().keys()
    return ((name, buffer) for name, buffer in model.named_buffers() if name in stored)


def fill(model: Any, path: Path) -> None:
    """Read the pieces of this rank.

    Raises:
        SourceError: a tensor is missing, left over, or has another shape.
    """
    for tensor, piece in pieces(model, path):
        place(tensor, piece)


def pieces(model: Any, path: Path) -> Iterator[tuple[Any, Any]]:
    """Each tensor of the model, and a slice of safetensors to read it from.

    Raises:
        SourceError: a tensor is missing, left over, or has another shape.
    """
    from safetensors import safe_open

    with ExitStack() as stack:
        files = {name: stack.enter_context(safe_open(path / name, "pt")) for name in _files(path)}
        held = {key: file for file in files.values() for key in file.keys()}  # noqa: SIM118  # a handle is no mapping
        wanted, kind = weights(model), model.config.model_type
        config = model.config.to_dict()
        apart = {name: keys_of(name, config, shape_of(one)[0]) for name, one in wanted.items() if name not in held}
        keys = {name: [key for part in parts for key in part] for name, parts in apart.items()}
        lacking = sorted(key for name in apart for key in (keys[name] or [name]) if key not in held)
        known = {filed(name, kind) for name, _ in model.named_parameters(remove_duplicate=False)}
        over = sorted(held.keys() - wanted.keys() - known - {key for one in keys.values() for key in one})
        if lacking or over:
            what = "lacks" if lacking else "has, and the model has not,"
            names = ", ".join((lacking or over)[:3])
            raise SourceError(
                f"{path} {what} {len(lacking or over)} tensors, such as {names}",
                "" if lacking else _left_behind(path, config, over),
            )
        for name, tensor in wanted.items():
            parts = [[held[key].get_slice(key) for key in part] for part in apart.get(name, [[name]])]
            piece = Fused(parts) if len(parts) * len(parts[0]) > 1 else parts[0][0]
            if list(piece.get_shape()) != list(shape_of(tensor)):
                raise SourceError(f"{name} of {path} has the shape {piece.get_shape()}, the model {shape_of(tensor)}")
            yield tensor, piece


def _left_behind(path: Path, config: Mapping[str, Any], keys: Iterable[str]) -> str:
    """A hint, if the converter drops all of these tensors: layers that predict further tokens, old frequencies."""
    family = find_family(config)
    drops = family.drops if family else ()
    if all(any(re.fullmatch(drop, key) for drop in drops) for key in keys):
        return f"they are no weights of it: convert hf2hf {path} FOLDER leaves them behind"
    return ""


def shape_of(tensor: Any) -> tuple[int, ...]:
    """The shape of a whole tensor: ZeRO-3 leaves an empty one in the module, and notes it."""
    return tuple(getattr(tensor, "ds_shape", tensor.shape))


def place(tensor: torch.Tensor, whole: Any) -> None:
    """Copy what of a whole tensor belongs to this rank.

    Args:
        tensor: where to; sharded or not.
        whole: what gives a tensor when it is sliced.
    """
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if not isinstance(tensor, DTensor):
        tensor.copy_(whole[...])
        return
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    local = tensor.to_local()
    if local.numel():
        local.copy_(whole[tuple(slice(low, low + size) for low, size in zip(offset, shape, strict=True))])


def _files(path: Path) -> list[str]:
    index = path / "model.safetensors.index.json"
    if index.is_file():
        held: Mapping[str, str] = json.loads(index.read_bytes())["weight_map"]
        return sorted(set(held.values()))
    if not (path / "model.safetensors").is_file():
        raise SourceError(f"{path} has no model.safetensors", MAKE)
    return ["model.safetensors"]
