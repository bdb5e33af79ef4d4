"""The help of commands: 80 columns, titles where there are many options, and examples that can be typed."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import click

MANY = 12
"""Most options that are listed without titles."""
TITLES: Mapping[str, str] = {
    "What SRC is": """
        config tokenizer family vocab_size settings accept only drop verbatim allow_missing container gqa_layout tag
        weights adapter source splits revision inputs tokenizer_type form key""",
    "How OUT is cut": """
        format archive for_trainer tp pp vpp first_stage_layers last_stage_layers pp_layout ep etp experts
        glu_interleave norm layout make_vocab_size_divisible_by true_vocab_size megatron_version ranks shard_size
        iteration to prefix""",
    "Optimizer": "with_optimizer optimizer consumed_samples lr min_lr",
    "Values and tokens": """
        dtype quantize replicas chat_template template append_eod eod control_tokens extra no_new pack length ftfy
        sample seed dedup""",
    "The job": "site account partition nodes time sbatch image jobs bench launcher save_seconds preflight",
    "How it is done": """
        repo dry_run force share parts verify stripes threads memory workers strict max_drop_rate cache listing html
        tensors blocks quiet as_json _click_default_help""",
}
"""Title: the options below it, by the names of their parameters, in this order."""


class Finite(click.FloatRange):
    """A finite number in a range. click's ranges contain NaN, and those without an end infinity."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Parse a number, and fail if it is not finite."""
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{number} is not a finite number.", param, ctx)
        return number


class Helped(click.Command):
    """A command whose help lists options under titles where there are many, and whose paths are not named twice."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for option in self.params:
            if isinstance(option, click.Option) and isinstance(option.type, click.IntRange | click.types.IntParamType):
                option.metavar = option.metavar or "N"

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse arguments; a second path for an option is refused, where click takes the last one without a word.

        Raises:
            UsageError: an option that takes one path is named more than once.
        """
        _, _, named = self.make_parser(ctx).parse_args(list(args))
        paths = [option for option in named if isinstance(option, click.Option) and isinstance(option.type, click.Path)]
        for option in paths:
            if paths.count(option) > 1 and not option.multiple and not ctx.resilient_parsing:
                raise click.UsageError(f"{option.opts[0]} is given twice, and takes one path.", ctx)
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options of the help."""
        options = [option for option in self.get_params(ctx) if isinstance(option, click.Option)]
        rows = {str(option.name): row for option in options if (row := option.get_help_record(ctx)) is not None}
        if len(rows) <= MANY + 1:  # and --help
            super().format_options(ctx, formatter)
            return
        titled = {title: [name for name in names.split() if name in rows] for title, names in TITLES.items()}
        known = {name for names in titled.values() for name in names}
        for title, names in {"Options": [name for name in rows if name not in known], **titled}.items():
            if names:
                with formatter.section(title):
                    formatter.write_dl([rows[name] for name in names], col_max=26)


command = partial(click.command, cls=Helped)
"""A decorator that makes a function a `Helped` command, as `click.command` makes a command."""


def with_examples(commands: Iterable[click.Command], examples: Mapping[str, str], before: str) -> None:
    """Add examples to the end of the help of commands.

    Args:
        commands: the commands of a group.
        examples: lines to type, by the name of the command, without the program and that name.
        before: the words before the name, such as `convert`.
    """
    for command in commands:
        if isinstance(command, click.Group):
            with_examples(command.commands.values(), examples, f"{before} {command.name}")
        name = f"{before} {command.name}".partition(" ")[2]
        if text := examples.get(name):
            typed = (f"{before.partition(' ')[0]} {name} {line}" for line in re.split(r"(?<!\\)\n", text))
            command.epilog = "\b\nExamples:\n" + "\n".join(f"  {line}" for line in typed)
