"""Mistral's own files, read and written.

    params.json                                    the settings (formats/huggingface/mistral/params.py)
    consolidated.safetensors                       the weights; or
    consolidated-00001-of-00010.safetensors …      several files, with consolidated.safetensors.index.json

w1 is the gate, w3 is up, w2 is down. Rotary embeddings rotate neighbouring rows of a head; Hugging Face rotates halves
(mistral-inference 1.6.0 transformer_layers.py, rope.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from formats.checkpoint import Checkpoint, Settings, Target, slot_dtype
from formats.disk.safetensors import Entry, Fragment, read_safetensors
from formats.errors import SourceError, UnsupportedError
from formats.families.family import Family
from formats.huggingface import MISTRAL
from formats.huggingface import folder as huggingface
from formats.huggingface.mistral import params
from formats.layout.placed import match
from formats.layout.slots import ALONE
from formats.layout.table import Rule, rules
from formats.model.spec import ModelSpec

NAME = MISTRAL.name
SINGLE = "consolidated.safetensors"
INDEX = f"{SINGLE}.index.json"
TABLE = rules("""
tok_embeddings.weight                                   embedding: vocab hidden
layers.{layer}.attention.wq.weight                      query: (group head pair half) hidden
layers.{layer}.attention.wk.weight                      key: (group pair half) hidden
layers.{layer}.attention.wv.weight                      value: (group dim) hidden
layers.{layer}.attention.wo.weight                      output: hidden (group head dim)
layers.{layer}.feed_forward.w1.weight                   gate: ffn hidden    dense
layers.{layer}.feed_forward.w3.weight                   up: ffn hidden    dense
layers.{layer}.feed_forward.w2.weight                   down: hidden ffn    dense
layers.{layer}.feed_forward.gate.weight                 router: expert hidden    sparse
layers.{layer}.feed_forward.experts.{expert}.w1.weight  expert_gate: expert_ffn hidden    sparse
layers.{layer}.feed_forward.experts.{expert}.w3.weight  expert_up: expert_ffn hidden    sparse
layers.{layer}.feed_forward.experts.{expert}.w2.weight  expert_down: hidden expert_ffn    sparse
layers.{layer}.attention_norm.weight                    input_norm: hidden
layers.{layer}.ffn_norm.weight                          post_norm: hidden
norm.weight                                             final_norm: hidden
output.weight                                           head: vocab hidden    untied
""")


def detect(path: Path) -> bool:
    """Whether a folder looks like this format."""
    return (path / params.NAME).is_file() and any((path / name).is_file() for name in (SINGLE, INDEX))


def tables() -> dict[str, tuple[Rule, ...]]:
    """The tensor layout of the format, by name."""
    return {NAME: TABLE}


def holders(family: Family) -> dict[str, bool]:
    """Whether the format can hold models of a family: true of Mistral and Mixtral."""
    return {NAME: family.name in params.FAMILIES}


def read(path: Path, settings: Settings) -> Checkpoint:
    """Open a folder: read its settings and the headers of its files, but no weights."""
    fragments = _fragments(path)
    assets = settings.config or (path if (path / "config.json").is_file() else None)
    config = huggingface.read_config(assets) if assets else None
    base = huggingface.read_spec(config, assets, Settings()) if assets and config else None
    spec = params.spec_of(path, settings, base)
    placed, dropped = match(spec.slots_in(TABLE, spec.sizes()), {ALONE: fragments}, (), path)
    files = tuple(sorted({fragment.path for fragment in fragments.values()}))
    return Checkpoint(path, path, NAME, spec, tuple(placed), tuple(dropped), files, {}, assets, config=config)


def _fragments(path: Path) -> dict[str, Fragment]:
    """Return the tensors of all consolidated files, by name.

    Raises:
        SourceError: a file and the index disagree, or the folder has other safetensors files besides.
    """
    weight_map = huggingface.read_weight_map(path, SINGLE, INDEX)
    fragments: dict[str, Fragment] = {}
    names = [SINGLE] if weight_map is None else sorted({*weight_map.values()})
    kind = "consolidated*.safetensors" if (path / "config.json").is_file() else "*.safetensors"
    if surplus := sorted({file.name for file in path.glob(kind)} - {*names}):
        raise SourceError(
            f"{path} has {surplus[0]} beside {names[0]}, which does not belong to it ({len(surplus)} in all)",
            "a folder is one model: move away what is not meant",
        )
    for name in names:
        tensors = read_safetensors(path / name)[0]
        wrong = [key for key in tensors if weight_map is not None and weight_map.get(key) != name]
        if wrong:
            raise SourceError(f"{path / name} holds {wrong[0]}, which {INDEX} does not place there")
        fragments |= tensors
    missing = [key for key in weight_map or {} if key not in fragments]
    if missing:
        raise SourceError(f"{path} lacks {missing[0]}, which {INDEX} names ({len(missing)} in all)")
    return fragments


def write(root: Path, spec: ModelSpec, dtypes: Mapping[tuple[str, int | None], str]) -> Target:
    """Lay out a folder with a single weights file, the only form that mistral-inference loads.

    Raises:
        UnsupportedError: the family cannot be stored in this format.
        RefusedError: params.json has no key for a setting of the model.
    """
    if spec.family not in params.FAMILIES:
        raise UnsupportedError(f"a {spec.family} has no files of Mistral's own", "see `convert formats`")
    parameters = params.written(spec)
    slots = {slot.keys[0]: slot for slot in spec.slots_in(TABLE, spec.sizes())}
    entries = [Entry(key, slot_dtype(slot, dtypes), slot.shape) for key, slot in slots.items()]
    file = huggingface.weights_file(root / SINGLE, entries, slots)
    return Target((file,), {params.NAME: (json.dumps(parameters, indent=2) + "\n").encode()}, {})
