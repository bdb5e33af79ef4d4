"""The commands that write a checkpoint, except those of GPT-NeoX and DeepSpeed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from converters.commands.options import (
    NAMED,
    OUTPUT,
    SOURCE,
    adapter,
    archive,
    at_iteration,
    chat_template,
    deepspeed_reading,
    experts,
    for_trainer,
    iteration_folder,
    layout,
    megatron_files,
    megatron_version,
    opened,
    optimizer_kind,
    parallel,
    places,
    reading,
    reading_of,
    shard_size,
    stages,
    topology,
    true_vocab_size,
    vocab_multiple,
    writing,
)
from converters.commands.running import carry_out, convert_to, is_written, output_of, request_of
from converters.common.cli_help import Finite, command
from formats.deepspeed import NEOX
from formats.errors import SourceError, UsageError
from formats.fsdp import FSDP
from formats.huggingface import HUGGINGFACE, MAXTEXT, MISTRAL, NANOTRON
from formats.megatron import DIST, MEGATRON, MEGATRON_FSDP
from formats.registry import format_of

USE_HF2MEGATRON = "any other format to Megatron is `convert hf2megatron`"
USE_RESHARD = "for Megatron to Megatron use `convert reshard`"
READ = (MEGATRON_FSDP, DIST, MEGATRON)
"""The formats of Megatron."""


@command()
@places
@megatron_files
@archive
@topology
@stages
@experts
@megatron_version
@for_trainer
@vocab_multiple
@click.option("--iteration", type=click.IntRange(1), metavar="N", help="Write iter_N instead of release.")
@true_vocab_size
@click.option(
    "--with-optimizer",
    is_flag=True,
    help="Convert the optimizer too (FP32 master weights, moments, step), so that Megatron resumes the training.",
)
@click.option(
    "--consumed-samples",
    type=click.IntRange(0),
    metavar="N",
    help="With the optimizer: where Megatron's schedule and data resume.  [default: what SRC says]",
)
@click.option(
    "--lr",
    type=Finite(0),
    metavar="RATE",
    help="With the optimizer: --lr of the training that resumes, by which Megatron-LM 0.19 finds parameter groups.",
)
@click.option("--min-lr", type=Finite(0), metavar="RATE", help="With --lr: its --min-lr.  [default: 0]")
@optimizer_kind
@deepspeed_reading
@reading
@writing
def hf2megatron(src: Path, out: Path, **options: Any) -> None:
    """Any checkpoint to Megatron: tensor and pipeline shards, or one for any topology.

    From Megatron to Megatron use `convert reshard`.
    """
    source = opened(src, options)
    if format_of(source) in READ:
        raise UsageError(f"{src} is a checkpoint of Megatron already", USE_RESHARD)
    convert_to("megatron", source, out, options)


@command()
@places
@shard_size
@at_iteration
@chat_template
@click.option("--adapter", type=click.Choice(["only"]),
              help="Of a training of Megatron-Bridge with LoRA: the adapter, as PEFT saves it.")  # fmt: skip
@reading_of(*READ)
@writing
def megatron2hf(src: Path, out: Path, **options: Any) -> None:
    """Megatron checkpoint to a Hugging Face folder.

    SRC is the run folder, an iter_* folder, or release/, of Megatron-LM or Megatron-LLM.
    """
    source = opened(iteration_folder(src, options.pop("iteration")), options, *READ)
    convert_to("huggingface", source, out, options)


@command()
@click.argument("src", type=SOURCE, required=False)
@click.argument("out", type=OUTPUT, required=False)
@shard_size
@chat_template
@adapter
@click.option(
    "--push", "repo", type=NAMED, metavar="ORG/NAME", help="Then send OUT to the Hub, as `convert push` does."
)
@click.option("--fsdp_checkpoint_path", "old_src", type=SOURCE, hidden=True)
@click.option("--consolidated_model_path", "old_out", type=OUTPUT, hidden=True)
@click.option("--hf_model_path_or_name", "--HF_model_path_or_name", "old_config", type=SOURCE, hidden=True)
@reading_of(FSDP)
@writing
@click.pass_context
def fsdp2hf(context: click.Context, /, src: Path | None, out: Path | None, repo: str | None, **options: Any) -> None:
    """FSDP checkpoint of any trainer to a Hugging Face folder.

    SRC is the folder with .metadata and .distcp files, the checkpoint-N around it, or a folder of per-rank dumps. Of a
    folder with several checkpoint-N, each becomes OUT/checkpoint-N, the newest first.
    """
    from converters.commands.publish import push
    from converters.common.hub_names import folder_of
    from converters.hub.push_plan import check_names
    from converters.hub.upload import require_token
    from converters.plan.output import plan_output
    from formats.fsdp.runs import checkpoints

    old_src, old_out, old_config = (options.pop(name) for name in ("old_src", "old_out", "old_config"))
    if old_src is not None and src is None:  # the flags and the default output of ControlLLM's converter
        src, out = old_src, out or old_out or old_src.parent / "hf" / old_src.name
    options["config"] = options["config"] or old_config
    if src is None or out is None:
        raise UsageError("two folders are needed", "convert fsdp2hf CHECKPOINT OUT --config BASE")
    runs = {run: out / run.name for run in checkpoints(folder_of(src).folder, FSDP.reader.detect)} or {src: out}
    if repo and len(runs) > 1:
        raise UsageError(f"{src} holds {len(runs)} checkpoints, --push sends one", f"name one: {next(iter(runs))}")
    if repo:
        check_names(repo, None)
    if repo and not options["dry_run"]:
        require_token()
    failed: list[SourceError] = []
    for run, place in runs.items():
        try:
            source = opened(run, options, FSDP)
            request = request_of(place, options, source)
            plan = plan_output(source, request, "huggingface", output_of(options))
            if len(runs) > 1 and not request.force and is_written(plan, request):
                click.echo(f"note: {place} is there already, {run} is not converted again", err=True)
            else:
                carry_out(plan, request, options, "huggingface")
        except SourceError as error:  # noqa: PERF203  # an unfinished save must not stop the conversion of the others
            if len(runs) == 1:
                raise
            click.echo(f"error: {error}", err=True)
            failed.append(error)
    if failed:
        raise SourceError(f"{len(failed)} of {len(runs)} checkpoints of {src} were not converted", failed[0].hint)
    if repo and options["dry_run"]:
        if not options["as_json"]:
            click.echo(f"then   push {out} to {repo}")
    elif repo and options["share"] is None:
        context.invoke(push, out=out, repo=repo, quiet=options["quiet"], as_json=options["as_json"])


@command()
@places
@shard_size
@chat_template
@click.option("--quantize", type=click.Choice(["fp8-block"]), help="FP8 with a scale for each block of 128 x 128.")
@reading_of(HUGGINGFACE)
@writing
def hf2hf(src: Path, out: Path, **options: Any) -> None:
    """Hugging Face folder to another one: cast, other file sizes, FP8, a chat template with rows for its tokens."""
    convert_to("huggingface", opened(src, options, HUGGINGFACE), out, options)


@command()
@places
@shard_size
@chat_template
@reading_of(MISTRAL)
@writing
def mistral2hf(src: Path, out: Path, **options: Any) -> None:
    """Mistral's own files (consolidated.safetensors, params.json) to a Hugging Face folder."""
    convert_to("huggingface", opened(src, options, MISTRAL), out, options)


