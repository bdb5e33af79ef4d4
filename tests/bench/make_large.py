"""Checkpoints of the largest open models, for plans: true metadata and sizes, and holes for weights.

python -m tests.bench.make_large {llama-405b,deepseek-v3} {hf,fsdp,fsdp-optim,zero3} OUT [--ranks N] [--layers N]

Ranks that hold the same shapes are names of one file (hard links): 1,024 of them take the room of three. What that
hides is stated beside the figures: a file system is asked for as many heads of items, but from its cache. The metadata
is written opcode by opcode as torch's own is (protocol 4, each object and text numbered; torch 2.13), without the
gigabytes that torch's objects would take.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import struct
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from formats.huggingface import folder as huggingface
from formats.huggingface.config import from_huggingface
from formats.torch_files.archive_plan import plan_archive
from formats.torch_files.pickle_values import Opaque, StorageRef, TensorRef
from tests.bench.make_model import SHAPES, SHARD, config, lay_out

DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 7168,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_nextn_predict_layers": 0,
    "num_attention_heads": 128, "num_key_value_heads": 128, "n_shared_experts": 1, "n_routed_experts": 256,
    "routed_scaling_factor": 2.5, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "qk_nope_head_dim": 128, "topk_method": "noaux_tc", "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8,
    "moe_layer_freq": 1, "first_k_dense_replace": 3, "norm_topk_prob": True, "scoring_func": "sigmoid",
    "hidden_act": "silu", "max_position_embeddings": 163840, "rms_norm_eps": 1e-6, "rope_theta": 10000,
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
    "attention_bias": False, "tie_word_embeddings": False, "vocab_size": 129280, "torch_dtype": "bfloat16",
}  # fmt: skip
"""The config of DeepSeek-V3, without the layer that predicts a second token."""
SHAPES["405B"] = (126, 16384, 53248, 128, 8, 128256)

Shapes = Mapping[str, tuple[int, ...]]


def config_of(model: str, layers: int | None) -> dict[str, Any]:
    """The config.json of a model, of fewer layers if so many are asked for."""
    settings = dict(DEEPSEEK if model == "deepseek-v3" else config("405B", "BF16"))
    return {**settings, "num_hidden_layers": layers or settings["num_hidden_layers"]}


def shapes_of(settings: Mapping[str, Any]) -> Shapes:
    """Every tensor of a model, by the name that it has in memory."""
    slots = huggingface.model_slots(from_huggingface(dict(settings), {}, "model"), memory=True)
    return {slot.keys[0]: slot.shape for slot in slots}


# --- Hugging Face ----------------------------------------------------------------------------------------------------


def make_hf(out: Path, settings: dict[str, Any]) -> None:
    """A folder of safetensors."""
    out.mkdir(parents=True)
    spec = from_huggingface(settings, {}, "model")
    dtypes = {(tensor, layer): "BF16" for tensor in spec.tensors for layer in (None, *range(spec.layers))}
    lay_out(out, huggingface.write(out, spec, dtypes, SHARD), sparse=True)
    (out / "config.json").write_text(json.dumps(settings, indent=2))


# --- FSDP ------------------------------------------------------------------------------------------------------------


class Metadata:
    """A pickle as CPython writes that of torch's `Metadata`."""

    def __init__(self, file: io.BufferedWriter) -> None:
        self.write, self.memo, self.count = file.write, dict[object, bytes](), 0
        self.write(b"\x80\x04")

    def named(self, key: object) -> None:
        """Give what was written last the next number."""
        self.write(b"\x94")
        number, self.count = self.count, self.count + 1
        if key is not None:
            self.memo[key] = b"h" + bytes([number]) if number < 256 else b"j" + struct.pack("<I", number)

    def text(self, value: str) -> None:
        if value in self.memo:
            self.write(self.memo[value])
        else:
            self.write(b"\x8c" + bytes([len(value.encode())]) + value.encode())
            self.named(value)

    def of(self, module: str, name: str) -> None:
        """A class, or a dtype."""
        if (module, name) in self.memo:
            self.write(self.memo[module, name])
        else:
            self.text(module)
            self.text(name)
            self.write(b"\x93")
            self.named((module, name))

    def number(self, value: int) -> None:
        for code, kind, limit in ((b"K", "<B", 1 << 8), (b"M", "<H", 1 << 16), (b"J", "<i", 1 << 31)):
            if value < limit:
                self.write(code + struct.pack(kind, value))
                return
        size = value.bit_length() // 8 + 1
        self.write(b"\x8a" + bytes([size]) + value.to_bytes(size, "little", signed=True))

    def size(self, sizes: Sequence[int]) -> None:
        """A `torch.Size` of one or two dimensions."""
        self.of("torch", "Size")
        for length in sizes:
            self.number(length)
        for code in (bytes([0x84 + len(sizes)]), b"\x85", b"R"):
            self.write(code)
            self.named(None)

    def begin(self, name: str, module: str = "torch.distributed.checkpoint.metadata") -> None:
        """An object, whose attributes follow."""
        self.of(module, name)
        for code in (b")\x81", b"}"):
            self.write(code)
            self.named(None)
        self.write(b"(")


