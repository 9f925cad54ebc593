"""The example of sessions behind a real server, and the clients of its benchmark."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from random import Random

import pytest
from paths import ROOT
from servers import get, run_server
from torch_threads import threads_as_before
from websocket_client import WebSocketClient, open_websocket

from benchmarks.sessions import TOLERANCE, find_differences
from benchmarks.speakers import Plan, speak
from examples.sessions.detector import FRAME_BYTES, Detector

__all__ = ["threads_as_before"]

pytestmark = pytest.mark.slow

APP = "examples.sessions.app:app"
# The frames of four speakers.
VOICES = [[Random(9 * one + at).randbytes(FRAME_BYTES) for at in range(9)] for one in range(4)]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with run_server(APP, ROOT, settings={"FAST_BATCHER_MAX_SESSIONS": "4"}) as address:
        yield address


def ask(socket: WebSocketClient, frame: bytes) -> float:
    socket.send(frame)
    return read(socket.receive())


def read(answer: str | tuple[int, str]) -> float:
    assert isinstance(answer, str), answer
    found: dict[str, float] = json.loads(answer)
    return found["speech"]


def close_of(answer: str | tuple[int, str]) -> tuple[int, str]:
    """The code of a close, and that of the error in its reason."""
    assert not isinstance(answer, str), answer
    return answer[0], answer[1].split()[0]


def test_each_connection_has_the_answers_of_the_model_alone(address: str) -> None:
    detector = Detector()
    answers: list[list[float]] = []
    with ExitStack() as stack:
        sockets = [stack.enter_context(open_websocket(address, "/speech")) for _ in VOICES]
        for frames in zip(*VOICES, strict=True):
            for socket, frame in zip(sockets, frames, strict=True):
                socket.send(frame)
            answers.append([read(socket.receive()) for socket in sockets])
    for voice, found in zip(VOICES, zip(*answers, strict=True), strict=True):
        state = detector.begin()
        alone = [detector.infer([frame], [state])[0] for frame in voice]
        assert found == pytest.approx(alone, abs=TOLERANCE)
        # A wrong state would be seen.
        assert abs(found[-1] - detector.infer([voice[-1]], [detector.begin()])[0]) > 1e-3


@pytest.mark.parametrize("wrong", [b"", bytes(FRAME_BYTES - 1), bytes(FRAME_BYTES + 1), "a text"])
def test_a_message_that_is_no_frame_closes_its_connection_alone(
    address: str, wrong: bytes | str
) -> None:
    with open_websocket(address, "/speech") as other, open_websocket(address, "/speech") as socket:
        ask(other, VOICES[0][0])
        ask(socket, VOICES[1][0])
        socket.send(wrong)
        assert socket.receive() == (1007, "a message is a frame of 640 bytes")
        ask(other, VOICES[0][1])


def test_a_connection_without_a_place_is_closed(address: str) -> None:
    with ExitStack() as stack:
        for voice in VOICES:
            ask(stack.enter_context(open_websocket(address, "/speech")), voice[0])
        with open_websocket(address, "/speech") as socket:
            socket.send(VOICES[0][0])
            assert close_of(socket.receive()) == (1013, "queue_full")


def test_a_killed_worker_closes_its_connections_and_sigterm_the_others() -> None:
    with ExitStack() as stack:
        with run_server(APP, ROOT, settings={"FAST_BATCHER_NUM_WORKERS": "2"}) as address:
            sockets = [stack.enter_context(open_websocket(address, "/speech")) for _ in range(2)]
            for socket, voice in zip(sockets, VOICES, strict=False):
                ask(socket, voice[0])
            (batcher,) = get(f"{address}/batchers.json").json()["batchers"]
            os.kill(batcher["workers"][0]["pid"], signal.SIGKILL)
            for socket, voice in zip(sockets, VOICES, strict=False):
                socket.send(voice[1])
            answers = {socket: socket.receive() for socket in sockets}
            (kept,) = [socket for socket, answer in answers.items() if isinstance(answer, str)]
            (lost,) = [answer for socket, answer in answers.items() if socket is not kept]
            assert close_of(lost) == (1013, "session_lost")
            ask(kept, VOICES[0][2])
        assert kept.receive() == (1012, "")


def test_the_speakers_of_the_benchmark_have_the_answers_of_the_model_alone(address: str) -> None:
    port = int(address.rpartition(":")[2])
    found = asyncio.run(speak(Plan(port, speakers=4, warm_up=0, seconds=0.1)))
    assert find_differences([found["answers"]])[0] < TOLERANCE
