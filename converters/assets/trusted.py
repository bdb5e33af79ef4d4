"""Which files of a folder may be copied or sent byte for byte: by their names, and by where their links lead.

A folder that was downloaded may hold anything: a file called `token`, or a link to a file of the user's. Weights are
converted, not copied, so they may be linked from another file system; what is copied must be in the folder itself.
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from pathlib import Path
from shlex import quote

from formats.errors import SourceError

STAYS = {
    "hidden": (".*",),
    "unfinished": ("*.partial", "*.incomplete"),
    "a state of training": (
        "optimizer*", "scheduler.*", "scaler.*", "rng_state*", "random_states*", "trainer_state.json",
        "training_args.bin", "checkpoint-*", "global_step*", "*optim_states.pt", "distrib_optim.pt", "*.distcp",
        "latest", "zero_to_fp32.py", "sharded_checkpoint.txt",
    ),
    "a cache": ("__pycache__",),
    "weights in another format": (
        "*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.h5", "*.msgpack", "*.npz", "*.onnx",
        "*.onnx_data", "*.ot", "*.tflite", "*.nemo",
    ),
}  # fmt: skip
"""Why a file or folder neither travels with a model nor is published: patterns of its name in lower case."""
TRAVELS = {
    "weights, and what goes with them": r".+\.safetensors|.+\.safetensors\.index\.json|vitruvian\.json|family\.toml",
    "settings": r"config\.json|.+_config\.json|(generation_)?config_.+\.json|configuration\.json|params\.json"
    r"|modules\.json|model_index\.json|mergekit_config\.yml",
    "tokenizers": r"tokenizer[\w.-]*\.(json|txt)|tokenizer\.model[\w.-]*|.+\.(model|tiktoken|spm|vocab|bpe|codes)"
    r"|vocab[\w.-]*\.(json|txt)|(encoder|tekken|normalizer|added_tokens|special_tokens_map)\.json|(merges|dict)\.txt",
    "chat templates": r".+\.jinja|chat_template[\w-]*\.(json|txt)",
    "code": r".+\.py|requirements\.txt",
    "documents": r".+\.(md|bib|cff|pdf|png|jpe?g|gif|svg|webp)"
    r"|(licen[cs]e|notice|copying|copyright|readme|authors|citation|terms|use_policy|third_party_notices?)"
    r"s?([-_][\w-]{1,60})?(\.(txt|rst|html))?",
    "records": r"(evaluation|eval|train|test|all|benchmark)_results\.json|train_params\.yaml",
}
"""What is copied and sent: regular expressions of the whole name, in any case."""
LARGEST = 64 << 20
"""Bytes of a file that holds no weights, whatever it is called: the largest tokenizers have half of it."""
WITH_A_MODEL = ("settings", "tokenizers", "chat templates", "code")
"""What of it is read with the weights."""
UNKNOWN = "not the name of a model file"
_FLAGS = re.ASCII | re.IGNORECASE | re.DOTALL
_TRAVELS = re.compile("|".join(f"(?:{names})" for names in TRAVELS.values()), _FLAGS)
_READ = re.compile("|".join(f"(?:{TRAVELS[what]})" for what in WITH_A_MODEL), _FLAGS)


def why_not(path: Path) -> str:
    """Why a file or folder neither travels with a model nor is published; empty when it does."""
    for why, patterns in STAYS.items():
        if any(fnmatchcase(path.name.lower(), pattern) for pattern in patterns):
            return why
    if not path.is_file():
        return ""
    if path.suffix != ".safetensors" and path.stat().st_size > LARGEST:
        return f"more than {LARGEST >> 20} MiB that are no safetensors"
    return "" if _TRAVELS.fullmatch(path.name) else UNKNOWN


def is_read_with_model(name: str) -> bool:
    """Whether a small file of this name says what a model computes, or what its tokens are."""
    return _READ.fullmatch(name) is not None


def require_there(path: Path, folder: Path) -> None:
    """What has the name of a file that travels is a file, or a folder.

    Raises:
        SourceError: it is a link that leads nowhere, as a copy of half a Hub cache leaves it, or a pipe or a device.
    """
    if not path.is_file() and not path.is_dir() and not why_not(path) and _TRAVELS.fullmatch(path.name):
        require_inside(path, folder)
        raise SourceError(f"{path} is not a regular file", "remove it if it is not of the model")


def require_inside(path: Path, folder: Path) -> Path:
    """A file that is to be copied is in its folder, or in the `blobs` of the same model of the Hub's cache.

    Args:
        path: a file in or below the folder, or a link there.
        folder: the one that the user named; a link to it is the user's own.

    Returns:
        The path.

    Raises:
        SourceError: its links lead out of the folder, to a file that does not travel, or nowhere.
    """
    try:
        place, root = path.resolve(strict=True), folder.resolve(strict=True)
    except (OSError, RuntimeError):  # RuntimeError: links in a circle, before Python 3.13
        raise SourceError(f"{path} is a broken link" if path.is_symlink() else f"{path} does not exist") from None
    if place == root / path.relative_to(folder) or place.parent == _blobs(root):
        return path
    inside = place.is_relative_to(root)
    if inside and not any(part.startswith(".") for part in place.relative_to(root).parts) and not why_not(place):
        return path
    where = "which does not travel with a model" if inside else f"which is not in {folder}"
    raise SourceError(
        f"{path} is a link to {place}, {where}: what a link leads to is neither copied nor sent",
        f"cp --remove-destination {quote(str(place))} {quote(str(path))}   # if it belongs to the model",
    )


def _blobs(root: Path) -> Path | None:
    """Where the Hub's cache keeps the files of a snapshot (huggingface_hub 2.4.0, file_download.py)."""
    for place in (root, *root.parents):
        if place.parent.name == "snapshots" and place.parent.parent.name.startswith("models--"):
            return place.parent.parent / "blobs"
    return None
