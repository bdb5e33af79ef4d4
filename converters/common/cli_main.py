"""The common part of the programs `convert` and `train`: help in sections, and one sentence for every error."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections import UserDict
from collections.abc import Mapping
from importlib import import_module
from io import TextIOWrapper
from typing import Any, NoReturn

import click

from converters.common.cli_help import with_examples
from formats.errors import OutputError, UnsupportedError, UsageError, VitruvianError, hint_of, short_memory

EXIT_CODES = """\b
Exit codes:
  0 done     3 source unreadable   6 verification failed       75 interrupted,
  1 a bug    4 not supported       7 output exists, no space      run it again
  2 usage    5 plan refused        8 network                      to resume"""


class Commands(UserDict[str, Any]):
    """The commands of a program by name, each imported on access, with its examples.

    Args:
        modules: the module of each command, followed by a colon and the function's name where that differs.
        examples: the examples of each command, as in `with_examples`.
        program: the name of the program.
    """

    def __init__(self, modules: Mapping[str, str], examples: Mapping[str, str], program: str) -> None:
        super().__init__(modules)
        self.examples, self.program = examples, program

    def __getitem__(self, name: str) -> click.Command:
        command: str | click.Command = self.data[name]
        if isinstance(command, str):
            module, _, function = command.partition(":")
            loaded: click.Command = getattr(import_module(module), function or name.replace("-", "_"))
            with_examples([loaded], self.examples, self.program)
            self.data[name] = command = loaded
        return command


class Sections(click.Group):
    """A group whose help lists its commands in sections. `sections`: title: name of a command: its module."""

    def __init__(
        self, name: str | None = None, *, sections: Mapping[str, Mapping[str, str]], examples: Mapping[str, str],
        program: str = "convert", **kwargs: Any,
    ) -> None:  # fmt: skip
        context = {"help_option_names": ["-h", "--help"], "max_content_width": 80}
        super().__init__(name, context_settings=context, epilog=EXIT_CODES, **kwargs)
        self.sections = sections
        modules = {name: module for commands in sections.values() for name, module in commands.items()}
        self.commands = Commands(modules, examples, program)

    def format_commands(self, _: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the sections."""
        for title, names in self.sections.items():
            with formatter.section(title):
                formatter.write_dl([(name, self.commands[name].get_short_help_str(120)) for name in names])


def printable(text: str) -> str:
    """A message with control characters escaped, which a terminal would obey: names in it come from files."""
    return "".join(char if char.isprintable() or char in "\n\t" else repr(char)[1:-1] for char in text)


def _tell(error: VitruvianError) -> NoReturn:
    """Print an error, as JSON with --json, and exit with its exit code."""
    if "--json" in sys.argv[1:]:
        facts = {"error": str(error), "hint": error.hint, "exit_code": error.exit_code}
        click.echo(json.dumps(facts, ensure_ascii=False), err=True)
        sys.exit(error.exit_code)
    _say("error", str(error), "red")
    if error.hint:
        _say("hint", error.hint, "cyan")
    sys.exit(error.exit_code)


def _say(what: str, text: str, colour: str) -> None:
    """Write a line to stderr, beginning with its kind, which is coloured on a terminal."""
    plain = "NO_COLOR" in os.environ
    click.echo(f"{what if plain else click.style(what, fg=colour, bold=True)}: {printable(text)}", err=True)


def _known(error: Exception) -> VitruvianError | None:
    """What an error of Python says of this machine; None where it is a bug."""
    if isinstance(error, RuntimeError):
        from formats.disk.threads import is_of_a_thread, no_further_thread

        return no_further_thread() if is_of_a_thread(error) else None
    if isinstance(error, ModuleNotFoundError) and error.name in ("torch", "transformers"):
        return UnsupportedError(
            f"this needs {error.name}, which is not installed", "pip install 'vitruvian[transformers]'"
        )
    return None


def run(group: click.Group, program: str) -> None:
    """Run a command line: one sentence and a hint for every error, and its exit code."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `convert … | head` ends quietly
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr is: a path need not be UTF-8
    verbose = any(re.fullmatch("-vv+", word) for word in sys.argv[1:])
    try:
        group.main(standalone_mode=False)
    except click.exceptions.Exit as done:
        sys.exit(done.exit_code)
    except click.ClickException as error:
        context = error.ctx if isinstance(error, click.UsageError) else None
        _tell(UsageError(error.format_message(), f"{context.command_path} --help" if context else ""))
    except (click.Abort, KeyboardInterrupt):  # click turns the latter into the former, but not as early
        _say("error", "interrupted", "red")
        sys.exit(75)
    except VitruvianError as error:
        if verbose:
            raise
        _tell(error)
    except OSError as error:
        if verbose:
            raise
        _tell(OutputError(f"{error.filename or 'output'}: {error.strerror}", hint_of(error)))
    except MemoryError as error:
        if verbose:
            raise
        error.__traceback__ = error.__context__ = None  # what the frames of the command hold is free again
        _tell(short_memory(str(error) or "Python got no more"))
    except Exception as error:  # the last resort, which says that it is a bug
        if verbose:
            raise
        if known := _known(error):
            _tell(known)
        click.echo(f"bug: {type(error).__name__}: {error}", err=True)
        click.echo(f"hint: run `{program} -vv …` again and report what it prints", err=True)
        sys.exit(1)
