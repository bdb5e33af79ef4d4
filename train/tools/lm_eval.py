"""Makes the command line of EleutherAI's lm-evaluation-harness for a model. The harness itself is never imported.

Facts: lm-eval 0.4.13, `lm_eval run --help` (older versions: the same without `run`); models/huggingface.py
and models/vllm_causallms.py for the keys of --model_args. `hf` has one copy of the model for each process of
`accelerate launch`, vLLM shares or copies the model itself.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from converters.assets.token_files import held_template
from formats.errors import SourceError, UsageError
from train.start.start_weights import MAKE

DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class Bench:
    """An evaluation with the harness.

    Attributes:
        model: a Hugging Face folder.
        tasks: names that the harness knows.
        backend: hf or vllm.
        gpus: number of copies of the model, each on its own GPU.
        dtype: one of `DTYPES`; None for the dtype in the model's config.
        chat: whether prompts get the chat template; None means if the model has a template.
        out: folder of the results.
        more: further arguments for the harness.
    """

    model: Path
    tasks: str
    backend: str
    gpus: int
    dtype: str | None
    chat: bool | None
    out: Path
    more: tuple[str, ...]


def command_of(bench: Bench) -> list[str]:
    """The command of an evaluation, as a list of arguments.

    Raises:
        UsageError: the model is not a Hugging Face folder, or has no chat template for `chat`, or the harness could not
            parse the folder's name.
        SourceError: the model's config does not specify the dtype of the weights.
    """
    model = bench.model
    if not (model / "config.json").is_file():
        raise UsageError(
            f"{model} is not a Hugging Face folder",
            MAKE,
        )
    if {",", "="} & set(str(model)):
        raise UsageError(f"the harness cannot take {model}: commas and = separate its arguments", "ln -s it elsewhere")
    files = {path.name: path for path in model.iterdir() if path.is_file()}
    template = held_template(files) is not None
    if bench.chat and not template:
        raise UsageError(f"{model} has no chat template", f"convert assets {model} --chat-template NAME, or --no-chat")
    argv = ["lm_eval", "--model", bench.backend, "--model_args"]
    arguments = {"pretrained": str(model), "dtype": bench.dtype or _dtype(model)}
    if bench.backend == "vllm":
        arguments["data_parallel_size"] = str(bench.gpus)
    elif bench.gpus > 1:
        argv = ["accelerate", "launch", "--multi_gpu", "--num_processes", str(bench.gpus), "-m", *argv]
    argv += [",".join(f"{name}={value}" for name, value in arguments.items())]
    argv += ["--tasks", bench.tasks, "--batch_size", "auto", "--output_path", str(bench.out), *bench.more]
    if template if bench.chat is None else bench.chat:
        argv += ["--apply_chat_template", "--fewshot_as_multiturn"]
    return argv


def _dtype(model: Path) -> str:
    """The dtype of the weights in a model's config: `dtype`, or `torch_dtype` before transformers 5."""
    try:
        config = json.loads((model / "config.json").read_bytes())
        dtype = config.get("dtype") or config.get("torch_dtype")
    except (ValueError, AttributeError) as error:
        raise SourceError(f"{model / 'config.json'} is damaged: {error}") from None
    if dtype not in DTYPES:
        raise SourceError(f"{model / 'config.json'} does not say the dtype of the weights", "--dtype bfloat16")
    return str(dtype)
