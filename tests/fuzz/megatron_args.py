"""Fuzzer: the args of a Megatron run, changed at random, against megatron-core's own config.

A tiny run gets one to three other arguments, of names and types that the dataclasses have. `megatron2hf` may refuse
it. Where it ends with exit code 0, real megatron-core is built from the changed args, as
`core_transformer_config_from_args` does (megatron/training/arguments.py at 0.16: fields by name, then a dozen by hand),
loads the weights with strict=True, and has to compute the logits that transformers computes of our output.

The judge is a process of its own, which a first case starts: megatron-core is changed there to run on a CPU.
Arguments of rotary scaling are left alone: stock Megatron ignores some, which the judge of stock Megatron sees.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import io
import json
import random
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.megatron_runs import shards, with_args

ROOT = Path(__file__).parents[2]
MODELS = ("llama", "qwen2", "qwen3", "starcoder2", "arcee", "mixtral", "qwen3_moe")
ROPE = ("rope", "yarn", "rotary_s", "mscale", "beta_", "original_max", "position_embedding_type", "use_rotary")
"""How names begin that are not changed."""
OPTIONS: dict[str, Any] = {
    "swiglu": False, "squared_relu": False, "quick_geglu": False, "num_experts": 1, "group_query_attention": False,
    "untie_embeddings_and_output_weights": False, "bias_gelu_fusion": False, "apply_layernorm_1p": False,
    "disable_bias_linear": False, "openai_gelu": False, "rotary_percent": 1.0, "spec": "", "num_query_groups": 1,
    "my_own_option": 0, "rotary_base": 1,
}  # fmt: skip
"""Arguments that are no field of a config, with a value of their type."""
VALUES: dict[str, tuple[Any, ...]] = {
    "bool": (True, False),
    "int": (0, 1, 2, 3, 4, 8, 64),
    "float": (0.0, 0.5, 1.0, 2.0, 0.01),
    "str": ("none", "local", "LayerNorm", "RMSNorm", "sigmoid", "softmax", "learnable", "off-by-one", "sinkhorn"),
    "list": ([1, 0], [0, 1], [1, 1], [4, 0]),
}
LIMIT = 2e-4
"""Of the largest logit: float32 of two programs."""


# --- the case --------------------------------------------------------------------------------------------------------


def attack(seed: int, folder: Path) -> str:
    """One case: `refused`, `right`, or `not judged` where megatron-core itself takes no such args on a CPU."""
    rng = random.Random(seed)
    name = rng.choice(MODELS)
    changes = _changes(rng)
    run = with_args(_run(name), folder / "run", **changes)
    code, output = _convert("megatron2hf", run, folder / "hf")
    case = f"seed {seed}: {name} with {changes}: exit code {code}: {output}"
    assert code != 1, case
    assert "Traceback" not in output, case
    if code:
        assert 2 <= code <= 7, case
        return "refused"
    answer = _judged({"run": str(run), "hf": str(folder / "hf")})
    assert answer["word"] in ("right", "not judged"), f"{case} {answer}"
    return str(answer["word"])


def _changes(rng: random.Random) -> dict[str, Any]:
    """Names of fields and options, each with a value of its type; often of the kind that changes a model."""
    from formats.megatron.args.fields import FIELDS

    every = {name: kind for name, kind in _fields().items() if not name.startswith(ROPE)}
    telling = sorted(name for name in every if name in FIELDS)
    changes = {}
    for _ in range(rng.randint(1, 3)):
        name = rng.choice(telling if rng.random() < 0.8 else sorted(every))
        kind = every[name]
        changes[name] = rng.choice([*VALUES[kind.strip("?")], *([None] if kind.endswith("?") else [])])
    return changes


@functools.cache
def _fields() -> dict[str, str]:
    """The kind of value of each argument, with `?` where it may be None: of the dataclasses, newer ones, `OPTIONS`."""
    from formats.megatron.args.fields import FIELDS

    kinds = {field.name: _kind(field.values[0]) for field in FIELDS.values() if field.values}
    kinds |= {name: _kind(value) for name, value in OPTIONS.items()}
    fields: dict[str, str] = _judged({"fields": True})
    return kinds | fields


def _kind(value: Any) -> str:
    """A key of `VALUES`."""
    name = type(value).__name__
    return name if name in VALUES else "int"


@functools.cache
def _run(name: str) -> Path:
    """A run of a tiny model, made once."""
    from tests.models import build

    folder = Path(tempfile.mkdtemp(prefix="fuzz-args-"))
    atexit.register(_remove, folder)
    source = build(folder / "hf", name, "float32", num_hidden_layers=2)
    code, output = _convert("hf2megatron", source, folder / "run", "--norm", "local")
    assert code == 0, output
    answer = _judged({"run": str(folder / "run"), "hf": str(source)})
    assert answer["word"] == "right", f"{name} as it is: {answer}"
    return folder / "run"


def _remove(folder: Path) -> None:
    import shutil

    shutil.rmtree(folder, ignore_errors=True)


def _convert(*argv: object) -> tuple[int, str]:
    """The command line, in this process."""
    from converters import cli

    before, code, output = sys.argv, 0, io.StringIO()
    sys.argv = ["convert", *map(str, argv), "-q"]
    try:
        with contextlib.redirect_stderr(output), contextlib.redirect_stdout(io.StringIO()):
            cli.main()
    except SystemExit as done:
        code = int(done.code or 0)
    finally:
        sys.argv = before
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    return code, output.getvalue().strip()


# --- the judge -------------------------------------------------------------------------------------------------------


@functools.cache
def _server() -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "tests.fuzz.megatron_args"]
    server = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    atexit.register(_end, server)
    return server


def _end(server: subprocess.Popen[str]) -> None:
    assert server.stdin
    server.stdin.close()
    server.wait(60)


def _judged(question: dict[str, Any]) -> Any:
    server = _server()
    assert server.stdin
    assert server.stdout
    server.stdin.write(json.dumps(question) + "\n")
    server.stdin.flush()
    try:
        for line in server.stdout:
            if line.startswith("ANSWER"):
                return json.loads(line.removeprefix("ANSWER"))
    except BaseException:  # a limit of time: what it answers later would be taken for the next answer
        _server.cache_clear()
        server.kill()
        raise
    raise AssertionError(f"the judge ended at {question}")


def _serve() -> None:
    """Answer questions until there are none."""
    import torch.distributed as dist

    sys.path.insert(0, str(Path(__file__).parents[1] / "golden"))  # where the judge finds what is beside it
    from tests.golden import megatron_judge as judge

    judge.patch_for_cpu()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    judge.ps.initialize_model_parallel()
    for line in sys.stdin:
        question = json.loads(line)
        answer = _kinds() if "fields" in question else _compare(Path(question["run"]), Path(question["hf"]))
        print(f"ANSWER{json.dumps(answer)}", flush=True)


def _kinds() -> dict[str, str]:
    """Field: kind of value, by its type, with `?` where it may be None; functions and the like have none."""
    import dataclasses

    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    by_word = {"bool": "bool", "int": "int", "float": "float", "str": "str", "List": "list", "Tuple": "list"}
    fields = {field.name: str(field.type) for config in (TransformerConfig, MLATransformerConfig)
              for field in dataclasses.fields(config)}  # fmt: skip
    kinds = {
        name: next((kind for word, kind in by_word.items() if word in annotation), "")
        for name, annotation in fields.items()
    }
    return {
        name: kind + "?" * ("None" in fields[name] or "Optional" in fields[name])
        for name, kind in kinds.items()
        if kind
    }


def _compare(run: Path, hf: Path) -> dict[str, str]:
    """What megatron-core computes of a run beside what transformers computes of a folder."""
    import torch
    from transformers import AutoConfig

    from tests.golden import megatron_judge as judge

    record = torch.load(shards(run)[0], weights_only=False)
    ids = judge.token_ids(AutoConfig.from_pretrained(hf))
    try:
        with torch.no_grad(), judge.CpuForCuda():
            model = _megatron(record["args"])
            model.load_state_dict(record["model"], strict=True)
            logits = model.float().eval()(ids, torch.arange(ids.shape[1])[None].expand_as(ids), None)
    except Exception as error:  # noqa: BLE001 - whatever it is: no run has such args
        return {"word": "not judged", "why": f"{type(error).__name__}: {error}"[:300]}
    with torch.no_grad():
        expected = judge.hugging_face_logits(hf, ids)
    difference = (logits[..., : expected.shape[-1]] - expected).abs().max().item()
    right = difference <= LIMIT * expected.abs().max().item()
    return {
        "word": "right" if right else "wrong",
        "difference": f"{difference:.3g} of {expected.abs().max().item():.3g}",
    }


def _megatron(args: Any) -> Any:
    """megatron-core's model of args (arguments.py `core_transformer_config_from_args`, gpt_builders.py, both 0.16)."""
    import dataclasses

    import torch
    from megatron.core.activations import squared_relu
    from megatron.core.fusions.fused_bias_geglu import quick_gelu
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    from tests.golden import megatron_judge as judge

    values = vars(args)
    kind = MLATransformerConfig if values.get("multi_latent_attention") else TransformerConfig
    fields = {field.name: values[field.name] for field in dataclasses.fields(kind) if field.name in values}
    fields |= {"num_moe_experts": values["num_experts"], "use_cpu_initialization": True}
    fields |= {"params_dtype": torch.float32, "pipeline_dtype": torch.float32}
    if values.get("swiglu"):
        fields |= {"activation_func": torch.nn.functional.silu, "gated_linear_unit": True}
        fields["bias_activation_fusion"] = values.get("bias_swiglu_fusion", False)
    else:
        fields["bias_activation_fusion"] = values.get("bias_gelu_fusion", True) and fields.get("add_bias_linear", True)
    if values.get("squared_relu"):
        assert not values.get("swiglu")
        fields["activation_func"] = squared_relu
    elif values.get("quick_geglu"):
        assert not values.get("swiglu")
        fields |= {"gated_linear_unit": True, "activation_func": quick_gelu}
    fields["num_query_groups"] = values["num_query_groups"] if values.get("group_query_attention") else None
    if values.get("rope_type") is None:
        fields.pop("rope_type", None)
    assert values.get("spec") is None
    config = kind(**fields)
    return GPTModel(
        config=config,
        transformer_layer_spec=judge.layer_spec(config, None),
        vocab_size=values["padded_vocab_size"],
        max_sequence_length=values["max_position_embeddings"],
        parallel_output=False,
        share_embeddings_and_output_weights=not values["untie_embeddings_and_output_weights"],
        position_embedding_type=values["position_embedding_type"],
        rotary_percent=values["rotary_percent"],
        rotary_base=values["rotary_base"],
        rope_scaling=values["use_rope_scaling"],
    )


if __name__ == "__main__":
    _serve()
