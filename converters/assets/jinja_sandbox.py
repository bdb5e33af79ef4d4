"""Render chat templates as transformers does, and without trusting them.

A template is a program that came with a model. `render` runs it in a sandbox where it can reach nothing but its
arguments; `guarded` also gives it a process of its own, so that a template that never ends, or takes all memory, is
stopped. Neither protects against a fault in jinja2 itself: 3.1.6 is the oldest version without a known escape.

Facts: transformers 5.23.0 utils/chat_template_utils.py: the environment and its options, the names that a template
finds in it, and how the span of a `{% generation %}` block is computed.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

from jinja2 import Template, TemplateError, meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from formats.errors import SourceError

MAX_TEXT = 1 << 22
"""Most characters of a rendered dialogue."""
MAX_SECONDS = 10
"""Most seconds of processor time of a guarded process."""
MAX_MEMORY = 1 << 30
"""Most bytes of address space of a guarded process."""

Message = Mapping[str, Any]
Rendered = tuple[str, list[tuple[int, int]]]
"""A text, and the start and stop of each of its generation blocks, in characters."""


class Dialogue(NamedTuple):
    """The input of a template; an optional dialogue that the template refuses is rendered as an empty text."""

    messages: Sequence[Message]
    add_generation_prompt: bool = False
    optional: bool = False


class Trial(NamedTuple):
    """The result of a guarded process: each dialogue's text, and the names that the template looks up."""

    rendered: list[Rendered]
    names: frozenset[str]


# --- the environment -------------------------------------------------------------------------------------------------


class _Progress:
    """The state of a rendering: characters so far, and (start, text) of each generation block."""

    def __init__(self) -> None:
        self.length = 0
        self.blocks: list[tuple[int, str]] = []


_PROGRESS: ContextVar[_Progress] = ContextVar("progress")


class _Generation(Extension):
    """The tag `generation`: renders its body and records where it begins."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it without ClassVar

    def parse(self, parser: Parser) -> nodes.Node:
        """Turn the block into a call of `_note` that gets the block's text."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_note"), [], [], body).set_lineno(line)

    def _note(self, caller: Callable[[], str]) -> str:
        text, progress = caller(), _PROGRESS.get()
        progress.blocks.append((progress.length, text))
        return text


