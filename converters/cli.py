"""The command `convert`. Nothing heavy is imported before a command needs it: help answers at once."""

from __future__ import annotations

import click

from converters.commands import assets, check, convert, look, neox, publish, submit, tokenizer, zero
from converters.entry import Sections, run

SECTIONS = {
    "Convert": (
        convert.fsdp2hf,
        convert.hf2fsdp,
        convert.hf2megatron,
        neox.hf2neox,
        convert.hf2hf,
        convert.megatron2hf,
        neox.neox2hf,
        zero.zero2hf,
        zero.zero2universal,
        convert.reshard,
        neox.average_norms,
        submit.submit,
    ),
    "Look": (look.inspect, look.plan, look.explain, look.formats),
    "Check": (check.digest, check.verify, check.diff),
    "Publish": (assets.assets, tokenizer.tokenizer, publish.push),
}


@click.group(cls=Sections, sections=SECTIONS)
@click.version_option(package_name="vitruvian", message="vitruvian %(version)s")
@click.option("-v", "--verbose", count=True, help="-vv shows the traceback of an error.")
def cli(verbose: int) -> None:
    """Move LLM checkpoints between frameworks: on a login node, in constant memory, proven complete."""
    del verbose  # `run` looks for it, because errors are caught there


def main() -> None:
    """Entry point."""
    run(cli, "convert")
