"""The command that completes a converted model: tokenizer, generation config, licence, chat template."""

from __future__ import annotations

import json
import shlex
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from converters.commands.options import FOLDER, NAMED, as_json
from converters.common.atomic import sync_path
from converters.common.cli_help import command
from formats.errors import RefusedError, SourceError, UsageError, some

if TYPE_CHECKING:
    from converters.assets.chat_template import Applied

STAGING = ".assets.partial"
KEPT = ("config.json", "README.md")
"""Files of OUT that BASE does not replace."""


@dataclass(frozen=True)
class Work:
    """The changes to OUT's small files.

    Attributes:
        staged: files that are new or changed: relative name to the path of the prepared file.
        same: files that are the same before and after, byte for byte.
        removed: files that are removed.
        view: all files after the changes: relative name to the path of their present content.
        applied: the result of applying the chat template, None without one.
    """

    staged: Mapping[str, Path]
    same: tuple[str, ...]
    removed: tuple[str, ...]
    view: Mapping[str, Path]
    applied: Applied | None


@command()
@click.argument("out", type=FOLDER)
@click.option("--from", "base", type=FOLDER, metavar="BASE", help="Hugging Face folder whose small files OUT gets.")
@click.option(
    "--chat-template", "template", type=NAMED, metavar="NAME|FILE", help="chatml, llama3, control, or a jinja file."
)
@click.option("-n", "--dry-run", is_flag=True, help="Print what would change and write nothing.")
@as_json
def assets(out: Path, base: Path | None, template: str | None, dry_run: bool, as_json: bool) -> None:
    """Give a model its tokenizer, generation config and chat template.

    OUT is a Hugging Face folder with weights. BASE replaces what OUT has, except its config and its card; the chat
    template of BASE, if it has one, becomes OUT's only one. What `convert verify OUT` compares is then what is there
    now: with `--from OUT` too, which changes nothing else.
    """
    from converters.hub.preflight import embedding_rows, findings

    if base is None and template is None:
        raise UsageError("nothing to do", "give --from BASE, --chat-template NAME, or both")
    rows = embedding_rows(out)
    with _staging(out, dry_run) as folder:
        work = prepare(out, base, template, rows, folder)
        problems_found = findings(work.view, rows, need_template=template is not None or _serves(out, rows))
        notes = [
            *(work.applied.notes if work.applied else ()),
            *(finding.sentence for finding in problems_found if not finding.blocks),
        ]
        problems = [finding.sentence for finding in problems_found if finding.blocks]
        states = _states(out, work)
        if as_json:
            click.echo(json.dumps(_record(out, rows, work, states, notes, problems), indent=1))
        else:
            _print(states, notes, problems)
        if work.staged or work.removed or template is not None:
            _refuse(out, rows, work.applied, template, problems)
        if not dry_run:
            publish(out, work)


def _serves(out: Path, rows: int) -> bool:
    """Whether a model has a chat template without blocking faults; then none may be there after the changes either."""
    from converters.assets.files import files
    from converters.hub.preflight import findings

    return not any(finding.blocks for finding in findings(dict(files(out)), rows, need_template=True))


def prepare(out: Path, base: Path | None, template: str | None, rows: int, folder: Path) -> Work:
    """Prepare every new file in a folder; OUT is only read.

    Raises:
        RefusedError: OUT and BASE would make a mixture of two tokenizers, or a chat template would be lost or cannot be
            applied.
    """
    from converters.assets.chat_template import apply_template, load_template
    from converters.assets.files import files, write
    from formats.checkpoint import ASSETS
    from formats.huggingface.lora_config import CONFIG as ADAPTER

    own = dict(files(out))
    if base is not None and not base.is_dir():
        raise UsageError(f"--from {base} is not a folder")
    small = {name: path for name, path in files(base) if name != ADAPTER} if base else {}
    if base is not None and not small:
        raise UsageError(
            f"--from {base} holds no tokenizer, config or card",
            f"--from {base / ASSETS}" if (base / ASSETS).is_dir() else "name a Hugging Face folder",
        )
    given = {name: path for name, path in small.items() if not (name in KEPT and name in own)}
    _check_mixture(out, base, own, given)
    if template is None:
        _require_template(out, base, own, given)
    text = load_template(template) if template is not None else None
    applied = apply_template(own | given, text, rows) if text is not None else None
    removed = applied.removed if applied else _other_templates(own, given)
    texts = applied.texts if applied else {}
    staged = {name: folder / name for name in {**given, **texts} if name not in removed}
    for path in write(folder, texts, {name: given[name] for name in given if name in staged and name not in texts}):
        sync_path(path)
    same = tuple(name for name, path in staged.items() if name in own and _read(own[name]) == _read(path))
    staged = {name: path for name, path in staged.items() if name not in same}
    view = {name: path for name, path in (own | staged).items() if name not in removed}
    return Work(staged, same, tuple(name for name in removed if name in own), view, applied)


