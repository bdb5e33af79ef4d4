"""Regular expressions in the settings of a LoRA, which may be anybody's: those that do not end in time are refused.

Python's `re` goes back: how long a match takes depends on the names, and may double with each letter, as of
`([a-z.]+)+!`. So expressions that can go back are first matched in a process of their own, with a bound of its time.
"""

from __future__ import annotations

import json
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from formats.errors import UnsupportedError, short

MAX_SECONDS = 5
"""Most seconds of processor time for all expressions of some settings."""
NAMED, RANKS = ("target_modules", "exclude_modules", "modules_to_save", "layers_pattern"), (
    "rank_pattern", "alpha_pattern",
)  # fmt: skip
"""Settings with expressions that tell which modules have a LoRA; settings with those that tell its rank and alpha."""
FORMS = {
    "modules_to_save": r"(^|.*\.){}($|\..*)",
    "layers_pattern": r"(?:^|.*?\.){}\.(\d+)\.",
    **dict.fromkeys(RANKS, r"(.*\.)?({})$"),
}
"""Setting: the expression that PEFT makes of one of its texts (peft 0.21.2 tuners/tuners_utils.py), if not itself."""
GOES_BACK = re.compile(r"[*+?{|]")
"""Matches in each expression that has a repeat or a choice."""


def match(setting: str, text: str, module: str) -> re.Match[str] | None:
    """Match an expression of a setting with the name of a module, as PEFT does.

    Raises:
        re.error: it is no regular expression.
    """
    form = FORMS.get(setting)
    return re.match(form.format(text), module) if form else re.fullmatch(text, module)


def require_bounded(config: Mapping[str, Any], settings: Iterable[str], modules: Collection[str], where: str) -> None:
    """Match the expressions of some settings with the names of modules, within a bound of time.

    Raises:
        UnsupportedError: it takes longer.
    """
    texts = [(name, text) for name in settings for text in _expressions(name, config) if GOES_BACK.search(text)]
    if not texts:
        return
    task = {"texts": texts, "modules": [*modules], "seconds": MAX_SECONDS}
    program = "import sys; sys.path[:] = sys.argv[1:]; from formats.huggingface.lora_patterns import child; child()"
    try:
        ran = subprocess.run(  # noqa: S603  # our own interpreter and our own words
            [sys.executable, "-c", program, *sys.path],
            input=json.dumps(task).encode(), stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, timeout=12 * MAX_SECONDS, check=False,
        )  # fmt: skip
        if ran.returncode not in (0, -signal.SIGXCPU, -signal.SIGKILL):
            ran.check_returncode()
        ended, told = ran.returncode == 0, ran.stdout
    except subprocess.TimeoutExpired as error:
        ended, told = False, error.stdout or b""
    if not ended:
        name, text = texts[max(len(told) - 1, 0)]
        raise UnsupportedError(
            f"{where} says {name} = {short(text)}, and Python does not match it with {len(modules)} names of modules "
            f"within {MAX_SECONDS} seconds",
            "write it without repeats that can share letters, or as a list of names",
        )


def _expressions(setting: str, config: Mapping[str, Any]) -> list[str]:
    """The expressions of a setting: a text, the entries of a list that PEFT takes for some, or the keys of a map."""
    value = config.get(setting)
    return [value] if isinstance(value, str) else [*(value or ())] if setting in FORMS else []


def child() -> None:
    """The main function of the process: a task on stdin; on stdout a byte for each expression that it begins with."""
    task = json.load(sys.stdin)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (task["seconds"], task["seconds"]))
    for setting, text in task["texts"]:
        sys.stdout.write(".")
        sys.stdout.flush()
        try:
            for module in task["modules"]:
                match(setting, text, module)
        except re.error:  # said where it is matched
            continue
