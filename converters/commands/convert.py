"""The commands that write a checkpoint, but those of GPT-NeoX and DeepSpeed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from converters.commands.options import (
    DIALECTS,
    FOLDER,
    OF_CORE,
    Size,
    at_iteration,
    chat_template,
    deepspeed_reading,
    experts,
    flag_of,
    iteration_folder,
    known_by,
    layout,
    megatron_version,
    opened,
    optimizer_kind,
    places,
    reading,
    reading_of,
    require_effect,
    shard_size,
    stages,
    topology,
    true_vocab_size,
    vocab_multiple,
    writing,
)
from converters.commands.running import carry_out, is_written, request_of, to_huggingface
from formats.deepspeed import NEOX
from formats.errors import SourceError, UsageError
from formats.fsdp import FSDP
from formats.huggingface import HUGGINGFACE
from formats.megatron import DIST, MEGATRON
from formats.registry import format_of

if TYPE_CHECKING:
    from converters.plan.plan import Plan
    from converters.plan.request import Request
    from formats.checkpoint import Checkpoint
    from formats.megatron.args.options import Options

USE_HF2MEGATRON = "any other format to Megatron is `convert hf2megatron`"
USE_RESHARD = "for Megatron to Megatron use `convert reshard`"
READ = (DIST, MEGATRON)
"""The formats of Megatron."""
OF_DIALECTS = {**dict.fromkeys(OF_CORE, ("torch", "torch_dist")), "tokens": ("megatron-llm",)}
"""Option: each --format of Megatron that it is for."""
SIZES = ("tp", "pp", "vpp")
"""Options that say 1 where they say nothing."""


@click.command()
@places
@click.option(
    "--format",
    "kind",
    type=click.Choice([*DIALECTS]),
    default="torch",
    show_default=True,
    help="megatron-core's --ckpt-format torch or torch_dist, or the files of Megatron-LLM.",
)
@topology
@stages
@click.option(
    "--norm",
    type=click.Choice(["te", "local"]),
    help="Names of the norms: Transformer Engine's or those of the local layers.  [default: te]",
)
@experts
@megatron_version
@vocab_multiple
@click.option("--iteration", type=click.IntRange(1), metavar="N", help="Write iter_N instead of release.")
@true_vocab_size
@click.option(
    "--with-optimizer",
    is_flag=True,
    help="Of a training in another framework: masters, moments and step too; Megatron goes on with it.",
)
@click.option(
    "--consumed-samples",
    "samples",
    type=click.IntRange(0),
    metavar="N",
    help="With the optimizer: where Megatron's schedule and data go on.  [default: what SRC says]",
)
@optimizer_kind
@deepspeed_reading
@reading
@writing
def hf2megatron(src: Path, out: Path, **options: Any) -> None:
    """Any checkpoint to Megatron: tensor and pipeline shards, or one for any topology.

    From Megatron to Megatron it is `convert reshard`.
    """
    from converters.plan.targets import plan_megatron

    source = opened(src, options)
    if format_of(source) in READ:
        raise UsageError(f"{src} is a checkpoint of Megatron already", USE_RESHARD)
    wanted = _wanted(options, options["norm"] or "te", options["multiple"], _dialect(options))
    request = request_of(out, options, source)
    _require_optimizer(options)
    if options["with_optimizer"]:
        from converters.plan.training_state import plan_resumed

        _require_core(wanted.dialect)
        if options["tokens"] is not None:
            raise UsageError("tokens that are new have no moments", "leave --true-vocab-size out")
        kind = options["optimizer"] or "plain"
        plan = plan_resumed(source, request, wanted, options["iteration"], options["samples"], kind)
    else:
        plan = plan_megatron(source, request, wanted, options["iteration"], options["tokens"])
    carry_out(plan, request, options)


def _require_optimizer(options: Mapping[str, Any]) -> None:
    """What is said of an optimizer is said of one that goes on."""
    for name in ("optimizer", "samples"):
        if options.get(name) is not None and not options["with_optimizer"]:
            raise UsageError(f"--{flag_of(name)} is for a training that goes on", "add --with-optimizer")


def _require_core(dialect: str) -> None:
    """An optimizer goes on in megatron-core only."""
    from formats.megatron import megatron_llm

    if dialect == megatron_llm.NAME:
        raise UsageError(f"an optimizer cannot go on with the format {dialect}", "leave --with-optimizer out")


def _dialect(options: Mapping[str, Any], known: str = "") -> str:
    """The dialect that is to be written: that of --format, or the one that is known.

    Raises:
        UsageError: an option is for another one.
    """
    dialect = DIALECTS.get(options["kind"], known)
    for name, kinds in OF_DIALECTS.items():
        if options[name] not in (None, ()) and dialect not in map(DIALECTS.get, kinds):
            known_for = " and ".join(kinds)
            raise UsageError(f"--{flag_of(name)} is for Megatron folders of the format {known_for}", "leave it out")
    return dialect


def _wanted(options: Mapping[str, Any], norm: str, multiple: int, dialect: str) -> Options:
    """How the Megatron folder is to be written. A pipeline layout says itself how many virtual chunks there are."""
    from formats.megatron.args.options import Options
    from formats.megatron.pipeline import virtual_chunks

    ends, layout = (options["first_stage_layers"], options["last_stage_layers"]), options["pp_layout"]
    if layout is not None and ends != (None, None):
        raise UsageError("--pp-layout says how many layers each stage has", "leave --first/last-stage-layers out")
    if options["pp"] == 1 and (layout is not None or ends != (None, None)):
        raise UsageError("one pipeline stage holds all layers", "add --pp")
    vpp = options["vpp"] if layout is None or options["vpp"] > 1 else virtual_chunks(layout, options["pp"])
    spread = {"ep": options["ep"] or 1, "etp": options["etp"], "experts": options["experts"]}
    spread |= {"interleave": options["interleave"] or 0, "shared_interleave": options.get("shared_interleave") or 0}
    spread |= {"version": options["version"], "accepted": options["accept"]}
    return Options(options["tp"], options["pp"], vpp, norm, multiple, dialect, *ends, layout, **spread)


@click.command()
@places
@click.option(
    "--shard-size",
    type=Size(),
    help="Size of each safetensors file.  [default: the files that the model once had, else 5GB]",
)
@at_iteration
@chat_template
@reading_of(*READ)
@writing
def megatron2hf(src: Path, out: Path, **options: Any) -> None:
    """Megatron checkpoint to a Hugging Face folder.

    SRC is the run folder, an iter_* folder, or release/, of Megatron-LM or Megatron-LLM.
    """
    to_huggingface(opened(iteration_folder(src, options["iteration"]), options, *READ), out, options)


@click.command()
@click.argument("src", type=FOLDER, required=False)
@click.argument("out", type=FOLDER, required=False)
@shard_size
@chat_template
@click.option("--push", "repo", metavar="ORG/NAME", help="Then send OUT to the Hub, as `convert push` does.")
@click.option("--fsdp_checkpoint_path", "old_src", type=FOLDER, hidden=True)
@click.option("--consolidated_model_path", "old_out", type=FOLDER, hidden=True)
@click.option("--hf_model_path_or_name", "--HF_model_path_or_name", "old_config", type=FOLDER, hidden=True)
@reading_of(FSDP)
@writing
@click.pass_context
def fsdp2hf(context: click.Context, /, src: Path | None, out: Path | None, repo: str | None, **options: Any) -> None:
    """FSDP checkpoint of any trainer to a Hugging Face folder.

    SRC is the folder with .metadata and .distcp files, the checkpoint-N around it, or a folder of per-rank dumps. Of a
    folder with several checkpoint-N, each becomes OUT/checkpoint-N, the newest first.
    """
    from converters.commands.publish import push
    from converters.hub.push_plan import check_names
    from converters.hub.upload import require_token
    from converters.plan.targets import plan_huggingface
    from formats.fsdp.checkpoint import checkpoints

    old_src, old_out, old_config = (options.pop(name) for name in ("old_src", "old_out", "old_config"))
    if old_src is not None and src is None:  # the flags, and the default, of ControlLLM's converter
        src, out = old_src, out or old_out or old_src.parent / "hf" / old_src.name
    options["config"] = options["config"] or old_config
    if src is None or out is None:
        raise UsageError("two folders are needed", "convert fsdp2hf CHECKPOINT OUT --config BASE")
    runs = {run: out / run.name for run in checkpoints(src)} or {src: out}
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
            plan = plan_huggingface(source, request, options["shard_size"], options["template"])
            if len(runs) > 1 and not request.force and is_written(plan, request):
                click.echo(f"note: {place} is there already, {run} is not converted again", err=True)
            else:
                carry_out(plan, request, options)
        except SourceError as error:  # noqa: PERF203  # an unfinished save must not keep the others from it
            if len(runs) == 1:
                raise
            click.echo(f"error: {error}", err=True)
            failed.append(error)
    if failed:
        raise SourceError(f"{len(failed)} of {len(runs)} checkpoints of {src} were not converted", failed[0].hint)
    if repo and options["dry_run"]:
        click.echo(f"then   push {out} to {repo}")
    elif repo and options["share"] is None:
        context.invoke(push, out=out, repo=repo, quiet=options["quiet"], as_json=options["as_json"])


@click.command()
@places
@shard_size
@chat_template
@reading_of(HUGGINGFACE)
@writing
def hf2hf(src: Path, out: Path, **options: Any) -> None:
    """Hugging Face folder to another one: cast, other file sizes, a chat template with rows for its tokens."""
    to_huggingface(opened(src, options, HUGGINGFACE), out, options)


@click.command()
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
    help="Of a training in any framework: masters, moments and step too; it goes on with any number of ranks.",
)
@deepspeed_reading
@reading
@writing
def hf2fsdp(src: Path, out: Path, **options: Any) -> None:
    """Any checkpoint to FSDP: a folder that torch.distributed.checkpoint loads.

    Name OUT checkpoint-0/pytorch_model_fsdp_0 for accelerate and the HF Trainer.
    """
    from converters.plan.targets import plan_fsdp

    if options["with_optimizer"] and options["dtype"] != "keep":
        raise UsageError(f"an optimizer cannot go on with --dtype {options['dtype']}", "leave one of them out")
    source = opened(src, options)
    request = request_of(out, options, source)
    if options["with_optimizer"]:
        from converters.plan.training_state import plan_fsdp_run

        plan = plan_fsdp_run(source, request, options["ranks"])
    else:
        plan = plan_fsdp(source, request, options["ranks"])
    carry_out(plan, request, options)


@click.command()
@places
@topology
@stages
@click.option("--norm", type=click.Choice(["te", "local"]), help="Megatron: names of the norms.  [default: as in SRC]")
@experts
@megatron_version
@layout
@click.option(
    "--make-vocab-size-divisible-by",
    "multiple",
    type=click.IntRange(1),
    metavar="N",
    help="Vocabulary padding.  [default: as in SRC]",
)
@click.option("--format", "kind", type=click.Choice([*DIALECTS]), help="Megatron: its files.  [default: as in SRC]")
@at_iteration
@true_vocab_size
@click.option(
    "--with-optimizer",
    is_flag=True,
    help="Megatron: masters, moments, step and scheduler too; a training goes on at the new topology.",
)
@optimizer_kind
@deepspeed_reading
@reading_of(NEOX)
@writing
def reshard(src: Path, out: Path, **options: Any) -> None:
    """Megatron or GPT-NeoX shards to shards of another topology."""
    source = opened(iteration_folder(src, options["iteration"]), options)
    if format_of(source) not in (*READ, NEOX):
        raise UsageError(f"{src} is a checkpoint of the format {source.format}, which has no shards", USE_HF2MEGATRON)
    neox = format_of(source) is NEOX
    if neox and options["with_optimizer"]:
        raise UsageError(
            "--with-optimizer is for Megatron", "`convert zero2universal` takes the optimizer of GPT-NeoX along"
        )
    _require_optimizer(options)
    known = known_by(lambda form: [name for name in form.writer_options if name not in SIZES])
    require_effect(options, source, known=known)
    request = request_of(out, options, source)
    planned = _reshard_neox if neox else _reshard_megatron
    carry_out(planned(source, request, options), request, options)


def _reshard_megatron(source: Checkpoint, request: Request, options: Mapping[str, Any]) -> Plan:
    from converters.plan.targets import plan_megatron
    from formats.megatron.details import Megatron

    saved = source.details_of(Megatron)
    multiple, norm = options["multiple"] or saved.vocab_multiple, options["norm"] or saved.norm
    iteration = None if source.home.name == "release" else saved.iteration
    names = options["experts"] or saved.experts
    interleaves = {
        name: size if options.get(name) is None else options[name] for name, size in saved.interleaves.items()
    }
    spelled = {**options, "experts": names, **interleaves}
    wanted = _wanted(spelled, norm, multiple, _dialect(options, saved.dialect))
    if not options["with_optimizer"]:
        return plan_megatron(source, request, wanted, iteration, options["tokens"])
    from converters.plan.training_state import plan_run

    _require_core(wanted.dialect)
    if options["dtype"] != "keep":
        what = f"--dtype {options['dtype']}"
        raise UsageError(f"an optimizer cannot go on with {what}", "reshard the weights without --with-optimizer")
    return plan_run(source, request, wanted, iteration, options["optimizer"])


def _reshard_neox(source: Checkpoint, request: Request, options: Mapping[str, Any]) -> Plan:
    from converters.commands.neox import stages
    from converters.plan.targets import plan_neox
    from formats.deepspeed.neox.checkpoint import Neox
    from formats.deepspeed.neox.writer import Options

    if options["vpp"] > 1:
        raise UsageError("GPT-NeoX has no virtual pipeline chunks", "leave --vpp out")
    for name in ("first_stage_layers", "last_stage_layers", "pp_layout"):
        if options[name] is not None:
            raise UsageError(f"--{flag_of(name)} is for Megatron folders", "leave it out")
    saved = source.details_of(Neox)
    kind = options["layout"] or ("pipeline" if saved.layered else "sequential" if options["pp"] == 1 else None)
    multiple = options["multiple"] or saved.vocab_multiple
    pp = stages(kind, options["pp"])
    wanted = Options(options["tp"], pp, multiple, saved.iteration or 0, source.run_config)
    return plan_neox(source, request, wanted)
