"""Identities of processes: only the process that is meant is killed."""

import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import Any

import pytest

from fast_batcher._host.identity import find_youngest_child, identify_process, kill_process

pytestmark = pytest.mark.slow


@contextmanager
def sleeper(
    *, command: Sequence[str] = ("sleep", "1000"), in_own_session: bool = False
) -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen(
        command, start_new_session=in_own_session, stdin=subprocess.PIPE
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def interpreter(*, in_own_session: bool = False) -> Any:
    """A process of the interpreter of these tests."""
    command = [sys.executable, "-c", "input()"]
    return sleeper(command=command, in_own_session=in_own_session)


def test_a_stopped_process_is_killed_and_waited_for() -> None:
    with sleeper() as process:
        os.kill(process.pid, signal.SIGSTOP)
        assert kill_process(identify_process(process.pid), 60.0)
        assert process.poll() == -signal.SIGKILL


@pytest.mark.parametrize("other", [{"namespace": 1}, {"started": "1"}, {"started": None}])
def test_a_process_with_the_same_pid_lives_on(other: dict[str, Any]) -> None:
    with sleeper() as process:
        meant = identify_process(process.pid)._replace(**other)
        assert not kill_process(meant)
        assert process.poll() is None


def test_a_dead_process_is_not_killed() -> None:
    with sleeper() as process:
        meant = identify_process(process.pid)
        process.kill()
        process.wait()
        assert not kill_process(meant)


# Seconds between two values of the clock that tells when processes start.
TICK = 1 / os.sysconf("SC_CLK_TCK")


def test_youngest_living_child_of_the_session_has_an_age() -> None:
    begun = monotonic()
    with interpreter() as process, interpreter(in_own_session=True) as other, sleeper():
        child, age = find_youngest_child(os.getpid())
        assert child == identify_process(process.pid)
        assert child is not None
        assert child.is_running
        assert -TICK <= age <= monotonic() - begun + TICK
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        # Nobody has reaped it.
        assert not identify_process(process.pid).is_running
        found, age = find_youngest_child(os.getpid())
        assert found not in (child, identify_process(other.pid))
        assert age > monotonic() - begun + TICK
        assert find_youngest_child(other.pid) == (None, math.inf)


def test_an_invisible_process_has_no_child() -> None:
    assert find_youngest_child(0) == (None, math.inf)
