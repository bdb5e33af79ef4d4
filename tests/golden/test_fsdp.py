"""What real torch.distributed saves (FSDP1, FSDP2, HSDP, TP x FSDP, accelerate, verl, torchtitan) comes back whole.

And back: what we write, dcp.load and accelerate read on any number of ranks.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.dcp_tools import edit, places, refused, save, weights
from tests.golden.worlds import KINDS, SCRIPT, WORLDS, Made, Run, World, make
from tests.models import files

pytestmark = pytest.mark.distributed
MODELS = [kind for kind in KINDS if kind != "edge"]
CASES = [(world, kind) for world in WORLDS for kind in MODELS]
LLAMA, WIDE, TIED, QWEN = WORLDS
ANY = ("--allow-missing", "*")


@pytest.fixture(scope="session")
def run(fsdp, tmp_path_factory) -> Run:
    """`run(calls)`: make several calls of fsdp_world.py."""
    path = tmp_path_factory.mktemp("calls") / "calls.json"

    def make_all(calls: list[list[str]]) -> tuple[int, str]:
        path.write_text(json.dumps(calls))
        return fsdp(["all", str(path)], 1, SCRIPT)

    return make_all


@pytest.fixture(scope="session")
def made(run, tmp_path_factory) -> Callable[[World], Made]:
    """`made(world)`: its checkpoints of every kind."""
    return lambda world: make(world, tmp_path_factory, run)


def same_bits(a: Any, b: Any) -> bool:
    import torch

    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return torch.equal(a.contiguous().flatten().view(torch.uint8), b.contiguous().flatten().view(torch.uint8))


@pytest.mark.parametrize(("world", "kind"), CASES, ids=str)
def test_every_kind_comes_back(made, convert, tmp_path, world, kind):
    """The file is that of transformers, byte for byte; and the digest tells so without converting."""
    source, checkpoint = made(world).source, made(world).checkpoint(kind)
    ran = convert("fsdp2hf", checkpoint, tmp_path / "out", "--config", source, "-q")
    assert ran.code == 0, ran.err
    assert files(tmp_path / "out") == files(source)
    digests = [convert("digest", place, "--config", source).out.split()[0] for place in (checkpoint, source)]
    assert digests[0] == digests[1]


@pytest.mark.parametrize(
    ("world", "kind"),
    [(LLAMA, "fsdp2"), (WIDE, "tp-fsdp"), (TIED, "accelerate"), (TIED, "hf-shards"), (QWEN, "verl-hsdp"),
     (QWEN, "accelerate-local")],
    ids=str,
)  # fmt: skip
def test_transformers_loads_it_whole(made, convert, tmp_path, world, kind):
    from transformers import AutoModelForCausalLM

    assert convert("fsdp2hf", made(world).checkpoint(kind), tmp_path / "out", "--config", made(world).source).code == 0
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto", output_loading_info=True)
    assert not any(info.values()), info
    expected = AutoModelForCausalLM.from_pretrained(made(world).source, dtype="auto").state_dict()
    state = loaded.state_dict()
    assert state.keys() == expected.keys()
    assert all(same_bits(state[key], expected[key]) for key in expected)


MERGE = """
import sys
from accelerate import PartialState
from accelerate.utils import merge_fsdp_weights
PartialState(cpu=True)
for words in zip(sys.argv[1::2], sys.argv[2::2]):
    merge_fsdp_weights(*words)
