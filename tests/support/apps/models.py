"""Models of the apps and of `test_fastapi.py`; they run in worker processes."""

import os
import socket
import time
from typing import NoReturn

from fastapi import HTTPException

from fast_batcher import InferenceModel


def wait_at_gate(port: int) -> None:
    """Tell the test that listens at this port that we are here, and wait until it lets us on."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.recv(1)


class Echo(InferenceModel[str, str]):
    def infer(self, inputs: list[str]) -> list[str]:
        return inputs


class Whereabouts(InferenceModel[str, tuple[int, int]]):
    """Answers with the ids of the API process and of the worker process."""

    def infer(self, inputs: list[str]) -> list[tuple[int, int]]:
        return [(os.getppid(), os.getpid()) for _ in inputs]


class Gated(InferenceModel[int, int]):
    """Waits at a gate while it loads, and for each input that is a gate's port; answers its pid."""

    def __init__(self, gate: int = 0) -> None:
        if gate:
            wait_at_gate(gate)

    def infer(self, inputs: list[int]) -> list[int]:
        for port in inputs:
            if port:
                wait_at_gate(port)
        return [os.getpid() for _ in inputs]


class SlowDoubler(InferenceModel[int, int]):
    """Takes long enough that a server which ends has requests in it."""

    def infer(self, inputs: list[int]) -> list[int]:
        time.sleep(0.02)
        return [2 * number for number in inputs]


class BreaksOnLoad(InferenceModel[str, str]):
    def __init__(self) -> None:
        raise FileNotFoundError("no weights at /models/tiny.bin")

    def infer(self, inputs: list[str]) -> NoReturn:
        raise AssertionError("it never loads")


class TooDarkError(Exception):
    """Answer of a model about a picture."""


class Raises(InferenceModel[str, str]):
    """Raises what the input asks for."""

    def infer(self, inputs: list[str]) -> NoReturn:
        match inputs[0]:
            case "value":
                raise ValueError("canary in the message")
            case "dark":
                raise TooDarkError("lux below 3")
            case "http":
                raise HTTPException(
                    status_code=422, detail={"field": "text"}, headers={"X-Model": "tiny"}
                )
            case "http positional":
                raise HTTPException(503, "the cache is cold")
            case other:
                raise AssertionError(other)
