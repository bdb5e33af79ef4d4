"""The common part of commands that write a checkpoint: make the request, run or print the plan, report the result."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from converters.plan.output import (
    FSDP,
    GPT_NEOX,
    HUGGINGFACE,
    MEGATRON_DEEPSPEED,
    MEGATRON_RUN,
    MISTRAL,
    NANOTRON,
    UNIVERSAL,
)
from formats.disk.handle import is_remote

if TYPE_CHECKING:
    from converters.plan.output import Output
    from converters.plan.plan import Plan
    from converters.plan.request import Request
    from formats.checkpoint import Checkpoint
    from formats.model.spec import Spec


def request_of(out: Path, options: Mapping[str, Any], source: Checkpoint) -> Request:
    """The request from the options of `writing`."""
    from converters.common.hub_names import place_of
    from converters.plan.opening import replicas_of
    from converters.plan.request import Limits, Request, named_of

    policy = replicas_of(source, options["replicas"])
    limits = Limits(options["threads"], options["memory"], policy, accepted=options["accept"])
    cast = None if options["dtype"] == "keep" else options["dtype"]
    quiet = options["quiet"] or options["as_json"]
    named, stripes = named_of(options), options["stripes"]
    return Request(
        place_of(out), cast, limits, options["force"], options["verify"], quiet, named=named, stripes=stripes
    )


def output_of(options: Mapping[str, Any]) -> Output:
    """The layout options of an output from the options of a command. Absent options have their defaults."""
    from converters.plan.output import DEFAULTS, Output

    stated = {name: value for name, value in options.items() if name in DEFAULTS and value is not None}
    return Output(**stated)


def require_new(path: Path) -> None:
    """Check that a page or a picture can be written, before the work for it is done.

    Raises:
        OutputError: the file exists, or its folder does not.
    """
    from formats.errors import OutputError

    if path.exists():
        raise OutputError(f"{path} exists", "choose another name")
    if not path.parent.is_dir():
        raise OutputError(f"{path.parent} is not a folder", "make it first")


def write_new(path: Path, text: str) -> None:
    """Write a page or a picture.

    Raises:
        OutputError: the file exists, or its folder does not.
    """
    from converters.common.atomic import write_file

    require_new(path)
    write_file(path, text.encode())


BRIDGE, ADAPTER_OF_BRIDGE = "bridge", "adapter of bridge"
"""Purposes of an output: a model for Megatron-Bridge, as `--for` names it, and an adapter."""
ADAPTER_OF_PEFT = "adapter of peft"
"""Purpose of an output: an adapter alone."""
TORCHTITAN, OLMO_CORE = "torchtitan", "olmo-core"
"""Purposes of an output: FSDP under the names of these trainers."""
RESUMED = "nanotron, with its optimizer"
"""A checkpoint of nanotron from which a training resumes."""
NEXT = {
    BRIDGE: "Megatron-Bridge with checkpoint.pretrained_checkpoint={word}, or its load_megatron_model({text})",
    ADAPTER_OF_BRIDGE: "Megatron-Bridge with checkpoint.load={word}, checkpoint.pretrained_checkpoint=BASE, "
    "load_optim=False and peft as in run_config.yaml",
    ADAPTER_OF_PEFT: "PeftModel.from_pretrained(BASE, {text}), BASE being the model that was trained, or "
    "`convert merge BASE {word} OUT`",
    HUGGINGFACE: "{auto}.from_pretrained({text}), or `convert push {word} ORG/NAME`",
    MEGATRON_RUN: "--load {word}, with the flags in {out}/megatron_flags.txt",
    FSDP: 'dcp.load({{"model": state_dict}}, checkpoint_id={text})',
    TORCHTITAN: "torchtitan with checkpoint.initial_load_path={word}",
    OLMO_CORE: "OLMo-core with load_path={word} and load_trainer_state=False",
    GPT_NEOX: "GPT-NeoX with load: {out} and finetune: true",
    MEGATRON_DEEPSPEED: "Megatron-DeepSpeed with --load {word} and the flags in {out}/megatron_flags.txt",
    MISTRAL: "Transformer.from_folder({text}) of mistral-inference, or vllm serve {word} --load-format mistral",
    NANOTRON: "nanotron with model: init_method: path: {out}, and model_config as {out}/model_config.json has it",
    RESUMED: "nanotron with checkpoints: resume_checkpoint_path: {out}, load_optimizer: true, load_lr_scheduler: false",
    UNIVERSAL: "DeepSpeed with checkpoint: {{load_universal: true}}, load_checkpoint from {out}",
}
"""Target or purpose of an output: how the output can be used.

