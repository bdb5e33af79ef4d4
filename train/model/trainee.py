"""The model: built on the meta device, and filled from a Hugging Face folder, by each rank its own shards.

No rank ever holds a whole tensor that is sharded: a rank reads the rows of its shard from the safetensors file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from formats.errors import SourceError, UnsupportedError
from formats.families import find_family
from formats.huggingface import mtp
from train.data.rows import CHUNK, IGNORED, Flat, Rows
from train.model.attention import forward_kwargs, keep_apart, named
from train.model.fused_experts import Fused, keys_of
from train.model.parts import decoder_of
from train.model.quantized import Packed
from train.model.rope import turn_apart
from train.model.router_loss import router_loss
from train.settings.config import Model
from train.settings.freezing import frozen
from train.start.start_weights import MAKE

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
FILED: Mapping[str, Mapping[str, str]] = {"gpt_neox": {"lm_head.weight": "embed_out.weight"}}
"""Model type: names in memory, and their names in the files where these differ (transformers 5.23.0
conversion_mapping.py)."""
LEARNED = ("biogpt", "gpt2", "gpt_bigcode", "gpt_neo", "openai-gpt", "opt")
"""Model types with learned position embeddings (transformers 5.23.0)."""
ADAPTERS = (".lora_A.", ".lora_B.", ".lora_magnitude_vector.")
"""Parts of the names of tensors that peft adds to a model (peft 0.21.2 tuners/lora/layer.py, dora.py)."""


class Trainee(nn.Module):
    """A causal language model with its loss.

    The loss is computed inside, because FSDP gathers the head's weights only during a forward of the root. It is
    computed in one call of the head, because ZeRO-3 gathers the weights at each call: ranks have different numbers of
    chunks, and separate calls would deadlock.
    """

    def __init__(self, model: Any, backend: str, kernels: str = "torch", group: Any = None) -> None:
        super().__init__()
        self.group = group
        self.model, self.backend, self.kernels, self.balance = model, backend, kernels, router_loss(model)
        keep_apart(model)
        turn_apart(model)
        head = model.get_output_embeddings()
        head.forward = _with_loss(head.forward, model.config)

    def forward(
        self,
        flat: Flat,
        device: torch.device,
        noise: torch.Tensor | None = None,
        predicted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The sum of the losses of all trained labels, float32; `predicted` is filled as by `summed_loss`.

        In training the sum includes the router's loss, where the model has such a loss.
        """
        kwargs = forward_kwargs(flat, device, self.backend, self.group)
        if noise is not None:
            embedded = self.model.get_input_embeddings()(kwargs.pop("input_ids"))
            kwargs["inputs_embeds"] = embedded + noise.to(embedded.dtype)
        out = decoder_of(self.model)(**kwargs)
        labels = torch.from_numpy(flat.labels).to(device)
        loss: torch.Tensor = self.model.get_output_embeddings()(out.last_hidden_state[0], labels, predicted)
        return loss if self.balance is None or not self.training else loss + self.balance(out.router_logits, flat)


def adjusted(logits: torch.Tensor, config: Any) -> torch.Tensor:
    """The model's logits from those of its head: granite scales logits, gemma2 caps them (transformers 5.23.0).

    `selfcheck.py` refuses models that do anything else with logits.
    """
    scale, cap = getattr(config, "logits_scaling", 1.0), getattr(config, "final_logit_softcapping", None)
    logits = logits if scale == 1.0 else logits / scale
    return logits if cap is None else torch.tanh(logits / cap) * cap


def _with_loss(head: Callable[[torch.Tensor], torch.Tensor], config: Any) -> Callable[..., torch.Tensor]:
    """Wrap a head so that it returns the sum of losses if it gets labels, and its own logits otherwise."""

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
    """Cross entropy, a chunk of tokens at a time; logits are recomputed in the backward pass.

    Args:
        hidden: hidden states, [n, hidden].
        labels: int64[n].
        head: computes logits from hidden states.
        predicted: int64[n], filled with the most likely token at each position; None if not needed.

    Returns:
        The sum of the losses of trained labels, float32; 0 if there is none.
    """

    def loss_of(states: torch.Tensor, targets: torch.Tensor, begin: int) -> torch.Tensor:
        logits = head(states).float()
        if predicted is not None:
            predicted[begin : begin + len(states)] = logits.argmax(-1)
        return nn.functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")

    total = hidden.new_zeros((), dtype=torch.float32)
    for place, (states, targets) in enumerate(zip(torch.split(hidden, CHUNK), torch.split(labels, CHUNK), strict=True)):
        total = total + checkpoint(loss_of, states, targets, place * CHUNK, use_reentrant=False)
    return total


