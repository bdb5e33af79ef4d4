"""`convert submit`: a conversion as a Slurm job; and the options that are shared with `train submit`."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from converters.commands.options import FILE, option_group
from converters.common.cli_help import command
from converters.common.cli_main import Sections
from formats.errors import UsageError

if TYPE_CHECKING:
    from converters.common.slurm import Job, Wishes

BASE_MB = 2000
"""Megabytes of memory of a conversion besides its buffers: Python, tokenizers, 16 processes of 21 MB.

Without processes 130 MB was the peak of an 8 B model on 128 ranks.
"""
PIECE = 4096
"""Bytes of memory for each block of a plan; 37,000 blocks took 82 MB."""
RATE = 100e6
"""Bytes of weights per second, for reading, writing and reading back together, on a slow shared file system."""
START = 900
"""Seconds for everything else."""
ROUND = 3600
"""Least seconds of a job that looks for new checkpoints, as it may find more than there are now."""
LOOKS = 100_000
"""Most jobs of a watch."""
OF_TRAININGS = ("partition", "nodes", "time")
"""Settings of a user that are for trainings, and do not fit a job without GPUs."""


def _settings(context: click.Context, _: click.Parameter, path: Path | None) -> None:
    """Take the defaults of options from the user's settings file."""
    from converters.common.slurm import load_settings

    if path is not None:
        context.default_map = load_settings(path)


submitting = option_group(
    click.option("--settings", type=FILE, envvar="VITRUVIAN_SETTINGS", is_eager=True,
                 expose_value=False, callback=_settings, metavar="FILE",
                 help="YAML with slurm: {site, account, …} and container: {image}.  [$VITRUVIAN_SETTINGS]"),
    click.option("--site", envvar="VITRUVIAN_SITE", default="local", show_default=True,
                 help="lumi, leonardo, or another one of containers/sites."),
    click.option("--account", metavar="PROJECT",
                 help="Project that is billed.  [default: sbatch's, such as $SBATCH_ACCOUNT]"),
    click.option("--partition", help="[default: the site's]"),
    click.option("--nodes", type=click.IntRange(1), help="[default: 1]"),
    click.option("--time", metavar="H:M:S",
                 help="Limit of a job.  [default: the estimate, within the limit of the partition]"),
    click.option("--sbatch", multiple=True, metavar="NAME=VALUE", help="Any other option, such as qos=boost_qos_dbg."),
    click.option("--image", type=FILE, envvar="VITRUVIAN_IMAGE", metavar="X.sif",
                 help="Run in this image.  [default: this Python]"),
    click.option("-n", "--dry-run", is_flag=True, help="Print the job; only the folder of its log is made."),
)  # fmt: skip


def wishes_of(options: Mapping[str, Any], *, typed: tuple[str, ...] = ()) -> Wishes:
    """The user's settings of a job from the options of `submitting`.

    Args:
        options: the values of the options.
        typed: options that count only on the command line: in a user's settings file they are meant for trainings.
    """
    from converters.common.slurm import Wishes, options_of

    settings, source = click.core.ParameterSource.DEFAULT_MAP, click.get_current_context().get_parameter_source
    given = {
        name: str(options[name])
        for name in ("account", "partition", "nodes", "time")
        if options[name] and not (name in typed and source(name) == settings)
    }
    return Wishes(options["site"], given | options_of(options["sbatch"]), options["image"])


def _require_internet(site: str, job: Job, words: tuple[str, ...], push: str | None) -> None:
    """Refuse nodes without internet for a conversion that reads from or sends to an address.

    Raises:
        UsageError: the nodes have no internet.
    """
    from converters.common.slurm import load_site

    online, partition = load_site(site).online, job.header.get("partition", "any partition")
    outside = [f"--push {push}"] if push else [word for word in words if "://" in word]
    if outside and online is not None and partition not in online:
        raise UsageError(
            f"{outside[0]} needs the internet, which jobs of {site} in {partition} do not have",
            "work on folders of this machine, and `convert push OUT ORG/NAME` on a login node",
        )


