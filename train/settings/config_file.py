"""Reads the settings of a training run.

Settings come from a YAML file, merged over another file if it names a `base`; dotted options on the command line
override them (`--optim.lr 1e-5`). An unknown key is an error that names the nearest known one. Keys of GPT-NeoX files
are translated, see `neox_keys.py`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from formats.errors import UsageError
from train.settings.config import Config, keys
from train.settings.neox_keys import Notes, completed, get, put, translated

QUANTIZED = "1, 2, 3, 5, 8, 16, 32, 40, 64 and 80"
"""Numbers of nodes on which users have run ZeRO++'s quantized gradients."""


def load_config(path: Path, overrides: Iterable[str] = ()) -> tuple[Config, list[str]]:
    """Read settings.

    Args:
        path: a YAML file.
        overrides: options of the command line: `--optim.lr`, `1e-5`, `--model.compile=true`, ….

    Returns:
        The settings, and notes on GPT-NeoX keys: the settings that they became, and the defaults of absent keys.

    Raises:
        UsageError: a key is unknown, or a value is wrong.
    """
    tree, translations = _tree(path)
    settings = dict(_options(overrides))
    for name, value in settings.items():
        put(tree, name, value, f"--{name}")
    notes = [note + _overridden(ours, settings) for ours, note in translations]
    notes += completed(tree, str(path))
    try:
        config = Config(**tree)
    except ValidationError as error:
        raise UsageError(*_explained(error, str(path))) from None
    config.remember(notes)
    _check_engine(config)
    if "zero_quantized_gradients" in config.parallel.deepspeed.get("zero_optimization", {}):
        notes.append(f"zero_quantized_gradients (qgZ) is known to work on {QUANTIZED} nodes")
    return config, notes


def _tree(path: Path, above: tuple[Path, ...] = ()) -> tuple[dict[str, Any], Notes]:
    """The settings of a file merged over those of its `base`, and the notes of both.

    Args:
        path: the file.
        above: the files that have this file as their base, directly or through others.
    """
    content = _read(path)
    base = content.pop("base", None)
    tree, notes = translated(content, str(path))
    if base is None:
        return tree, notes
    if not isinstance(base, str):
        raise UsageError(f"{path}: base is {base!r}", "it has to be one file of settings, which may have a base itself")
    chain = (*above, path.resolve())
    if (path.parent / base).resolve() in chain:
        raise UsageError(f"{path}: its base {base} is a file that has it as its base")
    base_tree, base_notes = _tree(path.parent / base, chain)
    return _upon(base_tree, tree), [note for note in base_notes if not _says(tree, note[0])] + notes


def _says(tree: Any, name: str) -> bool:
    """Whether a tree gives a setting a value."""
    value = get(tree, name)
    return value is not None and not isinstance(value, Mapping)


def _upon(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Settings `over` merged over settings `under`: sections are merged, everything else is replaced."""
    joined = {
        name: _upon(under[name], value)
        for name, value in over.items()
        if isinstance(value, Mapping) and isinstance(under.get(name), Mapping)
    }
    return {**under, **over, **joined}


def _read(path: Path) -> dict[str, Any]:
    """The content of a YAML file, without keys whose value is null."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8-sig"))
        _require_once(path)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        hint = f"iconv -f UTF-16 -t UTF-8 {path} > utf8.yml, if it is UTF-16"
        raise UsageError(f"{path} is not UTF-8: byte {error.start} cannot be read", hint) from None
    except yaml.YAMLError as error:
        raise UsageError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise UsageError(f"{path} is not a mapping of settings")
    if "lora" in content and content["lora"] is None:
        raise UsageError(f"{path}: lora is empty", "lora: {} takes the defaults; without it all weights are trained")
    return {name: value for name, value in content.items() if value is not None}


def _overridden(name: str, settings: Mapping[str, Any]) -> str:
    """A note of the command-line options that override a setting, or settings in a section; empty if none does."""
    options = [f"--{key} {value}" for key, value in settings.items() if name and f"{key}.".startswith(f"{name}.")]
    return f"; but {', '.join(options)}" if options else ""