def _items(shapes: Shapes, ranks: int, rank: int) -> Iterator[tuple[str, int, tuple[int, ...]]]:
    """What a rank holds: name, first row and shape; rows are cut as torch.chunk does."""
    for name, (rows, *others) in shapes.items():
        step = -(-rows // ranks)
        if rank * step < rows:
            yield name, rank * step, (min(step, rows - rank * step), *others)


def make_fsdp(out: Path, settings: dict[str, Any], ranks: int, states: Sequence[str]) -> int:
    """A checkpoint of torch's DCP, with the states of an optimizer. Returns how many pieces it has."""
    import torch

    out.mkdir(parents=True)
    weights = shapes_of(settings)
    dtype = "float32" if states else "bfloat16"
    paths = {f"model.{name}": ("model", name) for name in weights}
    paths |= {f"optim.state.{name}.{state}": ("optim", f"state.{name}.{state}") for state in states for name in weights}
    shapes = {name: weights[key.removeprefix("state.").removesuffix(f".{key.rpartition('.')[2]}") if top == "optim" else
              key] for name, (top, key) in paths.items()}  # fmt: skip
    archives: dict[tuple[int, ...], tuple[bytes, bytes, int]] = {}
    steps: dict[str, bytes] = {}
    if states:
        buffer = io.BytesIO()
        torch.save(torch.tensor(5.0), buffer)
        steps = dict.fromkeys((f"optim.state.{name}.step" for name in weights), buffer.getvalue())
    starts, files = [0] * ranks, dict[tuple[object, ...], Path]()
    items = [list(_items(shapes, ranks, rank)) for rank in range(ranks)]
    for _, _, shape in (item for every in items for item in every):
        if shape not in archives:
            buffer = io.BytesIO()
            torch.save(torch.zeros(shape, dtype=getattr(torch, dtype)), buffer)
            raw = buffer.getvalue()
            archives[shape] = raw[:4096], raw[4096:][-4096:], len(raw)
    pieces = sum(map(len, items)) + len(steps)
    with (out / ".metadata").open("wb") as file:
        pickle = Metadata(file)
        pickle.begin("Metadata")
        pickle.text("state_dict_metadata")
        pickle.write(b"}")
        pickle.named(None)
        pickle.write(b"(")
        chunks = {name: [] for name in shapes}  # type: dict[str, list[tuple[int, tuple[int, ...]]]]
        for every in items:
            for name, start, shape in every:
                chunks[name].append((start, shape))
        for name, shape in shapes.items():
            _tensor(pickle, name, shape, dtype, chunks[name])
        for name in steps:
            _tensor(pickle, name, (), "float32", [])
        file.write(b"u")
        pickle.text("planner_data")
        pickle.write(b"}")
        pickle.named(None)
        pickle.write(b"(")
        for name, path in (paths | {name: ("optim", name.removeprefix("optim.")) for name in steps}).items():
            for text in (name, *path):
                pickle.text(text)
            pickle.write(b"\x86")
            pickle.named(None)
        file.write(b"u")
        pickle.text("storage_data")
        pickle.write(b"}")
        pickle.named(None)
        pickle.write(b"(")
        for rank, every in enumerate(items):
            for number, (name, start, shape) in enumerate(every):
                if number % 1000 == 0 and (rank or number):
                    pickle.write(b"u(")
                length = archives[shape][2]
                _stored(pickle, name, (start, *[0] * (len(shape) - 1)), rank, starts[rank], length)
                starts[rank] += length
        at = starts[0]
        for name, raw in steps.items():
            _stored(pickle, name, (), 0, at, len(raw))
            at += len(raw)
        file.write(b"u")
        for name in ("storage_meta", "version"):
            pickle.text(name)
            file.write(b"N")
        file.write(b"ub.")
    for rank, every in enumerate(items):
        kind = (rank == 0, *(shape for _, _, shape in every))
        path = out / f"__{rank}_0.distcp"
        if kind in files:
            os.link(files[kind], path)
            continue
        files[kind] = path
        with path.open("wb") as file:
            at = 0
            for _, _, shape in every:
                head, tail, length = archives[shape]
                for place, content in ((at, head), (at + length - len(tail), tail)):
                    file.seek(place)
                    file.write(content)
                at += length
            file.seek(at)
            for raw in steps.values() if rank == 0 else ():
                file.write(raw)
    (out / "config.json").write_text(json.dumps(settings, indent=2))
    return pieces


def _tensor(
    pickle: Metadata, name: str, shape: tuple[int, ...], dtype: str, chunks: Sequence[tuple[int, tuple[int, ...]]]
) -> None:
    pickle.text(name)
    pickle.begin("TensorStorageMetadata")
    pickle.text("properties")
    pickle.of("torch.distributed.checkpoint.metadata", "TensorProperties")
    pickle.write(b")\x81")
    pickle.named(None)
    pickle.write(b"(")
    pickle.of("torch", dtype)
    for module, function, push in (
        ("torch.serialization", "_get_layout", lambda: pickle.text("torch.strided")),
        ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING", lambda: pickle.number(0)),
    ):
        pickle.of(module, function)
        push()
        pickle.write(b"\x85")
        pickle.named(None)
        pickle.write(b"R")
        pickle.named(None)
        pickle.write(b"\x89")
    pickle.write(b"t")
    pickle.named(None)
    pickle.write(b"b")
    pickle.text("size")
    _place(pickle, shape)
    pickle.text("chunks")
    pickle.write(b"]")
    pickle.named(None)
    pickle.write(b"(")
    for start, sizes in chunks or [(0, ())]:
        pickle.begin("ChunkStorageMetadata")
        pickle.text("offsets")
        _place(pickle, (start, *[0] * (len(sizes) - 1)) if sizes else ())
        pickle.text("sizes")
        _place(pickle, sizes)
        pickle.write(b"ub")
    pickle.write(b"eub")


def _place(pickle: Metadata, sizes: Sequence[int]) -> None:
    if sizes:
        pickle.size(sizes)
    else:
        pickle.of("torch", "Size")
        pickle.write(b")\x85")
        pickle.named(None)
        pickle.write(b"R")
        pickle.named(None)


def _stored(pickle: Metadata, name: str, offset: Sequence[int], rank: int, start: int, length: int) -> None:
    pickle.begin("MetadataIndex")
    pickle.text("fqn")
    pickle.text(name)
    pickle.text("index")
    pickle.number(rank)
    pickle.text("offset")
    _place(pickle, offset)
    pickle.write(b"ub")
    pickle.begin("_StorageInfo", "torch.distributed.checkpoint.filesystem")
    pickle.text("relative_path")
    pickle.text(f"__{rank}_0.distcp")
    pickle.text("offset")
    pickle.number(start)
    pickle.text("length")
    pickle.number(length)
    pickle.write(b"ub")


# --- DeepSpeed -------------------------------------------------------------------------------------------------------


def make_zero3(out: Path, settings: dict[str, Any], ranks: int) -> int:
    """A checkpoint of ZeRO stage 3, with Adam's states. Returns how many pieces it has."""
    tag = out / "global_step5"
    tag.mkdir(parents=True)
    shapes = shapes_of(settings)
    (out / "latest").write_text(tag.name)
    (out / "config.json").write_text(json.dumps(settings, indent=2))
    numel = sum(-(-prod(shape) // ranks) for shape in shapes.values())
    storages: dict[str, int] = {}

    def tensor(count: int, shape: tuple[int, ...]) -> TensorRef:
        key = str(len(storages))
        storages[key] = 4 * count
        return TensorRef(StorageRef("F32", key, count), 0, shape, (1,) * len(shape), "F32")

    flat = [tensor(numel, (numel,)) for _ in range(3)]
    state = {0: {"step": 5.0, "exp_avg": flat[1], "exp_avg_sq": flat[2]}}
    group = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "params": [0]}
    optimizer = {
        "zero_stage": 3, "partition_count": ranks, "fp32_flat_groups": flat[:1],
        "optimizer_state_dict": {"state": state, "param_groups": [group]},
    }  # fmt: skip
    sizes = OrderedDict((name, Opaque("torch", "Size", (shape,))) for name, shape in shapes.items())
    module = {
        "module": OrderedDict(), "buffer_names": [], "optimizer": None, "param_shapes": [sizes],
        "frozen_param_shapes": None, "frozen_param_fragments": None, "shared_params": {}, "global_steps": 5,
        "skipped_steps": 0, "dp_world_size": ranks, "mp_world_size": 1, "ds_config": {}, "ds_version": "0.19.8",
    }  # fmt: skip
    for name, value, needed in (
        ("zero_pp_rank_{}_mp_rank_00_model_states.pt", module, {}),
        ("bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt", {"optimizer_state_dict": optimizer}, storages),
    ):
        archive, first = plan_archive(value, needed), tag / name.format(0)
        with first.open("wb") as file:
            file.truncate(archive.size)
            for offset, content in archive.headers(dict.fromkeys(archive.storages(), 0)):
                file.seek(offset)
                file.write(content)
        for rank in range(1, ranks):
            os.link(first, tag / name.format(rank))
    return 3 * ranks * len(shapes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=["llama-405b", "deepseek-v3"])
    parser.add_argument("kind", choices=["hf", "fsdp", "fsdp-optim", "zero3"])
    parser.add_argument("out", type=Path)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--layers", type=int)
    options = parser.parse_args()
    settings = config_of(options.model, options.layers)
    if options.kind == "hf":
        make_hf(options.out, settings)
    elif options.kind == "zero3":
        print(make_zero3(options.out, settings, options.ranks))
    else:
        states = ("exp_avg", "exp_avg_sq") if options.kind == "fsdp-optim" else ()
        print(make_fsdp(options.out, settings, options.ranks, states))


if __name__ == "__main__":
    main()