def hand_over(job: Job, dry_run: bool) -> str:
    """Print a job and return its name, or submit it, print its number and return that."""
    from converters.common.slurm import submit

    if dry_run:
        job.folder.mkdir(parents=True, exist_ok=True)  # sbatch does not create it
        click.echo(job.text, nl=False)
        return job.name
    click.echo(job.cost, err=True)
    number = submit(job)
    click.echo(f"Submitted batch job {number}")
    return number


@command(context_settings={"ignore_unknown_options": True})
@submitting
@click.option(
    "--part",
    "parts",
    type=click.IntRange(2),
    metavar="N",
    help="Split it over N tasks; one more job finishes and verifies.",
)
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="COMMAND SRC OUT …")
@click.pass_context
def submit(context: click.Context, /, words: tuple[str, ...], **options: Any) -> None:
    """Submit a conversion to Slurm, as one job without GPUs or as several.

    The plan, made here from headers alone, gives memory, time and partition. A job that runs out of time is followed
    by one that resumes. With --part a last job waits for all others; -n prints a placeholder for their job ids. `watch`
    becomes a chain of short jobs, each of which checks once.
    """  # \b is the sign of click for lines as they stand
    from converters.common.cores import MOST
    from converters.common.progress import size
    from converters.common.slurm import cpu_job
    from converters.plan.request import EACH_MEMORY

    wishes, parts, dry_run = wishes_of(options, typed=OF_TRAININGS), options["parts"], options["dry_run"]
    plans, asked = _plans(context, words)
    seconds = sum(plan["bytes"] for plan in plans) / RATE
    buffers = asked["memory"] or EACH_MEMORY * MOST  # the job uses as many threads as it has cores
    megabytes = BASE_MB + (buffers + PIECE * max((plan.get("blocks", 0) for plan in plans), default=0)) / 10**6
    name, command, watching = words[0], ["convert", *words], "every" in asked
    if watching and parts:
        raise UsageError("--part is for one conversion", "several watches share the work: submit it several times")
    run, time = ([*command, "--once"], max(ROUND, START + seconds)) if watching else (command, START + seconds)
    job = cpu_job(name, run, wishes, time, megabytes)
    _require_internet(wishes.site, job, words, asked.get("push") or asked.get("repo"))
    for needs in (plan["target"]["needs"] for plan in plans if not watching):
        click.echo(f"{asked['out']} needs {size(needs['bytes'])} in {needs['files']} files and folders", err=True)
    if watching:
        looks = {"LINKS": f"${{VITRUVIAN_LINKS:-{LOOKS}}}", "PAUSE": f"{60 * asked['every']:.0f}"}
        log = {"output": str(job.folder).replace("%", "%%") + "/%x.out"}  # one file, not one a look
        job = replace(job, settings={**job.settings, **looks}, header={**job.header, **log})
    if parts:  # a part that runs out of time is not resumed: the last job has time for all that is left
        part = cpu_job(f"{name}-part", command, wishes, START + seconds / parts, megabytes, array=f"1-{parts}")
        share = {"COMMAND+": f'(--part "$SLURM_ARRAY_TASK_ID/{parts}")', "LINKS": "1"}
        number = hand_over(replace(part, settings={**part.settings, **share}), dry_run)
        job = replace(job, header={**job.header, "dependency": f"afterany:{number}"})
    hand_over(job, dry_run)


def _plans(context: click.Context, words: tuple[str, ...]) -> tuple[list[Mapping[str, Any]], Mapping[str, Any]]:
    """The plans of a conversion, from its own dry run, and its options.

    Raises:
        UsageError: the words are no conversion.
    """
    group = context.parent.command if context.parent else None
    name, *rest = words or ("",)
    if not isinstance(group, Sections) or name not in group.sections["Convert"] or name == "submit":
        raise UsageError(f"{name!r} is no conversion", "convert submit --site lumi hf2megatron SRC OUT --tp 8")
    shown, conversion = io.StringIO(), group.commands[name]
    with contextlib.redirect_stdout(shown), conversion.make_context(name, [*rest, "--dry-run", "--json"]) as called:
        conversion.invoke(called)
    text, decoder = shown.getvalue().strip(), json.JSONDecoder()
    plans = []
    while text:
        plan, end = decoder.raw_decode(text)
        text = text[end:].lstrip()
        plans.append(plan)
    return plans, called.params