class _Namespace(Namespace):
    """A jinja2 namespace whose attributes cannot replace Python's special ones, such as `__html__`."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        for name in dict(*args[1:], **kwargs):
            _check_name(name)
        Namespace.__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace has no attribute {name!r}: it begins with an underscore")


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache(1)
def _environment() -> ImmutableSandboxedEnvironment:
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    made.filters["tojson"] = _tojson
    made.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now, "namespace": _Namespace}
    return made


@lru_cache(8)
def _compiled(template: str) -> Template:
    return _environment().from_string(template)


# --- rendering -------------------------------------------------------------------------------------------------------


def render(
    template: str,
    messages: Sequence[Message],
    *,
    bos_token: str | None,
    eos_token: str | None,
    add_generation_prompt: bool = False,
    tools: Sequence[Any] | None = None,
    variables: Mapping[str, Any] = MappingProxyType({}),
) -> Rendered:
    """Render a dialogue, in this process and without a time limit: for templates that are known.

    Args:
        template: the text of a chat template.
        messages: the dialogue; keys whose value is None are left out, except `content`.
        bos_token: the tokenizer's bos token; the template does not find the name when it is None.
        eos_token: the tokenizer's eos token, likewise.
        add_generation_prompt: end with the beginning of a reply.
        tools: the functions that the model may call, as the template takes them.
        variables: further names that the template finds.

    Returns:
        The text, and (start, stop) of each generation block in it.

    Raises:
        SourceError: the template is malformed, fails, writes more than 4 million characters, or moves or changes the
            text of a generation block, whose place is unknown then.
    """
    named = {"bos_token": bos_token, "eos_token": eos_token}
    plain = [
        {key: value for key, value in message.items() if value is not None or key == "content"} for message in messages
    ]
    progress, pieces = _Progress(), list[str]()
    mark = _PROGRESS.set(progress)
    try:
        for piece in _compiled(template).generate(
            messages=plain,
            **{
                **variables,
                **{name: token for name, token in named.items() if token is not None},
                "tools": tools,
                "documents": None,
                "add_generation_prompt": add_generation_prompt,
            },
        ):
            pieces.append(piece)
            progress.length += len(piece)
            if progress.length > MAX_TEXT:
                raise SourceError(f"the chat template writes more than {MAX_TEXT} characters for a dialogue")
    except SourceError:
        raise
    except Exception as error:  # the template is the program that failed, and it can fail in any way
        raise SourceError(f"the chat template does not render: {_reason(error)}") from error
    finally:
        _PROGRESS.reset(mark)
    return _placed("".join(pieces), progress)


def _placed(text: str, progress: _Progress) -> Rendered:
    """The text with the spans of its blocks. A block in a macro or a captured `set` runs before its text appears."""
    if any(text[start : start + len(block)] != block for start, block in progress.blocks):
        raise SourceError("the chat template moves or changes the text of a generation block after the block ends")
    return text, [(start, start + len(block)) for start, block in progress.blocks]


def _reason(error: Exception) -> str:
    line = getattr(error, "lineno", None)
    message = " ".join(str(error).split())[:300] or "no reason given"
    return f"{type(error).__name__}: {message}" + (f" (line {line})" if line else "")


# --- a process of its own --------------------------------------------------------------------------------------------

_CHILD = "import sys; sys.path[:] = sys.argv[1:]; from converters.assets.jinja_sandbox import child; child()"


def guarded(template: str, dialogues: Sequence[Dialogue], *, bos_token: str | None, eos_token: str | None) -> Trial:
    """Render dialogues in a process that is ended after 10 seconds of processor time, or above 1 GiB of memory.

    Raises:
        SourceError: as in `render`, or the template reached a limit.
    """
    task = {
        "template": template,
        "dialogues": dialogues,
        "named": {"bos_token": bos_token, "eos_token": eos_token},
        "limits": {"RLIMIT_CORE": 0, "RLIMIT_CPU": MAX_SECONDS, "RLIMIT_AS": MAX_MEMORY},
    }
    try:
        ran = subprocess.run(  # noqa: S603  # our own interpreter and our own words
            [sys.executable, "-c", _CHILD, *sys.path],
            input=json.dumps(task).encode(),
            capture_output=True,
            timeout=6 * MAX_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise SourceError(f"the chat template does not end within {6 * MAX_SECONDS} seconds") from None
    if ran.returncode < 0:
        raise SourceError(
            f"the chat template does not end within {MAX_SECONDS} seconds of processor time and {MAX_MEMORY >> 20} MiB"
        )
    if ran.returncode > 0:
        raise RuntimeError(f"the process for chat templates failed: {ran.stderr.decode(errors='replace')[-500:]}")
    answer = json.loads(ran.stdout)
    if "error" in answer:
        raise SourceError(answer["error"])
    rendered = [(text, [(start, stop) for start, stop in spans]) for text, spans in answer["rendered"]]
    return Trial(rendered, frozenset(answer["names"]))


def child() -> None:
    """The main function of the guarded process: a task as JSON on stdin, the answer as JSON on stdout."""
    task = json.load(sys.stdin)
    for name, limit in task["limits"].items():
        allowed = resource.getrlimit(getattr(resource, name))[1]
        least = limit if allowed == resource.RLIM_INFINITY else min(limit, allowed)
        resource.setrlimit(getattr(resource, name), (least, least))
    answer: dict[str, Any]
    try:
        rendered = [_tried(task, Dialogue(*dialogue)) for dialogue in task["dialogues"]]
        names = meta.find_undeclared_variables(_environment().parse(task["template"]))
        answer = {"rendered": rendered, "names": sorted(names)}
    except SourceError as error:
        answer = {"error": str(error)}
    sys.stdout.write(json.dumps(answer))


def _tried(task: Mapping[str, Any], dialogue: Dialogue) -> Rendered:
    try:
        return render(
            task["template"],
            dialogue.messages,
            add_generation_prompt=dialogue.add_generation_prompt,
            **task["named"],
        )
    except SourceError:
        if dialogue.optional:
            return "", []
        raise
