"""Forked children of the tests' own process.

A child shares every descriptor of pytest: it must not return into a test, nor outlive one that is
ended.
"""

import os
import signal
import sys
import traceback
from collections.abc import Callable

from waits import LIMIT

# The exit status of a child that raises, which no test expects.
RAISED = 99


def fork(child: Callable[[], int]) -> int:
    """Fork a child that ends with the status it computes, or is killed after `LIMIT`; its pid."""
    pid = os.fork()
    if pid != 0:
        return pid
    try:
        signal.alarm(round(LIMIT))
        os._exit(child())
    except BaseException:  # noqa: BLE001  none may return into pytest
        traceback.print_exc(file=sys.__stderr__)
    finally:
        os._exit(RAISED)


def status_of(pid: int) -> int:
    """Wait for the end of a child; its exit status."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
