"""Small files beside the weights that say something else than those of another folder, which are carried instead.

Compared is what a training changes: tokens, chat templates, generation, processors. Keys that every program writes in
its own way are not, and a key that a file lacks says nothing. Facts: transformers 5.23.0 tokenization_utils_base.py
(`model_specific_special_tokens` are transformers 4's dict of `extra_special_tokens`) and processing_utils.py
(processor_config.json has in it what transformers 4 writes into preprocessor_config.json).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from converters.assets.files import PROCESSOR, near_folders
from converters.assets.token_files import (  # fmt: skip
    ADDED,
    CONFIG,
    GENERATION,
    NAMED_TEMPLATES,
    OUTPUTS,
    SAYING,
    TEMPLATE,
    TOKENIZER,
    TOKENIZER_CONFIG,
    TOKENIZER_FILES,
    generation_settings,
    left_over,
    object_of,
    templates_in,
    text_of,
)
from converters.assets.tokenizer_json import read_vocabulary
from formats.checkpoint import Checkpoint
from formats.disk.json_file import read_json
from formats.errors import SourceError, short, some
from formats.huggingface.rope import POSITIONS
from formats.model.untabled import language

SAID = tuple(f"{kind}_token" for kind in ("bos", "eos", "pad", "unk"))
FURTHER = ("additional_special_tokens", "extra_special_tokens")
"""The keys of further special tokens, in transformers 4 and 5."""
FURTHER_NAMED = ("extra_special_tokens", "model_specific_special_tokens")
"""The keys of further special tokens by name, in transformers 4 and 5."""
CLASS = "tokenizer_class"
ANY_CLASS = ("PreTrainedTokenizer", "TokenizersBackend", "PythonBackend", "SentencePieceBackend")
"""Tokenizer classes, without their suffix Fast, that read the tokenizers of others."""
TEMPLATE_OF, ID_OF = "chat_template ", "id of "
"""What precedes the name of a template and the text of an added token in a key of what a file says."""
IDS = tuple(f"{kind}_token_id" for kind in ("bos", "eos", "pad", "decoder_start"))
NO_MATTER = {"_from_model_config", "transformers_version", "use_cache", "return_dict_in_generate", *OUTPUTS}
"""Settings in a generation config that change no text."""
NONE = "and OUT gets none"
LONGEST = 20
"""More digits than any id has."""
MOST = 1 << 30
"""Most bytes of a file that is compared."""


def left_behind(source: Checkpoint) -> Iterator[str]:
    """Notes on the files of a checkpoint that are not carried, since those of another folder are.

    Where a tokenizer was named in place of the run's own, nothing that belongs to a tokenizer is compared.
    """
    if source.assets is None:
        return
    places = near_folders(source)
    known = source.assets in (source.settings.config, *places.values())
    theirs = (f"that of {source.assets} is", f"those of {source.assets} are") if known else ("another is", "others are")
    config = source.settings.config
    if config and config.is_dir():  # beside a Hugging Face folder, whose own files are carried
        places |= {config.resolve(): config}
    others = [place for resolved, place in places.items() if resolved != source.assets.resolve()]
    gets_template = not any(_has_template(place) for place in others) and _has_template(source.assets)
    for place in others:
        if source.tokenizer_given:
            own, carried = (_generation(folder, without=IDS) for folder in (place, source.assets))
            if own != carried and _is_there(place / GENERATION):
                yield (
                    f"{place / GENERATION} is not carried, another is: if the training changed it, put it into OUT, "
                    "and record it with `convert assets OUT --from OUT`"
                )
            continue
        names = _differing(place, source.assets)
        if not source.settings.only:
            names += _other_processors(place, source.assets)
        replaced = [name for name in names if _is_replaced(name, place, source.assets)]
        yield from _not_carried(place, replaced, source.assets, *theirs)
        yield from _not_carried(place, [name for name in names if name not in replaced], source.assets, NONE, NONE)
        if gets_template and _is_there(place / TOKENIZER_CONFIG):
            yield (
                f"{place} has a {TOKENIZER_CONFIG} and no chat template, OUT gets the one of {source.assets}: if the "
                "model was trained without, take it out of OUT, and record that with `convert assets OUT --from OUT`"
            )
        own, carried = _settings(place), _settings(source.assets)
        differ = [key for key, value in own.items() if _listed(value) != _listed(carried.get(key))]
        if differ:
            said = [f"{key} {short(own[key])} (carried: {short(carried.get(key))})" for key in differ]
            yield (
                f"{place / CONFIG} says {', '.join(said)}: if the training changed that, change it in OUT, and record "
                "it with `convert assets OUT --from OUT`"
            )


def _not_carried(place: Path, names: Sequence[str], carried: Path, one: str, several: str) -> Iterator[str]:
    """A note on files of a folder that are not carried, and on what is instead of one of them, or of several."""
    are, instead, them = ("is", one, "it") if len(names) == 1 else ("are", several, "them")
    if names:
        left = left_over(*([path.name for path in folder.iterdir()] for folder in (carried, place)))
        yield (
            f"{some(names, 5)} of {place} {are} not carried, {instead}; `convert assets OUT --from {place}` puts "
            f"{them} into OUT" + (f" once it is without {some(left, 5)}" if left else "")
        )


def _is_replaced(name: str, own: Path, carried: Path) -> bool:
    """Whether OUT gets a file of that name, or what another one says of the same."""
    if _is_there(carried / name):
        return True
    said = {key for other in _saying(carried) for key in _said(carried / other)} if name in _saying(own) else set()
    return not said.isdisjoint(_said(own / name)) or (bool(PROCESSOR.fullmatch(name)) and bool(_processors(carried)))


def _differing(own: Path, carried: Path) -> list[str]:
    """The files of a folder that say something else than those that are carried."""
    names = [name for name in TOKENIZER_FILES if _is_there(own / name) and not _is_same(own / name, carried / name)]
    ours = {name: _said(own / name) for name in _saying(own)}
    given = {key for said in ours.values() for key, value in said.items() if value is not None}
    theirs = {
        key: value for name in _saying(carried) for key, value in _said(carried / name).items() if value is not None
    }
    added = [(key, value) for said in ours.values() for key, value in said.items() if key.startswith(ID_OF)]
    vocabulary = _vocabulary(carried) if any(theirs.get(key) != value for key, value in added) else {}

    def differs(name: str, key: str, value: Any) -> bool:
        if value is None:
            return key in theirs and key not in given
        if key == CLASS or (name == TOKENIZER_CONFIG and key.startswith(ID_OF) and not vocabulary):
            return bool(theirs.get(key, value) != value)  # without a vocabulary added_tokens.json lists what is added
        return value not in (theirs.get(key), vocabulary.get(key))

    names += [name for name, said in ours.items() if any(differs(name, *item) for item in said.items())]
    if _is_there(own / GENERATION) and _generation(own) != _generation(carried):
        names.append(GENERATION)
    return names


def _saying(folder: Path) -> list[str]:
    """The names of files that are compared by what they say, each outranking those before it."""
    named = sorted(path.name for path in (folder / NAMED_TEMPLATES).glob("*.jinja"))
    return [*SAYING, *(f"{NAMED_TEMPLATES}{name}" for name in named)]


def _has_template(folder: Path) -> bool:
    """Whether a folder has a chat template; also where a file that may hold one is no JSON."""
    said = [item for name in _saying(folder) for item in _said(folder / name).items()]
    return any(key.startswith(TEMPLATE_OF) or isinstance(value, bytes) for key, value in said)


def _vocabulary(folder: Path) -> dict[str, int]:
    """The ids in a folder's tokenizer.json, as `_said` gives them; none where there is none or it cannot be loaded."""
    try:
        ids = read_vocabulary((folder / TOKENIZER).read_bytes()).ids if _is_there(folder / TOKENIZER) else {}
    except SourceError:
        return {}
    return {f"{ID_OF}{text}": number for text, number in ids.items()}


