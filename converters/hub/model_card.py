"""The model card: the README.md of a repository on the Hub.

A folder's own README.md stays as it is, except for metadata that it lacks. Without a README.md, a card is written with
the source of the weights, their hashes and how to load them. Nothing is invented: facts that no file records are left
out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from converters.assets.files import files as assets
from converters.assets.files import has_tokenizer
from converters.assets.token_files import held_template
from formats.checkpoint import MANIFEST
from formats.disk.json_file import read_json
from formats.errors import SourceError
from formats.huggingface.language_model import auto_class

if TYPE_CHECKING:
    from converters.hub.files import File

NAME = "README.md"
BEGIN, END = "<!-- vitruvian: begin -->", "<!-- vitruvian: end -->"
"""Marks around the section that is written anew at each push, so that its digests are never old."""
FRONT = re.compile(r"\A---[ \t]*\r?\n(.*?)(?:\r?\n)?^---[ \t]*(?:\r?\n|\Z)", re.DOTALL | re.MULTILINE)
MOST = 1 << 20
"""Most bytes of a README.md."""


def write_card(folder: Path, repo: str, files: Sequence[File], base_model: str | None) -> tuple[str, list[str]]:
    """The card of a folder, and notes on it.

    Args:
        folder: a Hugging Face folder.
        repo: ORG/NAME, for the usage example.
        files: what is sent besides the card.
        base_model: id of the model that the weights were trained from.

    Raises:
        SourceError: README.md is no text, or its metadata is malformed.
    """
    metadata = _metadata(folder, base_model)
    section = _conversion(folder, files)
    path = folder / NAME
    if not path.exists():
        title = repo.partition("/")[2]
        text = f"---\n{_yaml(metadata)}---\n\n# {title}\n\n{section}\n{_usage(folder, repo)}"
        return text, ["the card states no licence: add `license: ID` to the metadata of a README.md in the folder"]
    text, merged = _merged(path, metadata)
    notes = [f"{NAME} of the folder is the card: its text is kept"]
    if base_model and merged.get("base_model") != base_model:
        notes.append(f"{NAME} names another base_model already, --base-model {base_model} is not written")
    if "license" not in merged:
        notes.append("the card states no licence")
    if BEGIN in text and END in text.partition(BEGIN)[2]:
        before, _, rest = text.partition(BEGIN)
        text = before + section.strip("\n") + rest.partition(END)[2]
    return text, notes


def _metadata(folder: Path, base_model: str | None) -> dict[str, Any]:
    """The metadata of the card that is known for certain."""
    facts: dict[str, Any] = {"library_name": "transformers"}
    names = read_json(folder / "config.json").get("architectures")
    if isinstance(names, list) and names and str(names[0]).endswith("ForCausalLM"):
        facts["pipeline_tag"] = "text-generation"
    if base_model:
        facts["base_model"] = base_model
    return facts | {"tags": ["vitruvian"]}


def _yaml(value: Mapping[str, Any]) -> str:
    import yaml

    return str(yaml.safe_dump(dict(value), sort_keys=False, allow_unicode=True)) if value else ""


def _merged(path: Path, metadata: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """The text of a README.md with missing metadata added below its own, and all of the metadata."""
    try:
        if path.stat().st_size > MOST:
            raise SourceError(f"{path} has {path.stat().st_size} bytes, too many for a card")
        text = path.read_bytes().decode()
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise SourceError(f"{path} is no UTF-8 text: {error.reason} at byte {error.start}") from None
    match = FRONT.match(text)
    existing = _parse(match[1], path) if match else {}
    missing = {key: value for key, value in metadata.items() if key not in existing}
    if not missing:
        return text, existing
    body = text[match.end() :] if match else text
    front = f"{match[1]}\n{_yaml(missing)}".lstrip("\n") if match and existing else _yaml({**existing, **missing})
    if match and existing and not _reads_as(front, {*existing, *missing}):  # such as {a: 1}, which has no line to add
        front = _yaml({**existing, **missing})
    return f"---\n{front}---\n{body if match else chr(10) + body}", {**existing, **missing}


def _parse(front: str, path: Path) -> dict[str, Any]:
    import yaml

    try:
        metadata = yaml.safe_load(front)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        line = " ".join(str(error).split())[:200]
        raise SourceError(f"the metadata that begins {path} is no YAML: {line}", f"edit {path}, or remove it") from None
    if metadata is not None and not isinstance(metadata, dict):
        raise SourceError(f"the metadata that begins {path} is no mapping", f"edit {path}, or remove it")
    return metadata or {}


def _reads_as(front: str, keys: set[Any]) -> bool:
    import yaml

    try:
        metadata = yaml.safe_load(front)
    except yaml.YAMLError:
        return False
    return isinstance(metadata, dict) and set(metadata) == keys


def _conversion(folder: Path, files: Iterable[File]) -> str:
    """The section of the card on the source of the weights, their digest, and the hashes of files."""
    lines = [BEGIN, "## Conversion", "", f"Published with vitruvian {version()}."]
    if (folder / MANIFEST).is_file():
        lines += _provenance(read_json(folder / MANIFEST))
    lines += ["", "| file | bytes | SHA-256 |", "|---|---:|---|"]
    lines += [f"| {_cell(file.name)} | {file.size} | `{file.sha256}` |" for file in files if file.name != NAME]
    return "\n".join([*lines, END, ""])


def _provenance(manifest: Mapping[str, Any]) -> list[str]:
    """Lines on the conversion from a manifest; values that are not as expected are left out."""
    lines = []
    source = manifest.get("source")
    if isinstance(source, dict) and re.fullmatch("[a-z0-9_]{1,40}", str(source.get("format"))):
        sizes = source.get("topology")
        known = {name: n for name, n in sizes.items() if type(n) is int} if isinstance(sizes, dict) else {}
        shape = ", ".join(f"{_cell(name)} {n}" for name, n in known.items())
        lines += [f"Converted from: {source['format']}" + (f" ({shape})" if shape else "") + "."]
    digest = manifest.get("digest")
    if isinstance(digest, str) and re.fullmatch("[0-9a-f]{64}", digest):
        lines += ["", f"Digest of the weights: `{digest}`",
                  f"(`convert verify FOLDER` checks a copy against `{MANIFEST}`)."]  # fmt: skip
    return lines


def _cell(name: str) -> str:
    """A name escaped for a Markdown table."""
    return re.sub(r"([\\`*_{}\[\]<>()#+!|~])", r"\\\1", name) if not re.fullmatch(r"[\w./-]+", name) else name


def version() -> str:
    """The version of this tool."""
    from importlib.metadata import version as of

    return of("vitruvian")


def _usage(folder: Path, repo: str) -> str:
    """The section of the card on how to load the model."""
    auto = auto_class(read_json(folder / "config.json"))
    if not has_tokenizer(folder):
        lines = [f"from transformers import {auto}", "",
                 f"model = {auto}.from_pretrained({_quoted(repo)}, dtype=\"auto\")"]  # fmt: skip
        return "\n".join(["## Usage", "", "```python", *lines, "```", ""])
    lines = [
        f"from transformers import {auto}, AutoTokenizer",
        "",
        f"tokenizer = AutoTokenizer.from_pretrained({_quoted(repo)})",
        f'model = {auto}.from_pretrained({_quoted(repo)}, dtype="auto")',
    ]
    if held_template(dict(assets(folder))):
        lines += [
            'messages = [{"role": "user", "content": "Hello!"}]',
            "inputs = tokenizer.apply_chat_template(",
            '    messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"',
            ")",
        ]
    else:
        lines += ['inputs = tokenizer("Hello!", return_tensors="pt")']
    lines += [
        "outputs = model.generate(**inputs, max_new_tokens=50)",
        'print(tokenizer.decode(outputs[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))',
    ]
    return "\n".join(["## Usage", "", "```python", *lines, "```", ""])


def _quoted(text: str) -> str:
    return json.dumps(text)
