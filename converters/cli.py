"""The command `convert`. Nothing heavy is imported before a command needs it: help answers at once."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from formats.errors import UsageError, VitruvianError

if TYPE_CHECKING:
    from converters.convert import Request
    from converters.plan import Plan
    from formats.checkpoint import Checkpoint, Settings

SECTIONS = {
    "Convert": ("hf2megatron", "megatron2hf", "reshard"),
    "Look": ("inspect", "plan", "explain", "formats"),
    "Check": ("digest", "verify", "diff"),
}
EXIT_CODES = """\b
Exit codes:
  0 done           3 source unreadable   6 verification failed       75 interrupted,
  1 a bug          4 not supported       7 output exists, no space      run it again
  2 usage          5 plan refused        8 network                      to go on"""


class _Sections(click.Group):
    """A group whose help lists its commands in sections."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, names in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(name, self.commands[name].get_short_help_str(80)) for name in names])


@click.group(
    cls=_Sections, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}, epilog=EXIT_CODES
)
@click.version_option(package_name="vitruvian", message="vitruvian %(version)s")
@click.option("-v", "--verbose", count=True, help="-vv shows the traceback of an error.")
def cli(verbose: int) -> None:
    """Move LLM checkpoints between frameworks: on a login node, in constant memory, proven complete."""