`word` is the folder as a word of a shell, `text` as a text of Python, and `out` as it is; `auto` is the class of
transformers that loads the model.
"""


def next_step(to: str, out: Path, spec: Spec) -> str:
    """How an output can be used: the line of `NEXT` for its target or purpose."""
    from formats.disk.json_file import read_json
    from formats.families import FAMILIES
    from formats.huggingface.language_model import auto_class

    config = out / "config.json"
    auto = auto_class(read_json(config) if config.is_file() else {"model_type": spec.family})
    name, family = str(out), FAMILIES.get(spec.family)
    if to == HUGGINGFACE and family and family.elsewhere:
        return f"{family.architecture} of {family.elsewhere}: no release of transformers has this class"
    return NEXT[to].format(out=name, word=shlex.quote(name), text=json.dumps(name, ensure_ascii=False), auto=auto)


def convert_to(to: str, source: Checkpoint, out: Path, options: Mapping[str, Any]) -> None:
    """Convert a checkpoint to a target."""
    from converters.plan.output import plan_output

    request = request_of(out, options, source)
    named = (options.get("names"), options.get("for_trainer"))
    purpose = next((name for name in (TORCHTITAN, OLMO_CORE, BRIDGE) if name in named), to)
    purpose = RESUMED if to == NANOTRON and options.get("with_optimizer") else purpose
    carry_out(plan_output(source, request, to, output_of(options)), request, options, purpose)


def is_written(plan: Plan, request: Request) -> bool:
    """Whether OUT is what a plan would write. The source is read, since a training may have overwritten it."""
    from converters.common.progress import Progress
    from converters.move.engine import digest_of
    from converters.prove.digest import same_output

    remembered = same_output(plan, request.place)
    if remembered is None:
        return False
    jobs = [replace(job, targets=()) for job in plan.jobs]
    with Progress("comparing", plan.nbytes, request.quiet) as progress:
        return digest_of(jobs, request.limits, progress.advance) == remembered


def carry_out(plan: Plan, request: Request, options: Mapping[str, Any], to: str) -> None:
    """Print the plan; or run it, or a share of it, and print the result and how the output can be used."""
    from converters.commands.inspect_text import drift_lines, plan_lines
    from converters.common.progress import size
    from converters.library import conversion
    from converters.library.records import plan_record

    record = plan_record(plan)
    if options["dry_run"]:
        click.echo(json.dumps(record, indent=1) if options["as_json"] else "\n".join(plan_lines(record)))
        conversion.check(plan, request)
        return
    for note in record["notes"]:
        click.echo(f"note: {note}", err=True)
    done = conversion.carry_out(plan, request, options["share"], record["notes"])
    if options["as_json"]:
        click.echo(json.dumps(done.to_dict()))
        return
    for line in drift_lines(done.averaged):
        click.echo(line, err=True)
    if isinstance(done, conversion.Part):
        name, summary = f"part {done.part} of {done.out}", "the same command without --part finishes"
    else:
        purpose = ADAPTER_OF_PEFT if plan.source.settings.adapter == "only" else to
        name, summary = str(done.out), f"{'read back and equal' if done.verified else 'not read back'}\n"
        summary += f"source checksums: {done.source_checksums}{done.mixed and f' ({done.mixed})'}\ndigest {done.digest}"
        summary += "" if is_remote(done.out) else f"\nnext: {next_step(purpose, done.out, plan.source.spec)}"
    click.echo(f"{name}: {done.tensors} tensors, {size(done.nbytes)} in {done.seconds:.1f} s, {summary}")
