"""Read checkpoints of MaxText.

    RUN/checkpoints/STEP/_CHECKPOINT_METADATA   time of the save, whether layers are scanned
    RUN/checkpoints/STEP/items/_METADATA        the names of the arrays (orbax.py)

A training saves `params`, `opt_state` and `step` (`params.params.decoder…`); MaxText's
generate_param_only_checkpoint.py saves the parameters alone (`decoder….value`). A checkpoint has no model config: it is
read with a Hugging Face folder (`config`). STEP counts from 0: the training state in `3` has made 4 steps.

Facts: maxtext 0.2.5 (PyPI), common/checkpointing.py (`save_checkpoint`, `maybe_save_checkpoint`), train_state_nnx.py,
utils/generate_param_only_checkpoint.py.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any

from formats.checkpoint import ASSETS, Checkpoint, Details, Settings
from formats.disk.chunks import DTYPES, arrays, whole_number
from formats.disk.handle import is_remote
from formats.disk.safetensors import DTYPES as SIZES
from formats.errors import OptionNeededError, SourceError, UnsupportedError, some
from formats.families.family import Family
from formats.huggingface import MAXTEXT, language_model, own_config
from formats.huggingface import folder as huggingface
from formats.huggingface.maxtext.changes import changed
from formats.huggingface.maxtext.decoder import neighbours_of, require_scaling
from formats.huggingface.maxtext.layers import by_layer
from formats.huggingface.maxtext.orbax import METADATA, Tree, read_tree
from formats.huggingface.maxtext.tables import FAMILIES, TABLES, slots_of
from formats.layout.pieces import Scattered, match_pieces
from formats.layout.table import Rule
from formats.model.spec import ModelSpec

NAME = MAXTEXT.name
ITEMS = "items"
"""MaxText's name of the Orbax item with all that it saves except the state of its data loader."""
PARAMETERS = re.compile(r"(?:params\.params\.)?((?:decoder|token_embedder)\..+?)(?:\.value)?")
"""The name of a parameter, with the prefix of a training state and the suffix of a parameter-only checkpoint."""
OPTIMIZER = "opt_state"
STEP = re.compile(r"step(?:\.value)?")
"""The name of the number of steps that the training has made."""
BESIDE = re.compile(rf"{STEP.pattern}|(?:{OPTIMIZER}|nnx_aux)\..+")
"""The name of what a training state has besides parameters: step, optimizer, states of random numbers."""
UNFINISHED = ".orbax-checkpoint-tmp"
"""In the name of a folder that Orbax has not committed."""
FRESH = "fresh states of the optimizer"
EMBEDDING, HEAD = "token_embedder.embedding", "decoder.logits_dense.kernel"
HEAD_NAME = "lm_head.weight"
"""The name of the output head in transformers."""


def detect(path: Path) -> bool:
    """Whether a folder looks like an Orbax checkpoint, or like a MaxText step with its `items`."""
    return (locate(path) / METADATA).is_file()


def locate(path: Path) -> Path:
    """Return the folder of the arrays: the folder itself, or `items` in the folder of a step."""
    return path if (path / METADATA).is_file() else path / ITEMS


def parts(path: Path) -> list[Path]:
    """The folder of the arrays (`Format.folders`)."""
    return [locate(path)]


def tables() -> dict[str, tuple[Rule, ...]]:
    """The tensor layouts of the format, by name."""
    return TABLES


def holders(family: Family) -> dict[str, bool]:
    """Whether the format can hold models of a family: one whose MaxText decoder is known (`FAMILIES`)."""
    return {NAME: family.name in FAMILIES}


def read(path: Path, settings: Settings) -> Checkpoint:
    """Open a checkpoint: read the names, shapes and chunks of its arrays, but no weights.

    Raises:
        SourceError: arrays are missing, damaged, or of another model than the config describes.
        OptionNeededError: there is no Hugging Face config.
        UnsupportedError: the checkpoint is not MaxText's, its model is not supported, or tensorstore is not installed.
        RefusedError: the config describes a model that stock MaxText computes otherwise.
    """
    if any(UNFINISHED in folder.name for folder in (path, path.parent)):
        raise SourceError(f"{path} is a save that Orbax has not finished", "take another step")
    if is_remote(path):
        raise UnsupportedError(f"{path} is in a store, where checkpoints of Orbax are not read", "copy it to a disk")
    home = locate(path)
    _require_single(path, home)
    tree = read_tree(home)
    every = [".".join(name) for name in tree.names]
    names = _parameters(every, home)
    own = next((folder for folder in (path / ASSETS, path, home) if (folder / "config.json").is_file()), None)
    assets = settings.config or own
    config = huggingface.read_config(assets) if assets else None
    if assets is None or config is None:
        raise OptionNeededError(
            f"{home} says nothing of its model but names and shapes",
            "add --config BASE, a folder of Hugging Face whose config.json describes it",
            lambda: _contents(path, tree),
        )
    base, heads = config, [HEAD_NAME] if HEAD in names else []
    part = language_model.select(
        base, heads, settings, str(assets / "config.json")
    )  # MaxText trains the text of a Gemma 3 alone
    config = part.config
    spec = huggingface.read_spec(config, assets, settings)
    own_config.require_same(own, base, heads, settings, spec)
    neighbours = neighbours_of(spec, assets)
    require_scaling(spec, settings.values, assets)
    described = arrays(tree.store, names.values())
    tensors = dict[str, Scattered]()
    for key, name in names.items():
        of_layers = by_layer(key, name, described[name], tree.store, spec)
        if twice := sorted({*of_layers} & {*tensors}):
            raise SourceError(f"{home} holds {twice[0]} twice, once in the array {name}", "save it again with MaxText")
        tensors |= of_layers
    padded = _rows(tensors[EMBEDDING], spec, settings, home)
    _, pieces, _ = match_pieces(slots_of(spec, padded, neighbours=neighbours), tensors, (), home)
    others = [name for name in every if name not in names.values()]
    return Checkpoint(
        path, home, NAME, spec, tuple(changed(piece, spec) for piece in pieces),
        tuple(name for name in others if not name.startswith(OPTIMIZER)), tree.files, {}, assets,
        Details(fresh=FRESH, shown={"padded_vocab": padded} if padded != spec.vocab else {}),
        notes=(*_assumed(spec, neighbours), *part.notes, *renamed(home, tree)), settings=settings, config=config,
        padded_vocab=padded, left=part.left,
        state=(OPTIMIZER,) if any(name.startswith(OPTIMIZER) for name in others) else (),
    )  # fmt: skip


