"""The options that several commands share, and how a command opens its source."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from converters.common.cores import CEILING, MOST, cores
from converters.common.hub_names import READ, WRITTEN, require_scheme
from converters.plan.request import LONG
from formats.errors import SourceError
from formats.format import Format
from formats.megatron.args.versions import VERSIONS
from formats.model import accepted
from formats.registry import FORMATS, KNOWN_TO

if TYPE_CHECKING:
    from formats.checkpoint import Checkpoint, Settings
    from formats.families.family import Family

Command = TypeVar("Command", bound=Callable[..., Any])
LARGEST = 10**12
LEAST = 1024
"""The least number of bytes that may be given without a unit: a smaller number lacks its unit by mistake."""


class Filled(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.2
    """An option type: a text that is not empty, as that of a variable is which was never set (`--config "$BASE"`)."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parse a text."""
        if value == "":
            self.fail("it is empty", param, ctx)
        return super().convert(value, param, ctx)


class FilledPath(Filled, click.Path):
    """An option type: a path. Whether it exists is checked where it is opened, for a better error.

    Addresses are refused except for those of the schemes that are `taken`.
    """

    def __init__(self, taken: Collection[str] = (), **options: Any) -> None:
        super().__init__(path_type=Path, **options)
        self.taken = taken

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parse a path.

        Raises:
            UsageError: it is an address that is not taken.
        """
        require_scheme(value, self.taken)
        return super().convert(value, param, ctx)


class FilledText(Filled, click.types.StringParamType):
    """An option type: a name, or a name or a path."""


FILE = FOLDER = FilledPath()
SOURCE, OUTPUT = FilledPath(READ), FilledPath(WRITTEN)
"""A checkpoint that is read or written: a folder, or an address in a store."""
NAMED = FilledText()


class Size(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.2
    """An option type: a number of bytes, such as 5GB or 64MiB."""

    name = "size"
    units: Mapping[str, int] = {
        "": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30,
    }  # fmt: skip

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parse a size."""
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", str(value))
        if match is None or match[2].upper() not in self.units or float(match[1]) <= 0:
            self.fail(f"{value!r} is not a size such as 5GB or 64MiB", param, ctx)
        if not match[2] and float(match[1]) < LEAST:
            self.fail(f"{value!r} has no unit, such as {value}GB", param, ctx)
        size = int(float(match[1]) * self.units[match[2].upper()])
        if not 0 < size <= LARGEST:
            self.fail(f"{value!r} is not between 1 byte and 1 TB", param, ctx)
        return size


class Dtype(click.Choice):  # type: ignore[type-arg]  # generic since click 8.2
    """An option type: an element type, by its short name or by torch's."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parse a type."""
        return super().convert(LONG.get(value, value), param, ctx)


