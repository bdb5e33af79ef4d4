"""Find and open the files of a classic Megatron checkpoint, and check them against each other."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import prod
from pathlib import Path
from typing import Any

from formats.checkpoint import Settings
from formats.disk.safetensors import Fragment, read_bytes
from formats.errors import RefusedError, SourceError, UnsupportedError, short
from formats.layout.pieces import Scattered
from formats.layout.placed import Placed
from formats.layout.slots import Place
from formats.megatron import megatron_llm
from formats.megatron.args.fields import FIELDS
from formats.megatron.args.moe import interleaves_of
from formats.megatron.mesh import Mesh
from formats.megatron.tables import GROUPED
from formats.model.padding import require_rows, unit_of
from formats.model.spec import ModelSpec
from formats.model.values import positive_int
from formats.torch_files.archive import TorchFile, read_torch
from formats.torch_files.pickle_values import Namespace, TensorRef
from formats.torch_files.saves import require_same

TIES = ("iteration", "checkpoint_version", "consumed_train_samples", "consumed_valid_samples")
"""The entries of a file that are equal in all files of one save (training/checkpointing.py `generate_state_dict`, 0.16:
`args`, in which every rank counts the samples, `checkpoint_version`, `iteration`)."""

SHARED = sorted(
    {*FIELDS, *megatron_llm.OWN, "tensor_model_parallel_size", "pipeline_model_parallel_size"}
    | {"expert_model_parallel_size", "expert_tensor_parallel_size"}
)
"""Arguments that all files of a checkpoint must agree on."""

STATE = ("optimizer", "opt_param_scheduler", "lr_scheduler", "rng_state")
"""Keys of a file, beside the model, that a training needs to resume."""

OTHERS = (
    "random_rng_state", "np_rng_state", "torch_rng_state", "cuda_rng_state", "rng_tracker_states",
    "rerun_state_machine",
)  # fmt: skip
"""Further keys with tensors that are not of a model: the states of random generators, where Megatron-LM kept them under
separate keys, and of its checks of results (training/checkpointing.py, 2.x and 0.16)."""

OPTIMIZER = "optim.pt"
"""The only file in a folder mp_rank_TP[_PP]_DP: a data rank's part of the distributed optimizer of Megatron in 2023."""

MOST_RANKS = 100_000
MAX_DEPTH, MAX_KEYS = 6, 1_000_000
"""Limits: the depth of nested maps in a state dict (Megatron-LM's own models have 4), and the keys in a file."""

COMPARED = 1 << 16
"""How many bytes of a matrix are compared to detect a file that was copied over another rank's."""

DROPS = (r".*\._extra_state", r".*\.inv_freq")
"""Transformer Engine's FP8 state, and rotary tables that some versions saved."""
LOCAL = re.compile(r"decoder\.layers\.\d+\.input_layernorm\.weight")
FUSED = re.compile(r"decoder\.layers\.\d+\..*\.layer_norm_weight")
"""Keys of local layers, which MLA layers of Transformer Engine have too, and keys that no local layer has."""


@dataclass(frozen=True)
class Shard:
    """The file of a rank: its tensor, pipeline and expert rank, and the opened file."""

    tp: int
    pp: int
    ep: int
    file: TorchFile

    @property
    def chunks(self) -> list[tuple[str, Mapping[str, Any]]]:
        """(key, state dict) of each virtual pipeline chunk in the file."""
        names = [name for name in self.file.value if isinstance(name, str) and re.fullmatch(r"model\d{0,3}", name)]
        return [(name, self.file.value[name]) for name in sorted(names, key=lambda name: int(name[5:] or 0))]


