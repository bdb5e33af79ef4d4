"""The commands that show a checkpoint, a plan or a layout. They read headers only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from converters.commands.options import (
    FILE,
    SOURCE,
    as_json,
    dtype,
    experts,
    megatron_version,
    opened,
    own_family,
    reading,
    topology,
)
from converters.common.cli_help import command
from formats.errors import OptionNeededError, UnsupportedError, UsageError
from formats.huggingface import HUGGINGFACE
from formats.registry import FORMATS, is_known, open_checkpoint

SIZES = ("tp", "pp", "vpp", "ep", "etp")
"""Options of a topology that are shown on the page of a plan."""

if TYPE_CHECKING:
    from formats.families.family import Family

TARGETS: dict[str, dict[str, str]] = {
    "megatron": {"to": "megatron"},
    "megatron_dist": {"to": "megatron", "format": "torch_dist"},
    "megatron_fsdp": {"to": "megatron", "format": "fsdp_dtensor"},
    "megatron-llm": {"to": "megatron", "format": "megatron-llm"},
    "huggingface": {"to": "huggingface"},
    "fsdp": {"to": "fsdp"},
    "neox": {"to": "neox"},
    "megatron_deepspeed": {"to": "megatron-deepspeed"},
    "mistral": {"to": "mistral"},
    "nanotron": {"to": "nanotron"},
}
"""Value of `plan --to`: the target, and the `format` of its files."""


class Planned(click.Choice):  # type: ignore[type-arg]  # generic since click 8.2
    """An option type: a format to plan for; `hf` is accepted for `huggingface`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parse the name of a format."""
        return super().convert("huggingface" if value == "hf" else value, param, ctx)


@command()
@click.argument("src", type=SOURCE)
@click.option("--tensors", is_flag=True, help="List every physical tensor.")
@click.option("--html", type=FILE, metavar="FILE", help="Settings, tensors by kind and files, as one page.")
@reading
@as_json
def inspect(src: Path, tensors: bool, html: Path | None, as_json: bool, **options: Any) -> None:
    """What a checkpoint is: format, family, topology, sizes, files.

    Of a folder with several checkpoint-N, each, the newest first. Without a config, what the files alone say.
    """
    from converters.commands.inspect_text import inspect_lines
    from formats.fsdp.runs import checkpoints

    runs = checkpoints(src, is_known)
    if html:
        from converters.commands.pages.inspect import page
        from converters.commands.running import write_new

        if runs:
            raise UsageError(f"{src} holds {len(runs)} checkpoints, and a page is of one", f"take {runs[0]}")
        write_new(html, page(_inspected(src, options, True)))
    records = [_inspected(run, options, tensors) for run in runs or [src]]
    if as_json:
        click.echo(json.dumps({"checkpoints": records} if runs else records[0], indent=1))
    else:
        click.echo("\n\n".join("\n".join(inspect_lines(record)) for record in records))


def _inspected(src: Path, options: Mapping[str, Any], tensors: bool) -> dict[str, Any]:
    """The record of a checkpoint; with assumed options, or from its files alone, if a needed option is not given."""
    from converters.library.records import inspect_record

    try:
        return inspect_record(opened(src, options), tensors)
    except OptionNeededError as error:
        note = f"{error}: {error.hint}"
        if error.assumed:
            record = _inspected(src, {**options, **error.assumed}, tensors)
            return {**record, "notes": [*record["notes"], note]}
        if error.known is None:
            raise
        return {**error.known(), "notes": [note]}


@command()
@click.argument("src", type=SOURCE)
@click.option(
    "--to",
    type=Planned([*TARGETS]),
    required=True,
    metavar="FORMAT",
    help=f"The format to plan for: {', '.join(TARGETS)}.",
)
@topology
@experts
@megatron_version
@dtype
@click.option("--blocks", is_flag=True, help="List every strided block.")
@click.option("--html", type=FILE, metavar="FILE", help="Where each tensor goes, by file and rank, as one page.")
@reading
@as_json
def plan(src: Path, to: str, blocks: bool, html: Path | None, as_json: bool, **options: Any) -> None:
    """What a conversion would do: coverage, changes, files, blocks."""
    from converters.commands.inspect_text import block_lines, plan_lines
    from converters.commands.running import output_of, write_new
    from converters.library.records import plan_record
    from converters.plan.output import plan_output
    from converters.plan.request import Request

    source = opened(src, options)
    request = Request(Path("/OUT"), None if options["dtype"] == "keep" else options["dtype"])
    target = dict(TARGETS[to])
    planned = plan_output(source, request, target.pop("to"), output_of({**options, **target}))
    if html:
        from converters.commands.pages.plan import page

        sizes = ", ".join(f"{name} {size}" for name in SIZES if (size := options.get(name) or 1) > 1)
        write_new(html, page(planned, f"{to}, {sizes}" if sizes else to))
    lines = list(block_lines(planned)) if blocks else []
    if as_json:
        click.echo(json.dumps(plan_record(planned) | ({"list": lines} if blocks else {}), indent=1))
        return
    click.echo("\n".join([*plan_lines(plan_record(planned)), *lines]))


@command()
@click.argument("format_name", metavar="FORMAT")
@click.argument("key", default="")
@click.option("--model", type=SOURCE, metavar="SRC", help="Draw the sizes of this checkpoint.  [default: Llama-3 8B]")
@click.option("--tp", type=click.IntRange(1), help="Tensor parallel size.  [default: 2]")
@click.option("--svg", type=FILE, metavar="FILE", help="A picture of the same tensors in every format, side by side.")
@own_family
def explain(
    format_name: str, key: str, model: Path | None, tp: int | None, svg: Path | None, family: Family | None
) -> None:
    """Draw a layout: `convert explain megatron linear_qkv`.

    KEY is any part of a key. Without it, the rules of the format are listed.
    """
    from converters.commands.explain import EXAMPLE, LEGEND, draw, matching, tables
    from converters.commands.running import write_new
    from converters.common.progress import table
    from formats.model.spec import ModelSpec

    ranked = format_name in FORMATS and FORMATS[format_name].ranked
    if tp not in (None, 1) and not (ranked or svg):
        raise UsageError(f"--tp has no effect on the format {format_name}", "leave it out")
    if family and format_name != HUGGINGFACE.name:
        raise UsageError("--family describes names of Hugging Face alone", "convert explain huggingface")
    if svg and not key:
        raise UsageError("--svg draws some tensors", f"name them: convert explain {format_name} qkv --svg {svg}")
    if not key:
        for name, rules in tables(format_name).items():
            rows = ((rule.key, rule.pattern.text, " ".join(sorted(rule.conditions))) for rule in rules)
            click.echo(f"{name}\n{table(rows)}\n")
        return
    spec = open_checkpoint(model).spec if model else EXAMPLE
    if not isinstance(spec, ModelSpec):
        raise UnsupportedError(f"{model} has no table to draw: {spec.why}")
    if svg:
        from converters.commands.layout_svg import drawn_tensors, picture

        tensors = drawn_tensors(rule for _, rule in matching(format_name, key))
        write_new(svg, picture(spec, tensors, tp or 2))
        click.echo(svg)
        return
    tp = tp or (2 if ranked else 1)
    for name, rule in matching(format_name, key):
        click.echo(f"{name}: " + "\n".join(draw(rule, spec, tp)) + "\n")
    click.echo(LEGEND)


@command()
@as_json
def formats(as_json: bool) -> None:
    """Which formats and model families there are, and which of them go together."""
    from converters.commands.explain import held_by
    from converters.commands.inspect_text import formats_lines
    from formats.families import FAMILIES

    about = {form.name: form.about for form in FORMATS.values()}
    if as_json:
        families = {family.name: family.architecture for family in FAMILIES.values()}
        holders = {family.name: held_by(family) for family in FAMILIES.values()}
        click.echo(json.dumps({"formats": about, "families": families, "held_by": holders}, indent=1))
        return
    click.echo("\n".join(formats_lines(about)))
