"""The command `convert`. Nothing heavy is imported before a command needs it: help answers at once."""

from __future__ import annotations

import gc
import re
import signal
import sys

import click

from converters.commands import assets, check, convert, look, neox, publish, tokenizer, zero
from formats.errors import VitruvianError

SECTIONS = {
    "Convert": (
        convert.fsdp2hf,
        convert.hf2fsdp,
        convert.hf2megatron,
        neox.hf2neox,
        convert.megatron2hf,
        neox.neox2hf,
        zero.zero2hf,
        zero.zero2universal,
        convert.reshard,
        neox.average_norms,
    ),
    "Look": (look.inspect, look.plan, look.explain, look.formats),
    "Check": (check.digest, check.verify, check.diff),
    "Publish": (assets.assets, tokenizer.tokenizer, publish.push),
}
EXIT_CODES = """\b
Exit codes:
  0 done     3 source unreadable   6 verification failed       75 interrupted,
  1 a bug    4 not supported       7 output exists, no space      run it again
  2 usage    5 plan refused        8 network                      to go on"""


class Sections(click.Group):
    """A group whose help lists its commands in sections."""

    def format_commands(self, _: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the sections."""
        for title, commands in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(str(command.name), command.get_short_help_str(80)) for command in commands])


@click.group(
    cls=Sections,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=EXIT_CODES,
)
@click.version_option(package_name="vitruvian", message="vitruvian %(version)s")
@click.option("-v", "--verbose", count=True, help="-vv shows the traceback of an error.")
def cli(verbose: int) -> None:
    """Move LLM checkpoints between frameworks: on a login node, in constant memory, proven complete."""
    del verbose  # `main` looks for it, because errors are caught there


for _commands in SECTIONS.values():
    for _command in _commands:
        cli.add_command(_command)


def _printable(text: str) -> str:
    """A message without anything that a terminal would obey: names in it come from files."""
    return "".join(one if one.isprintable() or one == "\n" else repr(one)[1:-1] for one in text)


def main() -> None:
    """Entry point: one sentence and a hint for every error, and its exit code."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `convert … | head` ends quietly
    gc.set_threshold(100_000)  # headers are many small objects and no cycles: collecting them early finds nothing
    verbose = any(re.fullmatch("-vv+", word) for word in sys.argv[1:])
    try:
        cli.main(standalone_mode=False)
    except click.exceptions.Exit as done:
        sys.exit(done.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except click.Abort:
        click.echo("error: interrupted", err=True)
        sys.exit(75)
    except VitruvianError as error:
        if verbose:
            raise
        click.echo(f"error: {_printable(str(error))}", err=True)
        if error.hint:
            click.echo(f"hint: {_printable(error.hint)}", err=True)
        sys.exit(error.exit_code)
    except OSError as error:
        if verbose:
            raise
        click.echo(f"error: {_printable(str(error.filename or 'output'))}: {error.strerror}", err=True)
        sys.exit(7)
    except Exception as error:  # the last resort, which says that it is a bug
        if verbose:
            raise
        click.echo(f"bug: {type(error).__name__}: {error}", err=True)
        click.echo("hint: run `convert -vv …` again and report what it prints", err=True)
        sys.exit(1)
