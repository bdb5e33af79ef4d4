"""Custom code of a model: the classes that `auto_map` names, and whether their files are there.

Facts: transformers 5.23.0, dynamic_module_utils.py: `module.Class` is in module.py beside the config,
`repo--module.Class` in another repository; a tokenizer has a pair of such names, of which one may be null. Without
`trust_remote_code` a model type that transformers knows is loaded with transformers' class.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from formats.disk.json_file import read_json
from formats.errors import SourceError, short

ELSEWHERE = "--"
"""The separator between a repository and the name of a class in it."""


def missing_code(assets: Mapping[str, Path]) -> Iterator[str]:
    """A sentence for each code file that a config names and that is not among the assets.

    Args:
        assets: relative name to path.
    """
    for name, path in assets.items():
        if name != "config.json" and not name.endswith("_config.json"):
            continue
        try:
            named = read_json(path).get("auto_map")
        except SourceError:  # reported by the code that needs the file
            continue
        for code in dict.fromkeys(_files(named)):
            if code not in assets:
                yield f"auto_map of {name} names code in {short(code)}, which is not there: trust_remote_code fails"


def own_models(config: Mapping[str, Any]) -> list[str]:
    """The classes of models that the `auto_map` of a config.json names, such as `modeling_mine.MineForCausalLM`."""
    named = config.get("auto_map")
    classes = (value for key, value in named.items() if key.startswith("AutoModel")) if isinstance(named, dict) else ()
    return list(dict.fromkeys(value for value in classes if isinstance(value, str)))


def _files(named: Any) -> Iterator[str]:
    """The code files of the classes that an `auto_map` names, except those in other repositories."""
    match named:
        case str() if ELSEWHERE not in named:
            yield f"{named.rpartition('.')[0]}.py"
        case dict():
            for value in named.values():
                yield from _files(value)
        case list():
            for value in named:
                yield from _files(value)
