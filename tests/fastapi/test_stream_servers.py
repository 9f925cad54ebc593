"""Streams behind uvicorn: deaths, clients that go, SIGTERM, errors; real processes and sockets.

What the texts mean to the model: `apps/streaming.py`.
"""

import json
import os
import signal
from collections.abc import Callable, Iterator
from http.client import HTTPConnection, IncompleteRead
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
from servers import Gate, Server, ask_until, gate, get, serve
from waits import LIMIT, SOON_IN_WORKER

__all__ = ["gate", "serve"]

pytestmark = pytest.mark.slow


class Client:
    """A client that reads of its answer as much as the test wants, when it wants it."""

    def __init__(self, url: str, path: str) -> None:
        self._connection = HTTPConnection(urlsplit(url).netloc, timeout=LIMIT)
        self._connection.request("GET", path)
        self._answer: Any = None

    def read(self, count: int | None = None) -> str:
        """Return the next characters, or all that follow up to the end of the body."""
        if self._answer is None:
            self._answer = self._connection.getresponse()
            assert self._answer.status == 200, self._answer.read()
        content: bytes = self._answer.read(count)
        return content.decode()

    def close(self) -> None:
        self._connection.close()


class Site:
    """The app of streams in a server of its own.

    Args:
        serve: Starts the server.
        app: The name of the app in its module.
        options: More options of the batcher.
    """

    def __init__(self, serve: Callable[..., Server], app: str = "app", **options: Any) -> None:
        settings = {"OPTIONS": json.dumps({"timeout": LIMIT, **options})}
        self.server = serve(f"apps.streaming:{app}", "--no-access-log", settings=settings)
        self.url = self.server.url()
        self._clients: list[Client] = []

    def ask(self, path: str) -> Client:
        """Send a request."""
        self._clients.append(Client(self.url, path))
        return self._clients[-1]

    def worker(self) -> dict[str, int]:
        """Return what the worker tells of itself; it must not wait at a gate."""
        whereabouts = get(f"{self.url}/worker").json()
        return dict(zip(("pid", "joined", "live"), whereabouts, strict=True))

    def end(self) -> str:
        """End the server; return what it has said."""
        self.server.process.send_signal(signal.SIGTERM)
        assert self.server.wait_for_exit() in (0, -signal.SIGTERM)
        return self.server.output

    def close(self) -> None:
        for client in self._clients:
            client.close()


@pytest.fixture
def site(serve: Callable[..., Server]) -> Iterator[Callable[..., Site]]:
    sites: list[Site] = []

    def start(*app: str, **options: Any) -> Site:
        sites.append(Site(serve, *app, **options))
        return sites[-1]

    yield start
    for one in sites:
        one.close()


# --- deaths ---------------------------------------------------------------------------------------


def test_killed_worker_cuts_bodies_that_have_begun(site: Callable[..., Site], gate: Gate) -> None:
    here = site()
    before = here.worker()["pid"]
    cut = here.ask("/spell/ab~.")
    assert cut.read(2) == "ab"
    joined = here.ask(f"/spell/-xy?gate={gate.port}")
    gate.wait_for_visitor()
    waiting = here.ask("/spell/uvw")
    ask_until(here.url, running=3)
    os.kill(before, signal.SIGKILL)
    with pytest.raises(IncompleteRead) as caught:
        cut.read()
    assert caught.value.partial == b""
    # Those that have no chunk begin again: the client does not notice.
    gate.wait_for_visitor()
    gate.let_on()
    assert [joined.read(), waiting.read()] == ["xy", "uvw"]
    after = here.worker()
    assert after["pid"] != before
    assert after["live"] == 0
    assert "WorkerLostError" in here.end()


# --- clients that go ------------------------------------------------------------------------------


# The model computes while the client goes, or the server sends more than the client reads.
COMPUTING, SENDING = "-~.", "~Z"


@pytest.mark.parametrize(
    ("path", "app", "rest"),
    [
        ("spell", "app", COMPUTING),
        ("spell", "app", SENDING),
        ("spell", "wrapped", COMPUTING),
        ("leaving", "app", COMPUTING),
        ("leaving", "app", SENDING),
        ("leaving", "wrapped", COMPUTING),
    ],
)
def test_client_gone_in_mid_stream_leaves_the_model(
    site: Callable[..., Site], gate: Gate, path: str, app: str, rest: str
) -> None:
    here = site(app)
    gone = here.ask(f"/{path}/ab{rest}?gate={gate.port}")
    assert gone.read(2) == "ab"
    if rest is COMPUTING:
        gate.wait_for_visitor()
    other = here.ask(f"/{path}/xyz")
    ask_until(here.url, submitted=2)
    gone.close()
    ask_until(here.url, cancelled=1)
    if rest is COMPUTING:
        gate.let_on()
    assert other.read() == "xyz"
    assert here.worker()["live"] == 0
    assert "Traceback" not in here.end()


@pytest.mark.parametrize(
    ("path", "app", "is_cancelled"),
    [
        ("leaving", "app", True),
        ("leaving", "wrapped", True),
        # Nobody looks for the client before the response begins.
        ("spell", "app", False),
        ("spell", "wrapped", False),
    ],
)
def test_client_gone_before_first_chunk_leaves_the_model(
    site: Callable[..., Site], gate: Gate, path: str, app: str, *, is_cancelled: bool
) -> None:
    here = site(app)
    gone = here.ask(f"/{path}/-~z?gate={gate.port}")
    gate.wait_for_visitor()
    gone.close()
    if is_cancelled:
        ask_until(here.url, cancelled=1)
    gate.let_on()
    ask_until(here.url, cancelled=1, running=0)
    assert here.worker()["live"] == 0
    assert "Traceback" not in here.end()


