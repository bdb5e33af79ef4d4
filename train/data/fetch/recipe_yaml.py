"""Parses the YAML of recipes: every key and every value is checked before any data is read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from formats.errors import UsageError, VitruvianError, short
from train.data.fetch.filters import TESTS, Condition, Template, template
from train.data.fetch.recipe import FORMS, ROLES, Recipe, check_local, is_folder, is_local, nearest

SHIPPED = "train.data.fetch.recipes"
LARGEST = 1 << 20
KEYS = (
    "about", "source", "config", "splits", "revision", "quotes", "where",
    "system", "user", "assistant", "conversations", "turns", "roles", "text", "keep", "dedup", "sample", "seed", "as",
)  # fmt: skip
TURN = {"role": "role", "content": "content"}


def shipped() -> list[Recipe]:
    """The included recipes, sorted by name."""
    folder = resources.files(SHIPPED)
    names = sorted(file.name for file in folder.iterdir() if file.name.endswith(".yml"))
    return [parse(folder.joinpath(name).read_bytes(), name.removesuffix(".yml"), name) for name in names]


def load(name: str) -> Recipe:
    """The included recipe of a name, or the recipe in a file.

    Raises:
        UsageError: there is no such recipe, or it is invalid.
    """
    if re.fullmatch(r"[\w-]+", name):
        file = resources.files(SHIPPED).joinpath(f"{name}.yml")
        if file.is_file():
            return parse(file.read_bytes(), name, name)
    path = Path(name).expanduser()
    if not path.is_file():
        known = [recipe.name for recipe in shipped()]
        raise UsageError(f"{name} is neither a recipe nor a file{nearest(name, known)}", "train fetch --list")
    with path.open("rb") as opened:
        return parse(opened.read(LARGEST + 1), path.stem, str(path))


def override(recipe: Recipe, source: str | None = None, splits: Iterable[str] = (), **changes: Any) -> Recipe:
    """The recipe, changed by the options of the command line; an option that is None keeps the recipe's value."""
    overrides = {name: value for name, value in changes.items() if value is not None}
    if source:
        overrides["source"] = _sources(source, "source")
        if is_local(source):
            overrides["revision"] = None
        if is_local(source) and not is_folder(source):
            overrides |= {"config": (), "splits": ()}
    changed = replace(recipe, **(overrides | ({"splits": tuple(splits)} if splits else {})))
    check_local(changed)
    return changed


