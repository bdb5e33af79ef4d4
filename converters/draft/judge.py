"""Check a family file with transformers: each tensor has a line, and the model computes the same after FSDP.

Loading the FSDP checkpoint into the model with torch's reader checks the lines of names in memory; loading the folder
that is converted back with `from_pretrained` checks those of names in files. An order inside a tensor that is the same
in both can only be checked with Megatron.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from converters.draft import computed
from converters.draft.probes import Model
from converters.draft.reading import require_read
from converters.draft.tables import template
from formats.errors import UsageError, VerificationError
from formats.families.family import Family

RANKS = 2


def check(family: Family, model: Model, folder: Path) -> Iterator[str]:
    """Check a family, and yield a sentence for each check that it passes.

    Args:
        family: the family of a file.
        model: the model that the family is to describe.
        folder: an empty folder, for the tiny model and its conversions.

    Raises:
        UsageError: the file is of another model, or tensors have no line.
        SourceError, UnsupportedError, RefusedError: the family cannot read the config of the model.
        VerificationError: the model computes other logits after a conversion.
    """
    if (family.model_type or family.name, family.architecture) != (model.kind, model.architecture):
        described = f"{family.model_type or family.name} ({family.architecture})"
        raise UsageError(f"{family.file} describes {described}, and the model is {model.kind} ({model.architecture})")
    _check_names(family, model)
    yield f"every tensor of {model.architecture} has a line, and every line a tensor"
    require_read(family, model)
    net = computed.tiny_model(model, **model.untied)
    net.save_pretrained(folder / "hf")
    before = computed.logits(net)
    _through(family, net, before, folder)
    yield f"equal logits after FSDP on {RANKS} ranks, in memory by torch's reader and back in Hugging Face"
    yield f"Megatron: {family.only_here or 'not judged here: compare logits with those of megatron-core once'}"


def _check_names(family: Family, model: Model) -> None:
    """Refuse a family in which a tensor has no line, or a line no tensor.

    Raises:
        UsageError: there is such a tensor or line.
    """
    probe = model.probe(**model.untied)
    choices = {name for names, _ in family.biases.values() for name in names.split()}
    lines = {spelling: rule for rule in family.tensors for spelling in rule.spellings}
    there = {template(name) for name in (*probe.hub, *probe.memory)}
    drops = {"mtp", "tied", "optional", "compressed", "uncompressed", *choices}
    idle = [spelling for spelling in lines if spelling not in there and not drops & lines[spelling].conditions]
    for what, names in (("has no line for", sorted(there - lines.keys())), ("has lines of no tensor:", sorted(idle))):
        if names:
            raise UsageError(f"{family.file} {what} {', '.join(names)}", "a line is a key, two spaces, and a pattern")


def _through(family: Family, net: Any, before: Any, folder: Path) -> None:
    """Convert the model to FSDP and back, and compare its logits after each conversion.

    Raises:
        VerificationError: logits differ, or the folder that comes back does not load cleanly.
    """
    import torch
    import torch.distributed.checkpoint as dcp

    from converters.library.conversion import convert

    options: Any = {"family": family.file}
    convert(folder / "hf", folder / "fsdp", to="fsdp", ranks=RANKS, **options)
    other = type(net)(net.config).eval()
    state = {"model": {name: torch.zeros_like(tensor) for name, tensor in other.state_dict().items()}}
    dcp.load(  # type: ignore[attr-defined]
        state, checkpoint_id=folder / "fsdp", no_dist=True
    )
    other.load_state_dict(state["model"])
    _same(other, before, "what torch loads of the FSDP checkpoint")
    convert(folder / "fsdp", folder / "back", to="huggingface", **options)
    reloaded, report = type(net).from_pretrained(
        folder / "back", dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    if problems := {name: sorted(map(str, keys)) for name, keys in report.items() if keys}:
        raise VerificationError(f"what comes back does not load cleanly: {json.dumps(problems)[:300]}")
    reloaded.config._experts_implementation = "eager"  # noqa: SLF001  # as it was computed before
    _same(reloaded.eval(), before, "what comes back of it")


def _same(model: Any, before: Any, what: str) -> None:
    import torch

    with torch.no_grad():
        difference = float((computed.logits(model) - before).abs().max() / before.abs().max())
    if not difference <= computed.EQUAL:
        raise VerificationError(f"{what} computes other logits: {difference:.2g} of the largest apart")