def _require_single(path: Path, home: Path) -> None:
    """Refuse a folder in which there are arrays besides those of `home`: further items of a step, or a checkpoint more.

    Raises:
        SourceError: there are such arrays.
    """
    homes = sorted({home, *(metadata.parent for metadata in path.glob(f"*/{METADATA}"))})
    if len(homes) > 1:
        names = ", ".join("itself" if folder == path else folder.name for folder in homes)
        inner = " or ".join(str(folder) for folder in homes if folder != path)
        raise SourceError(f"{path} holds {len(homes)} checkpoints of Orbax: {names}", f"name one: {inner}")


def _contents(path: Path, tree: Tree) -> dict[str, Any]:
    """Return the fields that `inspect` shows without a config; they count all arrays, optimizer states among them."""
    described = arrays(tree.store, map(".".join, tree.names))
    types = {name: DTYPES.get(array.dtype, array.dtype) for name, array in described.items()}
    return {
        "path": str(path),
        "format": NAME,
        "topology": {},
        "containers": dict(Counter(names[0] for names in tree.names)),
        "dtypes": dict(Counter(types.values())),
        "tensors": len(described),
        "files": len(tree.files),
        "bytes": sum(prod(array.shape) * SIZES.get(types[name], 0) for name, array in described.items()),
    }


def _parameters(every: Sequence[str], home: Path) -> dict[str, str]:
    """Return the array names of the parameters of a decoder, by the names of the parameters.

    Raises:
        SourceError: a parameter has two arrays.
        UnsupportedError: the checkpoint has no decoder of MaxText, or parameters besides it.
    """
    names = dict[str, str]()
    for name in every:
        if (match := PARAMETERS.fullmatch(name)) and names.setdefault(match[1], name) != name:
            raise SourceError(f"{home} holds {match[1]} twice: {names[match[1]]}, {name}", "save it again with MaxText")
    if EMBEDDING not in names:
        raise UnsupportedError(
            f"{home} is a checkpoint of Orbax, but not of MaxText: it has no {EMBEDDING}, it has {some(every, 3)}",
            "export it with its trainer",
        )
    beside = [name for name in every if name not in names.values() and not BESIDE.fullmatch(name)]
    if beside:
        raise UnsupportedError(f"{home} holds {some(beside, 3)} besides a decoder, which is not read")
    return names


def _rows(embedding: Scattered, spec: ModelSpec, settings: Settings, home: Path) -> int:
    """Return the number of rows of the embedding; rows beyond the vocabulary that the user gives are padding.

    Raises:
        SourceError: the embedding has fewer rows than the config has tokens.
        OptionNeededError: it has more: MaxText pads none, unless the vocabulary of its training was padded by hand.
    """
    rows = (*embedding.shape, 0)[0]
    if rows < (spec.vocab or 0):
        raise SourceError(
            f"{home}: {EMBEDDING} {list(embedding.shape)} has fewer rows than the config has tokens, {spec.vocab}",
            "check that the config belongs to these weights",
        )
    if rows > (spec.vocab or 0) and settings.vocab_size is None:
        raise OptionNeededError(
            f"{home}: {EMBEDDING} has {rows} rows, the config {spec.vocab} tokens, and MaxText pads no vocabulary",
            f"check that the config belongs to these weights; --vocab-size {spec.vocab} takes the others for padding",
            vocab_size=str(spec.vocab),
        )
    return rows


def renamed(home: Path, tree: Tree) -> Iterator[str]:
    """Yield a note if a folder has the number of another step; MaxText's has that of the step before.

    Raises:
        SourceError: the number of steps is missing or damaged.
    """
    name = (home.parent if home.name == ITEMS else home).resolve().name
    numbered = re.fullmatch(r"\d{1,9}", name)
    counts = [key for key in map(".".join, tree.names) if numbered and STEP.fullmatch(key)]
    for key, array in arrays(tree.store, counts).items():
        step = whole_number(tree.store, key, array)
        if step is not None and int(name) not in (step - 1, step):
            yield f"{name} holds step {step}, as its files say: {home} says {key} = {step}"


def _assumed(spec: ModelSpec, neighbours: bool) -> tuple[str, ...]:
    """Return the note on settings that the checkpoint does not record and that are assumed."""
    rows = "neighbours rotate (rope_type: llama3.1)" if neighbours else "halves of a head rotate (rope_type: default)"
    divided = "logits are divided" if FAMILIES[spec.family].gemma else "no logits are divided"
    value = "true" if FAMILIES[spec.family].gemma else "false"
    tied = f", and {divided} (normalize_embedding_logits: {value})" if spec.tied else ""
    return (f"the checkpoint says no settings: they are those of the config; {rows}{tied}",)