def _check_engine(config: Config) -> None:
    """Refuse settings that the chosen engine does not support."""
    zero = {"parallel.deepspeed": bool(config.parallel.deepspeed)}
    ours = {
        "parallel.replicas": config.parallel.replicas > 1,
        "optim.moments": config.optim.moments == "8bit",
        "lora.quantize": config.lora is not None and config.lora.quantize != "none",
        "parallel.offload": config.parallel.offload,
        "parallel.reshard": not config.parallel.reshard,
        "parallel.context": config.parallel.context > 1,
        "parallel.tensor": config.parallel.tensor > 1,
        "model.compile": config.model.compile,
        "model.kernels": config.model.kernels == "liger",
        "log.layer_norms": config.log.layer_norms,
    }
    foreign = {"fsdp": zero, "transformers": ours | zero, "deepspeed": ours}
    for name, is_set in foreign[config.engine].items():
        if is_set:
            raise UsageError(f"the engine {config.engine} does not know {name}", keys().get(name, ""))


def _require_once(path: Path) -> None:
    """Refuse a section or setting that is given twice: YAML silently takes the last value."""

    def walk(node: Any) -> None:
        if isinstance(node, yaml.MappingNode):
            lines: dict[str, int] = {}
            for key, value in node.value:
                if key.value in lines:
                    where = f"in lines {lines[key.value]} and {key.start_mark.line + 1}"
                    raise UsageError(f"{path}: {key.value} is given twice, {where}")
                lines[key.value] = key.start_mark.line + 1
                walk(value)

    walk(yaml.compose(path.read_text(), yaml.SafeLoader))


def _options(overrides: Iterable[str]) -> Iterable[tuple[str, Any]]:
    argv = list(overrides)
    while argv:
        argument = argv.pop(0)
        if not argument.startswith("--"):
            raise UsageError(f"{argument} is not a setting such as --optim.lr 1e-5")
        name, equals, value = argument[2:].partition("=")
        if not equals:
            if not argv:
                raise UsageError(f"--{name} has no value")
            value = argv.pop(0)
        free = name.startswith("data.validation.")  # the name of a set keeps its hyphens
        yield name if free else name.replace("-", "_"), _value(value)


def _value(text: str) -> Any:
    """A value as YAML reads it, except that text such as `1e-5`, a string in YAML 1.1, is a number."""
    try:
        return float(text) if text.lower().lstrip("+-")[:1].isdigit() and "e" in text.lower() else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError):
        return text


def _explained(error: ValidationError, path: str) -> tuple[str, str]:
    """The first fault of a validation as a sentence, or all unknown keys with the nearest known ones as a hint."""
    faults = error.errors()

    def of_type(kind: str) -> list[str]:
        return [".".join(map(str, fault["loc"])) for fault in faults if fault["type"] == kind]

    def more(named: int) -> str:
        return f" ({len(faults) - named} more)" if len(faults) > named else ""

    if unknown := of_type("extra_forbidden"):  # a misspelled key is also missing
        near = [key for key in map(_nearest, unknown) if key]
        fault_text = f"{', '.join(unknown)} {'are no settings' if len(unknown) > 1 else 'is no setting'}"
        known = ", ".join(key for key in keys() if key.startswith(unknown[0].partition(".")[0] + "."))
        others = f"there are {known}" if known else "`train init` writes a file with every setting"
        hint = f"did you mean {', '.join(dict.fromkeys(near))}?" if near else others
        return f"{path}: {fault_text}{more(len(unknown))}", hint
    fault = faults[0]
    where = re.sub(r"\.(constrained-float|literal\[.*\])$", "", ".".join(map(str, fault["loc"])))  # of a union
    fault_text = f"{where} is {fault['input']!r}: {fault['msg']}{more(1)}"
    if fault["type"] == "missing":
        lacking = of_type("missing")
        fault_text = f"{', '.join(lacking)} {'are' if len(lacking) > 1 else 'is'} missing{more(len(lacking))}"
    return f"{path}: {fault_text}", keys().get(where, "")


def _nearest(name: str) -> str:
    """The known setting whose name is nearest to an unknown one, empty if none is near."""
    known = list(keys())
    last = {key.rpartition(".")[2]: key for key in known}
    close = difflib.get_close_matches(name, known, 1, 0.6)
    return close[0] if close else last.get((difflib.get_close_matches(name.rpartition(".")[2], last, 1) or [""])[0], "")
