"""Identities of processes: only the process that is meant is killed."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from fast_batcher._host.identity import identify_process, kill_process

pytestmark = pytest.mark.slow


@contextmanager
def sleeper() -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        process.kill()


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