def main() -> None:
    """Entry point: one sentence and a hint for every error, and its exit code."""
    verbose = sum(len(word) - 1 for word in sys.argv[1:] if re.fullmatch("-v+", word)) + sys.argv.count("--verbose")
    try:
        cli.main(standalone_mode=False)
    except click.exceptions.Exit as done:
        sys.exit(done.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except click.Abort:
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(0)
    except VitruvianError as error:
        if verbose > 1:
            raise
        click.echo(f"error: {error}", err=True)
        if error.hint:
            click.echo(f"hint: {error.hint}", err=True)
        sys.exit(error.exit_code)
    except Exception as error:
        if verbose > 1:
            raise
        click.echo(f"bug: {type(error).__name__}: {error}", err=True)
        click.echo("hint: run it again with -vv and report what it prints", err=True)
        sys.exit(1)


# --- options ---------------------------------------------------------------------------------------------------------

Command = TypeVar("Command", bound=Callable[..., Any])
FOLDER = click.Path(path_type=Path)


class _Size(click.ParamType):
    """Bytes, such as 5GB or 64MiB."""

    name = "size"
    units: Mapping[str, int] = {
        "": 1,
        "B": 1,
        "KB": 10**3,
        "MB": 10**6,
        "GB": 10**9,
        "TB": 10**12,
        "KIB": 2**10,
        "MIB": 2**20,
        "GIB": 2**30,
    }

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", str(value))
        if match is None or match[2].upper() not in self.units or float(match[1]) <= 0:
            self.fail(f"{value!r} is no size such as 5GB or 64MiB", param, ctx)
        return int(float(match[1]) * self.units[match[2].upper()])


def _all(*options: Callable[[Any], Any]) -> Callable[[Command], Command]:
    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


reading = _all(
    click.option(
        "--vocab-size",
        type=click.IntRange(1),
        metavar="N",
        help="True vocabulary, where the checkpoint only knows a padded one.",
    ),
    click.option(
        "--config",
        type=FOLDER,
        metavar="BASE",
        help="Hugging Face folder (or config.json) that belongs to the weights.",
    ),
    click.option(
        "--set",
        "settings",
        multiple=True,
        metavar="NAME=VALUE",
        help="A setting that the checkpoint lacks or has wrong, such as rope_theta=500000.",
    ),
)
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
effort = _all(
    click.option(
        "-j", "--threads", type=click.IntRange(1, 256), default=2, show_default=True, help="Tensors at a time."
    ),
    click.option("--memory", type=_Size(), default="16MiB", show_default=True, help="All buffers together."),
)
replicas = click.option(
    "--replicas", type=click.Choice(["verify", "first", "mean"]), default="verify", show_default=True,
    help="Further copies of a tensor: compare, ignore, or average in float32.",
)  # fmt: skip
writing = _all(
    click.option(
        "--dtype",
        type=click.Choice(["keep", "bf16", "fp16", "fp32"]),
        default="keep",
        show_default=True,
        help="Cast floating point weights.",
    ),
    replicas,
    click.option("-n", "--dry-run", is_flag=True, help="Print the plan and write nothing."),
    click.option("--force", is_flag=True, help="Replace OUT if it exists."),
    click.option(
        "--verify/--no-verify",
        default=True,
        show_default=True,
        help="Read OUT back and compare before it is published.",
    ),
    effort,
    click.option("-q", "--quiet", is_flag=True, help="No progress."),
    as_json,
)
topology = _all(
    click.option("--tp", type=click.IntRange(1), default=1, show_default=True, help="Tensor parallel size."),
    click.option("--pp", type=click.IntRange(1), default=1, show_default=True, help="Pipeline parallel size."),
    click.option(
        "--vpp", type=click.IntRange(1), default=1, show_default=True, help="Virtual pipeline chunks of each stage."
    ),
)


def _open(path: Path, vocab_size: int | None, config: Path | None, settings: tuple[str, ...]) -> Checkpoint:
    from formats.checkpoint import Settings
    from formats.registry import open_checkpoint
    from formats.spec import parse_settings

    if config is not None and not config.exists():
        raise UsageError(f"--config {config} does not exist")
    chosen: Settings = Settings(vocab_size, parse_settings(settings), config)
    return open_checkpoint(path, chosen)


def _expect(source: Checkpoint, wanted: str, instead: str) -> None:
    if source.format != wanted:
        raise UsageError(f"{source.root} is a {source.format} checkpoint, this command reads {wanted}", instead)


def _request(out: Path, options: Mapping[str, Any]) -> Request:
    from converters.convert import Request
    from converters.engine import Limits

    limits = Limits(options["threads"], options["memory"], options["replicas"])
    cast = None if options["dtype"] == "keep" else options["dtype"]
    return Request(out, cast, limits, options["force"], options["verify"], options["quiet"] or options["as_json"])


def _convert(plan: Plan, request: Request, options: Mapping[str, Any]) -> None:
    """Print the plan, or run it and print what came out."""
    from converters import digest
    from converters.convert import run
    from converters.report import size
    from converters.show import plan_lines, plan_record

    if options["dry_run"]:
        click.echo(json.dumps(plan_record(plan), indent=1) if options["as_json"] else "\n".join(plan_lines(plan)))
        return
    for note in plan_record(plan)["notes"]:
        click.echo(f"note: {note}", err=True)
    began = time.monotonic()
    digests = run(plan, request)
    seconds = time.monotonic() - began
    record = {
        "out": str(request.out),
        "digest": digest.total(digests),
        "tensors": len(digests),
        "bytes": plan.nbytes,
        "seconds": round(seconds, 3),
        "verified": request.verify,
    }
    checked = "read back and equal" if request.verify else "not read back"
    text = f"{request.out}: {len(digests)} tensors, {size(plan.nbytes)} in {seconds:.1f} s, {checked}\ndigest {record['digest']}"
    click.echo(json.dumps(record) if options["as_json"] else text)


# --- convert ---------------------------------------------------------------------------------------------------------


@cli.command()
@click.argument("src", type=FOLDER)
@click.argument("out", type=FOLDER)
@topology
@click.option(
    "--norm",
    type=click.Choice(["te", "local"]),
    default="te",
    show_default=True,
    help="Names of the norms: Transformer Engine's or those of the local layers.",
)
@click.option(
    "--make-vocab-size-divisible-by",
    "vocab_multiple",
    type=click.IntRange(1),
    default=128,
    show_default=True,
    metavar="N",
    help="The vocabulary is padded to a multiple of this times tp.",
)
@click.option("--iteration", type=click.IntRange(1), metavar="N", help="Write iter_N instead of release.")
@reading
@writing
def hf2megatron(src: Path, out: Path, **options: Any) -> None:
    """Hugging Face folder to Megatron tensor and pipeline shards."""
    from converters.convert import plan_megatron
    from formats.megatron import Options

    source = _open(src, options["vocab_size"], options["config"], options["settings"])
    _expect(source, "huggingface", "for Megatron to Megatron use `convert reshard`")
    request = _request(out, options)
    wanted = Options(options["tp"], options["pp"], options["vpp"], options["norm"], options["vocab_multiple"])
    _convert(plan_megatron(source, request, wanted, options["iteration"]), request, options)


@cli.command()
@click.argument("src", type=FOLDER)
@click.argument("out", type=FOLDER)
@click.option(
    "--shard-size",
    type=_Size(),
    help="Size of each safetensors file.  [default: the files that the model once had, else 5GB]",
)
@reading
@writing
def megatron2hf(src: Path, out: Path, **options: Any) -> None:
    """Megatron shards to a Hugging Face folder. SRC is the run folder, an iter_* folder, or release/."""
    from converters.convert import plan_huggingface

    source = _open(src, options["vocab_size"], options["config"], options["settings"])
    _expect(source, "megatron", "for Hugging Face to Megatron use `convert hf2megatron`")
    request = _request(out, options)
    _convert(plan_huggingface(source, request, options["shard_size"]), request, options)


@cli.command()
@click.argument("src", type=FOLDER)
@click.argument("out", type=FOLDER)
@topology
@click.option("--norm", type=click.Choice(["te", "local"]), help="Names of the norms.  [default: as in SRC]")
@click.option(
    "--make-vocab-size-divisible-by",
    "vocab_multiple",
    type=click.IntRange(1),
    metavar="N",
    help="Vocabulary padding.  [default: as in SRC]",
)
@reading
@writing
def reshard(src: Path, out: Path, **options: Any) -> None:
    """Megatron shards to Megatron shards of another topology, directly."""
    from converters.convert import plan_megatron
    from formats.megatron import Options

    source = _open(src, options["vocab_size"], options["config"], options["settings"])
    _expect(source, "megatron", "for Hugging Face to Megatron use `convert hf2megatron`")
    request = _request(out, options)
    multiple = options["vocab_multiple"] or source.extra["args"].get("make_vocab_size_divisible_by") or 128
    wanted = Options(options["tp"], options["pp"], options["vpp"], options["norm"] or source.extra["norm"], multiple)
    iteration = None if source.extra["folder"] == "release" else source.extra["iteration"]
    _convert(plan_megatron(source, request, wanted, iteration), request, options)


# --- look ------------------------------------------------------------------------------------------------------------


@cli.command()
@click.argument("src", type=FOLDER)
@click.option("--tensors", is_flag=True, help="List every physical tensor.")
@reading
@as_json
def inspect(
    src: Path, tensors: bool, vocab_size: int | None, config: Path | None, settings: tuple[str, ...], as_json: bool
) -> None:
    """What a checkpoint is: format, family, topology, sizes, files. Reads headers only."""
    from converters.show import inspect_lines, inspect_record

    source = _open(src, vocab_size, config, settings)
    click.echo(
        json.dumps(inspect_record(source, tensors), indent=1) if as_json else "\n".join(inspect_lines(source, tensors))
    )


@cli.command("plan")
@click.argument("src", type=FOLDER)
@click.option(
    "--to", "to", type=click.Choice(["megatron", "huggingface"]), required=True, help="The format to plan for."
)
@topology
@click.option(
    "--dtype",
    type=click.Choice(["keep", "bf16", "fp16", "fp32"]),
    default="keep",
    show_default=True,
    help="Cast floating point weights.",
)
@click.option("--blocks", is_flag=True, help="List every strided block.")
@reading
@as_json
def plan_command(
    src: Path,
    to: str,
    tp: int,
    pp: int,
    vpp: int,
    dtype: str,
    blocks: bool,
    vocab_size: int | None,
    config: Path | None,
    settings: tuple[str, ...],
    as_json: bool,
) -> None:
    """What a conversion would do: coverage proved, changes of value, files, bytes, blocks."""
    from converters.convert import Request, plan_huggingface, plan_megatron
    from converters.show import block_lines, plan_lines, plan_record
    from formats.megatron import Options

    source = _open(src, vocab_size, config, settings)
    request = Request(Path("OUT"), None if dtype == "keep" else dtype)
    plan = (
        plan_megatron(source, request, Options(tp, pp, vpp), None)
        if to == "megatron"
        else plan_huggingface(source, request, None)
    )
    click.echo(json.dumps(plan_record(plan), indent=1) if as_json else "\n".join(plan_lines(plan)))
    for line in block_lines(plan) if blocks else ():
        click.echo(line)


@cli.command()
@click.argument("format_name", metavar="FORMAT")
@click.argument("key", default="")
@click.option("--model", type=FOLDER, metavar="SRC", help="Draw the sizes of this checkpoint.  [default: Llama-3 8B]")
@click.option("--tp", type=click.IntRange(1), default=2, show_default=True, help="Tensor parallel size.")
def explain(format_name: str, key: str, model: Path | None, tp: int) -> None:
    """Draw the layout of a tensor: `convert explain megatron linear_qkv`. Without KEY, list the rules."""
    from converters.explain import EXAMPLE, draw, matching, tables
    from converters.report import table
    from formats.registry import open_checkpoint

    if not key:
        for name, rules in tables(format_name).items():
            click.echo(
                f"{name}\n{table((rule.key, rule.pattern.text, ' '.join(sorted(rule.conditions))) for rule in rules)}\n"
            )
        return
    spec = open_checkpoint(model).spec if model else EXAMPLE
    unit = 128 * tp
    padded = -(-(spec.vocab or 0) // unit) * unit
    for name, rule in matching(format_name, key):
        click.echo(f"{name}: " + "\n".join(draw(rule, spec, tp, padded)) + "\n")


@cli.command("formats")
@as_json
def formats_command(as_json: bool) -> None:
    """Which formats and model families there are."""
    from converters.report import table
    from formats.families import FAMILIES
    from formats.registry import FORMATS, module

    record = {
        "formats": {
            name: {"holds": text, "reads": hasattr(module(name), "read"), "writes": hasattr(module(name), "write")}
            for name, text in FORMATS.items()
        },
        "families": {
            family.name: {"class": family.architecture, "tensors": len(family.tensors)} for family in FAMILIES.values()
        },
    }
    if as_json:
        click.echo(json.dumps(record, indent=1))
        return
    click.echo("formats")
    click.echo(table((name, "read, write", text) for name, text in FORMATS.items()))
    click.echo("families")
    click.echo(table((family.name, family.architecture) for family in FAMILIES.values()))


# --- check -----------------------------------------------------------------------------------------------------------


@cli.command("digest")
@click.argument("src", type=FOLDER)
@click.option("--tensors", is_flag=True, help="Print the digest of every logical tensor too.")
@reading
@replicas
@effort
@as_json
def digest_command(
    src: Path,
    tensors: bool,
    vocab_size: int | None,
    config: Path | None,
    settings: tuple[str, ...],
    replicas: str,
    threads: int,
    memory: int,
    as_json: bool,
) -> None:
    """A hash of the weights that is the same in every format and topology."""
    from converters import digest

    source = _open(src, vocab_size, config, settings)
    found = _digests(source, threads, memory, replicas, as_json)
    if as_json:
        click.echo(json.dumps({"digest": digest.total(found), "tensors": found}, indent=1))
        return
    for name in sorted(found) if tensors else ():
        click.echo(f"{found[name]}  {name}")
    click.echo(f"{digest.total(found)}  {src}")


def _digests(source: Checkpoint, threads: int, memory: int, replicas: str, quiet: bool) -> dict[str, str]:
    from converters.convert import plan_reading
    from converters.engine import Limits, digest_of
    from converters.report import Progress

    plan = plan_reading(source)
    with Progress("hashing", plan.nbytes, quiet) as progress:
        return digest_of(plan.jobs, Limits(threads, memory, replicas), progress.advance)


@cli.command()
@click.argument("out", type=FOLDER)
@click.argument("src", type=FOLDER, required=False)
@reading
@replicas
@effort
@as_json
def verify(
    out: Path,
    src: Path | None,
    vocab_size: int | None,
    config: Path | None,
    settings: tuple[str, ...],
    replicas: str,
    threads: int,
    memory: int,
    as_json: bool,
) -> None:
    """Check OUT against its manifest (vitruvian.json), or against SRC in any format."""
    from converters import digest
    from formats.errors import SourceError, VerificationError

    checkpoint = _open(out, vocab_size, config, settings)
    if src is not None:
        against, name = _digests(_open(src, vocab_size, config, settings), threads, memory, replicas, as_json), str(src)
    else:
        remembered, name = digest.read_manifest(out), digest.MANIFEST
        if remembered is None:
            raise SourceError(
                f"{out} holds no {digest.MANIFEST}", f"compare it with its source: convert verify {out} SRC"
            )
        against = remembered
    found = _digests(checkpoint, threads, memory, replicas, as_json)
    wrong = sorted(tensor for tensor in {*found, *against} if found.get(tensor) != against.get(tensor))
    if as_json:
        click.echo(
            json.dumps(
                {
                    "equal": not wrong,
                    "digest": digest.total(found),
                    "against": digest.total(against),
                    "differing": wrong,
                },
                indent=1,
            )
        )
    if wrong:
        raise VerificationError(
            f"{len(wrong)} of {len(against)} tensors of {out} differ from {name}: {', '.join(wrong[:5])}{' …' if len(wrong) > 5 else ''}",
            f"convert diff {out} {src}" if src else "copy the checkpoint again, or compare it with its source",
        )
    if not as_json:
        click.echo(f"{out} equals {name}: {len(found)} tensors\ndigest {digest.total(found)}")


@cli.command("diff")
@click.argument("one", type=FOLDER)
@click.argument("two", type=FOLDER)
@reading
@click.option("--memory", type=_Size(), default="16MiB", show_default=True, help="All buffers together.")
@as_json
def diff_command(
    one: Path,
    two: Path,
    vocab_size: int | None,
    config: Path | None,
    settings: tuple[str, ...],
    memory: int,
    as_json: bool,
) -> None:
    """Compare two checkpoints in any formats: settings, tensors, values. Exit 6 when they differ."""
    from converters.convert import plan_reading
    from converters.diff import compare
    from converters.report import Progress, table
    from formats.errors import VerificationError

    first, second = (_open(path, vocab_size, config, settings) for path in (one, two))
    configured = first.spec.differences(second.spec)
    left, right = plan_reading(first), plan_reading(second)
    with Progress("comparing", left.nbytes, as_json) as progress:
        found = compare(left, right, memory, progress.advance)
    if as_json:
        tensors = [{"name": d.name, "what": d.what, "elements": d.count, "largest": d.largest} for d in found]
        click.echo(
            json.dumps({"equal": not configured and not found, "settings": configured, "tensors": tensors}, indent=1)
        )
    else:
        for line in configured:
            click.echo(f"setting {line}")
        rows = [
            (
                d.name,
                d.what,
                f"{d.count} elements differ" if d.count else "",
                f"by up to {d.largest:g}" if d.count else "",
            )
            for d in found
        ]
        click.echo(table(rows, ""), nl=bool(rows))
    if configured or found:
        raise VerificationError(
            f"{one} and {two} differ in {len(configured)} settings and {len(found)} of {len(left.jobs)} tensors"
        )
    if not as_json:
        click.echo(f"{one} and {two} are equal: {len(left.jobs)} tensors, {len(configured)} settings differ")
