"""Find, read and write the yml files of GPT-NeoX."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from formats.disk.safetensors import file_size
from formats.errors import OptionNeededError, SourceError, short

YAML, CONFS = (".yml", ".yaml"), (".yml", ".yaml", ".json")
"""Suffixes of files with settings: in a folder that the user names, and in that in which NeoX saves the files that it
was started with (megatron/neox_arguments/arguments.py `from_ymls`; JSON is YAML)."""
MOST_YAML = 1 << 20
MERGE = "tag:yaml.org,2002:merge"
"""The tag of the key `<<`, which a map may have several times."""


def config_of(tag: Path, given: Path | None) -> tuple[dict[str, Any], str]:
    """The merged yml, and its name for errors: the user's file or folder, else the yml saved with the weights.

    Raises:
        SourceError: the user's file or folder does not exist.
        OptionNeededError: there is no yml.
    """
    place = tag / "configs"
    if given is not None and not (given / "config.json").is_file():
        place = given
        if not place.exists():
            raise SourceError(f"{place} is not there", "--config names the yml of the run, or a folder with it")
    suffixes = YAML if place == given else CONFS
    paths = [place] if place.is_file() else sorted(path for path in place.glob("*") if path.suffix in suffixes)
    if not paths:
        raise OptionNeededError(f"{place} holds no yml with the settings of the model", "add --config RUN.yml")
    return read_yml(paths), str(paths[0] if len(paths) == 1 else place)


def read_yml(paths: Iterable[Path]) -> dict[str, Any]:
    """Merge yml files as NeoX does: `-` and `_` are the same in a key, and files must not contradict each other.

    Raises:
        SourceError: a file cannot be read, is too large, is no map or has a key twice; or two files contradict each
            other.
    """
    import yaml

    merged: dict[str, Any] = {}
    for path in paths:
        try:
            if (size := file_size(path)) > MOST_YAML:
                raise SourceError(f"{path} has {size} bytes, too many for a configuration")
            config = _load(path)
        except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
            raise SourceError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
        except OSError as error:
            raise SourceError(f"{path}: {error.strerror}") from None
        if not isinstance(config, dict):
            raise SourceError(f"{path} holds no map of settings")
        for name, value in config.items():
            key = str(name).replace("-", "_")
            if key in merged and not _same(merged[key], value):
                reason = f"{path} says {key} = {short(value)}, another file {short(merged[key])}"
                raise SourceError(reason, "name the right yml with --config")
            merged[key] = value
    return merged


def _load(path: Path) -> Any:
    """The contents of a yml without duplicate keys, of which PyYAML, and so NeoX, would silently take the last.

    Raises:
        SourceError: the yml has a key twice.
    """
    import yaml

    loader = yaml.SafeLoader(path.read_text())
    try:
        node = loader.get_single_node()
        lines: dict[str, int] = {}
        for name, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if not isinstance(name, yaml.ScalarNode) or name.tag == MERGE:
                continue
            key, line = name.value.replace("-", "_"), name.start_mark.line + 1
            if key in lines:
                raise SourceError(
                    f"{path} says {short(key)} twice, in lines {lines[key]} and {line}",
                    "NeoX trained with the last one: remove the other, and name the file with --config",
                )
            lines[key] = line
        return None if node is None else loader.construct_document(node)
    finally:
        loader.dispose()


def _same(first: Any, second: Any) -> bool:
    try:
        return bool(first == second)
    except RecursionError:  # a list that holds itself
        return False


def dump_yml(config: Mapping[str, Any]) -> bytes:
    """A yml that NeoX reads: numbers such as 3.0e-06 have a point, without which they would be read as text."""
    import yaml

    return yaml.safe_dump(dict(config), sort_keys=False).encode()