@command()
@places
@deepspeed_reading
@reading
@writing
def hf2mistral(src: Path, out: Path, **options: Any) -> None:
    """Any checkpoint of a Mistral or Mixtral to Mistral's own files: consolidated.safetensors with params.json."""
    source = opened(src, options)
    if format_of(source) is MISTRAL:
        raise UsageError(f"{src} holds Mistral's own files already", "there is nothing to do")
    convert_to("mistral", source, out, options)


@command()
@places
@shard_size
@chat_template
@reading_of(NANOTRON)
@writing
def nanotron2hf(src: Path, out: Path, **options: Any) -> None:
    """Checkpoint of nanotron to a Hugging Face folder.

    SRC is the folder of a step, or of a run, of which the last step is taken.
    """
    convert_to("huggingface", opened(src, options, NANOTRON), out, options)


@command()
@places
@shard_size
@chat_template
@reading_of(MAXTEXT)
@writing
def maxtext2hf(src: Path, out: Path, **options: Any) -> None:
    """Checkpoint of MaxText to a Hugging Face folder.

    SRC is the folder of a step, or items in it. Needs the package tensorstore: pip install 'vitruvian[orbax]'.
    """
    convert_to("huggingface", opened(src, options, MAXTEXT), out, options)


@command()
@places
@parallel
@vocab_multiple
@click.option(
    "--with-optimizer",
    is_flag=True,
    help="Convert the optimizer too (FP32 master weights, moments, step), for a training of these --tp and --pp.",
)
@deepspeed_reading
@reading
@writing
def hf2nanotron(src: Path, out: Path, **options: Any) -> None:
    """Any checkpoint to nanotron, whose training loads the weights at any topology.

    The vocabulary has to divide over the tensor parallel ranks of the training.
    """
    convert_to("nanotron", opened(src, options), out, options)


@command()
@places
@click.option(
    "--ranks",
    type=click.IntRange(1, 100_000),
    default=1,
    show_default=True,
    help="How many .distcp files; any number of ranks can load them.",
)
@click.option(
    "--with-optimizer",
    is_flag=True,
    help="Convert the optimizer too (FP32 master weights, moments, step); any number of ranks resumes the training.",
)
@click.option(
    "--names",
    type=click.Choice(["huggingface", "torchtitan", "olmo-core"]),
    help="Names of the tensors: Hugging Face's, or those that a trainer has of its own.  [default: huggingface]",
)
@deepspeed_reading
@reading
@writing
def hf2fsdp(src: Path, out: Path, **options: Any) -> None:
    """Any checkpoint to FSDP: a folder that torch.distributed.checkpoint loads.

    Name OUT checkpoint-0/pytorch_model_fsdp_0 for accelerate and the HF Trainer.
    """
    convert_to("fsdp", opened(src, options), out, options)


@command()
@places
@megatron_files
@archive
@topology
@stages
@experts
@megatron_version
@for_trainer
@layout
@vocab_multiple
@at_iteration
@true_vocab_size
@click.option(
    "--with-optimizer",
    is_flag=True,
    help="Megatron: the optimizer and its scheduler too, to resume at the new topology.",
)
@optimizer_kind
@deepspeed_reading
@reading_of(NEOX)
@writing
def reshard(src: Path, out: Path, **options: Any) -> None:
    """Megatron or GPT-NeoX shards to shards of another topology."""
    source = opened(iteration_folder(src, options.pop("iteration")), options)
    if format_of(source) not in (*READ, NEOX):
        raise UsageError(f"{src} is a checkpoint of the format {source.format}, which has no shards", USE_HF2MEGATRON)
    if format_of(source) is NEOX and options["with_optimizer"]:
        raise UsageError(
            "--with-optimizer is for Megatron", "`convert zero2universal` converts the optimizer of GPT-NeoX too"
        )
    convert_to("neox" if format_of(source) is NEOX else "megatron", source, out, options)
