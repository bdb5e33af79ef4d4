"""`train submit`: a training as a chain of jobs, and what comes before and after it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from converters.commands.options import FILE
from converters.commands.submit import OF_TRAININGS, hand_over, submitting, wishes_of
from formats.errors import UsageError

DATA = ("fetch", "lint", "tokenize", "show", "count", "pack", "packs", "role-bins")
"""Commands that run as a job without GPUs."""


@click.command(context_settings={"ignore_unknown_options": True})
@submitting
@click.option("--jobs", default="auto", show_default=True, metavar="auto|N", help="Jobs of the chain at the most.")
@click.option("--bench", type=FILE, metavar="FILE", help="Batch script to submit whenever a job has left a checkpoint.")
@click.option("--launcher", type=click.Choice(["srun", "torchrun"]), default="srun", show_default=True,
              help="A task for each GPU, or for each node.")  # fmt: skip
@click.option("--save-seconds", type=click.IntRange(1, 65535), default=600, show_default=True,
              help="How long before the end of a job the training is told to save.")  # fmt: skip
@click.option("--preflight", is_flag=True, help="Instead of a training: examine each node, and the link between them.")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="CONFIG.yml … | COMMAND …")
def submit(words: tuple[str, ...], **options: Any) -> None:
    """A training as a chain of jobs until it is done; an evaluation, data work or a preflight as one job.

    \b
    train submit run1/config.yml --site lumi --account P --nodes 24 [--optim.lr 1e-5 …]
    train submit --preflight --site lumi --account P --nodes 24
    train submit --site lumi --account P eval run1 --all
    train submit --site leonardo --account P tokenize --input …

    Each job submits the next one, if there is something left and the last one has made a checkpoint. Script and logs go
    into the folder slurm beside CONFIG. -n prints the script, which may be edited and given to sbatch.
    """  # noqa: D301  # \b is the sign of click for lines as they stand
    from train.tools import submit as jobs

    kind = words[0] if words else ""
    wishes = wishes_of(options, typed=OF_TRAININGS if kind in DATA else ("time",) if options["preflight"] else ())
    if options["preflight"]:
        if words:
            raise UsageError(
                f"--preflight examines nodes, it does not run {words[0]}", "submit that in a line of its own"
            )
        job = jobs.preflight(wishes)
    elif not words:
        raise UsageError("what is to be submitted?", "train submit CONFIG.yml, or --preflight")
    elif words[0] in DATA:
        job = jobs.data(words, wishes)
    elif words[0] == "eval":
        from train.commands.evaluate import evaluate
        from train.start.run_folder import open_run

        given = evaluate.make_context("eval", list(words[1:])).params
        open_run(given["run"], given["overrides"])
        job = jobs.evaluation(words, wishes, options["launcher"])
    else:
        if options["jobs"] != "auto" and not (options["jobs"].isdigit() and int(options["jobs"])):
            raise UsageError(f"--jobs {options['jobs']} is neither auto nor a number")
        links = 1000 if options["jobs"] == "auto" else int(options["jobs"])
        job = jobs.training(
            Path(words[0]), words[1:], wishes, links, options["bench"], options["launcher"], options["save_seconds"]
        )
    hand_over(job, options["dry_run"])
