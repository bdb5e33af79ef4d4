"""Sources of records: a data set of the Hub, a folder as the library `datasets` reads it, or files.

Nothing is cached: sets of the Hub are streamed, at one commit, and of Parquet files only the columns that the recipe
names are requested.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from converters.common.hub_names import one_line
from formats.errors import NetworkError, SourceError, UnsupportedError, UsageError, VitruvianError, short
from train.data.fetch.recipe import Recipe, expanded, nearest
from train.data.fetch.tables import Row, arrow_row, files_of, parquet_rows, require, rows

if TYPE_CHECKING:
    from datasets import DatasetBuilder

LIBRARIES = ("httpx2", "httpx", "requests", "urllib3", "hf_xet", "aiohttp")
"""Libraries that connect to the Hub: their exceptions are reported as network errors."""
LATER = (408, 409, 425, 429)
INSTALL = "pip install 'vitruvian[data]'"
LOGIN = "hf auth login   # or set HF_TOKEN; some sets also ask you to accept terms on their page"


Part = tuple[str, Callable[[], Iterator[Row]]]
"""The name of a part of a source, such as a split, and a function that starts to read the part."""


@dataclass(frozen=True)
class Source:
    """An opened source.

    Attributes:
        name: name of the source in the recipe.
        revision: the commit on the Hub, None for local data.
        parts: the parts to read in order, such as splits.
    """

    name: str
    revision: str | None
    parts: tuple[Part, ...]


def open_source(recipe: Recipe, quiet: bool = False) -> Source:
    """Open the source of a recipe. Of a set of the Hub only the description is read, no records.

    Raises:
        UsageError: set, subset, split, column or file do not exist, or the Hub requires another token.
        NetworkError: the Hub cannot be reached.
        UnsupportedError: the library `datasets` or `pyarrow` is not installed.
        SourceError: the data is damaged.
    """
    if not recipe.local:
        return _hub(recipe, quiet)
    folder = expanded(recipe.source[0])
    if len(recipe.source) == 1 and folder.is_dir():
        return _folder(recipe, folder, quiet)
    paths = files_of(recipe)
    if any(path.name.endswith(".parquet") for path in paths):
        _library("pyarrow")
    parts = tuple((str(path), partial(rows, path, recipe.quotes, recipe.fields)) for path in paths)
    return Source(", ".join(recipe.source), None, parts)


def commit_of(name: str, revision: str | None) -> str:
    """The current commit of a revision of a set.

    Raises:
        UsageError: there is no such set or revision.
        NetworkError: the Hub cannot be reached.
    """
    from huggingface_hub import HfApi

    with explained(name):
        return str(HfApi(library_name="vitruvian").dataset_info(name, revision=revision, timeout=30).sha)


def _hub(recipe: Recipe, quiet: bool) -> Source:
    _library("datasets", quiet)
    name = recipe.source[0]
    if Path(name).exists():  # load.py of the library would prefer it to the Hub
        raise UsageError(f"{name} is a set of the Hub and also a folder here", f"--source ./{name}   # for the folder")
    commit = commit_of(name, recipe.revision)
    parts = [part for config in recipe.config or (None,) for part in _splits(recipe, name, name, config, commit)]
    return Source(name, commit, tuple(parts))


def _folder(recipe: Recipe, folder: Path, quiet: bool) -> Source:
    _library("datasets", quiet)
    if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
        return Source(str(folder), None, _saved(recipe, folder))
    absolute = str(folder.resolve())
    parts = [
        part for config in recipe.config or (None,) for part in _splits(recipe, absolute, str(folder), config, None)
    ]
    return Source(str(folder), None, tuple(parts))


def _splits(recipe: Recipe, path: str, name: str, config: str | None, commit: str | None) -> list[Part]:
    """The splits of one subset of a set; each split has to have the recipe's fields."""
    import datasets

    with explained(name):
        builder = datasets.load_dataset_builder(path, config, revision=commit)
        _exact(builder)
        known = [str(split) for split in builder.config.data_files or ()]
    parts: list[Part] = []
    for split in _wanted(recipe, known, f"{name} {config}" if config else name):
        with explained(name):
            features = builder.as_streaming_dataset(split=split).features
        label = f"{split} of {name} {config}" if config else f"{split} of {name}"
        if features is not None:
            require(recipe.fields, list(features), label)
        parts.append((label, partial(_streamed, builder, split, name, recipe.fields)))
    return parts


def _wanted(recipe: Recipe, known: list[str], place: str) -> tuple[str, ...]:
    """The splits to read.

    Raises:
        UsageError: a split does not exist, or the set has several and the recipe names none.
    """
    for split in recipe.splits:
        if split not in known:
            raise UsageError(
                f"{place} has no split {short(split)}{nearest(split, known)}", f"its splits: {', '.join(known)}"
            )
    if not recipe.splits and len(known) != 1:
        raise UsageError(
            f"{place} has {len(known)} splits, and the recipe names none", f"--split {known[0] if known else 'train'}"
        )
    return recipe.splits or tuple(known)


