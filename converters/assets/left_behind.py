"""Small files beside the weights that say something else than those of another folder, which are carried instead.

Compared is what a training changes: tokens, chat template, generation. Keys that every program writes in its own way
are not.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from converters.assets.token_files import (  # fmt: skip
    CONFIG,
    GENERATION,
    OUTPUTS,
    SLOW,
    TEMPLATE,
    TOKENIZER_CONFIG,
    generation_settings,
)
from formats.checkpoint import ASSETS, Checkpoint
from formats.disk.json_file import read_json
from formats.errors import SourceError, short, some

TOKENIZER = "tokenizer.json"
TOKENIZER_FILES = (TOKENIZER, "merges.txt", *SLOW)
"""Files that are compared byte for byte."""
ADDED = "added_tokens.json"
SAYING = ("chat_template.json", ADDED, "special_tokens_map.json", TOKENIZER_CONFIG, TEMPLATE)
"""Files that are compared by what they say, each outranking those before it."""
SAID = ("chat_template", *(f"{kind}_token" for kind in ("bos", "eos", "pad", "unk")))
FURTHER = ("additional_special_tokens", "extra_special_tokens")
"""The keys of further special tokens, in transformers 4 and 5."""
IDS = tuple(f"{kind}_token_id" for kind in ("bos", "eos", "pad", "decoder_start"))
NO_MATTER = {"_from_model_config", "transformers_version", "use_cache", "return_dict_in_generate", *OUTPUTS}
"""Settings in a generation config that change no text."""
MOST = 1 << 30
"""Most bytes of a file that is compared."""


def left_behind(source: Checkpoint) -> Iterator[str]:
    """Notes on the files of a checkpoint that are not carried, since those of another folder are.

    Where a tokenizer was named in place of the run's own, nothing that belongs to a tokenizer is compared.
    """
    if source.assets is None:
        return
    homes = [source.home, source.root]
    if not (source.home / CONFIG).is_file() and (source.home.parent / CONFIG).is_file():
        homes.append(source.home.parent)  # readers look there too
    places = {place.resolve(): place for home in homes for place in (home / ASSETS, home)}
    known = source.assets in (source.settings.config, *places.values())
    theirs = f"those of {source.assets}" if known else "others"
    for resolved, place in places.items():
        if resolved == source.assets.resolve():
            continue
        if source.tokenizer_given:
            own, carried = (_generation(folder, without=IDS) for folder in (place, source.assets))
            if own != carried and _is_there(place / GENERATION):
                yield (
                    f"{place / GENERATION} is not carried, another is: if the training changed it, put it into OUT, "
                    "and record it with `convert assets OUT --from OUT`"
                )
            continue
        if names := _differing(place, source.assets):
            yield (
                f"{some(names, 5)} of {place} are not carried, {theirs} are; `convert assets OUT --from {place}` puts "
                "them into OUT"
            )
        own, carried = _ids(place), _ids(source.assets)
        differ = [key for key, value in own.items() if _listed(value) != _listed(carried.get(key))]
        if differ:
            ids = [f"{key} {short(own[key])} (carried: {short(carried.get(key))})" for key in differ]
            yield (
                f"{place / CONFIG} says {', '.join(ids)}: if the training changed that, change it in OUT, and record "
                "it with `convert assets OUT --from OUT`"
            )


def _differing(own: Path, carried: Path) -> list[str]:
    """The files of a folder that say something else than those that are carried."""
    names = [name for name in TOKENIZER_FILES if _is_there(own / name) and not _is_same(own / name, carried / name)]
    said = {key: value for name in SAYING for key, value in _said(carried / name).items()}
    for name in SAYING:
        if name == ADDED and _is_there(own / TOKENIZER):
            continue  # it has them too
        if any(said.get(key) != value for key, value in _said(own / name).items()):
            names.append(name)
    if _is_there(own / GENERATION) and _generation(own) != _generation(carried):
        names.append(GENERATION)
    return names


def _is_there(path: Path) -> bool:
    return path.is_file() and path.stat().st_size < MOST


def _is_same(one: Path, other: Path) -> bool:
    return other.is_file() and one.read_bytes() == other.read_bytes()


def _said(path: Path) -> dict[str, Any]:
    """What a small file says of chat template and tokens, by key; its bytes where it is no JSON."""
    if not _is_there(path):
        return {}
    content = path.read_bytes()
    if path.name == TEMPLATE:
        return {SAID[0]: content.decode(errors="replace")}
    try:
        document = read_json(path)
    except SourceError:
        return {path.name: content}
    if path.name == ADDED:
        return {f"token {text}": number for text, number in document.items()}
    said = {key: _text(document[key]) for key in SAID if document.get(key) is not None}
    further = [str(_text(token)) for key in FURTHER if isinstance(document.get(key), list) for token in document[key]]
    return said | ({FURTHER[0]: sorted(further)} if further else {})


def _text(token: Any) -> Any:
    """The text of a token, which may be an object with flags."""
    return token.get("content") if isinstance(token, dict) else token


def _listed(value: Any) -> Any:
    """One id as a list, as several are."""
    return [value] if isinstance(value, int) else value


def _generation(folder: Path, without: Collection[str] = ()) -> dict[str, Any] | bytes:
    """What a folder says of generation, without what changes no text; the bytes of the file where it is no JSON."""
    assets = {name: folder / name for name in (GENERATION, CONFIG) if _is_there(folder / name)}
    try:
        settings = generation_settings(assets)
    except SourceError:
        return next(iter(assets.values())).read_bytes()
    left_out = {*NO_MATTER, *without}
    matter = {key: value for key, value in settings.items() if key not in left_out and value is not None}
    return {key: _listed(value) if key in IDS else value for key, value in matter.items()}


def _ids(folder: Path) -> dict[str, Any]:
    """The ids of special tokens that a config.json gives; none where it is no JSON."""
    try:
        settings = generation_settings({CONFIG: folder / CONFIG} if _is_there(folder / CONFIG) else {})
    except SourceError:
        return {}
    return {key: settings[key] for key in IDS if key in settings}
