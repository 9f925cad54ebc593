"""Common parts of the models of tests: gates, the echo model, and NumPy."""

import importlib
import json
import os
import socket
from typing import Any

from fast_batcher import InferenceModel

# Wherever a model waits for ever; some hours after the end of the test run is ever enough.
FOR_EVER = 10_000


def call_at_gate(path: str, note: Any = None) -> socket.socket:
    """Tell the test at this `waits.Gate` that we are here; the result ends when it lets us on."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(path)
        connection.sendall(json.dumps({"pid": os.getpid(), "note": note}).encode() + b"\n")
    except OSError:
        connection.close()
        raise
    return connection


def pass_gate(path: str, note: Any = None) -> None:
    """The same, and wait until it lets us on; a gate that is closed down lets everybody on."""
    try:
        with call_at_gate(path, note) as connection:
            connection.recv(1)
    except (ConnectionError, FileNotFoundError):
        return


class Echo(InferenceModel[Any, Any]):
    def infer(self, inputs: list[Any]) -> list[Any]:
        return inputs


class AtGate(InferenceModel[Any, Any]):
    """Base of models that a test gives a gate."""

    def __init__(self, gate: str) -> None:
        self._gate = gate


def load_numpy() -> Any:
    # Every worker imports this module, and most need no arrays; importing NumPy takes longer than
    # everything else that a worker does in these tests.
    return importlib.import_module("numpy")