def open_config(path: Path) -> Any:
    """The configuration of the model in a Hugging Face folder, as an object of transformers.

    Raises:
        SourceError: transformers cannot read it.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = " ".join(str(error).split())[:200]
        raise SourceError(f"transformers cannot read {path / 'config.json'}: {why}") from error


def fitted(rows: Rows, path: Path) -> Rows:
    """Rows that refuse ids and positions beyond the model's size. Raises what `open_config` raises."""
    model_config = open_config(path).get_text_config()
    positions, learned = getattr(model_config, "max_position_embeddings", None), model_config.model_type in LEARNED
    return replace(rows, vocabulary=int(model_config.vocab_size)).within(positions, learned)


def make(model_config: Any, backend: str, dtype: torch.dtype = torch.float32, context: int = 1) -> Any:
    """A model of transformers on the meta device.

    Args:
        model_config: the model's configuration, of transformers.
        backend: a key of `attention.BACKENDS`.
        dtype: dtype of all weights.
        context: number of ranks that share a row.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            model_config, dtype=dtype, attn_implementation=named(backend, context)
        )
    model.config.use_cache = False
    _keep_exact(model)
    return model


def _keep_exact(model: Any) -> None:
    """Turn frozen parameters into buffers, and keep all stored buffers in float32, so that they are not rounded.

    An example is the router's correction bias: ERNIE's is a parameter (transformers 5.23.0), and in bf16 neighbouring
    values of MiniMax-M2's would become equal.
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


def freeze(model: Any, patterns: Sequence[str]) -> None:
    """Freeze the parameters whose names match the patterns. Raises what `freezing.frozen` raises."""
    parameters = {name: tensor for name, tensor in weights(model).items() if isinstance(tensor, nn.Parameter)}
    for name in frozen(parameters, patterns):
        parameters[name].requires_grad_(False)


def compile_layers(decoder_layers: Iterable[Any]) -> None:
    """Compile each layer's forward, once for all sizes of rows, inside of checkpointing and of FSDP's hooks.

    Outside of them, each size would be compiled anew until torch gives up and runs all sizes eagerly (torch 2.11).
    """
    for layer in decoder_layers:
        layer.forward = torch.compile(layer.forward, dynamic=True)


def save_memory(decoder_layers: Iterable[Any], settings: Model, device: torch.device) -> None:
    """Reduce activation memory: keep only the inputs of layers, and recompute the rest in the backward pass.

    Args:
        decoder_layers: the layers.
        settings: whether activations are recomputed, and whether inputs are kept in CPU memory.
        device: where the model runs.
    """
    for layer in decoder_layers:
        if settings.activation_checkpointing:
            layer.forward = _twice(layer.forward)
        if settings.activation_offload:
            layer.forward = _away(layer.forward, device.type == "cuda")


def _twice(forward: Any) -> Any:
    def again(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return again


def _away(forward: Any, pinned: bool) -> Any:
    def saving(*args: Any, **kwargs: Any) -> Any:
        with save_on_cpu(pin_memory=pinned):
            return forward(*args, **kwargs)

    return saving


def fill_buffers(model: Any, device: torch.device) -> None:
    """Initialise non-persistent buffers (rotary frequencies, embedding scales) as the model's class does.

    Raises:
        UnsupportedError: the class does not compute a buffer's value, which would stay random memory.
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
    """A model whose parameters are on the meta device and whose buffers are real, as its class makes them."""
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
    """The model's own tensors by their names in its files, each once: a tied head is left out for the embedding."""
    tensors: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *_stored_buffers(model)]:
        if id(tensor) not in seen and not any(adapter in name for adapter in ADAPTERS):
            seen.add(id(tensor))
            tensors[filed(name, model.config.model_type)] = tensor
    return tensors


