"""`train chat`: chats with a model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from converters.commands.options import FOLDER
from converters.common.cli_help import Finite, command

if TYPE_CHECKING:
    from train.data.tokens.tokenizers import Fast
    from train.tools.chat import Answer


@command()
@click.argument("model", type=FOLDER)
@click.option("--prompt", metavar="TEXT", help="One turn.  [default: a conversation on stdin, a line a turn]")
@click.option("--system", metavar="TEXT", help="A system turn before all others.")
@click.option("--max-new-tokens", "most", type=click.IntRange(1), default=256, show_default=True, metavar="N",
              help="Longest answer.")  # fmt: skip
@click.option("--temperature", type=Finite(0), default=0.0, show_default=True,
              help="0 is greedy: the most likely token each time.")  # fmt: skip
@click.option("--seed", type=click.IntRange(0), default=1234, show_default=True, help="With a temperature.")
@click.option("--ids", is_flag=True, help="Show pieces and ids of prompt and answer, and what ended it.")
@click.option("--backend", type=click.Choice(["transformers", "vllm"]), default="transformers", show_default=True)
def chat(
    model: Path, prompt: str | None, system: str | None, most: int, temperature: float, seed: int, ids: bool,
    backend: str,
) -> None:  # fmt: skip
    """Chat with a model in a Hugging Face folder, with its own chat template, on the GPU if there is one.

    A control token that is spelled out in a text stays text. An answer ends at the tokens of generation_config.json;
    its sampling settings are not used.
    """
    from train.tools.chat import Sampling, open_chat

    talk = open_chat(model, backend)
    for note in talk.notes:
        click.echo(f"note: {note}", err=True)
    roles, contents = (["system"], [system]) if system is not None else ([], [])
    for turn in _turns() if prompt is None else [prompt]:
        answer = talk.answer([*roles, "user"], [*contents, turn], Sampling(most, temperature, seed))
        roles, contents = [*roles, "user", "assistant"], [*contents, turn, answer.text]
        for line in _shown(answer, talk.vocabulary) if ids else [answer.text]:
            click.echo(line)
        if answer.ending is None and not ids:
            click.echo(f"note: cut off after {len(answer.ids)} tokens", err=True)


def _turns() -> Iterator[str]:
    """The non-empty lines of stdin, each after a prompt on a terminal."""
    sign = "> " if sys.stdin.isatty() else ""
    click.echo(sign, nl=False, err=True)
    while line := sys.stdin.buffer.readline():
        if line.strip():
            yield line.decode("utf-8", "surrogateescape").rstrip("\r\n")
        click.echo(sign, nl=False, err=True)


def _shown(answer: Answer, vocabulary: Fast) -> Iterator[str]:
    """The lines of a prompt and its answer, in the form of `train show`."""
    end = f"ended by {answer.ending}" if answer.ending is not None else "cut off"
    for name, ids in (("prompt", answer.prompt), ("answer", answer.ids)):
        yield f"{name}, {len(ids)} tokens" + (f", {end}" if name == "answer" else "")
        yield f"  text    {vocabulary.decode(ids)}"
        yield f"  pieces  {' '.join(vocabulary.pieces(ids))}"
        yield f"  ids     {' '.join(map(str, ids))}"
