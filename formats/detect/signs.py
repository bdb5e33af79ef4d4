"""Recognises checkpoints of programs whose format has no reader: what they are, and what can be done with them.

Facts, measured with what the named program wrote: orbax-checkpoint 0.12.8, mlx-lm 0.32.2. Read: megatron-core 0.19.2
training/checkpointing.py (torch_dcp), NeMo 2.5 scripts/checkpoint_converters, litgpt 0.5.13 scripts, nanotron 0.4
serialize, ColossalAI applications/Colossal-LLaMA, T5X checkpoints.py, transformers
4.57 utils/__init__.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from fnmatch import fnmatch
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from formats.errors import SourceError, UnsupportedError

MOST_TEXT = 1 << 20
MOST_ENTRIES = 10_000
"""Maximum number of files of a folder whose names are read."""


class Sign(NamedTuple):
    """A kind of checkpoint: a description, a hint what can be done with it today, and how it is recognised.

    `told_by` returns the file or folder by which a path is recognised, None if it is not; `hint` may name the
    `{folder}`.
    """

    what: str
    hint: str
    told_by: Callable[[Path], Path | None]


def check(path: Path) -> None:
    """Refuse a folder that would be taken for a format of the registry, and name its program.

    Raises:
        UnsupportedError: the folder is of a kind in `LOOKALIKES`.
    """
    _refuse(path, LOOKALIKES if path.is_dir() else ())


def check_unknown(path: Path) -> None:
    """Refuse a file, or a folder of no known format, and name its program.

    Raises:
        UnsupportedError: the path is of a kind in `OTHERS`.
    """
    _refuse(path, OTHERS)


def _refuse(path: Path, signs: Iterable[Sign]) -> None:
    for sign in signs:
        if telling := sign.told_by(path):
            raise UnsupportedError(
                f"{path} is {sign.what}, which is not read ({telling} tells)", sign.hint.format(folder=path)
            )


def _holds(*patterns: str) -> Callable[[Path], Path | None]:
    """Recognise a folder that has an entry for each of the patterns, whose alternatives are separated by bars.

    A file is recognised by its own name, if there is only one pattern.
    """
    wanted = [pattern.split("|") for pattern in patterns]

    def told_by(path: Path) -> Path | None:
        if not path.is_dir():
            return path if len(wanted) == 1 and any(fnmatch(path.name, pattern) for pattern in wanted[0]) else None
        names = sorted(entry.name for entry in islice(path.iterdir(), MOST_ENTRIES))
        names_of_groups = [
            next((name for pattern in group for name in names if fnmatch(name, pattern)), None) for group in wanted
        ]
        return None if None in names_of_groups or not names_of_groups[0] else path / names_of_groups[0]

    return told_by


def _says(name: str, pattern: str) -> Callable[[Path], Path | None]:
    """Recognise a folder by a regular expression in the text of a small file."""

    def told_by(path: Path) -> Path | None:
        file = path / name
        if not file.is_file() or file.stat().st_size > MOST_TEXT:
            return None
        return file if re.search(pattern, file.read_text(errors="replace")) else None

    return told_by


def _torch_dcp(path: Path) -> Path | None:
    """Recognise Megatron's plain DCP, whose keys are names of modules; in fsdp_dtensor keys begin with `module`."""
    folder = _iteration(path)
    if folder is None or not any(folder.glob("*.metadata")):
        return None
    from formats.megatron import fsdp_dtensor
    from formats.torch_files import dcp

    if not dcp.names(folder, *fsdp_dtensor.OBJECTS):
        return None
    try:
        entries, objects = dcp.contents(folder)
    except SourceError:  # a reader will report this
        return None
    keys = [entry.name for entry in entries if re.match(r"model\d*\.", entry.name)]
    mine = set(fsdp_dtensor.OBJECTS) <= set(objects) and not any(map(fsdp_dtensor.KEY.match, keys))
    return folder / dcp.METADATA if mine and keys else None


def _bridge_fsdp(path: Path) -> Path | None:
    """Recognise Megatron-FSDP files of Megatron-Bridge, which have no arguments inside, by its run_config.yaml."""
    folder = _iteration(path)
    return _says("run_config.yaml", r"\n  ckpt_format: fsdp_dtensor\n")(folder) if folder else None


def _iteration(path: Path) -> Path | None:
    from formats.megatron.folders import locate

    try:
        return locate(path)[1]
    except SourceError:
        return None


