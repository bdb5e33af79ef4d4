"""`train eval`: scores of checkpoints, without touching the training."""

from __future__ import annotations

from pathlib import Path

import click

from converters.commands.options import FOLDER, NAMED, FilledPath, as_json
from converters.common.cli_help import command
from formats.errors import UsageError


@command(
    "eval", context_settings={"ignore_unknown_options": True}
)  # fmt: skip
@click.argument("run", type=FOLDER)
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--checkpoint",
    type=NAMED,
    metavar="N|FOLDER",
    help="Global step in RUN, or any checkpoint; see `convert formats`.  [default: latest]",
)
@click.option("--all", "whole", is_flag=True, help="Each global_step* and iter_* of the run that has no results yet.")
@click.option(
    "--ppl",
    "texts",
    type=FilledPath(exists=True, file_okay=False),
    metavar="FOLDER",
    help="Instead of the validation sets: its *.jsonl, records with text.",
)
@click.option(
    "--out",
    type=FOLDER,
    metavar="FOLDER",
    help="Where STEP.csv goes.  [default: RUN/perplexity, with --ppl a folder in it]",
)
@as_json
def evaluate(
    run: Path,
    overrides: tuple[str, ...],
    checkpoint: str | None,
    whole: bool,
    texts: Path | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """Perplexity, ROUGE and BLEU of checkpoints.

    RUN is a run folder or a file of settings; any setting can be given as a dotted option, such as
    --evaluate.metrics '[rouge, bleu]'. A checkpoint of GPT-NeoX, Megatron, DeepSpeed or another trainer is converted to
    a temporary Hugging Face folder in RUN. Under torchrun or srun the numbers are the same on any number of ranks.
    """
    from train.once import reported_once

    with reported_once():
        _evaluate(run, overrides, checkpoint, whole, texts, out, as_json)


def _evaluate(
    run: Path,
    overrides: tuple[str, ...],
    checkpoint: str | None,
    whole: bool,
    texts: Path | None,
    out: Path | None,
    as_json: bool,
) -> None:
    from train.start.run_folder import open_run

    if whole and checkpoint is not None:
        raise UsageError("--all and --checkpoint exclude each other")
    settings, notes = open_run(run, overrides)

    from train.distributed import world
    from train.run.evaluate import CSV, line_of, write_csv, write_scores
    from train.tools.eval_saved import every, facts_of, find, inside_of, score

    def note(text: str) -> None:
        click.echo(f"note: {text}", err=True)

    save = settings.save.path
    folder = out or (save / CSV / texts.resolve().name if texts else save / CSV)
    parallel = settings.parallel
    with world(1, parallel.timeout_minutes, parallel.context, parallel.tensor) as ranks:
        places = ranks.from_first(
            lambda: (
                [place for place in every(save) if not (folder / f"{place.step}.csv").is_file()]
                if whole
                else [find(save, checkpoint or "latest")]
            )
        )
        if not whole and out is not None and places[0].step is None:
            raise UsageError(f"{places[0].path} has no global step, which names the file in --out", "--json prints all")
        for text in notes if ranks.first else []:
            note(text)
        if ranks.first and not places:
            note(f"every checkpoint of {save} has its results in {folder}")
        for place, scores in score(settings, places, texts, ranks, note) if places else ():
            if not ranks.first:
                continue
            if place.progress is not None and folder == save / CSV:
                if replaced := write_scores(save, place.progress, scores):
                    note(replaced)
            elif place.step is not None and (out is not None or inside_of(save, place)):
                write_csv(folder, place.step, scores)
            click.echo(facts_of(place, scores) if as_json else line_of(place.step, scores))