def read_shards(iteration: Path) -> list[Shard]:
    """Open the file of every rank.

    Raises:
        SourceError: a folder holds no file of a rank, or a file without a model.
        UnsupportedError: a folder is not named after a tensor, pipeline and expert rank.
        RefusedError: a file holds tensors beside its model and the training state.
    """
    shards = []
    for folder in sorted(iteration.glob("mp_rank_*")):
        names = [name for name in ("model_optim_rng.pt", "model_rng.pt") if (folder / name).is_file()]
        if not names and (folder / OPTIMIZER).is_file():
            continue
        match_ = re.fullmatch(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?", folder.name)
        if match_ is None:
            raise UnsupportedError(f"{folder}: its name is not that of a tensor, pipeline and expert rank")
        if not names:
            raise SourceError(f"{folder} holds no model_optim_rng.pt")
        file = read_torch(folder / names[0])
        if not isinstance(file.value, dict) or not Shard(0, 0, 0, file).chunks:
            raise SourceError(f"{file.path} holds no `model`")
        if not all(isinstance(state, dict) for _, state in Shard(0, 0, 0, file).chunks):
            raise SourceError(f"{file.path}: its `model` is no map of tensors")
        require_alone(file, [name for name, _ in Shard(0, 0, 0, file).chunks])
        pp, ep = int(match_[2] or 0), int(match_[3] or 0)
        if match_[2] and not match_[3] and _one_stage_of_experts(file):
            pp, ep = 0, pp
        shards.append(Shard(int(match_[1]), pp, ep, file))
    if not shards:
        raise SourceError(f"{iteration} holds no mp_rank folder with a model")
    return shards


def require_alone(file: TorchFile, models: Iterable[str] = ()) -> None:
    """Refuse a file with tensors that belong neither to its model nor to the training state.

    Args:
        file: the file of a rank, or the common state of all ranks.
        models: the keys of the model's chunks in the file.

    Raises:
        RefusedError: the file holds other tensors: of two models nothing specifies which one is wanted.
    """
    for name, value in file.value.items():
        if name not in {*STATE, *OTHERS, *models} and _holds_tensors(value):
            raise RefusedError(
                f"{file.path} holds tensors under {short(name)} beside its model: nothing says if they are wanted",
                f"without {short(name)} in the files, the model is converted",
            )


def _holds_tensors(value: Any) -> bool:
    """Whether nested maps and lists, which may contain themselves, hold a tensor of more than one element."""
    rest, seen = [value], set[int]()
    while rest:
        item = rest.pop()
        if isinstance(item, TensorRef) and prod(item.shape) > 1:
            return True
        if isinstance(item, Mapping | list | tuple) and id(item) not in seen:
            seen.add(id(item))
            rest += item.values() if isinstance(item, Mapping) else item
    return False


def _one_stage_of_experts(file: TorchFile) -> bool:
    """Whether the only number after the tensor rank in a folder's name is an expert rank: args have a single stage."""
    args = args_of(file)
    stages, spread = (args.get(f"{axis}_model_parallel_size") for axis in ("pipeline", "expert"))
    return stages in (None, 1) and type(spread) is int and spread > 1


def names_of(keys: Collection[str]) -> tuple[str, str]:
    """The naming of the norms and of the experts: `local`, or `te` for Transformer Engine, which fuses some norms."""
    norm = "local" if any(map(LOCAL.fullmatch, keys)) and not any(map(FUSED.fullmatch, keys)) else "te"
    return norm, "local" if any(".local_experts." in key for key in keys) else "te"


def embedding_rows(tensors: Mapping[str, Scattered], name: str, folder: Path) -> int:
    """The rows of an embedding, padding included.

    Raises:
        SourceError: there is none.
    """
    if name not in tensors or not tensors[name].shape:
        raise SourceError(f"{folder} holds no {name}")
    return tensors[name].shape[0]


def vocab_multiple(args: Mapping[str, Any], path: Path) -> int:
    """The number that, times the tensor parallel size, the padded vocabulary is a multiple of; 128 if args lack it."""
    value = args.get("make_vocab_size_divisible_by")
    return 128 if value is None else positive_int(value, "make_vocab_size_divisible_by", str(path))


def require_padding(spec: ModelSpec, rows: int, args: Mapping[str, Any], where: Path, settings: Settings) -> None:
    """Refuse a vocabulary that a training with these args would have padded to fewer rows than there are.

    `pad_vocab_size_to` of BigScience's Megatron-DeepSpeed names the rows themselves (megatron/tokenizer/tokenizer.py).
    A run that records its vocabulary (`true_vocab_size`) may have been cut for another tensor parallel size.

    Args:
        spec: the model, with its vocabulary.
        rows: rows of the embedding, padding included.
        args: the attributes of the checkpoint's `args`.
        where: what to call the checkpoint in an error.
        settings: the user's settings.

    Raises:
        RefusedError: rows of tokens would be taken for padding.
    """
    if args.get("pad_vocab_size_to") is None and args.get("true_vocab_size") != spec.vocab:
        unit = unit_of(args.get("make_vocab_size_divisible_by"), args.get("tensor_model_parallel_size"), rows)
        require_rows(spec.vocab, rows, unit, where, settings.values)


def mesh_of(shards: Sequence[Shard], args: Mapping[str, Any], iteration: Path) -> Mesh:
    """The mesh of a checkpoint: how tensors and experts are cut over the files of a pipeline stage.

    Raises:
        SourceError: `args` record an impossible expert tensor parallel size.
    """
    tp, ep = max(shard.tp for shard in shards) + 1, max(shard.ep for shard in shards) + 1
    etp = args.get("expert_tensor_parallel_size")
    etp = tp if etp is None or args.get("num_experts") is None else etp
    if type(etp) is not int or not 0 < etp <= MOST_RANKS:
        raise SourceError(f"{iteration}: args say expert_tensor_parallel_size = {short(etp)}")
    return Mesh(tp, ep, etp, *interleaves_of(args, str(iteration)).values())


def args_of(file: TorchFile) -> dict[str, Any]:
    """The attributes of a file's `args`.

    Raises:
        SourceError: the file has no args.
        UnsupportedError: the checkpoint version is below 2.0.
    """
    args = file.value.get("args")
    if not isinstance(args, Namespace):
        raise SourceError(
            f"{file.path} holds no args",
            "Megatron-Bridge and NeMo keep none: export with AutoBridge.export_ckpt, or llm.export_ckpt of NeMo",
        )
    version = file.value.get("checkpoint_version", 0)
    if not isinstance(version, int | float) or not version >= 2.0:
        raise UnsupportedError(
            f"{file.path}: checkpoint version {short(version)} orders query, key and value otherwise (before 2.0)"
        )
    return vars(args)


def check_grid(shards: list[Shard], mesh: Mesh, pp: int, args: Mapping[str, Any], iteration: Path) -> None:
    """Refuse files that are not exactly one for each rank that `args` record, of one iteration and one model.

    Raises:
        SourceError: a rank is missing or there twice, files are of different saves or models, a file was written by
            another rank, or the parallel sizes of `args` are not those of the files.
    """
    for axis, size in (("tensor", mesh.tp), ("pipeline", pp), ("expert", mesh.ep)):
        claimed = args.get(f"{axis}_model_parallel_size", size)
        if claimed != size and not (axis == "expert" and claimed is None and size == 1):
            raise SourceError(f"{iteration}: args say {axis} parallel size {short(claimed)}, {size} ranks are there")
    if mesh.ranks * pp > MOST_RANKS:
        raise SourceError(f"{iteration} claims {mesh.ranks * pp} ranks")
    if not mesh.in_files:
        raise SourceError(
            f"{iteration}: with expert_tensor_parallel_size {mesh.etp} its files do not hold all of the model: of "
            f"ranks with the same numbers out of {mesh.tp} tensor and {mesh.ep} expert ranks only one wrote its own",
            "torch_dist holds all of it",
        )
    present = {(shard.tp, shard.pp, shard.ep) for shard in shards}
    ranks = [(tp, stage, ep) for stage in range(pp) for _, tp, ep in mesh.files()]
    missing = [folder_of(*rank, pp, mesh) for rank in ranks if rank not in present]
    if missing or len(shards) != len(ranks):
        names = ", ".join(missing[:8]) or "some are there twice"
        raise SourceError(f"{iteration}: of {len(ranks)} ranks {len(missing)} are missing: {names}")
    first = shards[0].file
    heads = {shard.file.path: args_of(shard.file) | shard.file.value for shard in shards}
    require_same({path: head.get for path, head in heads.items()}, TIES)
    for shard in shards[1:]:
        other = args_of(shard.file)
        for name in SHARED:
            if other.get(name) is not args.get(name) and short(other.get(name)) != short(args.get(name)):
                raise SourceError(
                    f"{shard.file.path} says {name} = {short(other.get(name))}, {first.path} {short(args.get(name))}: "
                    "they are of different models"
                )
    _check_writers(shards, mesh, pp, args)


def check_apart(placed: Iterable[Placed]) -> None:
    """Refuse files of which one was copied over another: ranks hold different parts of dense matrices, and experts.

    Matrices of one number are not compared, nor are experts that are all alike in a file: those of a model that was
    made of a dense one are.

    Raises:
        SourceError: two files have equal bytes at the begin of their parts of a matrix, or of all of their experts.
    """
    firsts: dict[tuple[Path, bool], list[Placed]] = {}
    for tensor in placed:
        slot, of_experts = tensor.slot, "ep" in tensor.slot.rule.splits
        if slot.layer is None or slot.replica or not (of_experts or "tp" in slot.rule.splits):
            continue
        tensors = firsts.setdefault((tensor.fragment.path, of_experts), [tensor])
        first = tensors[0].slot
        if slot is not first and of_experts and (slot.layer, slot.rule) == (first.layer, first.rule):
            tensors.append(tensor)
    seen: dict[tuple[str, bytes], Path] = {}
    for (path, of_experts), tensors in firsts.items():
        items = [item for tensor in tensors for item in (_experts if of_experts else _elements)(tensor)]
        begin = tensors[0].key, blake2b(b"".join(items)).digest()
        if len({*items}) > 1 and (other := seen.setdefault(begin, path)) != path:
            raise SourceError(
                f"{path} begins {tensors[0].key} as {other} does: the file of one rank was copied over that of another"
            )


def _elements(tensor: Placed) -> list[bytes]:
    """The elements at the begin of a tensor."""
    fragment = tensor.fragment
    content = read_bytes(fragment.path, fragment.offset, min(fragment.nbytes, COMPARED))
    width = max(1, fragment.nbytes // max(1, prod(fragment.shape)))
    return [content[at : at + width] for at in range(0, len(content), width)]


def _experts(tensor: Placed) -> list[bytes]:
    """The begin of each expert in a tensor, which has one, or all of its rank one after the other."""
    fragment, slot = tensor.fragment, tensor.slot
    count = 1 if slot.rule.of_expert else dict(slot.sizes)["expert"] // dict(slot.mesh)["ep"][1]
    step = fragment.nbytes // count
    return [read_bytes(fragment.path, fragment.offset + step * at, min(step, COMPARED)) for at in range(count)]


def _check_writers(shards: list[Shard], mesh: Mesh, pp: int, args: Mapping[str, Any]) -> None:
    """Refuse a file that another rank than that in its folder's name has written, as far as `args` record it.

    Raises:
        SourceError: the rank in `args` belongs to another folder.
    """
    written = [args_of(shard.file).get("rank") for shard in shards]
    ranks = [rank for rank in written if type(rank) is int]
    if len(ranks) < len(shards) or not any(ranks):
        return  # some converters write rank 0 into every file
    world = args.get("world_size")
    share = world // pp if isinstance(world, int) and world % pp == 0 and world >= mesh.ranks * pp else 0
    for shard, rank in zip(shards, ranks, strict=True):
        inner = rank % share if share else rank
        wrong_expert = mesh.ep > 1 and share and inner // mesh.etp % mesh.ep != shard.ep
        if rank % mesh.tp != shard.tp or wrong_expert or (share and rank // share != shard.pp):
            raise SourceError(
                f"{shard.file.path} was written by rank {short(rank)}, which belongs elsewhere: files are mixed up"
            )


def tensors_of(shards: Iterable[Shard], mesh: Mesh, pp: int) -> dict[Place, dict[str, Fragment]]:
    """The tensors of each chunk of each file, by dotted key.

    Raises:
        SourceError: a file holds a key twice.
        UnsupportedError: a key holds no tensor.
    """
    by_place: dict[Place, dict[str, Fragment]] = {}
    for shard in shards:
        for name, state in shard.chunks:
            tensors = by_place[Place(folder_of(shard.tp, shard.pp, shard.ep, pp, mesh), name)] = {}
            for path, ref in _flat(state, shard.file.path):
                key = path.replace(" ", ".")
                if key in tensors:
                    raise SourceError(f"{shard.file.path} holds {key} twice")
                if isinstance(ref, TensorRef):
                    tensors[key] = shard.file.fragment(ref, key)
                elif not any(re.fullmatch(drop, key) for drop in DROPS):
                    raise UnsupportedError(f"{shard.file.path}: {key} holds {short(ref)}, which is not a tensor")
    return by_place


def flattened(by_place: Mapping[Place, Mapping[str, Fragment]]) -> dict[Place, dict[str, Fragment]]:
    """The tensors, those of `GROUPED` with their elements as one dimension, in storage order."""
    return {
        place: {
            key: fragment._replace(shape=(prod(fragment.shape),), strides=(1,))
            if GROUPED.fullmatch(key) and fragment.row_major and len(fragment.shape) == 2
            else fragment
            for key, fragment in tensors.items()
        }
        for place, tensors in by_place.items()
    }


def _flat(state: Mapping[str, Any], path: Path) -> Iterator[tuple[str, Any]]:
    """(keys joined by spaces, value) of each entry of a nested state dict, within limits against hostile files.

    Raises:
        SourceError: the maps are too deep or too large, or a key is no text.
    """
    rest: list[tuple[str, Any]] = [("", state)]
    for _ in range(MAX_KEYS):
        if not rest:
            return
        prefix, value = rest.pop()
        if not isinstance(value, Mapping):
            yield prefix, value
        elif prefix.count(" ") >= MAX_DEPTH or len(value) > MAX_KEYS or not all(isinstance(key, str) for key in value):
            break
        else:
            rest += [(f"{prefix} {key}" if prefix else key, inner) for key, inner in reversed(list(value.items()))]
    raise SourceError(f"{path}: its `model` is no map of tensors by name")


def iteration_of(file: TorchFile) -> int:
    """The iteration in a file; 0 if the file says `release`, or nothing.

    Raises:
        SourceError: the iteration is no such number.
    """
    value = file.value.get("iteration", 0)
    if value == "release":
        return 0
    if type(value) is not int or not 0 <= value < 10**18:
        raise SourceError(f"{file.path}: its iteration is {short(value)}")
    return value


def state_of(shards: Sequence[Shard]) -> tuple[str, ...]:
    """The names of the training state in the files of a checkpoint: entries `STATE`, and files of optimizers."""
    names = {name for shard in shards for name in STATE if name in shard.file.value}
    names |= {
        path.name for shard in shards for path in shard.file.path.parent.glob("*optim*.pt") if path != shard.file.path
    }
    names |= {path.name for path in shards[0].file.path.parents[2].glob("layer_wise_optimizer_*.pt")}
    if any(shards[0].file.path.parent.parent.glob(f"mp_rank_*/{OPTIMIZER}")):
        names.add(OPTIMIZER)
    return tuple(sorted(names))


def folder_of(tp: int, pp: int, ep: int, stages: int, mesh: Mesh) -> str:
    """The name of the folder of a rank."""
    return f"mp_rank_{tp:02d}" + (f"_{pp:03d}" if stages > 1 else "") + (f"_{ep:03d}" if mesh.ep > 1 else "")
