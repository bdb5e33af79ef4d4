"""Options that several commands share: the format of records, and how records are encoded."""

from __future__ import annotations

import click

from converters.commands.options import NAMED, option_group
from formats.errors import UsageError

control_tokens = click.option(
    "--control-tokens", metavar="ROLE=ID,…", help="Ids of control tokens, such as user=7,assistant=8.  [default: found]"
)

chat_template = click.option(
    "--chat-template",
    "template",
    type=NAMED,
    metavar="NAME|FILE",
    help="control, chatml, llama3, or a jinja file.  [default: the tokenizer's, for conversations]",
)
record_format = option_group(
    click.option(
        "--format",
        "form",
        type=click.Choice(["auto", "control-text", "conversations", "sharegpt", "text", "mixed"]),
        default="auto",
        show_default=True,
        help="Format of the records; auto takes that of the first records, and refuses an ambiguous one.",
    ),
    click.option(
        "--jsonl-keys", "key", default="text", show_default=True, metavar="KEY", help="The field that holds text."
    ),
)


def parse_control_tokens(text: str | None) -> dict[str, int]:
    """The ids that --control-tokens gives, by role."""
    try:
        pairs = [pair.split("=") for pair in (text or "").split(",") if pair]
        return {role.strip(): int(number) for role, number in pairs}
    except ValueError:
        raise UsageError(f"--control-tokens {text} is not a list such as user=7,assistant=8") from None
