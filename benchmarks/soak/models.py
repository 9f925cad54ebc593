"""The models of the soaks, and the file in which a worker notes what it computes."""

import os
import random
import struct
import time
import zlib
from typing import Any, NamedTuple

from fast_batcher import InferenceModel

_NONCE = struct.Struct("<Q")


class Item(NamedTuple):
    """One caller's input."""

    client: int
    sequence: int
    # Unique among all inputs of the run.
    nonce: int
    payload: bytes


def right_answer(item: Item) -> tuple[int, int]:
    """Compute the model's answer; it depends on everything in the item."""
    text = f"{item.client} {item.sequence} {item.nonce}".encode()
    return zlib.crc32(item.payload, zlib.crc32(text)), item.nonce


class Journal(InferenceModel[Item, Any]):
    """Writes the batch's nonces into a file of its process, then answers.

    Args:
        folder: Where the files are.
        fault_rate: Share of batches that raise, and share that have one output too few.
    """

    def __init__(self, folder: str, fault_rate: float) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._file = os.open(f"{folder}/{os.getpid()}", flags, 0o600)
        self._fault_rate = fault_rate
        self._random = random.Random(os.getpid())

    def infer(self, inputs: list[Item]) -> list[Any]:
        """Answer each input; what a killed process has written remains in its file."""
        os.write(self._file, b"".join([_NONCE.pack(item.nonce) for item in inputs]))
        outputs = [right_answer(item) for item in inputs]
        chance = self._random.random()
        if chance < self._fault_rate:
            raise ValueError("a deliberate fault")
        return outputs[1:] if chance < 2 * self._fault_rate else outputs


class SharedJournal(Journal):
    """Writes into the directory of sockets: one named by an argument must not change."""

    def __init__(self) -> None:
        super().__init__(os.environ["XDG_RUNTIME_DIR"], 0.0)


def read_journal(folder: str, pid: int) -> list[int]:
    """Read the nonces that this process has written."""
    try:
        with open(f"{folder}/{pid}", "rb") as file:
            data = file.read()
    except FileNotFoundError:
        return []
    whole = len(data) - len(data) % _NONCE.size
    return [nonce for (nonce,) in _NONCE.iter_unpack(data[:whole])]


class Works(InferenceModel[Any, Any]):
    """Echoes after 2 ms and 0.1 ms per input."""

    def infer(self, inputs: list[Any]) -> list[Any]:
        """Return the inputs after the model's time."""
        time.sleep(0.002 + 0.0001 * len(inputs))
        return inputs
