"""A function in a forked process: one that waits forever there is a failure here."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable

SECONDS = 20


def in_a_fork(function: Callable[[], int]) -> int:
    """The small number that a function returns in a forked process; -1 if it raises, and -14 if it does not end."""
    child = os.fork()
    if not child:
        code = 255
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(SECONDS)
            code = function()
        except BaseException:  # noqa: BLE001  # whatever a test raises
            traceback.print_exc()
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return -1 if code == 255 else code
