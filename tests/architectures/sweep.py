"""Every architecture of transformers that generates text: Hugging Face to FSDP, into the model in memory, and back.

Each is a tiny model whose weights are random, norms included. What `hf2fsdp` writes is loaded by torch's DCP into the
state dict of another model of the class, which names every key that it misses; what `fsdp2hf` makes of it is loaded by
`from_pretrained`, which reports what is missing, unknown or of another shape, and has the names of `save_pretrained`.
"""

from __future__ import annotations

import inspect
import multiprocessing
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.fuzz.architectures import build, built, classes, equal, loaded, quiet, run

RIGHT, REFUSED, UNBUILT, FOUND = "right", "refused", "not built", "FOUND"
LISTED = Path(__file__).with_name("outcomes.txt")
"""What became of each type with transformers 5.23.0: type, outcome, reason."""
REASON = 110
"""Characters of a reason."""


def randomized(kind: str) -> Any | None:
    """A model of a type in which two tensors of one shape differ; None where its class does not take small sizes."""
    import torch

    model = build(kind, 0)
    if model is None:
        return None
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.is_floating_point():
                continue
            if "norm" in name:
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                parameter.normal_(0, 0.08, generator=generator)
    return model.eval()


def logits(model: Any) -> Any | None:
    """What a model computes of a text; None where it wants more than that."""
    import torch

    ids = torch.arange(3, 19)[None]
    torch.manual_seed(0)
    try:
        with torch.no_grad(), quiet():
            if "input_ids" not in inspect.signature(model.forward).parameters:
                return None
            return model(input_ids=ids).logits
    except Exception:  # noqa: BLE001  # a text alone is not what its class takes
        return None


def names(folder: Path) -> set[str]:
    """The names of the tensors in a Hugging Face folder."""
    from safetensors import safe_open

    keys: set[str] = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            keys |= set(file.keys())
    return keys


def through(kind: str, folder: Path) -> tuple[str, str]:
    """The outcome of a type, and what was said.

    Raises:
        AssertionError: a command ended with exit code 0, and what it wrote is not the model.
    """
    import torch
    import torch.distributed.checkpoint as dcp

    with quiet():
        model = randomized(kind)
        if model is None:
            return UNBUILT, _unbuilt(kind)
        other = type(model)(model.config)
        model.save_pretrained(folder / "base")
        expected, before = model.state_dict(), logits(model)
    code, output = run("hf2fsdp", folder / "base", folder / "dcp", "-q")
    if code:
        error = re.search(r"error: (.*)", output)
        return REFUSED, (error[1] if error else output).replace(f"{folder}/", "")
    with quiet():
        state = {"model": {key: torch.zeros_like(value) for key, value in other.state_dict().items()}}
        try:
            dcp.load(state, checkpoint_id=folder / "dcp", no_dist=True)
        except (RuntimeError, dcp.CheckpointException) as error:
            raise AssertionError(f"{kind}: what hf2fsdp wrote does not load: {str(error)[-200:]}") from None
    wrong = [key for key, value in state["model"].items() if not torch.equal(value, expected[key])]
    assert not wrong, f"{kind}: in memory other values than in the model: {wrong[:9]}"
    code, output = run("fsdp2hf", folder / "dcp", folder / "out", "-q")
    assert code == 0, f"{kind}: fsdp2hf refuses what hf2fsdp wrote: {output}"
    again, report = loaded(folder / "out", model)
    assert not any(report[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys")), f"{kind}: {report}"
    assert equal(again, model), f"{kind}: the tensors differ"
    here, there = names(folder / "out"), names(folder / "base")
    assert here == there, f"{kind}: names: {sorted(here - there)[:5]} for {sorted(there - here)[:5]}"
    after = None if before is None else logits(again.eval())
    assert before is None or torch.allclose(after, before, atol=1e-5, equal_nan=True), f"{kind}: logits differ"
    return RIGHT, "" if before is not None else "without logits"


def _unbuilt(kind: str) -> str:
    try:
        built(kind, 0, sparse=True)
    except Exception as error:  # noqa: BLE001  # whatever its class raises is the reason
        return f"{type(error).__name__}: {error}"
    return "only with other settings"


def outcome(kind: str) -> tuple[str, str, str]:
    """The line of a type."""
    with tempfile.TemporaryDirectory(prefix=f"{kind}-") as folder:
        try:
            what, reason = through(kind, Path(folder))
        except AssertionError as error:
            what, reason = FOUND, str(error)[-2000:]
    return kind, what, reason if what == FOUND else " ".join(reason.split())[:REASON].strip()


def listed() -> dict[str, tuple[str, str]]:
    """The outcome and the reason of each type in the list."""
    lines = (line.split(maxsplit=1) for line in LISTED.read_text().splitlines())
    by_kind = {}
    for kind, rest in lines:
        what = next(word for word in (RIGHT, REFUSED, UNBUILT) if rest.startswith(word))
        by_kind[kind] = what, rest.removeprefix(what).strip()
    return by_kind


def main() -> int:
    """Every type, or those that are named; --write puts them into the list. Exit code 1 where one is not as listed."""
    chosen = [word for word in sys.argv[1:] if word != "--write"]
    known, odd, kinds = listed() if LISTED.is_file() else {}, 0, chosen or classes()
    with multiprocessing.get_context("spawn").Pool(2, maxtasksperchild=20) as pool:
        for kind, what, reason in pool.imap(outcome, kinds):
            changed = what == FOUND or known.get(kind, ("", ""))[0] != what
            known[kind] = what, reason
            odd += changed
            print(f"{_line(kind, what, reason)}{' (not as listed)' * changed}", flush=True)
    if "--write" in sys.argv[1:]:
        LISTED.write_text("".join(f"{_line(kind, *known[kind])}\n" for kind in classes() if kind in known))
    print(f"{len(kinds)} types, {odd} not as listed")
    return 1 if odd else 0


def _line(kind: str, what: str, reason: str) -> str:
    return f"{kind:<26}{what:<11}{reason}".rstrip()


if __name__ == "__main__":
    sys.exit(main())
