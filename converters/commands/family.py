"""The command for a model without a table: its family is drafted from transformers, and checked with transformers."""

from __future__ import annotations

from pathlib import Path

import click

from converters.commands.options import FILE, NAMED
from converters.commands.running import require_new, write_new
from converters.common.cli_help import command


class Families(click.Group):
    """A group whose default command is `draft`."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find a command: `draft` if the first word is not a command."""
        return super().resolve_command(ctx, args if args[0] in self.commands else ["draft", *args])


@click.group(cls=Families, subcommand_metavar="MODEL [OUT] | check FILE MODEL")
def family() -> None:
    """Draft a family file for a model without a table.

    MODEL is a model type of transformers, or the folder of a config.json. The draft goes to OUT, or to the terminal.
    """


@command(hidden=True)
@click.argument("model", type=NAMED)
@click.argument("out", type=FILE, required=False)
def draft(model: str, out: Path | None) -> None:
    """Draft the family file of MODEL.

    Axes are told by their sizes, norms and the parts of fused tensors by what the model computes. What nobody can
    see is marked, and Megatron is refused until you take `only_here` out.
    """
    from converters.draft.computed import single_threaded, without_warnings
    from converters.draft.probes import model_of
    from converters.draft.tables import drafted
    from converters.draft.toml import draft as written
    from formats.families import find_family

    if out:
        require_new(out)
    with single_threaded(), without_warnings():
        described = model_of(model)
        made = written(described, drafted(described))
    if out is None:
        click.echo(made.text, nl=False)
        return
    write_new(out, made.text)
    click.echo(f"{out}: {len(made.rows)} lines, {len(made.doubtful) + bool(made.unread)} to review")
    for row in made.doubtful:
        click.echo(f"  {row.key}: {row.doubt}")
    if made.unread:
        click.echo(f"  {made.unread}")
    if made.faults:
        click.echo(f"  it does not load yet: {made.faults}")
    table = find_family({"model_type": described.kind, "architectures": [described.architecture]})
    if table:
        click.echo(f"{described.kind} has a table: no command needs this file")
    else:
        click.echo(f"next: convert family check {out} {model}")


@command()
@click.argument("file", type=FILE)
@click.argument("model", type=NAMED)
def check(file: Path, model: str) -> None:
    """What FILE lacks of MODEL, and its logits after FSDP."""
    import tempfile

    from converters.draft.computed import single_threaded, without_warnings
    from converters.draft.judge import check as judged
    from converters.draft.probes import model_of
    from formats.huggingface.family_file import load

    loaded = load(file)
    with single_threaded(), without_warnings(), tempfile.TemporaryDirectory() as folder:
        for line in judged(loaded, model_of(model), Path(folder)):
            click.echo(line)


family.add_command(draft)
family.add_command(check)
