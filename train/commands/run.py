"""`train run`: a training, under torchrun, srun, or alone."""

from __future__ import annotations

from pathlib import Path

import click


@click.command(context_settings={"ignore_unknown_options": True, "help_option_names": ["-h", "--help"]})
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED)
def run(config: Path, overrides: tuple[str, ...]) -> None:
    r"""Fine-tune on packed rows.

    \b
    torchrun --nproc-per-node 8 -m train run CONFIG.yml [--optim.lr 1e-5 …]

    Every setting of the file can be given as a dotted word. Under srun with a task for each GPU torchrun is not needed.
    Run again, it goes on from its latest checkpoint.
    """  # fmt: skip
    from train.config import load_config

    settings, notes = load_config(config, overrides)

    from train.distributed import world
    from train.export import export
    from train.loop import train

    with world(settings.parallel.replicas) as ranks:
        if ranks.first:
            for note in notes:
                click.echo(f"note: {note}", err=True)
        progress = train(settings, ranks, click.echo)
    if settings.export is not None and ranks.first:
        export(settings.save.path / progress.name, settings.export)
        click.echo(f"exported to {settings.export}")
