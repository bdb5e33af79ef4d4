"""An error that all ranks raise is printed by one of them."""

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
"""Seconds that the store of torchrun may take to answer, and that a rank waits for torchrun to end it."""


@contextmanager
def reported_once() -> Iterator[None]:
    """Let the first rank that raises print the error; the other ranks exit with the same code and print nothing.

    The others wait before they exit: torchrun kills all ranks as soon as one has exited, and that has to be the rank
    that prints. torchrun prints a trace of its own afterwards in any case.
    """
    try:
        yield
    except (VitruvianError, OSError) as error:
        if _is_first():
            raise
        _wait()
        raise SystemExit(getattr(error, "exit_code", OutputError.exit_code)) from None
    except SystemExit as error:  # the first rank knows why, see `World.from_first`
        if error.code and _has_agent():
            _wait()
        raise


def _wait() -> None:
    """Wait until torchrun ends this rank, and exit with 0: it lists a rank that its signal killed as failed."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    time.sleep(SECONDS)


def _has_agent() -> bool:
    """Whether torchrun keeps a store for its ranks (torch 2.13 distributed/elastic/agent/server/api.py)."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _is_first() -> bool:
    """Whether no other rank of this torchrun has reported an error yet; True also where there is no store to ask."""
    if not _has_agent():
        return True
    from torch._C._distributed_c10d import TCPStore
    from torch.distributed import DistError

    environment = os.environ
    try:
        place, wait = (environment["MASTER_ADDR"], int(environment["MASTER_PORT"])), timedelta(seconds=SECONDS)
        store = TCPStore(*place, is_master=False, wait_for_workers=False, timeout=wait)
        return int(store.add(f"{KEY}/{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}", 1)) == 1
    except (DistError, RuntimeError, ValueError, KeyError):
        return True
