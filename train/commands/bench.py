"""`train bench`: lm-evaluation-harness on a model, with the right arguments."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import click

from converters.commands.options import FOLDER
from converters.common.cli_help import command
from formats.errors import UnsupportedError


@command()
@click.argument("model", type=FOLDER)
@click.argument("more", nargs=-1, type=click.UNPROCESSED, metavar="[-- ARGS]")
@click.option("--tasks", required=True, metavar="A,B", help="Names of the harness: lm_eval ls tasks.")
@click.option("--backend", type=click.Choice(["hf", "vllm"]), default="hf", show_default=True)
@click.option(
    "--gpus", type=click.IntRange(1), default=1, show_default=True, help="GPUs, each with a copy of the model."
)
@click.option("--dtype", type=click.Choice(["bfloat16", "float16", "float32"]), help="[default: that of config.json]")
@click.option("--chat/--no-chat", default=None, help="Prompts in the chat template.  [default: if the model has one]")
@click.option("--out", type=FOLDER, metavar="FOLDER", help="Where results go.  [default: MODEL/benchmarks]")
@click.option("-n", "--dry-run", is_flag=True, help="Print the command, and do not run it.")
def bench(model: Path, dry_run: bool, out: Path | None, **options: Any) -> None:
    """Print the command of lm-evaluation-harness for a Hugging Face folder, and run it.

    Arguments after -- go to the harness, such as --num_fewshot 5 or --include_path FOLDER. The harness is found on the
    PATH, so it may be in an environment of its own.
    """
    from train.tools.lm_eval import Bench, command_of

    argv = command_of(Bench(model=model, out=out or model / "benchmarks", **options))
    click.echo(shlex.join(argv))
    if dry_run:
        return
    if shutil.which(argv[0]) is None:
        package = "accelerate" if argv[0] == "accelerate" else "lm_eval[hf]"
        if options["backend"] == "vllm":
            package = "lm_eval[vllm]"
        raise UnsupportedError(f"{argv[0]} is not installed here", f"pip install '{package}', or print with -n")
    process = subprocess.run(argv, check=False)  # noqa: S603  # runs the command that was printed
    raise SystemExit(process.returncode)
