"""Starts an app under uvicorn, and ends it with its workers. Runs in the command's process.

The server leads a separate process group, so a Ctrl-C reaches the command alone, which then ends
the server in order; what is left of the group after that is killed and reported.
"""

import os
import re
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from benchmarks.cpu import TreeCpu, descendants, process_cpu
from benchmarks.harness import ROOT
from benchmarks.load import tied

HOST = "127.0.0.1"
# Workers import torch and load a model, on a machine that may be busy or have a cold disk.
START_LIMIT = 300.0
# uvicorn lets answers finish, then a batcher drains (20 s) and stops its workers (2 s).
STOP_LIMIT = 300.0
# Longer than any measurement, so that the server never closes an idle connection, seconds.
KEEP_ALIVE = 3600
UVICORN_OPTIONS = [
    *("--host", HOST, "--no-access-log", "--no-use-colors"),
    *("--timeout-keep-alive", str(KEEP_ALIVE)),
]
# Lines of the server's log that an error shows.
KEPT_LINES = 200


class Server:
    """A running server.

    Args:
        process: uvicorn, with its log as a pipe on stderr.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.port = 0
        self.log: deque[str] = deque(maxlen=KEPT_LINES)
        self._is_listening = threading.Event()
        self._reader = threading.Thread(target=self._read_log, name="server-log")
        self._reader.start()

    def _read_log(self) -> None:
        assert self.process.stderr is not None  # it was asked for as a pipe
        for line in self.process.stderr:
            self.log.append(line.rstrip())
            address = re.search(r"running on http://[\d.]+:(\d+)", line)
            if address:
                self.port = int(address[1])
                self._is_listening.set()
        self._is_listening.set()  # it has ended, and will never listen

    def wait_until_listening(self) -> None:
        """Wait until uvicorn logs its port, which it does when the app has started.

        Raises:
            RuntimeError: It did not start; the text is its log.
        """
        self._is_listening.wait(START_LIMIT)
        if not self.port:
            raise RuntimeError("the server did not start:\n" + "\n".join(self.log))

    def read_cpu(self) -> TreeCpu:
        """Read the CPU seconds of the server and of its living workers."""
        workers = 0.0
        for pid in descendants(self.process.pid):
            try:
                workers += process_cpu(pid)
            except OSError:
                continue  # it ended while we looked
        return TreeCpu(api=process_cpu(self.process.pid), workers=workers)

    def end(self, stop_limit: float = STOP_LIMIT) -> bool:
        """End it and everything it started; return whether SIGTERM was enough."""
        started = descendants(self.process.pid)
        try:
            self.process.send_signal(signal.SIGTERM)
            # Its workers hold the other end of the log too: at the log's end all have ended.
            self._reader.join(stop_limit)
            ended_in_order = not self._reader.is_alive()
        finally:
            self._kill_group()
            for pid in started:  # what has left the group
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            status = self.process.wait()
            self._reader.join()
            assert self.process.stderr is not None
            self.process.stderr.close()
        # Once it has shut down, uvicorn ends itself with the signal that it was sent.
        return ended_in_order and status in (0, -signal.SIGTERM)

    def _kill_group(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


def start(command: Sequence[str], environment: Mapping[str, str] | None = None) -> Server:
    """Start a server, from the repository's root.

    Args:
        command: What to run.
        environment: Variables besides this process's.
    """
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | dict(environment or {}),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    return Server(process)


@contextmanager
def serve(app: str, environment: Mapping[str, str] | None = None) -> Iterator[Server]:
    """Run an app on a free port, from the repository's root.

    Args:
        app: "module:name" for uvicorn.
        environment: Variables besides this process's.

    Raises:
        RuntimeError: The server did not start, or did not end in order.
    """
    server = start(tied.command("uvicorn", app, "--port", "0", *UVICORN_OPTIONS), environment)
    try:
        server.wait_until_listening()
        yield server
    except BaseException:
        server.end()
        raise
    if not server.end():
        raise RuntimeError("the server did not end in order:\n" + "\n".join(server.log))
