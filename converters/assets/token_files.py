"""Read the small files of a model folder for its special tokens, their ids, and the chat template.

All functions read `assets`: relative name to path, as `converters.assets.files` finds them.
Facts: transformers 5.23.0 tokenization_utils_base.py `from_pretrained` (a chat_template.jinja outranks the template
inside tokenizer_config.json; special_tokens_map.json outranks tokenizer_config.json, but neither it nor
added_tokens.json is read where tokenizer_config.json has `added_tokens_decoder`), tokenization_utils_tokenizers.py
`__init__` (tokens that these files name and tokenizer.json lacks get the next ids, whatever the files say; so do those
that the class has by default, and that of tokenizer.json's `padding`, where no file has their key; a class with an
`__init__` of its own is built anew, with the added tokens of `added_tokens_decoder` alone) and
generation/configuration_utils.py `from_model_config` (without a generation_config.json its values come from
config.json).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from converters.assets.class_tokens import Default, class_defaults
from converters.assets.json_edit import decoded, members
from formats.errors import SourceError, short

if TYPE_CHECKING:
    from converters.assets.tokenizer_json import Vocabulary

Assets = Mapping[str, Path]

CONFIG = "config.json"
GENERATION = "generation_config.json"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
ADDED, SPECIAL = "added_tokens.json", "special_tokens_map.json"
TEMPLATE, OLD_TEMPLATE = "chat_template.jinja", "chat_template.json"
NAMED_TEMPLATES = "additional_chat_templates/"
"""The folder of further templates, such as one for tools: each file is named as its template."""
OLD_TEMPLATES = (OLD_TEMPLATE, NAMED_TEMPLATES)
"""Other files that may hold a template."""
SLOW = ("tokenizer.model", "vocab.json", "vocab.txt", "tekken.json", "sentencepiece.bpe.model", "spiece.model")
"""Files of tokenizers other than tokenizer.json."""
TOKENIZER_FILES = (TOKENIZER, "merges.txt", *SLOW)
"""Files that hold a vocabulary."""
SAYING = (OLD_TEMPLATE, ADDED, SPECIAL, TOKENIZER_CONFIG, TEMPLATE)
"""Files that say which tokens are special or added, and the chat template, each outranking those before it where
tokenizer_config.json lists added tokens."""
DECODER = "added_tokens_decoder"
SPLIT = "split_special_tokens"
"""The key that makes transformers encode special tokens as plain text."""
LISTS = ("additional_special_tokens", "extra_special_tokens", "model_specific_special_tokens")
"""The keys of further special tokens, in a list or by name."""
KINDS = ("bos", "eos", "pad")
NAMED = tuple(f"{kind}_token" for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
"""The keys of single special tokens, in the order in which transformers adds them to a tokenizer."""
WRITTEN = tuple(f"{kind}_token_id" for kind in (*KINDS, "forced_bos", "forced_eos", "decoder_start"))
"""The keys of ids that a text may get; `generate` ignores ids of `suppress_tokens` that no token has."""
OUTPUTS = ("output_attentions", "output_hidden_states", "output_scores", "output_logits")
"""Settings of what `generate` returns besides tokens; one of them sets `return_dict_in_generate`."""
_GENERATES = """
assistant_confidence_threshold assistant_early_exit assistant_ensemble_weight assistant_lookbehind bad_words_ids
begin_suppress_tokens bos_token_id cache_config cache_implementation compile_config constraints
continuous_batching_config decoder_start_token_id disable_compile diversity_penalty do_sample dola_layers
early_stopping encoder_no_repeat_ngram_size encoder_repetition_penalty eos_token_id epsilon_cutoff eta_cutoff
exponential_decay_length_penalty force_words_ids forced_bos_token_id forced_eos_token_id guidance_scale is_assistant
length_penalty low_memory max_cache_len max_length max_matching_ngram_size max_new_tokens max_time min_length
min_new_tokens min_p no_repeat_ngram_size num_assistant_tokens num_assistant_tokens_schedule num_beam_groups num_beams
num_return_sequences output_attentions output_hidden_states output_logits output_scores pad_token_id penalty_alpha
prefill_chunk_size prompt_lookup_num_tokens remove_invalid_values renormalize_logits repetition_penalty
return_dict_in_generate sequence_bias speculation_type stop_strings suppress_tokens target_lookbehind temperature
token_healing top_h top_k top_p typical_p use_cache use_mtp watermarking_config
"""
GENERATES = frozenset(_GENERATES.split())
"""The settings of a generation config, which config.json may hold instead."""
DECODERS = ("decoder", "generator", "text_config")
"""Parts of a config.json whose settings of generation count where the whole has none."""


def content(assets: Assets, name: str) -> bytes:
    """The bytes of a file.

    Raises:
        SourceError: the file cannot be read.
    """
    try:
        return assets[name].read_bytes()
    except OSError as error:
        raise SourceError(f"{assets[name]}: {error.strerror}") from None


def object_of(assets: Assets, name: str) -> dict[str, Any]:
    """The object in a JSON file, empty if there is no such file.

    Raises:
        SourceError: the file cannot be read, or is no JSON object.
    """
    if name not in assets:
        return {}
    text = decoded(content(assets, name), name)
    return {member.key: member.value for member in members(text, name)}


def named_tokens(assets: Assets) -> dict[str, str]:
    """The tokenizer's bos, eos and pad tokens, by kind."""
    config, special = _token_settings(assets)
    named = {kind: text_of((config | special).get(f"{kind}_token")) for kind in KINDS}
    return {kind: token for kind, token in named.items() if isinstance(token, str)}


