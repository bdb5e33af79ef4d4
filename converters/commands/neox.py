"""The commands for checkpoints of GPT-NeoX."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from converters.commands.options import (
    FOLDER,
    OUTPUT,
    SOURCE,
    accept,
    as_json,
    chat_template,
    deepspeed_reading,
    effort,
    layout,
    opened,
    parallel,
    places,
    reading,
    reading_of,
    shard_size,
    tag,
    vocab_multiple,
    writing,
)
from converters.commands.running import convert_to
from converters.common.cli_help import command
from formats.deepspeed import NEOX
from formats.errors import UsageError
from formats.registry import format_of

ARCHITECTURES = {"gpt_neox": "neox", "llama": "llama", "mistral": "mistral"}
"""Family: its name in GPT-NeoX's own script."""


@command()
@click.argument("src", type=SOURCE, required=False)
@click.argument("out", type=OUTPUT, required=False)
@click.option("--input_dir", "old_src", type=SOURCE, hidden=True)  # the flags of GPT-NeoX's own script
@click.option("--output_dir", "old_out", type=OUTPUT, hidden=True)
@click.option("--config_file", "old_config", type=SOURCE, hidden=True)
@click.option("--architecture", type=click.Choice([*ARCHITECTURES.values()]), hidden=True)
@click.option("--precision", type=click.Choice(["auto", "bf16", "fp16", "fp32"]), hidden=True)
@deepspeed_reading
@click.option(
    "--tokenizer",
    type=FOLDER,
    metavar="FILE|FOLDER",
    help="SentencePiece model, or tokenizer.json."
    "  [default: that of the config's folder, or else the yml's vocab_file, of an HFTokenizer or SPMTokenizer, "
    "if it is here]",
)
@shard_size
@chat_template
@reading_of(NEOX)
@writing
def neox2hf(src: Path | None, out: Path | None, tokenizer: Path | None, **options: Any) -> None:
    """GPT-NeoX checkpoint to a Hugging Face folder.

    SRC is the run folder, whose `latest` names a checkpoint, or a global_stepN. --config takes the run's yml where
    SRC has none in configs/, or a Hugging Face folder. The flags of GPT-NeoX's own script are understood too.
    """
    from converters.assets.tokenizer_files import attached, load, named_in_yml
    from converters.plan.targets import require_vocab

    architecture, precision = options.pop("architecture"), options.pop("precision")
    old = [options.pop(f"old_{name}") for name in ("src", "out", "config")]
    new = [src, out, options["config"]]
    if any(one is not None and other is not None for one, other in zip(old, new, strict=True)):
        raise UsageError("the flags of GPT-NeoX's script name what is named already", "convert neox2hf RUN OUT")
    src, out, options["config"] = (one or other for one, other in zip(old, new, strict=True))
    if src is None or out is None:
        raise UsageError("two folders are needed", "convert neox2hf RUN OUT")
    if precision not in (None, "auto"):
        if options["dtype"] not in ("keep", precision):
            raise UsageError(f"--precision {precision} is not --dtype {options['dtype']}", "leave one of them out")
        options["dtype"] = precision
    source = opened(src, options, NEOX)
    if architecture not in (None, ARCHITECTURES.get(source.spec.family)):
        raise UsageError(f"--architecture {architecture}, but {src} holds a {source.spec.family}", "leave it out")
    vocabulary, notes = (load(tokenizer), ()) if tokenizer is not None else named_in_yml(source, "--tokenizer FOLDER")
    if vocabulary and source.spec.vocab is None:
        source = opened(src, options | {"vocab_size": vocabulary.size}, NEOX)
    require_vocab(source, *notes)
    source = replace(source, notes=(*source.notes, *notes))
    with tempfile.TemporaryDirectory(prefix="vitruvian-") as folder:
        if vocabulary:
            options["tokenizer"] = vocabulary.path
            source = attached(source, vocabulary, Path(folder))
        convert_to("huggingface", source, out, options)


@command()
@places
@parallel
@layout
@click.option("--iteration", type=click.IntRange(0), default=0, show_default=True, metavar="N",
              help="Write global_stepN.")  # fmt: skip
@vocab_multiple
@deepspeed_reading
@reading
@writing
def hf2neox(src: Path, out: Path, **options: Any) -> None:
    """Any checkpoint to GPT-NeoX: a run that it loads with `finetune: true`.

    From GPT-NeoX to GPT-NeoX use `convert reshard`.
    """
    source = opened(src, options)
    if format_of(source) is NEOX:
        raise UsageError(f"{src} is a checkpoint of GPT-NeoX already", "for another topology use `convert reshard`")
    convert_to("neox", source, out, options)


@command("average-norms")
@click.argument("run", type=FOLDER)
@click.argument("out", type=FOLDER)
@tag
@click.option("--config", type=FOLDER, metavar="YML", help="The run's yml, where RUN has none in configs/.")
@accept
@click.option("-n", "--dry-run", is_flag=True, help="Say what would be written, and write nothing.")
@click.option("--force", is_flag=True, help="Replace the checkpoint in OUT.")
@effort
@as_json
def average_norms(run: Path, out: Path, dry_run: bool, as_json: bool, **options: Any) -> None:
    """GPT-NeoX checkpoint with its norms averaged over tensor parallel ranks.

    In the model and in the FP32 master weights, in the same topology; what holds no norm is a hard link. OUT is a run
    folder to train on from, with or without `finetune: true`.
    """
    from converters import average_norms
    from converters.commands.inspect_text import drift_lines
    from converters.common.progress import size
    from converters.convert import check_paths
    from converters.plan.request import Limits, Request
    from formats.checkpoint import Settings

    limits = Limits(options["threads"], options["memory"])
    request = Request(out, force=options["force"])
    settings = Settings(config=options["config"], tag=options["tag"], accept=options["accept"])
    work = average_norms.plan(run, settings, request)
    written = sum(path.stat().st_size for path in work.written)
    facts = {"out": str(out), "written": len(work.written), "bytes": written, "linked": len(work.linked)}
    if dry_run:
        check_paths(work.source, request)
    drifted = {} if dry_run else average_norms.run(work, request, limits)
    if as_json:
        click.echo(json.dumps(facts | {"averaged": drifted}))
        return
    for line in drift_lines(drifted):
        click.echo(line, err=True)
    verb = "would be written" if dry_run else "written"
    click.echo(f"{out}: {len(work.written)} files {verb}, {size(written)}; {len(work.linked)} linked")