def _is_there(path: Path) -> bool:
    return path.is_file() and path.stat().st_size < MOST


def _is_same(one: Path, other: Path) -> bool:
    return other.is_file() and one.read_bytes() == other.read_bytes()


def _said(path: Path) -> dict[str, Any]:
    """What a small file says of chat template and tokens, by key; its bytes where it is no JSON."""
    if not _is_there(path):
        return {}
    content = path.read_bytes()
    if path.suffix == ".jinja":
        name = "default" if path.name == TEMPLATE else path.stem
        return {f"{TEMPLATE_OF}{name}": content.decode(errors="replace")}
    try:
        document = read_json(path)
    except SourceError:
        return {path.name: content}
    if path.name == ADDED:
        return {f"{ID_OF}{text}": number for text, number in document.items()}
    said = {f"{TEMPLATE_OF}{name}": text for name, text in templates_in(document.get("chat_template")).items()}
    said |= {key: text_of(document[key]) for key in SAID if document.get(key) is not None}
    said |= {key: None for key, value in document.items() if key.endswith("_token") and value is None}
    further = [str(text_of(token)) for key in FURTHER if isinstance(document.get(key), list) for token in document[key]]
    said |= {FURTHER[0]: sorted(further)} if further else {}
    for key in FURTHER_NAMED:
        said |= {name: text_of(token) for name, token in _object(document, key).items()}
    for number, token in _object(document, "added_tokens_decoder").items():
        said[f"{ID_OF}{text_of(token)}"] = int(number) if number.isdecimal() and len(number) < LONGEST else number
    kind = str(document.get(CLASS) or "").removesuffix("Fast")
    return said | ({CLASS: kind} if kind and kind not in ANY_CLASS else {})