"""


@pytest.mark.parametrize("world", [LLAMA, WIDE], ids=str)
def test_accelerate_merges_to_the_same_bytes(made, convert, fsdp, tmp_path, world):
    """`accelerate merge-weights`, where it works; it takes the folder with .metadata alone."""
    kinds = ["accelerate", "fsdp2", "fsdp2-files", "hsdp", "tp-fsdp", "fsdp1"]
    argv = []
    for kind in kinds:
        place = made(world).checkpoint(kind)
        inside = place / "pytorch_model_fsdp_0"
        argv += [str(inside if inside.exists() else place), str(tmp_path / f"{kind}-theirs")]
    script = tmp_path / "merge.py"
    script.write_text(MERGE)
    code, out = fsdp(argv, 1, script)
    assert code == 0, out
    for kind in kinds:
        place = tmp_path / kind
        assert convert("fsdp2hf", made(world).checkpoint(kind), place, "--config", made(world).source, "-q").code == 0
        theirs = (tmp_path / f"{kind}-theirs/model.safetensors").read_bytes()
        assert (place / "model.safetensors").read_bytes() == theirs, kind


@pytest.mark.parametrize(
    ("world", "kind"), [(LLAMA, "fsdp2-optim"), (TIED, "app-state"), (QWEN, "titan-like")], ids=str
)
def test_the_optimizer_stays_behind_and_is_named(made, convert, tmp_path, world, kind):
    ran = convert("fsdp2hf", made(world).checkpoint(kind), tmp_path / "out", "--config", made(world).source)
    assert ran.code == 0
    assert "what is no weight of the model is not carried" in ran.err
    assert "optim" in ran.err
    assert files(tmp_path / "out") == files(made(world).source)


# --- odd tensors -----------------------------------------------------------------------------------------------------


@pytest.fixture(params=WORLDS, ids=str)
def edge(request, made, convert, tmp_path) -> Callable[..., tuple[dict[str, Any], dict[str, Any]]]:
    """`edge(...)`: the tensors that were saved, and those that came out."""
    from safetensors.torch import load_file

    world = made(request.param)

    def get(*options: object) -> tuple[dict[str, Any], dict[str, Any]]:
        out = tmp_path / "out"
        ran = convert(
            "fsdp2hf", world.checkpoint("edge"), out, "--config", world.source, "--verbatim", "-q", *ANY, *options
        )
        assert ran.code == 0, ran.err
        return load_file(world.folder / "edge.safetensors"), load_file(out / "model.safetensors")

    return get


def test_odd_tensors_keep_every_bit(edge):
    """0-d, empty, float8, transposed, expanded, uneven, with fewer rows than ranks."""
    saved, converted = edge()
    saved = {name: tensor for name, tensor in saved.items() if not name.startswith("list.")}
    assert len(saved) > 20
    assert {tensor.ndim for tensor in saved.values()} >= {0, 1, 2, 3, 5}
    for name, tensor in saved.items():
        assert name in converted
        assert same_bits(converted[name], tensor), name


def test_tensors_in_lists_are_not_lost(edge):
    """Tensors of the model in a list or a dictionary in it are tensors of the model."""
    saved, converted = edge()
    for name in ("list.1", "list.2.inner"):
        assert name in converted
        assert same_bits(converted[name], saved[name])


def test_a_cast_of_what_has_none_is_refused(made, convert, tmp_path):
    """FP8 beside BF16 would stay as it is, in a folder that says otherwise."""
    options = ("--config", made(LLAMA).source, "--verbatim", *ANY, "--dtype", "bf16")
    ran = convert("fsdp2hf", made(LLAMA).checkpoint("edge"), tmp_path / "out", *options)
    assert (ran.code, "holds float8 as F8_E4M3" in ran.err) == (4, True), ran.err
    assert not (tmp_path / "out").exists()


# --- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "name"), [("bf16", "bfloat16"), ("fp16", "float16")])
@pytest.mark.parametrize("kind", ["accelerate", "tp-fsdp", "accelerate-local", "fsdp2-zstd"])
def test_a_cast_is_that_of_torch(made, convert, tmp_path, kind, dtype, name):
    import torch

    world = made(WIDE)
    options = ("--config", world.source, "--dtype", dtype, "-q")
    assert convert("fsdp2hf", world.checkpoint(kind), tmp_path / "out", *options).code == 0
    converted, expected = weights(tmp_path / "out"), weights(world.source)
    assert converted.keys() == expected.keys()
    assert all(same_bits(converted[key], expected[key].to(getattr(torch, name))) for key in expected)
    assert f'"dtype": "{name}"' in (tmp_path / "out/config.json").read_text()


@pytest.mark.parametrize("extra", [{}, {"optim": {"lr": 0.1}}], ids=["alone", "with an optimizer"])
def test_a_container_can_be_named(model, convert, tmp_path, extra):
    """The averaged weights of a run lie beside the model, with the same keys: the user says which is meant."""
    source = model("llama")
    state = weights(source)
    ema = {key: value / 2 for key, value in state.items()}
    folder = save(tmp_path / "c", {"model": state, "ema": ema} | extra)
    for command in ("fsdp2hf", "hf2megatron", "digest"):
        out = [tmp_path / "none"] * (command != "digest")
        ran = convert(command, folder, *out, "--config", source)
        refused(ran, 5, f"{folder} could hold several models: model, ema", "--container")
    assert convert("fsdp2hf", folder, tmp_path / "usual", "--config", source, "--container", "model").code == 0
    assert files(tmp_path / "usual") == files(source)
    assert convert("fsdp2hf", folder, tmp_path / "ema", "--config", source, "--container", "ema").code == 0
    converted = weights(tmp_path / "ema")
    assert converted.keys() == ema.keys()
    assert all(same_bits(converted[key], ema[key]) for key in ema)
    assert convert("fsdp2hf", folder, tmp_path / "none", "--config", source, "--container", "teacher").code == 5


@pytest.mark.parametrize(
    ("container", "outer", "named"),
    [
        ("ema", "", "ema"),
        ("model", "teacher.", "teacher"),
        ("ema_model", "module.", "ema_model"),
        ("model", "net.", ""),
    ],
)
def test_a_copy_alone_is_named(model, convert, tmp_path, container, outer, named):
    source = model("llama")
    folder = save(tmp_path / "c", {container: {outer + key: value for key, value in weights(source).items()}})
    ran = convert("fsdp2hf", folder, tmp_path / "out", "--config", source)
    assert ran.code == 0, ran.err
    assert ("the name of a model beside the one that is trained" in ran.err) == bool(named)
    assert not named or f"all weights here are under '{named}'" in ran.err
    ran = convert("fsdp2hf", folder, tmp_path / "chosen", "--config", source, "--container", container)
    assert ran.code == 0, ran.err
    assert "beside the one that is trained" not in ran.err


@pytest.mark.parametrize(("name", "outer"), [("llama-tied", "model."), ("gpt2", "net.inner."), ("falcon", "policy.")])
def test_a_module_around_the_model(model, convert, tmp_path, name, outer):
    """A LightningModule keeps the model in an attribute, as Composer's HuggingFaceModel does.

    Where it is: lightning 2.6.6, strategies/model_parallel.py and fsdp.py, `save_checkpoint`.
    """
    source = model(name)
    state = {outer + key: value for key, value in weights(source).items()}
    moments = {key: value.float() for key, value in state.items()}
    folder = save(tmp_path / "c.ckpt", {"state_dict": state, "optimizer_0": {"exp_avg": moments}})
    assert convert("fsdp2hf", folder, tmp_path / "out", "--config", source).code == 0
    assert files(tmp_path / "out") == files(source)
    other = save(tmp_path / "two.ckpt", {"state_dict": state | {"scale_head.weight": state[min(state)]}})
    assert "tensors are missing" in convert("fsdp2hf", other, tmp_path / "two", "--config", source).err


# --- what we write ---------------------------------------------------------------------------------------------------

SIZES = (1, 2, 3, 4)


def loads(folder: Path, source: Path, sizes: tuple[int, ...]) -> list[list[str]]:
    """Load the folder with torch, and the one around it with accelerate."""
    calls = [["load", str(folder), str(source), str(size)] for size in sizes]
    return [*calls, ["load-accelerate", str(folder.parent), str(source), "2"]]


@pytest.mark.parametrize("ranks", [1, 3, 7])
@pytest.mark.parametrize(("name", "dtype"), [("llama", "float32"), ("llama-tied", "bfloat16")])
def test_torch_and_accelerate_load_what_we_write(model, convert, run, tmp_path, name, dtype, ranks):
    source, folder = model(name, dtype), tmp_path / "checkpoint-0/pytorch_model_fsdp_0"
    assert convert("hf2fsdp", source, folder, "--ranks", ranks, "-q").code == 0
    assert len(list(folder.glob("*.distcp"))) == ranks
    code, out = run(loads(folder, source, SIZES))
    assert code == 0, out
    assert out.count("equal ") == len(SIZES) + 1


def test_the_judge_sees_what_is_wrong(model, convert, run, tmp_path):
    source, other, calls = model("llama"), model("llama", num_hidden_layers=5), []
    for number, (taken, options) in enumerate([(source, ()), (other, ()), (source, ("--dtype", "bf16"))]):
        folder = tmp_path / f"{number}"
        assert convert("hf2fsdp", taken, folder, "--ranks", 2, *options, "-q").code == 0
        calls.append(["load", str(folder), str(source), "2"])
    entries: list[Any] = []
    edit(tmp_path / "0", lambda metadata: entries.extend(places(metadata, "model.model.layers.3.mlp.up_proj.weight")))
    info = entries[1][1]
    with (tmp_path / "0" / info.relative_path).open("r+b") as file:
        file.seek(info.offset + info.length // 2)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))
    code, out = run(calls)
    assert code != 0
    assert out.count("failed: ") == len(calls)
    for message in ("differs in 1 of", "model.layers.4.mlp.up_proj.weight is unexpected", "stored as torch.bfloat16"):
        assert message in out


def test_one_checkpoint_becomes_another(made, convert, run, tmp_path):
    """From any kind to the folder that dcp.load reads: nothing of Hugging Face in between."""
    world, calls = made(WIDE), []
    for kind in ("tp-fsdp", "hf-shards"):
        folder = tmp_path / kind / "pytorch_model_fsdp_0"
        options = ("--config", world.source, "--ranks", 3, "-q")
        assert convert("hf2fsdp", world.checkpoint(kind), folder, *options).code == 0
        calls.append(["load", str(folder), str(world.source), "2"])
    code, out = run(calls)
    assert code == 0, out
    assert out.count("equal ") == len(calls)