def publish(out: Path, work: Work) -> None:
    """Move the files to their places, each in one step, and record them in the manifest."""
    from converters.assets.files import files
    from converters.assets.trusted import is_read_with_model
    from converters.prove.digest import record_files

    for name, path in work.staged.items():
        (out / name).parent.mkdir(exist_ok=True)
        path.replace(out / name)
    for name in work.removed:
        (out / name).unlink()
    for folder in {(out / name).parent for name in (*work.staged, *work.removed)}:
        sync_path(folder)
    record_files(out, [name for name, _ in files(out) if is_read_with_model(Path(name).name)])


def _check_mixture(out: Path, base: Path | None, own: Mapping[str, Path], given: Mapping[str, Path]) -> None:
    from converters.assets.token_files import left_over

    if left := left_over(own, given):
        are = "it is" if len(left) == 1 else "they are"
        raise RefusedError(
            f"{out} holds {some(left, 5)}, which {base} lacks: OUT would have parts of two tokenizers",
            f"if {are} not needed: rm {shlex.join(str(out / name) for name in left)}",
        )


def _require_template(out: Path, base: Path | None, own: Mapping[str, Path], given: Mapping[str, Path]) -> None:
    """Refuse a BASE without a chat template, where its tokenizer_config.json would replace one that has OUT's."""
    from converters.assets.token_files import TOKENIZER_CONFIG, held_template, object_of, templates_in

    if held_template(given) is not None:
        return
    view = {**own, **given}
    before, after = (templates_in(object_of(files, TOKENIZER_CONFIG).get("chat_template")) for files in (own, view))
    kept = {*after, *(["default"] if held_template(view) is not None else [])}
    if lost := [name for name in before if name not in kept]:
        raise RefusedError(
            f"{out / TOKENIZER_CONFIG} holds a chat template ({', '.join(lost)}), and {base} has none: it would be "
            "lost",
            "keep it in a file, and give --chat-template FILE",
        )


def _other_templates(own: Mapping[str, Path], given: Mapping[str, Path]) -> tuple[str, ...]:
    """The template files of OUT beside those of a BASE with a template, which they would outrank."""
    from converters.assets.token_files import OLD_TEMPLATES, TEMPLATE, held_template

    if held_template(given) is None:
        return ()
    return tuple(name for name in own if name not in given and name.startswith((TEMPLATE, *OLD_TEMPLATES)))


@contextmanager
def _staging(out: Path, dry_run: bool) -> Iterator[Path]:
    """A folder for prepared files: inside OUT, so that a file can be renamed to its place; elsewhere in a dry run."""
    if dry_run:
        with tempfile.TemporaryDirectory(prefix="vitruvian-") as elsewhere:
            yield Path(elsewhere)
        return
    folder = out / STAGING
    if folder.exists():
        shutil.rmtree(folder)  # left by a run that was killed
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror}") from None


def _states(out: Path, work: Work) -> dict[str, str]:
    """The change to each file, by name: new, replaced, same or removed."""
    states = {name: "replaced" if (out / name).exists() else "new" for name in work.staged}
    return dict(sorted((states | dict.fromkeys(work.same, "same") | dict.fromkeys(work.removed, "removed")).items()))


def _record(
    out: Path, rows: int, work: Work, states: Mapping[str, str], notes: list[str], problems: list[str]
) -> dict[str, object]:
    applied = work.applied
    facts: dict[str, object] = {"out": str(out), "rows": rows, "files": states}
    if applied is not None:
        facts |= {"terminator": applied.terminator, "added": applied.added, "rows_needed": applied.rows_needed}
    return facts | {"notes": notes, "problems": problems}


def _print(states: Mapping[str, str], notes: list[str], problems: list[str]) -> None:
    from converters.common.progress import table

    if states:
        click.echo(table((state, name) for name, state in states.items()))
    for note in notes:
        click.echo(f"note: {note}", err=True)
    for problem in problems:
        click.echo(f"problem: {problem}", err=True)


def _refuse(out: Path, rows: int, applied: Applied | None, template: str | None, problems: list[str]) -> None:
    """Refuse a model that could not be served.

    Raises:
        RefusedError: the embedding has too few rows, or there are problems.
    """
    if applied is not None and applied.rows_needed > rows:
        raise RefusedError(
            f"{', '.join(applied.added)} are new: {applied.rows_needed} rows are needed, the embedding has {rows}",
            f"the embedding grows with `convert hf2hf {out} NEW --chat-template {template}`",
        )
    if problems:
        rest = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
        raise RefusedError(f"{out} could not be served: {problems[0]}{rest}")