def _exact(builder: DatasetBuilder) -> None:
    """Keep the library `datasets` from guessing types of cells (5.2.0: packaged_modules, CsvConfig and JsonConfig)."""
    for name, value in (("keep_default_na", False), ("parse_agent_traces", False)):
        if hasattr(builder.config, name):
            setattr(builder.config, name, value)


def _streamed(builder: DatasetBuilder, split: str, name: str, fields: tuple[str, ...]) -> Iterator[Row]:
    """The records of a split. Parquet is read by `parquet_rows`; all other formats by the library `datasets`."""
    from datasets.packaged_modules.parquet.parquet import Parquet
    from datasets.utils.file_utils import xopen

    with explained(name):
        if not isinstance(builder, Parquet):
            yield from map(arrow_row, builder.as_streaming_dataset(split=split))
            return
        for address in builder.config.data_files[split]:
            with xopen(address, "rb") as file:  # reconnects if the connection is lost
                yield from parquet_rows(file, fields, f"{split} of {name}")


def _saved(recipe: Recipe, folder: Path) -> tuple[Part, ...]:
    """The parts of a folder that `save_to_disk` of `datasets` wrote."""
    import datasets

    with explained(str(folder)):
        loaded = datasets.load_from_disk(str(folder))
    sets: Mapping[str, Any] = (
        loaded if isinstance(loaded, datasets.DatasetDict) else {str(loaded.split or "train"): loaded}
    )
    parts: list[Part] = []
    for split in _wanted(recipe, list(sets), str(folder)):
        require(recipe.fields, sets[split].column_names, f"{split} of {folder}")
        parts.append((f"{split} of {folder}", partial(map, arrow_row, sets[split].select_columns(list(recipe.fields)))))
    return tuple(parts)


# --- the library -----------------------------------------------------------------------------------------------------


def _library(name: str, quiet: bool = False) -> None:
    """Check that a library is installed, and reduce its output.

    Raises:
        UnsupportedError: the library is not installed.
    """
    try:
        module = import_module(name)
    except ImportError as error:
        raise UnsupportedError(f"this needs the library {name}: {error}", INSTALL) from None
    if name != "datasets":
        return
    module.config.TORCH_AVAILABLE = False  # importing torch takes seconds, and a signal meanwhile would end in C++
    if hasattr(module.config, "HF_DATASETS_TRUST_REMOTE_CODE"):  # before 4.0 a set could contain code
        module.config.HF_DATASETS_TRUST_REMOTE_CODE = False
    if quiet or not sys.stderr.isatty():
        module.disable_progress_bars()
    if quiet and "DATASETS_VERBOSITY" not in os.environ:
        logging.getLogger("datasets").setLevel(logging.CRITICAL)
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    logging.getLogger("httpx").setLevel(logging.ERROR)


@contextmanager
def explained(name: str) -> Iterator[None]:
    """Turn exceptions of libraries into errors of one sentence. None of our own code may run inside."""
    try:
        yield
    except (VitruvianError, GeneratorExit):
        raise
    except Exception as error:  # any exception of a library
        raise _meaning(error, name) from error


def _meaning(error: BaseException, name: str) -> VitruvianError:
    """The error for the user, from an exception of a library or the exceptions that caused it."""
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    chain: BaseException | None = error
    while chain is not None:
        text = one_line(str(chain)) or type(chain).__name__
        if isinstance(chain, OfflineModeIsEnabled):
            return UsageError(f"HF_HUB_OFFLINE is set, so {name} cannot be asked for", "unset HF_HUB_OFFLINE")
        if isinstance(chain, HfHubHTTPError) and chain.response is not None:
            return _refusal(chain.response.status_code, one_line(str(chain.server_message or "") or text), name)
        if type(chain).__module__.partition(".")[0] in LIBRARIES or isinstance(chain, ConnectionError | TimeoutError):
            return NetworkError(f"{name} cannot be reached: {text}", "the same command, later")
        chain = chain.__cause__
    text = one_line(str(error)) or type(error).__name__
    if type(error).__name__ in ("DatasetNotFoundError", "DataFilesNotFoundError") or "BuilderConfig" in text:
        return UsageError(f"{name}: {text}", LOGIN if "Hub" in text else "")
    if "scripts are no longer supported" in text:
        return UnsupportedError(f"{name} is a script that makes a data set, and scripts of others are not run here")
    if isinstance(error, OSError) and error.errno is not None:
        return SourceError(f"{error.filename or name}: {error.strerror}")
    return SourceError(f"{name} cannot be read: {type(error).__name__}: {text}")


def _refusal(status: int, text: str, name: str) -> VitruvianError:
    """The error for an HTTP status of the Hub: exit code 8 if a retry may help, 2 if something else has to change."""
    if status >= 500 or status in LATER:
        return NetworkError(f"the Hub is not able to serve {name} now ({status}: {text})", "the same command, later")
    if status in (401, 403):
        return UsageError(f"the Hub does not give {name} to this token ({status}: {text})", LOGIN)
    return UsageError(f"{name} or its revision does not exist for this token ({status}: {text})", LOGIN)
