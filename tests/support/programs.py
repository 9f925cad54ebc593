"""Programs in processes of their own: what happens when an interpreter forks or ends."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from paths import PYTHONPATH
from waits import LIMIT

PREAMBLE = """\
import asyncio, json, os, signal, sys, threading
import models.base, models.children, models.crashing, models.loading, models.ordinary
from openings import opening_of
from fast_batcher._parent.worker_process import WorkerProcess
from fast_batcher import DynBatcher, InferenceModel

def tell(thing):
    # One write, so that what two processes tell does not mix.
    os.write(1, (json.dumps(thing) + "\\n").encode())

# As in a terminal: what a shell starts in the background, these tests for example, ignores it.
signal.signal(signal.SIGINT, signal.default_int_handler)

"""


# What comes after the definition of `double`, a function that batches: a call of it by an object
# that goes with the program.
CALL_WHILE_ENDING = """
class Late:
    def __del__(self, double=double, print=print):
        try:
            double(1)
        except Exception as error:
            print(error)
late = Late()
"""


def run_command(command: Sequence[str], **options: Any) -> "subprocess.CompletedProcess[str]":
    """Run it to its end, and keep what it prints."""
    return subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT, check=False, **options
    )


def run_program(program: str) -> "subprocess.CompletedProcess[str]":
    """Run it to its end, with the modules that this process finds."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return run_command([sys.executable, "-c", program], env=environment)


class Program:
    """A Python program in a session of its own; it tells what happens as lines of JSON.

    Args:
        path: Where to put it.
        code: Its text.
        guarded: Whether what it does is under a main guard.
    """

    def __init__(self, path: Path, code: str, *, guarded: bool = True) -> None:
        body = textwrap.dedent(code)
        if guarded:
            body = PREAMBLE + 'if __name__ == "__main__":\n' + textwrap.indent(body, "    ")
        else:
            body = PREAMBLE + body
        path.write_text(body)
        self._process = subprocess.Popen(
            [sys.executable, "-W", "error", str(path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": PYTHONPATH},
        )
        # Ends the wait for a line that never comes.
        self._watchdog = threading.Timer(LIMIT, self._process.kill)
        self._watchdog.start()
        self.pid = self._process.pid

    def __enter__(self) -> "Program":
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.communicate()
        self._watchdog.cancel()
        self._watchdog.join()

    def tells(self) -> Any:
        """The next thing it has to say."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"it ended without a word: {self.finish()}"
        return json.loads(line)

    def kill(self) -> None:
        """Kill it, and it alone."""
        os.kill(self.pid, signal.SIGKILL)

    def interrupt(self) -> None:
        """Send SIGINT to it and its workers, as a terminal does at Ctrl-C."""
        os.killpg(self.pid, signal.SIGINT)

    def finish(self, timeout: float = LIMIT) -> tuple[int, str]:
        """Wait for its end; its exit status and what it wrote to stderr."""
        _, stderr = self._process.communicate(timeout=timeout)
        return self._process.returncode, stderr


Start = Callable[..., Program]


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Callable[..., Program]]:
    programs: list[Program] = []

    def start(code: str, **options: Any) -> Program:
        path = tmp_path / f"program_{len(programs)}.py"
        programs.append(Program(path, code, **options))
        return programs[-1]

    yield start
    for one in programs:
        one.__exit__()
