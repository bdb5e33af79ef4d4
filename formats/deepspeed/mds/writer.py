"""Write checkpoints for Megatron-DeepSpeed: the layer files of its pipeline, for any topology.

With `--finetune` a training loads the layer files, and of `mp_rank_*` the keys that the engine and
megatron/checkpointing.py require (deepspeed/runtime/engine.py `_load_checkpoint`, 0.19.8). With
`--universal-checkpoint` it resumes, if the checkpoint has an optimizer (`optimizer.py`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from formats.checkpoint import OutputFile, Target, slot_dtype
from formats.deepspeed import folders as deepspeed
from formats.deepspeed.mds import optimizer
from formats.deepspeed.mds.args import flags, spelled
from formats.deepspeed.mds.optimizer import Resumed
from formats.deepspeed.mds.tables import FAMILIES, OF_BIGSCIENCE, slots_of
from formats.deepspeed.universal import LATEST, VERSION
from formats.errors import RefusedError, UsageError
from formats.megatron.args.options import main_dtype
from formats.megatron.classic import FLAGS
from formats.model.spec import ModelSpec
from formats.torch_files.archive_writer import TensorEntry, archived
from formats.torch_files.pickle_values import Dtype, Namespace

INFO = "universal_checkpoint_info"


@dataclass(frozen=True)
class Options:
    """The user's options: topology, order of query, key and value (`tables.ORDERS`), vocabulary padding, iteration."""

    tp: int = 1
    pp: int = 1
    qkv: str | None = None
    vocab_multiple: int = 128
    iteration: int = 0


def write(
    root: Path,
    spec: ModelSpec,
    dtypes: Mapping[tuple[str, int | None], str],
    options: Options,
    resumed: Resumed | None = None,
) -> Target:
    """Lay out a run folder with one checkpoint.

    Args:
        root: the run folder.
        spec: the model; its true vocabulary must be known.
        dtypes: the element type of each logical tensor.
        options: topology, and the order of query, key and value of the code that will load the checkpoint.
        resumed: the training state with which a training resumes; None for weights alone.

    Raises:
        UsageError: the order of query, key and value is not given, or the optimizer has made more steps than there were
            iterations.
        RefusedError: the sizes do not divide, or the code has no such model.
        UnsupportedError: models of the family are not written for Megatron-DeepSpeed.
    """
    unit = options.vocab_multiple * options.tp
    padded = -(-(spec.vocab or 0) // unit) * unit
    if options.pp > spec.layers:
        raise RefusedError(f"{spec.layers} layers do not fill {options.pp} pipeline stages")
    if spec.ffn % options.tp:
        raise RefusedError(f"{spec.ffn} rows of the MLP do not divide over tp = {options.tp}")
    args = {
        **spelled(spec),
        "padded_vocab_size": padded,
        "make_vocab_size_divisible_by": options.vocab_multiple,
        "tensor_model_parallel_size": options.tp,
        "pipeline_model_parallel_size": options.pp,
        "world_size": options.tp * options.pp,
        "params_dtype": Dtype(main_dtype(dtypes.values())),
        "bf16": main_dtype(dtypes.values()) == "bfloat16",
        "fp16": main_dtype(dtypes.values()) == "float16",
    }
    qkv, beside = _order(spec, options), optimizer.fresh_keys(spec.family)
    if resumed:
        optimizer.require_padding(spec, padded, options.tp)
        args |= {name: resumed.progress[name] for name in optimizer.OF_ARGS if name in resumed.progress}
        beside = optimizer.progress_keys(resumed, spec.family)
        beside |= {
            "skipped_steps": optimizer.skipped(resumed, options.iteration),
            "optimizer": None,
            "param_shapes": optimizer.shapes(spec, qkv, resumed),
            INFO: {
                "universal_checkpoint_version": VERSION,
                "original_vocab_size": spec.vocab,
                "padded_vocab_size": padded,
            },
        }
    by_file: dict[str, list[TensorEntry]] = {}
    for slot in slots_of(spec, options.tp, padded, {qkv}, FAMILIES[spec.family]):
        key = slot.keys[0].partition(".")[2]
        by_file.setdefault(slot.place.file, []).append((key, slot, slot.shape, slot_dtype(slot, dtypes)))
    tag = f"global_step{options.iteration}"
    files = [_archived(root / tag / name, tensors) for name, tensors in by_file.items()]
    for rank in range(options.tp * options.pp):
        state = _state(spec, {**args, "rank": rank}, qkv, options) | beside
        files.append(_archived(root / tag / deepspeed.model_name(rank), (), state))
    texts = {deepspeed.LATEST: tag.encode(), FLAGS: flags(args, resumes=resumed is not None).encode()}
    if resumed:
        files += optimizer.files(root / tag, spec, qkv, resumed)
        texts |= {f"{tag}/{name}": content for name, content in optimizer.texts(spec, qkv, resumed).items()}
        texts[LATEST] = tag.encode()
    return Target(tuple(files), texts, {}, tag)


def _order(spec: ModelSpec, options: Options) -> str:
    """Return the order of query, key and value to write, one of `tables.ORDERS`.

    Raises:
        UsageError: the user gave no order, or an order that BigScience's tree does not have.
        RefusedError: no tree stores such a model in the order.
    """
    if FAMILIES[spec.family] == OF_BIGSCIENCE:
        if options.qkv not in (None, "grouped"):
            raise UsageError(f"BigScience's tree has one order, not {options.qkv}", "leave --qkv out")
        return "grouped"
    if options.qkv is None:
        raise UsageError(
            "trees of Megatron-DeepSpeed have query, key and value in different orders, and load each without a word",
            "--qkv blocked for deepspeedai's code since 2024-12-04, grouped for older code, separate for that of "
            "OpenLLM-France (Lucie) where heads share keys",
        )
    if options.qkv == "separate" and spec.kv_heads == spec.heads:
        raise RefusedError(
            "the trees that hold queries apart from keys and values do so where heads share keys, and in this model "
            f"each of {spec.heads} heads has its own",
            "--qkv grouped",
        )
    return options.qkv


def _state(spec: ModelSpec, args: Mapping[str, Any], qkv: str, options: Options) -> dict[str, Any]:
    """Return the content of the file of a model-parallel rank."""
    return {
        "module": None,
        "dp_world_size": 1,
        "mp_world_size": options.tp * options.pp,
        "global_steps": options.iteration,
        "skipped_steps": 0,
        "iteration": options.iteration,
        "checkpoint_version": 3.0,
        "args": Namespace(args),
        deepspeed.OURS: {"qkv": qkv, "vocab": spec.vocab},
    }


def _archived(path: Path, tensors: list[TensorEntry] | tuple[()], state: Mapping[str, Any] | None = None) -> OutputFile:
    """Lay out a file that records its own name, as torch.save does, so that a reader refuses swapped ranks."""
    return archived(path, tensors, lambda refs: OrderedDict(refs) if state is None else dict(state), path.stem)