def _token_settings(assets: Assets) -> tuple[dict[str, Any], dict[str, Any]]:
    """What counts of tokenizer_config.json and of special_tokens_map.json, which outranks it."""
    config, special = object_of(assets, TOKENIZER_CONFIG), object_of(assets, SPECIAL)
    return config, {} if DECODER in config else special


def left_over(own: Collection[str], given: Collection[str]) -> list[str]:
    """The files of a tokenizer that would stay in a folder among the given ones of another tokenizer."""
    names = (*TOKENIZER_FILES, ADDED, SPECIAL)
    return [] if set(given).isdisjoint(names) else [name for name in names if name in own and name not in given]


def text_of(token: Any) -> Any:
    """The text of a token, which may be an object with flags."""
    return token.get("content") if isinstance(token, dict) else token


class Outside(NamedTuple):
    """A token that tokenizer.json lacks: what names it, such as a file, and whether it is special."""

    named_by: str
    special: bool


def tokens_outside(assets: Assets, known: Vocabulary) -> dict[str, Outside]:
    """The tokens that tokenizer.json lacks, to which transformers gives ids after all others.

    Args:
        assets: relative name to path.
        known: the vocabulary of tokenizer.json.
    """
    config, special = _token_settings(assets)
    name = TOKENIZER_CONFIG if DECODER in config else ADDED
    listed = config[DECODER] if DECODER in config else [*object_of(assets, ADDED)]
    named: list[tuple[Any, Outside]] = [(each.token, Outside(each.of, True)) for each in _class_defaults(assets)]
    if known.padding is not None and "pad_token" not in config and "pad_token" not in special:
        named.append((known.padding, Outside("its padding", True)))
    named += [
        (token, Outside(name, isinstance(token, dict) and token.get("special") is True)) for token in _values(listed)
    ]
    config = {key: value for key, value in config.items() if key in LISTS or key not in special}
    for name, settings in ((SPECIAL, special), (TOKENIZER_CONFIG, config)):
        for key, value in settings.items():
            tokens = _values(value) if key in LISTS else [value] if key.endswith("_token") else []
            named += [(token, Outside(name, True)) for token in tokens]
    texts = {text: outside for token, outside in named if isinstance(text := text_of(token), str) and text}
    return {text: outside for text, outside in texts.items() if text not in known.ids}


def _class_defaults(assets: Assets) -> Iterator[Default]:
    """The special tokens that the class of the tokenizer adds, since no file says what they are."""
    config, special = _token_settings(assets)
    for each in class_defaults(config, object_of(assets, CONFIG)):
        if each.key not in config and each.key not in special:
            yield each


