"""`train init`: makes a run folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from converters.commands.options import FILE, FOLDER, option_group
from converters.common.cli_help import command
from formats.errors import UsageError
from train.settings.other_trainers import TRAINERS
from train.settings.presets import preset, sources

others = option_group(
    *(
        click.option(f"--from-{name}", name.replace("-", "_"), type=FILE, help=f"Take the settings of {trainer.name}.")
        for name, trainer in TRAINERS.items()
    )
)


@command()
@click.argument("folder", type=FOLDER)
@click.option("--from", "start", type=FOLDER, help="Checkpoint of any format to start from.")
@click.option("--after", "before", type=FILE, help="Settings of the phase that this one follows.")
@click.option("--data", multiple=True, type=FILE, required=True, help="Token files, without .bin.")
@click.option("--config", type=FOLDER, help="Hugging Face folder, for a checkpoint without its own.")
@click.option(
    "--gqa-layout", type=click.Choice(["auto", "blocked", "grouped"]), default="auto",
    help="QKV order of a GPT-NeoX checkpoint, as for `convert`.",
)  # fmt: skip
@click.option("--preset", "preset_name", metavar="NAME", help="Take the settings of a published recipe.")
@others
def init(
    folder: Path,
    start: Path | None,
    before: Path | None,
    data: tuple[Path, ...],
    config: Path | None,
    gqa_layout: str,
    preset_name: str | None,
    **others: Path | None,
) -> None:
    """Make a run folder: every setting explained, the start linked.

    \b
    train init run1 --from final_train_v2/global_step423858 --data P_text_document
    train init run2 --after run1/config.yml --data Q_text_document
    train init r3 --from BASE --data P_text_document --preset llama-3.1-8b/lumi-8

    A checkpoint's global step becomes the iteration offset. A phase that follows another one uses its save folder.
    Of another trainer's file it is printed what each key became, and what was left; the start is its model if that
    is a folder here.
    """  # noqa: D301  # \b makes click keep the line breaks
    from train.tools.init_folder import init as begin
    from train.tools.init_folder import init_after

    given = {name.replace("_", "-"): path for name, path in others.items() if path is not None}
    if len(given) > 1 or (given and before is not None):
        raise UsageError("give one file of settings", f"--from-{next(iter(given))} or the other one")
    if preset_name is not None and (given or before is not None):
        raise UsageError("--preset gives settings, and so does another option", "give one of them")
    settings = _translated(*next(iter(given.items()))) if given else {}
    ranks = 8
    if preset_name is not None:
        chosen = preset(preset_name)
        settings, ranks = {key: value for key, (value, _) in chosen.settings.items()}, chosen.ranks
        for line in sources(preset_name):
            click.echo(line, err=True)
    if start is None and given:
        start = Path(str(settings.get("model.path")))
        if not start.is_dir():
            raise UsageError(f"the model {start} is not a folder here", "--from FOLDER names it")
    if (start is None) == (before is None):
        raise UsageError("give one of --from CHECKPOINT and --after CONFIG")
    if before is not None and (config is not None or gqa_layout != "auto"):
        raise UsageError("--config and --gqa-layout belong to --from: the previous phase has its own")
    if before is not None:
        path = init_after(folder, before, data)
    else:
        path = begin(folder, Path(str(start)), data, config, gqa_layout, settings)
    click.echo(path)
    click.echo(
        f"hint: look at it, then: train plan {path} --ranks {ranks} && "
        f"torchrun --nproc-per-node 8 -m vitruvian train run {path}",
        err=True,
    )


def _translated(name: str, path: Path) -> dict[str, Any]:
    """Our settings from a file of another trainer; prints what each key became."""
    from train.settings.translation import translate

    settings, lines = translate(TRAINERS[name], path)
    for line in lines:
        click.echo(line, err=True)
    return settings
