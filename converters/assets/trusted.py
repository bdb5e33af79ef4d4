"""Which files of a folder may be copied or sent byte for byte: by their names, and by the targets of links.

A folder that was downloaded may hold anything: a file called `token`, or a link to a private file of the user. Weights
are converted, not copied, so they may be links to another file system; a file that is copied has to be in the folder.
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from pathlib import Path
from shlex import quote

from formats.errors import SourceError

OTHER_WEIGHTS = "weights in another format"
STAYS = {
    "hidden": (".*",),
    "unfinished": ("*.partial", "*.incomplete"),
    "a state of training": (
        "optimizer*", "scheduler.*", "scaler.*", "rng_state*", "random_states*", "trainer_state.json",
        "training_args.bin", "checkpoint-*", "global_step*", "*optim_states.pt", "distrib_optim.pt", "*.distcp",
        "latest", "zero_to_fp32.py", "sharded_checkpoint.txt",
    ),
    "a cache": ("__pycache__",),
    OTHER_WEIGHTS: (
        "*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.h5", "*.msgpack", "*.npz", "*.onnx",
        "*.onnx_data", "*.ot", "*.tflite", "*.nemo",
    ),
}  # fmt: skip
"""Reason why a file or folder is neither carried with a model nor published: patterns of its name in lower case."""
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
"""Kind of files that are copied and sent: a regular expression of the whole name, in any case."""
LARGEST = 64 << 20
"""Most bytes of a file without weights, whatever its name: the largest tokenizers have half as many."""
TOO_LARGE = f"more than {LARGEST >> 20} MiB that are no safetensors"
WITH_A_MODEL = ("settings", "tokenizers", "chat templates", "code")
"""The kinds that are read together with the weights."""
UNKNOWN = "not the name of a model file"
_FLAGS = re.ASCII | re.IGNORECASE | re.DOTALL
_TRAVELS = re.compile("|".join(f"(?:{names})" for names in TRAVELS.values()), _FLAGS)
_RECORD = re.compile(TRAVELS["records"], _FLAGS)
_READ = re.compile("|".join(f"(?:{TRAVELS[what]})" for what in WITH_A_MODEL), _FLAGS)
_OF_TOKENIZER = re.compile("|".join(f"(?:{TRAVELS[what]})" for what in ("tokenizers", "chat templates")), _FLAGS)


def stays(name: str) -> str:
    """The reason why no file or folder of this name is carried or published; empty where there is none."""
    found = (why for why, patterns in STAYS.items() if any(fnmatchcase(name.lower(), each) for each in patterns))
    return next(found, "")


def refusal_reason(path: Path) -> str:
    """The reason why a file or folder is neither carried with a model nor published; empty when it is."""
    if why := stays(path.name):
        return why
    if not path.is_file():
        return ""
    if path.suffix != ".safetensors" and path.stat().st_size > LARGEST:
        return TOO_LARGE
    return "" if _TRAVELS.fullmatch(path.name) else UNKNOWN


def is_read_with_model(name: str) -> bool:
    """Whether a small file of this name determines what a model computes, or what its tokens are."""
    return _READ.fullmatch(name) is not None


def is_of_tokenizer(name: str) -> bool:
    """Whether a small file of this name is part of a tokenizer, or its chat template."""
    return _OF_TOKENIZER.fullmatch(name) is not None


def is_record(name: str) -> bool:
    """Whether a small file of this name tells how a model was trained, or how good it is."""
    return _RECORD.fullmatch(name) is not None


def require_there(path: Path, folder: Path) -> None:
    """Refuse a path with the name of a file that is carried that is neither a file nor a folder.

    Raises:
        SourceError: the path is a broken link, as in a copy of half a Hub cache, or a pipe or a device.
    """
    if not path.is_file() and not path.is_dir() and not refusal_reason(path) and _TRAVELS.fullmatch(path.name):
        require_inside(path, folder)
        raise SourceError(f"{path} is not a regular file", "remove it if it is not of the model")


def require_inside(path: Path, folder: Path) -> Path:
    """Refuse a file to copy that is neither in its folder nor in the `blobs` of the same model in the Hub's cache.

    Args:
        path: a file in or below the folder, or a link there.
        folder: the folder that the user named, which may itself be a link.

    Returns:
        The path.

    Raises:
        SourceError: links lead out of the folder, to a file that is not carried, or nowhere.
    """
    try:
        place, root = path.resolve(strict=True), folder.resolve(strict=True)
    except (OSError, RuntimeError):  # RuntimeError: links in a circle, before Python 3.13
        raise SourceError(f"{path} is a broken link" if path.is_symlink() else f"{path} does not exist") from None
    if place == root / path.relative_to(folder) or place.parent == _blobs(root):
        return path
    inside = place.is_relative_to(root)
    if inside and not any(part.startswith(".") for part in place.relative_to(root).parts) and not refusal_reason(place):
        return path
    where = "which does not travel with a model" if inside else f"which is not in {folder}"
    raise SourceError(
        f"{path} is a link to {place}, {where}: what a link leads to is neither copied nor sent",
        f"cp --remove-destination {quote(str(place))} {quote(str(path))}   # if it belongs to the model",
    )


def _blobs(root: Path) -> Path | None:
    """The folder of the files of a snapshot in the Hub's cache (huggingface_hub 2.4.0, file_download.py), or None."""
    for place in (root, *root.parents):
        if place.parent.name == "snapshots" and place.parent.parent.name.startswith("models--"):
            return place.parent.parent / "blobs"
    return None