def test_client_gone_before_its_turn_never_joins(site: Callable[..., Site], gate: Gate) -> None:
    here = site(max_batch_size=1)
    first = here.ask(f"/spell/-ab?gate={gate.port}")
    gate.wait_for_visitor()
    # One is sent to the worker and waits there for the place, the other waits in the queue.
    for count in (1, 2):
        here.ask("/leaving/xyz").close()
        ask_until(here.url, cancelled=count)
    gate.let_on()
    assert first.read() == "ab"
    whereabouts = here.worker()
    assert (whereabouts["joined"], whereabouts["live"]) == (1, 0)


def test_client_that_reads_nothing_pauses_its_stream(site: Callable[..., Site]) -> None:
    here = site()
    idle = here.ask("/spell/~Z")
    ask_until(here.url, paused=1)
    assert here.ask("/spell/xyz").read() == "xyz"
    assert here.worker()["live"] == 1
    idle.close()
    ask_until(here.url, cancelled=1)
    assert here.worker()["live"] == 0
    assert "Traceback" not in here.end()


def test_client_that_reads_nothing_loses_its_place(site: Callable[..., Site]) -> None:
    here = site()
    idle = here.ask(f"/spell/~Z?timeout={SOON_IN_WORKER}")
    ask_until(here.url, expired=1)
    assert here.worker()["live"] == 0
    with pytest.raises(IncompleteRead) as caught:
        idle.read()
    assert caught.value.partial.strip(b"z") == b""
    assert here.ask("/spell/xyz").read() == "xyz"


# --- the end of the server ------------------------------------------------------------------------


@pytest.mark.parametrize("app", ["app", "draining"])
@pytest.mark.parametrize("is_group", [False, True])
def test_streams_end_whole_after_sigterm(
    site: Callable[..., Site], gate: Gate, app: str, *, is_group: bool
) -> None:
    here = site(app)
    running = here.ask(f"/spell/ab-cd?gate={gate.port}")
    assert running.read(2) == "ab"
    gate.wait_for_visitor()
    waiting = here.ask("/spell/xyz")
    ask_until(here.url, running=2)
    server = here.server
    everyone = psutil.Process(server.process.pid).children(recursive=True)
    (os.killpg if is_group else os.kill)(server.process.pid, signal.SIGTERM)
    server.wait_for("Shutting down")
    gate.let_on()
    assert [running.read(), waiting.read()] == ["cd", "xyz"]
    assert server.wait_for_exit() in (0, -signal.SIGTERM)
    assert psutil.wait_procs(everyone, timeout=LIMIT)[1] == []
    assert "Traceback" not in server.output


def test_stream_without_an_end_ends_with_the_drain(site: Callable[..., Site]) -> None:
    here = site("draining", drain_timeout=0.1)
    stream = here.ask("/spell/~a")
    stream.read(2)
    here.server.process.send_signal(signal.SIGTERM)
    with pytest.raises(IncompleteRead):
        stream.read()
    assert here.server.wait_for_exit() in (0, -signal.SIGTERM)
    assert "BatcherClosedError" in here.server.output


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        pytest.param("/spell/!", 500, "inference_failed", id="join raises"),
        pytest.param("/spell/$", 500, "poison_request", id="worker dies"),
        pytest.param("/spell/~.?timeout=0.5", 504, "deadline_exceeded", id="no chunk in time"),
    ],
)
def test_error_before_first_chunk_is_a_status(
    site: Callable[..., Site], path: str, status: int, code: str
) -> None:
    here = site()
    answer = get(here.url + path)
    assert (answer.status_code, answer.json()["code"]) == (status, code)
    assert here.ask("/spell/xyz").read() == "xyz"
    assert here.worker()["live"] == 0


def test_error_after_first_chunk_cuts_the_body_and_is_one_line_of_log(
    site: Callable[..., Site],
) -> None:
    here = site()
    cut = here.ask("/spell/ab*")
    with pytest.raises(IncompleteRead) as caught:
        cut.read()
    assert caught.value.partial == b"ab"
    assert here.ask("/spell/xyz").read() == "xyz"
    assert here.worker()["live"] == 0
    output = here.end()
    assert "Traceback" not in output
    named = [line for line in output.splitlines() if "the words of the model" in line]
    (line,) = named
    assert "/spell/{letters}: an error has cut the body of a stream: ValueError" in line
    assert "in two lines" in line


def test_full_queue_refuses_streams_with_503(site: Callable[..., Site], gate: Gate) -> None:
    here = site(max_batch_size=1, max_queue_size=1)
    accepted = [here.ask(f"/spell/-a?gate={gate.port}")]
    gate.wait_for_visitor()
    # The second waits in the worker for the place, the third in the queue.
    for load in ({"running": 2}, {"running": 2, "waiting": 1}):
        accepted.append(here.ask("/spell/a"))
        ask_until(here.url, **load)
    answer = get(f"{here.url}/spell/a")
    assert (answer.status_code, answer.json()["code"]) == (503, "queue_full")
    gate.let_on()
    assert [client.read() for client in accepted] == ["a", "a", "a"]
