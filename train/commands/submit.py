"""`train submit`: submits a training as a chain of Slurm jobs; evaluations, data commands and preflights as jobs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from converters.commands.options import FILE
from converters.commands.submit import OF_TRAININGS, hand_over, submitting, wishes_of
from converters.common.cli_help import command
from formats.errors import UsageError

DATA = ("fetch", "lint", "tokenize", "show", "count", "pack", "packs", "role-bins")
"""Commands that are submitted as a job without GPUs."""


@command(context_settings={"ignore_unknown_options": True})
@submitting
@click.option(
    "--jobs", default="auto", show_default=True, metavar="auto|N", help="Maximum number of jobs in the chain."
)
@click.option("--bench", type=FILE, metavar="FILE", help="Batch script to submit whenever a job has left a checkpoint.")
@click.option("--launcher", type=click.Choice(["srun", "torchrun"]), default="srun", show_default=True,
              help="A task for each GPU, or for each node.")  # fmt: skip
@click.option("--save-seconds", type=click.IntRange(1, 65535), default=600, show_default=True,
              help="Seconds before the end of a job at which the training gets the signal to save.")  # fmt: skip
@click.option("--preflight", is_flag=True, help="Instead of a training: examine each node, and the link between them.")
@click.argument("argv", nargs=-1, type=click.UNPROCESSED, metavar="CONFIG.yml … | COMMAND …")
def submit(argv: tuple[str, ...], **options: Any) -> None:
    """Submit a training to Slurm as a chain of jobs; an evaluation, a data command or a preflight as one job.

    \b
    train submit run1/config.yml --site lumi --account P --nodes 24
    train submit --preflight --site lumi --account P --nodes 24
    train submit --site lumi --account P eval run1 --all
    train submit --site leonardo --account P tokenize --input …

    Each job submits the next one, if there are steps left and it has written a checkpoint. Script and logs go into the
    folder slurm beside CONFIG. -n prints the script, which may be edited and passed to sbatch.
    """  # noqa: D301  # \b makes click keep the line breaks
    from train.tools import submit as jobs

    kind = argv[0] if argv else ""
    wishes = wishes_of(options, typed=OF_TRAININGS if kind in DATA else ("time",) if options["preflight"] else ())
    if options["preflight"]:
        if argv:
            raise UsageError(
                f"--preflight examines nodes, it does not run {argv[0]}", "submit that with another command"
            )
        job = jobs.preflight(wishes)
    elif not argv:
        raise UsageError("nothing to submit", "train submit CONFIG.yml, or --preflight")
    elif argv[0] in DATA:
        job = jobs.data(argv, wishes)
    elif argv[0] == "eval":
        from train.commands.evaluate import evaluate
        from train.start.run_folder import open_run

        params = evaluate.make_context("eval", list(argv[1:])).params
        open_run(params["run"], params["overrides"])
        job = jobs.evaluation(argv, wishes, options["launcher"])
    else:
        if options["jobs"] != "auto" and not (options["jobs"].isdigit() and int(options["jobs"])):
            raise UsageError(f"--jobs {options['jobs']} is neither auto nor a number")
        links = 1000 if options["jobs"] == "auto" else int(options["jobs"])
        job = jobs.training(
            Path(argv[0]), argv[1:], wishes, links, options["bench"], options["launcher"], options["save_seconds"]
        )
        if options["dry_run"]:  # to be edited, also where the training would refuse its ranks
            hand_over(job, dry_run=True)
        jobs.require_batch(Path(argv[0]), argv[1:], wishes)
        if options["dry_run"]:
            return
    hand_over(job, options["dry_run"])
