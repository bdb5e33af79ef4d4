"""A refusal of all ranks, told by one of them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from formats.errors import OutputError, VitruvianError

KEY = "vitruvian/refused"
SECONDS = 5
"""How long the store of torchrun may take to answer."""


@contextmanager
def told_once() -> Iterator[None]:
    """Let the first rank that is refused say why; the others end with the same exit code and say nothing.

    These wait, because torchrun ends all ranks as soon as one has ended: that shall be the one that speaks. torchrun
    prints a trace of its own after it, whatever its ranks do.
    """
    try:
        yield
    except (VitruvianError, OSError) as error:
        if _is_first():
            raise
        _wait()
        raise SystemExit(getattr(error, "exit_code", OutputError.exit_code)) from None
    except SystemExit as error:  # the first rank knows why, see `World.told`
        if error.code and _has_agent():
            _wait()
        raise


def _wait() -> None:
    """Wait until torchrun ends this rank; it lists one that its signal has ended among the failures."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    time.sleep(SECONDS)


def _has_agent() -> bool:
    """Whether torchrun keeps a store for its ranks (torch 2.13 distributed/elastic/agent/server/api.py)."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _is_first() -> bool:
    """Whether no other rank of this torchrun has said anything; also where nobody can tell."""
    if not _has_agent():
        return True
    from torch._C._distributed_c10d import TCPStore
    from torch.distributed import DistError

    held = os.environ
    try:
        place, wait = (held["MASTER_ADDR"], int(held["MASTER_PORT"])), timedelta(seconds=SECONDS)
        store = TCPStore(*place, is_master=False, wait_for_workers=False, timeout=wait)
        return int(store.add(f"{KEY}/{held.get('TORCHELASTIC_RESTART_COUNT', '0')}", 1)) == 1
    except (DistError, RuntimeError, ValueError, KeyError):
        return True