def filed(name: str, kind: str) -> str:
    """The name of a tensor in the files of a model, also where peft has wrapped its layer.

    Args:
        name: name of the tensor in memory.
        kind: the model's type, of transformers.
    """
    name = name.replace(".base_layer.", ".")
    return FILED.get(kind, {}).get(name, name)


def _stored_buffers(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    stored = model.state_dict().keys()
    return ((name, buffer) for name, buffer in model.named_buffers() if name in stored)


def fill(model: Any, path: Path) -> None:
    """Read this rank's shards of all tensors from a Hugging Face folder.

    Raises:
        SourceError: a tensor is missing, left over, or has another shape.
    """
    for tensor, piece in pieces(model, path):
        place(tensor, piece)


def pieces(model: Any, path: Path) -> Iterator[tuple[Any, Any]]:
    """Each tensor of the model, and a safetensors slice to read it from.

    Raises:
        SourceError: a tensor is missing, left over, or has another shape.
    """
    from safetensors import safe_open

    with ExitStack() as stack:
        files = {name: stack.enter_context(safe_open(path / name, "pt")) for name in _files(path)}
        file_of = {key: file for file in files.values() for key in file.keys()}  # noqa: SIM118  # a safetensors handle is no mapping
        tensors, kind = weights(model), model.config.model_type
        config = model.config.to_dict()
        unfiled = {
            name: keys_of(name, config, shape_of(tensor)[0]) for name, tensor in tensors.items() if name not in file_of
        }
        keys = {name: [key for part in parts for key in part] for name, parts in unfiled.items()}
        lacking = sorted(key for name in unfiled for key in (keys[name] or [name]) if key not in file_of)
        known = {filed(name, kind) for name, _ in model.named_parameters(remove_duplicate=False)}
        over = sorted(
            file_of.keys()
            - tensors.keys()
            - known
            - {key for keys_of_tensor in keys.values() for key in keys_of_tensor}
        )
        if lacking or over:
            what = "lacks" if lacking else "has, and the model has not,"
            names = ", ".join((lacking or over)[:3])
            raise SourceError(
                f"{path} {what} {len(lacking or over)} tensors, such as {names}",
                "" if lacking else _not_carried(path, config, over),
            )
        for name, tensor in tensors.items():
            parts = [[file_of[key].get_slice(key) for key in part] for part in unfiled.get(name, [[name]])]
            joined, rank = len(parts) * len(parts[0]) > 1, len(shape_of(tensor))
            apart_of_experts = len(parts[0][0].get_shape()) == rank
            piece = Fused(parts, apart=apart_of_experts) if joined else parts[0][0]
            if list(piece.get_shape()) != list(shape_of(tensor)):
                raise SourceError(f"{name} of {path} has the shape {piece.get_shape()}, the model {shape_of(tensor)}")
            yield tensor, piece


def _not_carried(path: Path, config: Mapping[str, Any], keys: Sequence[str]) -> str:
    """A hint, if the converter leaves out all of these tensors.

    These are layers that predict further tokens, and stored rotary frequencies.
    """
    if len(mtp.keys_of(keys)) == len(keys):
        return f"layers that predict further tokens are not trained: convert hf2hf {path} FOLDER --drop mtp"
    family = find_family(config)
    drops = family.drops if family else ()
    if all(any(re.fullmatch(drop, key) for drop in drops) for key in keys):
        return f"they are not weights of this model: convert hf2hf {path} FOLDER drops them"
    return ""


def shape_of(tensor: Any) -> tuple[int, ...]:
    """The shape of a whole tensor: ZeRO-3 leaves an empty tensor in the module, and keeps the shape in `ds_shape`.

    For a quantized weight it is `whole_shape`.
    """
    return tuple(getattr(tensor, "ds_shape", getattr(tensor, "whole_shape", tensor.shape)))


def place(tensor: torch.Tensor, whole: Any) -> None:
    """Copy this rank's shard of a whole tensor into the tensor in memory.

    Args:
        tensor: the destination, sharded or not.
        whole: the source; slicing the source returns a tensor.
    """
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if isinstance(tensor, Packed):
        tensor.quantize(whole[...])
        return
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
        weight_map: Mapping[str, str] = json.loads(index.read_bytes())["weight_map"]
        return sorted(set(weight_map.values()))
    if not (path / "model.safetensors").is_file():
        raise SourceError(f"{path} has no model.safetensors", MAKE)
    return ["model.safetensors"]