BASE = "take the Hugging Face folder that it was made of"
LOOKALIKES = (
    Sign(
        "a checkpoint of Megatron-LM with --ckpt-format torch_dcp",
        "load it in that training and save with --ckpt-format torch_dist, which is read",
        _torch_dcp,
    ),
    Sign(
        "a checkpoint of Megatron-Bridge with ckpt_format: fsdp_dtensor",
        "load it there and save with ckpt_format: torch_dist, which is read",
        _bridge_fsdp,
    ),
    Sign(
        "a quantized model of MLX",
        "mlx_lm.convert --hf-path {folder} --mlx-path OUT --dequantize makes one of Hugging Face",
        _says("config.json", r'"quantization"\s*:\s*\{\s*"(group_size|bits|mode)"'),
    ),
)
"""Kinds that would be taken for another format, or for an incomplete one; tried in this order, before the registry."""
OTHERS = (
    Sign("a PEFT adapter", "merge it into its model: convert merge BASE ADAPTER OUT", _holds("adapter_config.json")),
    Sign(
        "a model of LitGPT",
        "litgpt convert_from_litgpt {folder} OUT; OUT/model.pth, as pytorch_model.bin beside the config.json of its "
        "base, is one of Hugging Face",
        _holds("lit_model.pth|lit_model.pth.lora|lit_model.pth.adapter*"),
    ),
    Sign(
        "a part of a checkpoint of nanotron",
        "the folder of a step is read, with model_config.json and the files in model/",
        _holds("checkpoint_metadata.json", "model"),
    ),
    Sign(
        "a part of a model in Mistral's own files",
        "consolidated.safetensors, or its parts with consolidated.safetensors.index.json, is read with its params.json",
        _holds("consolidated*.safetensors"),
    ),
    Sign(
        "a model in Meta's or Mistral's own files of torch",
        "take those of Hugging Face, with a config.json",
        _holds("consolidated.*|consolidated-*"),
    ),
    Sign(
        "a model of NeMo 1",
        "scripts/checkpoint_converters/convert_llama_nemo_to_hf.py of NeMo 2, or that of its family, exports it",
        _holds("*.nemo"),
    ),
    Sign(
        "a model of NeMo 1, unpacked",
        "pack it with tar -cf MODEL.nemo; scripts/checkpoint_converters of NeMo 2 exports that",
        _holds("model_weights|model_weights.ckpt", "model_config.yaml"),
    ),
    Sign("a model of llama.cpp", BASE, _holds("*.gguf|ggml-model*.bin")),
    Sign(
        "a checkpoint of ColossalAI",
        "its model is one of Hugging Face: name {folder}/modeling",
        _holds("running_states.json", "modeling"),
    ),
    Sign(
        "a checkpoint of T5X (JAX)",
        "transformers 4 converts those of T5: models/t5/convert_t5x_checkpoint_to_pytorch.py",
        _holds("target.*|state.param_states*", "checkpoint"),
    ),
    Sign(
        "a part of a checkpoint of Orbax (JAX: MaxText, Flax)",
        "of MaxText the folder of a step is read, with items/_METADATA in it",
        _holds("_CHECKPOINT_METADATA|_METADATA|manifest.ocdbt"),
    ),
    Sign(
        "a model of Flax",
        "transformers 4 loads it: AutoModelForCausalLM.from_pretrained(FOLDER, from_flax=True).save_pretrained(OUT)",
        _holds("flax_model.msgpack|flax_model.msgpack.index.json|flax_model-*.msgpack"),
    ),
    Sign(
        "a model of TensorFlow",
        "transformers 4 loads it: AutoModelForCausalLM.from_pretrained(FOLDER, from_tf=True).save_pretrained(OUT)",
        _holds("tf_model.h5|tf_model.h5.index.json|tf_model-*.h5|*.ckpt.index"),
    ),
    Sign("a model of PaddlePaddle", "export it with PaddleNLP, or " + BASE, _holds("model_state*.pdparams")),
    Sign("a model of OLMo 1", "hf_olmo/convert_olmo_to_hf.py of OLMo exports it", _holds("model.pt", "train.pt")),
    Sign("an engine of TensorRT-LLM", BASE, _holds("rank*.engine|rank*.safetensors")),
    Sign("a model of MLC", BASE, _holds("mlc-chat-config.json|ndarray-cache.json|tensor-cache.json")),
    Sign("a model of ONNX", BASE, _holds("*.onnx")),
    Sign("a model of OpenVINO", BASE, _holds("openvino_model.xml|openvino_language_model.xml")),
    Sign("a pipeline of diffusers", "its parts are folders of their own: name one", _holds("model_index.json")),
)
"""Kinds that no reader recognises; tried in this order, when no format recognises a folder, and for files."""