class _Loader(yaml.SafeLoader):
    """YAML without surprises: `no` is text (Norwegian), a date is text, and no key may be given twice."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  # as in its parent class

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """A mapping, refused if two keys are equal."""
        names = set[str]()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in names:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{short(key.value)} is given twice", key.start_mark
                )
            names.add(key.value if isinstance(key, yaml.ScalarNode) else "")
        return super().construct_mapping(node, deep)


for _tag, _pattern, _first in (
    ("null", r"~|null|", ["~", "n", ""]),
    ("bool", r"true|false", ["t", "f"]),
    ("int", r"[-+]?(0|[1-9]\d{0,18})", list("-+0123456789")),
    ("float", r"[-+]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][-+]?\d+)?", list("-+.0123456789")),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _first)


def parse(content: bytes, name: str, where: str) -> Recipe:
    """Parse a recipe, and check all that can be checked without its data.

    Args:
        content: the bytes of the file.
        name: the name of the recipe.
        where: the name of the file, for errors.

    Raises:
        UsageError: the content is not a recipe, or is an invalid one.
    """
    if len(content) > LARGEST:
        raise UsageError(f"{where} is larger than {LARGEST} bytes: no recipe is")
    try:
        document = yaml.load(content, _Loader)  # noqa: S506  # a SafeLoader
    except yaml.MarkedYAMLError as error:
        line = f" in line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UsageError(f"{where} is no recipe: {_line(error.problem)}{line}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UsageError(f"{where} is no recipe: {_line(str(error) or type(error).__name__)}") from None
    if not isinstance(document, dict):
        raise UsageError(f"{where} is no recipe: it holds {short(document)} and no keys", "train fetch --list")
    try:
        return _recipe(document, name)
    except VitruvianError as error:
        raise UsageError(f"{where}: {error}", error.hint) from None


def _line(text: str | None) -> str:
    return " ".join((text or "").split())[:200]


def _recipe(content: Mapping[Any, Any], name: str) -> Recipe:
    for key in content:
        if key not in KEYS:
            raise UsageError(f"{short(key)} is no key of a recipe{nearest(str(key), KEYS)}", "keys: " + ", ".join(KEYS))
    if "source" not in content:
        raise UsageError("it has no source", "source: org/name, or ./file.jsonl")
    fields = {
        key: read(content[key], key) for key, read in _READERS.items() if key in content and (content[key] is not None)
    }
    fields["form"] = fields.pop("as", "text" if "text" in content else "conversations")
    speakers = tuple((role, fields.pop(role)) for role in ROLES if role in fields)
    recipe = Recipe(name, speakers=speakers, **fields)
    _check(recipe, content)
    return recipe


def _check(recipe: Recipe, content: Mapping[str, Any]) -> None:
    """Check the keys against each other."""
    kinds = [kind for kind in ("conversations", "text") if content.get(kind) is not None] + (
        ["user and assistant"] if recipe.speakers else []
    )
    roles = [role for role, _ in recipe.speakers]
    if len(kinds) != 1:
        raise UsageError(
            f"it takes {' and also '.join(kinds) or 'nothing'} from a record",
            "one of: user and assistant; conversations; text",
        )
    if roles and not {"user", "assistant"} <= set(roles):
        raise UsageError(f"it has {roles[0]} and lacks user or assistant", "user: FIELD, assistant: FIELD")
    if (recipe.text and recipe.form == "conversations") or (recipe.form == "text" and not recipe.text):
        raise UsageError(f"{kinds[0]} cannot be written as {recipe.form}", "as: text goes with text: FIELD")
    for key in ("turns", "roles"):
        if key in content and not recipe.conversations:
            raise UsageError(f"{key} belongs to conversations, which it lacks", "conversations: FIELD")
    if "seed" in content and "sample" not in content:
        raise UsageError("it has a seed and no sample", "sample: N")
    output = {"text"} if recipe.form != "conversations" else {"conversations", "messages"}
    if clash := output & set(recipe.keep):
        raise UsageError(f"keep names {clash.pop()}, which is a field of the output")
    check_local(recipe)


def _text(value: Any, key: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise UsageError(f"{key} is {short(value)} and has to be text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{key} holds half of a surrogate pair, which is no text") from None
    return value


def _texts(value: Any, key: str) -> tuple[str, ...]:
    values = value if isinstance(value, list) else [value]
    if not values:
        raise UsageError(f"{key} is an empty list")
    return tuple(_text(item, key) for item in values)


def _sources(value: Any, key: str) -> tuple[str, ...]:
    values = _texts(value, key)
    kinds = {is_local(item) for item in values}
    if len(kinds) > 1 or (kinds == {False} and len(values) > 1):
        raise UsageError(f"source names {' and '.join(values)}", "one set of the Hub, or any number of files")
    if kinds == {False} and not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", values[0]):
        raise UsageError(f"source {short(values[0])} is not a valid name on the Hub", "a path begins with ./ or /")
    return values


def _template(value: Any, key: str) -> Template:
    return template(_text(value, key))


def _flag(value: Any, key: str) -> bool:
    if not isinstance(value, bool):
        raise UsageError(f"{key} is {short(value)} and has to be true or false")
    return value


def _number(value: Any, key: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < (key == "sample"):
        raise UsageError(f"{key} is {short(value)} and has to be a number such as 1000")
    return value


def _one_of(*known: str) -> Callable[[Any, str], str]:
    def read(value: Any, key: str) -> str:
        if value not in known:
            raise UsageError(f"{key} is {short(value)}{nearest(str(value), known)}", f"one of: {', '.join(known)}")
        return str(value)

    return read


def _mapping(value: Any, key: str) -> dict[str, Any]:
    if not isinstance(value, dict) or not value:
        raise UsageError(f"{key} is {short(value)} and has to be names with values")
    return {_text(name, key): item for name, item in value.items()}


def _turns(value: Any, key: str) -> tuple[str, str]:
    keys_given = _mapping(value, key)
    for name in keys_given:
        if name not in TURN:
            raise UsageError(f"{key} names {short(name)}{nearest(name, TURN)}", "turns: {role: from, content: value}")
    keys = {**TURN, **{name: _text(new_name, f"{key} {name}") for name, new_name in keys_given.items()}}
    return keys["role"], keys["content"]


def _roles(value: Any, key: str) -> tuple[tuple[str, str], ...]:
    pairs = tuple((name, _text(role, f"{key} {name}")) for name, role in _mapping(value, key).items())
    for _, role in pairs:
        if not re.fullmatch(r"[\w-]+", role):
            raise UsageError(f"{key} makes {short(role)} of a speaker, which is no role", "roles: {human: user}")
    return pairs


def _where(value: Any, key: str) -> tuple[Condition, ...]:
    conditions = []
    for field, value_of_field in _mapping(value, key).items():
        tests = (
            value_of_field
            if isinstance(value_of_field, dict)
            else {"in" if isinstance(value_of_field, list) else "is": value_of_field}
        )
        if not tests:
            raise UsageError(f"where {field} says nothing", f"where: {{{field}: VALUE}}")
        for test, expected in tests.items():
            if test not in TESTS:
                near = nearest(str(test), TESTS)
                raise UsageError(f"where {field}: {short(test)} is no condition{near}", f"one of: {', '.join(TESTS)}")
            _check_value(field, test, expected)
            conditions.append(Condition(field, test, expected))
    return tuple(conditions)


def _check_value(field: str, test: str, expected: Any) -> None:
    scalar = isinstance(expected, str | int | float | bool)
    fits = {
        "value": scalar or expected is None,
        "list": isinstance(expected, list) and all(isinstance(item, str | int | float | bool) for item in expected),
        "pattern": isinstance(expected, str),
        "bound": scalar and not isinstance(expected, bool),
    }
    if not fits[TESTS[test][2]]:
        raise UsageError(f"where {field}: {test} cannot be {short(expected)}: it takes a {TESTS[test][2]}")


_READERS: Mapping[str, Callable[[Any, str], Any]] = {
    "about": _text, "source": _sources, "config": _texts, "splits": _texts, "revision": _text, "quotes": _flag,
    "where": _where, "system": _template, "user": _template, "assistant": _template, "conversations": _text,
    "turns": _turns, "roles": _roles, "text": _template, "keep": _texts, "sample": _number, "seed": _number,
    "dedup": lambda value, key: bool(_one_of("prompt")(value, key)), "as": _one_of(*FORMS),
}  # fmt: skip
