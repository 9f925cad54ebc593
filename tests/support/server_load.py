"""Clients that ask servers of several kinds without a pause, and the commands of these servers."""

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest
from paths import SUPPORT
from waits import LIMIT

URL = r"(?i:running on|listening at:) (http://[\d.:]+)"
GUNICORN = ["gunicorn", "--worker-class", "uvicorn_worker.UvicornWorker", "--chdir", str(SUPPORT)]
GUNICORN += ["--bind", "127.0.0.1:0", "--workers", "2"]
# Clients of a load: more than the server processes, so that each of those has some.
CLIENTS = 6
# Answers after which a load is under way: a dozen batches.
UNDER_WAY = 100


class Load:
    """Clients of a server that ask without a pause until they are told to stop.

    Every second one has a connection of its own for each request. A connection that is refused, or
    is closed before an answer, is within the rules of a server that ends: the client tries again.
    Every answer has to be the right one, and has to come.

    Args:
        url: Of the server.
        path: What they ask for; each question has a number of its own.
        is_right: Whether this is the answer to a number.
    """

    def __init__(
        self,
        url: str,
        path: str = "/double/{}",
        is_right: Callable[[int, Any], bool] = lambda number, answer: answer == 2 * number,
    ) -> None:
        self._url = url
        self._path = path
        self._is_right = is_right
        self._numbers = itertools.count()
        self._stopped = threading.Event()
        # Guards what the clients have seen.
        self._changed = threading.Condition()
        self.answered = 0
        self.wrong: list[str] = []
        # Requests that ended without an answer although their connections were new.
        self.dropped: list[str] = []
        self._clients = ThreadPoolExecutor(CLIENTS)
        for number in range(CLIENTS):
            self._clients.submit(self._ask, keeps=number % 2)

    def wait_for(self, answers: int) -> None:
        """Wait until there are this many more answers."""
        with self._changed:
            wanted = self.answered + answers
            is_there = self._changed.wait_for(lambda: self.answered >= wanted, LIMIT)
        assert is_there, (self.answered, self.wrong)

    def stop(self) -> None:
        self._stopped.set()
        self._clients.shutdown()

    def _ask(self, keeps: int) -> None:
        limits = httpx2.Limits(max_keepalive_connections=keeps)
        with httpx2.Client(base_url=self._url, timeout=LIMIT, limits=limits) as client:
            while not self._stopped.is_set():
                number = next(self._numbers)
                try:
                    response = client.get(self._path.format(number))
                except httpx2.TimeoutException as error:
                    self._note(f"no answer to {number}: {error!r}")
                except httpx2.TransportError as error:
                    if not keeps:
                        self.dropped.append(f"{number}: {error!r}")
                    self._stopped.wait(0.01)  # leave the cores to the server
                else:
                    is_ok = response.status_code == 200
                    is_right = is_ok and self._is_right(number, response.json())
                    self._note("" if is_right else f"{number}: {response} {response.text}")

    def _note(self, wrong: str) -> None:
        with self._changed:
            if wrong:
                self.wrong.append(wrong)
            else:
                self.answered += 1
                self._changed.notify_all()


@pytest.fixture
def load() -> Iterator[Callable[..., Load]]:
    loads: list[Load] = []

    def start(url: str, *options: Any) -> Load:
        loads.append(Load(url, *options))
        return loads[-1]

    yield start
    for load in loads:
        load.stop()
