"""Something of a saved model is taken away or exchanged: what comes out is the model, or a refusal.

A file that is removed, cut off, or another model's; a tensor, a layer or the last rows of a tensor; a config of another
size. Exit code 0 is right only if `from_pretrained` gives the original.
"""

from __future__ import annotations

import copy
import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.architectures.sizes import SMALL
from tests.fuzz.architectures import SAVERS, build, classes, equal, loaded, quiet, run

State = dict[str, Any]


def a_tensor(state: State, rng: random.Random) -> str:
    """One tensor."""
    key = rng.choice([*state])
    del state[key]
    return f"without {key}"


def a_layer(state: State, rng: random.Random) -> str:
    """Every tensor of one layer of one list."""
    lists = sorted({name[0] for key in state if (name := re.match(r"(?:.*?\.)?(?:layers|h|blocks|layer)\.\d+\.", key))})
    if not lists:
        return a_tensor(state, rng)
    prefix = rng.choice(lists)
    for key in [key for key in state if key.startswith(prefix)]:
        del state[key]
    return f"without {prefix}"


def the_last_tensors(state: State, rng: random.Random) -> str:
    """The end of the state dict, as in a file that was the last of several."""
    lost = rng.randint(1, max(1, len(state) // 3))
    for key in [*state][-lost:]:
        del state[key]
    return f"without the last {lost} tensors"


def the_last_rows(state: State, rng: random.Random) -> str:
    """Some rows of one tensor."""
    key = rng.choice([key for key, value in state.items() if value.dim() and value.shape[0] > 1])
    state[key] = state[key][: rng.randint(1, state[key].shape[0] - 1)].contiguous()
    return f"with {len(state[key])} rows of {key}"


def nothing(state: State, rng: random.Random) -> str:
    """The whole model."""
    del state, rng
    return "whole"


FROM_STATE: tuple[Callable[[State, random.Random], str], ...] = (
    a_tensor, a_layer, the_last_tensors, the_last_rows, nothing, nothing,
)  # fmt: skip


def no_file(files: list[Path], rng: random.Random) -> str:
    """A file less."""
    path = rng.choice(files)
    path.unlink()
    return f"without {path.name}"


def the_last_file(files: list[Path], rng: random.Random) -> str:
    """That of the last rank: nothing after it shows that it is missing."""
    del rng
    files[-1].unlink()
    return f"without {files[-1].name}"


def a_cut_file(files: list[Path], rng: random.Random) -> str:
    """A file that ends early."""
    path = rng.choice(files)
    content = path.read_bytes()
    path.write_bytes(content[: rng.randrange(len(content))])
    return f"with {path.name} cut off"


def anothers_file(files: list[Path], rng: random.Random) -> str:
    """A file in another's place."""
    first, second = rng.choice(files), rng.choice(files)
    shutil.copy(first, second) if first != second else first.unlink()
    return f"with {first.name} in the place of {second.name}"


FROM_FILES = (no_file, the_last_file, the_last_file, a_cut_file, anothers_file)


def other_sizes(config: dict[str, Any], rng: random.Random) -> str:
    """A config with another number of layers, hidden size or vocabulary."""
    places = [config, *(value for key, value in config.items() if key.endswith("_config") and isinstance(value, dict))]
    sizes = [(place, key) for place in places for key in SMALL if type(place.get(key)) is int and place[key] > 1]
    if not sizes:
        return "whole"
    place, key = rng.choice(sizes)
    place[key] += rng.choice([-1, 1]) * (1 if place[key] < 8 else place[key] // 2)
    return f"with {key} {place[key]}"


def loads(folder: Path, like: Any) -> bool:
    """Whether transformers loads a folder at all."""
    try:
        loaded(folder, like)
    except Exception:  # noqa: BLE001  # whatever its code raises
        return False
    return True


def attack(seed: int, folder: Path) -> str:
    """One random model, one thing taken from it."""
    rng = random.Random(seed)
    kind = rng.choice(classes())
    with quiet():
        model = build(kind, seed)
        if model is None:
            return "not built"
        base = folder / "base"
        model.save_pretrained(base)
        original = copy.deepcopy(model)
        state = {key: value.detach().contiguous() for key, value in model.state_dict().items()}
        what = rng.choice(FROM_STATE)(state, rng)
        container = rng.choice(["shards", *SAVERS])
        argv = SAVERS[container](folder / "source", state, rng)
    judged = rng.random() < 0.7  # otherwise the base's own weights are all that there is to be compared with
    if judged:
        for path in base.glob("*.safetensors*"):
            path.unlink()
    if what == "whole" and rng.random() < 0.7:
        files = sorted(path for path in (folder / "source").iterdir())
        what = rng.choice(FROM_FILES)(files, rng)
    elif what == "whole":
        config = json.loads((base / "config.json").read_text())
        what = other_sizes(config, rng)
        (base / "config.json").write_text(json.dumps(config))
    code, output = run(*argv, folder / "source", folder / "out", "--config", base, "-q", transformers=judged)
    about = f"seed {seed}: {kind} as {container} {what}: exit {code}\n{output}"
    if code:
        return "refused"
    try:
        again, report = loaded(folder / "out", original)
    except Exception as error:  # noqa: BLE001  # whatever transformers cannot load is no right result
        if not judged and not loads(
            base, original
        ):  # with transformers out of reach the base's weights are the only judge
            return "as broken as the base"
        raise AssertionError(f"{about}{type(error).__name__}: {error}") from None
    assert not any(report[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys")), f"{about}{report}"
    assert equal(again, original), f"{about}the tensors differ"
    return "right"