class ShareType(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.2
    """An option type: one of several processes of a conversion, such as 2/8."""

    name = "share"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parse `I/N`, I from 1 to N."""
        from converters.move.journal import Share

        match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", str(value))
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            self.fail(f"{value!r} is not a part such as 1/8 or 8/8", param, ctx)
        return Share(int(match[1]), int(match[2]))


def option_group(*options: Callable[[Any], Any]) -> Callable[[Command], Command]:
    """A decorator that adds several options."""

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def _learn(context: click.Context, _: click.Parameter, path: Path | None) -> Family | None:
    """Load a family of the user's own, which is known until the command ends."""
    if path is None:
        return None
    from formats.families import known
    from formats.huggingface.family_file import load

    family = load(path)
    context.with_resource(known(family))
    return family


places = option_group(click.argument("src", type=SOURCE), click.argument("out", type=OUTPUT))
own_family = click.option(
    "--family", type=FOLDER, metavar="FILE", callback=_learn,
    help="A family of your own, in TOML: the table and the settings of a model that `convert formats` does not list.",
)  # fmt: skip
accept = click.option(
    "--accept", multiple=True, metavar="NAME",
    help="Convert despite a deviation, as the error message names it: an argument of the run, or "
         f"{', '.join(accepted.KNOWN)}.",
)  # fmt: skip


def reading_of(*formats: Format) -> Callable[[Command], Command]:
    """The options for a source of one of these formats; options that have no effect on any are hidden from help."""
    hidden = {name: not set(known) & set(formats) for name, known in KNOWN_TO.items()}
    return option_group(
        click.option("--vocab-size", type=click.IntRange(1), metavar="N",
                     help="True vocabulary, where the checkpoint only knows a padded one."),
        click.option("--config", type=SOURCE, metavar="BASE",
                     help="Hugging Face folder (or ORG/NAME in the Hub's cache): settings and tokenizer."),
        click.option("--verbatim", is_flag=True, hidden=hidden["verbatim"],
                     help="Copy every tensor under its own name, without the table of a family, and where no file says "
                          "which tensors the model has."),
        click.option("--allow-missing", multiple=True, metavar="NAME", hidden=hidden["allow_missing"],
                     help="In a model without a table: a tensor that may be missing or unexpected, or a pattern, such "
                          "as 'visual.*'."),
        click.option("--container", metavar="NAME", hidden=hidden["container"],
                     help="The part of an FSDP checkpoint that is the model, such as model or ema.  [default: found]"),
        click.option("--gqa-layout", type=click.Choice(["auto", "blocked", "grouped"]), default="auto",
                     show_default=True, hidden=hidden["gqa_layout"],
                     help="Order of query, key and value where heads share keys. GPT-NeoX: blocked since November "
                          "2024, grouped before; Megatron-DeepSpeed, in one matrix: the same with December 2024."),
        click.option("--set", "settings", multiple=True, metavar="NAME=VALUE",
                     help="Set what the checkpoint lacks or states wrongly, such as rope_theta=500000 (JSON, or "
                          "none)."),
        accept,
        click.option("--drop", multiple=True, type=click.Choice(["mtp"]), hidden=hidden["drop"],
                     help="Leave out a part of the model: mtp, the layers of multi-token prediction."),
        click.option("--only", type=click.Choice(["text"]), hidden=hidden["only"],
                     help="Of a multimodal model, the language model alone."),
        own_family,
    )  # fmt: skip


reading = reading_of(*FORMATS.values())
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
memory = click.option(
    "--memory",
    type=Size(),
    help="All buffers together, such as 64MiB.  [default: 4MiB a thread, 16MiB at least]",
)
effort = option_group(
    click.option("-j", "--threads", type=click.IntRange(1, CEILING), default=cores,
                 help=f"Tensors that are converted at a time.  [default: the cores of the job, {MOST} at most]"),
    memory,
)  # fmt: skip
COPIES = (
    "Copies of a tensor on other ranks: compare, ignore (and take FP32 master weights uncompared), or average in "
    "float32."
)
replicas = click.option(
    "--replicas", type=click.Choice(["verify", "first", "mean"]), default="verify", show_default=True, help=COPIES,
)  # fmt: skip
dtype = click.option(
    "--dtype", type=Dtype(["keep", "bf16", "fp16", "fp32"]), default="keep", show_default=True,
    help="Cast floating point weights, except the biases of expert routing.",
)  # fmt: skip
shard_size = click.option(
    "--shard-size",
    type=Size(),
    help="Size of each safetensors file.  [default: 5GB; from Megatron, the files of the original model]",
)
chat_template = click.option(
    "--chat-template", type=NAMED, metavar="NAME|FILE",
    help="chatml, llama3, control, or a jinja file. Tokens that it needs are added; their rows are the mean of all.",
)  # fmt: skip
parallel = option_group(
    click.option("--tp", type=click.IntRange(1), default=1, show_default=True, help="Tensor parallel size."),
    click.option("--pp", type=click.IntRange(1), default=1, show_default=True, help="Pipeline parallel size."),
)
topology = option_group(
    parallel,
    click.option("--vpp", type=click.IntRange(1), default=1, show_default=True,
                 help="Virtual pipeline chunks of each stage."),
)  # fmt: skip
stages = option_group(
    click.option("--first-stage-layers", type=click.IntRange(1), metavar="N",
                 help="Megatron: layers of the first pipeline stage; the others share the rest evenly."),
    click.option("--last-stage-layers", type=click.IntRange(1), metavar="N", help="Megatron: the same for the last."),
    click.option("--pp-layout", metavar="LAYOUT",
                 help="Megatron: the stages as in --pipeline-model-parallel-layout, such as 'Et*3|(tt|)*29L'."),
)  # fmt: skip
megatron_files = option_group(
    click.option("--format", type=click.Choice(["torch", "torch_dist", "fsdp_dtensor", "megatron-llm"]),
                 help="Megatron: megatron-core's --ckpt-format, or the files of Megatron-LLM."
                      "  [default: torch; for reshard as in SRC]"),
    click.option("--norm", type=click.Choice(["te", "local"]),
                 help="Megatron: names of the norms, Transformer Engine's or those of the local layers."
                      "  [default: te; for reshard as in SRC]"),
)  # fmt: skip
archive = click.option(
    "--archive", is_flag=True,
    help="Megatron: one data file for all ranks; torch_dist, unless --format is fsdp_dtensor.",
)  # fmt: skip
experts = option_group(
    click.option("--ep", type=click.IntRange(1), help="Megatron: ranks over which experts are spread.  [default: 1]"),
    click.option("--etp", type=click.IntRange(1), help="Megatron: tensor parallel size of an expert.  [default: tp]"),
    click.option("--experts", type=click.Choice(["te", "local"]),
                 help="Megatron: names of the experts, Transformer Engine's grouped ones or one by one."
                      "  [default: those of --norm]"),
    click.option("--glu-interleave", type=click.IntRange(0), metavar="N",
                 help="Megatron: in each expert N rows of gate, N of up, and so on (--moe-mlp-glu-interleave-size); "
                      "0 for all of gate first.  [default: 0; for reshard as in SRC]"),
)  # fmt: skip
vocab_multiple = click.option(
    "--make-vocab-size-divisible-by", type=click.IntRange(1), metavar="N",
    help="The vocabulary is padded to a multiple of this times tp.  [default: 128; for reshard as in SRC]",
)  # fmt: skip
true_vocab_size = click.option(
    "--true-vocab-size", type=click.IntRange(1), metavar="N",
    help="Megatron-LLM: tokens that its training will have. Rows that the model lacks are copies of its last.",
)  # fmt: skip
for_trainer = click.option(
    "--for", "for_trainer", type=click.Choice(["bridge"]),
    help="Megatron, torch_dist: with the run_config.yaml and train_state.pt that Megatron-Bridge loads.",
)  # fmt: skip
megatron_version = click.option(
    "--megatron-version", type=click.Choice(VERSIONS),
    help="Megatron-LM that megatron_flags.txt is for; with --for bridge, what Bridge runs with: 0.16 for its 0.3.1."
         "  [default: the newest that computes the model]",
)  # fmt: skip
optimizer_kind = click.option(
    "--optimizer", type=click.Choice(["plain", "distributed"]),
    help="Megatron: the optimizer of the training that is resumed.  [default: as in SRC, else plain]",
)  # fmt: skip
at_iteration = click.option(
    "--iteration", type=click.IntRange(1), metavar="N", help="The iteration of the run.  [default: the last one]"
)
policy = click.option(
    "--replicas", type=click.Choice(["verify", "first", "mean"]),
    help=f"{COPIES}  [default: verify; mean for GPT-NeoX]",
)  # fmt: skip
writing = option_group(
    dtype,
    policy,
    click.option("-n", "--dry-run", is_flag=True, help="Print the plan and write nothing."),
    click.option("--force", is_flag=True,
                 help="Replace the checkpoint in OUT. Refused where other files are in it."),
    click.option("--part", "share", type=ShareType(), metavar="I/N",
                 help="Do part I of N, beside others on any nodes. The same command without --part finishes."),
    click.option("--verify/--no-verify", default=True, show_default=True,
                 help="Read OUT back and compare before it is published."),
    click.option("--stripes/--no-stripes", default=True, show_default=True,
                 help="On Lustre: spread the files of OUT over its disks, by their size."),
    effort,
    click.option("-q", "--quiet", is_flag=True, help="No progress."),
    as_json,
)  # fmt: skip
weights = click.option(
    "--weights", type=click.Choice(["module", "fp32-master", "exp_avg", "exp_avg_sq"]),
    help="DeepSpeed: the model's own weights, or what the optimizer keeps of each.  [default: module, if there]",
)  # fmt: skip
tag = click.option("--tag", metavar="NAME", help="The checkpoint in a run's folder.  [default: what `latest` says]")
deepspeed_reading = option_group(tag, weights)
adapter = click.option(
    "--adapter", type=click.Choice(["merged", "only"]),
    help="Of a LoRA training: the merged model, or the adapter alone as PEFT saves it.",
)  # fmt: skip
layout = click.option(
    "--layout", type=click.Choice(["sequential", "pipeline"]),
    help="Files of GPT-NeoX: one for each rank, or one for each layer and rank.  [default: pipeline if --pp > 1]",
)  # fmt: skip


def opened(path: Path, options: Mapping[str, Any], *formats: Format) -> Checkpoint:
    """Open the source of a command.

    Args:
        path: the folder of the checkpoint.
        options: the values of the options of `reading`.
        formats: the formats that the command reads; none for any.
    """
    from converters.plan.opening import open_only

    return open_only(path, settings_of(options), options.get("family"), formats)


def iteration_folder(run: Path, number: int | None) -> Path:
    """The folder of an iteration of a Megatron run; the run itself without a number.

    Raises:
        SourceError: the run has no such iteration.
    """
    if number is None:
        return run
    from converters.common.hub_names import folder_of
    from formats.megatron.folders import name_of

    run = folder_of(run).folder
    folder = run / name_of(number)
    if not folder.is_dir():
        iterations = sorted(path.name for path in run.glob("iter_*"))
        raise SourceError(f"{run} holds no {folder.name}", f"present: {', '.join(iterations) or 'no iteration'}")
    return folder


def settings_of(options: Mapping[str, Any]) -> Settings:
    """The settings of a reader from the options of `reading` and `deepspeed_reading`.

    Raises:
        UsageError: --config names no configuration.
    """
    from formats.checkpoint import Settings
    from formats.model.settings import parse_settings

    return Settings(
        options["vocab_size"],
        parse_settings(options["settings"]),
        options["config"],
        options["verbatim"],
        options["container"],
        options.get("tag"),
        options.get("weights"),
        options["gqa_layout"],
        options["allow_missing"],
        options["accept"],
        options["drop"],
        options.get("adapter"),
        options["only"],
    )
