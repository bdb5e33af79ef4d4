"""The command that sends a folder to the Hub."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from converters.commands.options import FOLDER, NAMED, as_json
from converters.common.cli_help import command
from converters.common.cli_main import printable

if TYPE_CHECKING:
    from converters.hub.push_plan import Push


@command()
@click.argument("out", type=FOLDER)
@click.argument("repo", type=NAMED, metavar="ORG/NAME")
@click.option("--private/--public", default=True, show_default=True, help="Visibility of a new repository.")
@click.option("--revision", metavar="BRANCH", help="Branch, made if it does not exist; or refs/pr/N.  [default: main]")
@click.option("--create-pr", is_flag=True, help="Open a pull request instead of changing main.")
@click.option("--base-model", metavar="ID", help="The model on the Hub that the weights come from, for the card.")
@click.option("-n", "--dry-run", is_flag=True, help="Print what would be sent and send nothing.")
@click.option("-q", "--quiet", is_flag=True, help="No progress.")
@as_json
def push(out: Path, repo: str, dry_run: bool, quiet: bool, as_json: bool, **options: Any) -> None:
    """Hugging Face folder to the Hub, verified before and after.

    The token is that of HF_TOKEN or of `hf auth login`.
    """
    from converters.hub.push_plan import plan_push, verify_folder
    from converters.hub.upload import require_token
    from converters.library.publishing import problems_of, require_fit

    quiet = quiet or as_json
    if not dry_run:
        require_token()
    plan = plan_push(out, repo, quiet=quiet, **options)
    problems = problems_of(out)
    digest = None if problems else verify_folder(out, quiet=quiet)
    if dry_run:
        _show(plan, problems, as_json)
    require_fit(out, problems)
    if not dry_run:
        _send(plan, digest, quiet, as_json)


def _send(plan: Push, digest: str | None, quiet: bool, as_json: bool) -> None:
    """Send the files, and print the result; `digest` is that of the verified weights, None without a manifest."""
    from converters.common.progress import size
    from converters.library.publishing import notes_of, send

    notes = notes_of(plan, digest)
    for note in notes:
        click.echo(printable(f"note: {note}"), err=True)
    if not quiet:
        click.echo(f"sending {len(plan.files)} files, {size(plan.nbytes)}", err=True)
        sys.stderr.flush()
    done = send(plan, digest, quiet=quiet)
    for note in done.notes[len(notes) :]:
        click.echo(printable(f"note: {note}"), err=True)
    if as_json:
        click.echo(json.dumps(done.to_dict(), indent=1))
        return
    click.echo(f"{done.url}: {done.files} files, {size(done.nbytes)}, each compared with the Hub's hash of it")


def _show(plan: Push, problems: list[str], as_json: bool) -> None:
    """Print the files, the card and the problems of a push that is not sent."""
    from converters.common.progress import size, table

    where = {"repo": plan.repo, "private": plan.private, "revision": plan.revision, "create_pr": plan.create_pr}
    if as_json:
        files = [{"name": file.name, "bytes": file.size, "sha256": file.sha256} for file in plan.files]
        left_out = [{"name": name, "why": why} for name, why in plan.left_out]
        facts = {**where, "bytes": plan.nbytes, "files": files, "left_out": left_out, "card": plan.card}
        click.echo(json.dumps({**facts, "notes": plan.notes, "problems": problems}, indent=1))
        return
    target = "a new pull request" if plan.create_pr else f"branch {plan.revision or 'main'}"
    kind = "private" if plan.private else "public"
    click.echo(f"{plan.folder} to {target} of {plan.repo} ({kind} if it is new): {size(plan.nbytes)}")
    click.echo(table((file.sha256, f"{file.size:>14}", file.name) for file in plan.files))
    for name, why in plan.left_out:
        click.echo(printable(f"not sent: {name} ({why})"))
    for note in plan.notes:
        click.echo(f"note: {note}")
    click.echo(printable(f"\n--- README.md ---\n{plan.card}"), nl=False)