def _object(document: dict[str, Any], key: str) -> dict[str, Any]:
    return value if isinstance(value := document.get(key), dict) else {}


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


def _settings(folder: Path) -> dict[str, Any]:
    """What a config.json says of special tokens, None for null, and of positions; nothing where it is no JSON."""
    assets = {CONFIG: folder / CONFIG} if _is_there(folder / CONFIG) else {}
    try:
        config = object_of(assets, CONFIG)
        given = config | generation_settings(assets)
    except SourceError:
        return {}
    positions = language(config).get(POSITIONS)
    said = {key: given[key] for key in IDS if key in given}
    return said if positions is None else said | {POSITIONS: positions}


def _other_processors(own: Path, carried: Path) -> list[str]:
    """The configs of processors in a folder that say something else than those that are carried.

    Where one transformers has written them in another way than the other, only what both say is compared.
    """
    theirs = {name: _processing(carried / name) for name in _processors(carried)}
    said = {key: value for part in theirs.values() for key, value in part.items()}
    names = []
    for name in _processors(own):
        ours = _processing(own / name)
        alike = not said or {part for part, _ in ours} in ({""}, {part for part, _ in theirs.get(name, {})})
        if any((alike or key in said) and said.get(key) != value for key, value in ours.items()):
            names.append(name)
    return names


def _processors(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.json") if PROCESSOR.fullmatch(path.name) and _is_there(path))


def _processing(path: Path) -> dict[tuple[str, str], Any]:
    """What the config of a processor says, by (part, key); its bytes where it is no JSON."""
    try:
        document = read_json(path)
    except SourceError:
        return {("", path.name): path.read_bytes()}
    whole = "processor"
    if path.name != "processor_config.json":
        kinds = {"feature_extractor_type": "feature_extractor", "video_processor_type": "video_processor"}
        whole = next((part for key, part in kinds.items() if key in document), "image_processor")
    parts = {
        key: value
        for key, value in document.items()
        if key.endswith(("_processor", "_extractor")) and isinstance(value, dict)
    }
    said = {(whole, key): value for key, value in document.items() if key not in parts}
    said |= {(part, key): value for part, values in parts.items() for key, value in values.items()}
    return {
        (part, key): value.removesuffix("Fast") if key.endswith("_type") and isinstance(value, str) else value
        for (part, key), value in said.items()
        if key != "transformers_version" and value is not None
    }
