r"""What is passed to a chat template beside roles and texts: tool calls, tools, reasoning, and its own variables.

    {"role": "assistant", "content": null, "reasoning_content": "…",
     "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{\"a\": 1}"}}]}
    {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "…"}]}

A template reads the keys that it knows, and silently leaves out the rest. So a key that a template does not read is
refused, and data that it reads and does not write is counted, see `template_encoder.LOST`.

Facts: OpenAI's reference of chat completions (messages, tool_calls, arguments as a JSON string, parts of a content);
transformers 5.23.0 chat_extras.md (`tools`, arguments as an object) and utils/chat_template_utils.py; vLLM 0.11
entrypoints/chat_utils.py, `_postprocess_messages`: arguments are decoded before a template gets them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from train.data.tokens.turn_flags import REASONING, RENDERED, Unclear, is_empty

READ = re.compile(r"""(\w+)(?:\.get\(\s*["']|\.|\[["'])(\w+)""")
NO_TURN = re.compile("loop|ns$|namespace|tool|function|param")
"""Match the attributes of variables that a chat template reads, and names of variables that are not turns."""
TOOLS = re.compile(r"\btools\b")
VARIABLES = "chat_template_kwargs"
"""Field of a record with variables for the chat template, named as in TRL."""


class Reads(NamedTuple):
    """The keys and fields that a chat template reads.

    Attributes:
        keys: keys of a turn.
        fields: fields of a record that are passed to the template.
    """

    keys: frozenset[str] = frozenset()
    fields: frozenset[str] = frozenset()


def reads(template: str | None) -> Reads:
    """The keys and fields that a chat template reads; none without a template."""
    if template is None:
        return Reads()
    keys = {key for base, key in READ.findall(template) if not NO_TURN.search(base)}
    if not keys.isdisjoint(REASONING):
        keys.update(REASONING)
    fields = {VARIABLES, *(["tools"] if TOOLS.search(template) else [])}
    return Reads(frozenset(keys), frozenset(fields))


def text_of(content: Any, number: int) -> Any:
    """The text of a turn's content; the texts of the parts of a list are concatenated.

    Templates that read lists themselves concatenate too (Llama 4, Gemma 3, Qwen2-VL).

    Raises:
        Unclear: a part is not text.
    """
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise Unclear("more", f"turn {number} has a part of the type {str(kind)[:40]!r}")
        texts.append(part["text"])
    return "".join(texts)


def message_of(turn: Mapping[str, Any], number: int, role: str, text: str | None, keys: frozenset[str]) -> Any:
    """A turn as a chat template takes it.

    Raises:
        Unclear: a tool call has no name, or arguments that are no object; or reasoning is no text, or given twice.
    """
    message: dict[str, Any] = {"role": role, "content": text}
    further = {key: turn[key] for key in RENDERED if key in keys and not is_empty(turn.get(key))}
    thought = next((further.pop(key) for key in REASONING if key in further), None)
    if thought is not None:
        if not isinstance(thought, str) or any(key in further and further[key] != thought for key in REASONING):
            raise Unclear("tool call", f"turn {number} has reasoning that is no text, or two of it")
        message |= {"thinking": thought, "reasoning_content": thought}
    message |= {key: value for key, value in further.items() if key not in REASONING}
    if "tool_calls" in message:
        message["tool_calls"] = _calls(message["tool_calls"], f"turn {number} has a tool call")
    return message


def _calls(calls: Any, shown: str) -> list[Any]:
    if not isinstance(calls, list):
        raise Unclear("tool call", f"{shown} outside a list")
    return [_call(call, shown) for call in calls]


def _call(call: Any, shown: str) -> dict[str, Any]:
    """A tool call with its arguments decoded to an object."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise Unclear("tool call", f"{shown} without a name")
    arguments = _decoded(function.get("arguments", {}))
    if not isinstance(arguments, dict):
        raise Unclear("tool call", f"{shown} of {function['name'][:40]!r} whose arguments are no object")
    changed = {**function, "arguments": arguments}
    return changed if function is call else {**call, "function": changed}


def tools_of(record: Mapping[str, Any]) -> list[Any] | None:
    """The tools of a record as a list, which tables have as JSON text; None if there are none.

    Raises:
        Unclear: the field is no list of tools with names.
    """
    value = record.get("tools")
    if is_empty(value):
        return None
    tools = _decoded(value)
    if not isinstance(tools, list) or None in map(tool_name, tools):
        raise Unclear("tool call", "the record has tools that are no list of functions with names")
    return tools


def tool_name(tool: Any) -> str | None:
    """The name of a tool, or of the function of a tool call; None without a name."""
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None


def called_functions(message: Mapping[str, Any]) -> list[str]:
    """The names of the functions in the tool calls of a message, and the texts in their arguments."""
    functions = [call.get("function", call) for call in message.get("tool_calls", ())]
    return [text for function in functions for text in (function["name"], *texts(function["arguments"]))]


def _decoded(value: Any) -> Any:
    """The value of a JSON text, None if the text is invalid; any other value unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


def _refuse(constant: str) -> Any:
    raise ValueError(constant)


def variables_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """The variables that a record sets for its chat template.

    Raises:
        Unclear: the field is no object.
    """
    value = record.get(VARIABLES)
    if is_empty(value):
        return {}
    if not isinstance(value, dict):
        raise Unclear("record", f"the record has {VARIABLES!r} that is no object")
    return value


def replaced(value: Any, change: Callable[[str], str]) -> Any:
    """A JSON value with `change` applied to all its strings, keys too."""
    match value:
        case str():
            return change(value)
        case Mapping():
            return {change(key): replaced(item, change) for key, item in value.items()}
        case list() | tuple():
            return [replaced(item, change) for item in value]
    return value


def texts(value: Any) -> list[str]:
    """All strings in a JSON value, keys too."""
    match value:
        case str():
            return [value]
        case Mapping():
            return [*value, *texts(list(value.values()))]
        case list() | tuple():
            return [text for item in value for text in texts(item)]
    return []