def rebuilt_tokens(assets: Assets) -> dict[str, int | None] | None:
    """The added tokens of a tokenizer that transformers builds anew, in its order, with the ids that are listed.

    None where tokenizer_config.json has no `added_tokens_decoder`: transformers then adds the tokens of tokenizer.json.

    Raises:
        SourceError: a key of `added_tokens_decoder` is no id.
    """
    config = object_of(assets, TOKENIZER_CONFIG)
    decoder = config.get(DECODER)
    if not isinstance(decoder, dict):
        return None
    try:
        listed = sorted((int(key), text_of(token)) for key, token in decoder.items() if isinstance(text_of(token), str))
    except ValueError:
        raise SourceError(f"{DECODER} of {TOKENIZER_CONFIG} has a key that is no id: {short([*decoder])}") from None
    further = [value for key, value in config.items() if key.endswith("_token") and key not in NAMED]
    known = {each.key: each.token for each in reversed([*_class_defaults(assets)])} | config
    named = [*map(known.get, NAMED), *further, *(token for key in LISTS for token in _values(config.get(key)))]
    tokens: dict[str, int | None] = {text: number for number, text in listed}
    return tokens | {text: None for token in named if isinstance(text := text_of(token), str) and text not in tokens}


def split_tokens(assets: Assets) -> str | None:
    """The file that says that special tokens are encoded as plain text, None if none does."""
    config, special = _token_settings(assets)
    name, settings = (SPECIAL, special) if SPLIT in special else (TOKENIZER_CONFIG, config)
    return name if settings.get(SPLIT) else None


class Entry(NamedTuple):
    """What a file beside tokenizer.json says of an added token: the file, the key, and the token with its flags."""

    file: str
    key: str
    token: dict[str, Any]


def token_entries(assets: Assets) -> dict[str, Entry]:
    """The entries of added tokens that count instead of those in tokenizer.json, by the text of the token."""
    config, special = _token_settings(assets)
    entries = []
    for key, value in (config | special).items():
        tokens = _values(value) if key in (*LISTS, DECODER) else [value] if key.endswith("_token") else []
        file = SPECIAL if key in special else TOKENIZER_CONFIG
        entries += [Entry(file, key, token) for token in tokens if isinstance(token, dict)]
    return {text: entry for entry in entries if isinstance(text := entry.token.get("content"), str)}


def _values(value: Any) -> list[Any]:
    """The values of a list, or of an object; none of anything else."""
    return [*value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []


def token_ids(value: Any, name: str) -> list[int]:
    """The ids in a setting such as eos_token_id: none, one or several.

    Raises:
        SourceError: the value is neither null, an id nor a list of ids.
    """
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(token_id) is int for token_id in ids):
        raise SourceError(f"{name} is {short(value)}, not an id or a list of ids")
    return ids


def generation_settings(assets: Assets) -> dict[str, Any]:
    """The settings of generation; config.json counts only without a generation_config.json."""
    if GENERATION in assets:
        return object_of(assets, GENERATION)
    config = object_of(assets, CONFIG)
    decoder = next((part for name in DECODERS if isinstance(part := config.get(name), dict) and part), {})
    given = (item for part in (decoder, config) for item in part.items())
    settings = {key: value for key, value in given if key in GENERATES and value is not None}
    return settings | ({"return_dict_in_generate": True} if any(settings.get(key) for key in OUTPUTS) else {})


def eos_ids(assets: Assets) -> list[int]:
    """The ids at which generation stops."""
    name = GENERATION if GENERATION in assets else CONFIG
    return token_ids(generation_settings(assets).get("eos_token_id"), f"eos_token_id of {name}")


def templates_in(value: Any) -> dict[str, Any]:
    """The templates of a setting `chat_template` by name; one without a name is the default."""
    if isinstance(value, list):
        return {str(entry.get("name")): entry.get("template") for entry in value if isinstance(entry, dict)}
    if isinstance(value, dict):
        return value
    return {} if value is None else {"default": value}


def held_template(assets: Assets) -> str | None:
    """The chat template of a model, None without one.

    Raises:
        SourceError: the template is no text.
    """
    if TEMPLATE in assets:
        return decoded(content(assets, TEMPLATE), TEMPLATE)
    for name in (TOKENIZER_CONFIG, OLD_TEMPLATE):
        template = templates_in(object_of(assets, name).get("chat_template")).get("default")
        if template is not None and not isinstance(template, str):
            raise SourceError(f"chat_template of {name} is {short(template)}, not a text")
        if template is not None:
            return template
    return None
