"""Models that fail to load or to warm up, and classes that are no models. Worker process."""

import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from models.base import FOR_EVER, Echo, call_at_gate
from models.crashing import CRASHES
from models.ordinary import Whereabouts


class RaisesOnLoad(Echo):
    def __init__(self) -> None:
        raise FileNotFoundError("no weights at /models/tiny.bin")


class ExitsOnLoad(Echo):
    """Ends its process while it loads."""

    def __init__(self, way: str) -> None:
        CRASHES[way]()


class SystemExitOnLoad(Echo):
    def __init__(self) -> None:
        sys.exit(3)


class NeverLoads(Echo):
    """Tells the gate, and goes on loading whatever the gate does."""

    def __init__(self, gate: str) -> None:
        with call_at_gate(gate):
            time.sleep(FOR_EVER)


class LoadsAgain(Whereabouts):
    """Loads, then fails to load twice, then loads again. Counts in a file."""

    def __init__(self, path: str) -> None:
        with open(path, "a+") as file:
            file.write("x")
            file.seek(0)
            attempt = len(file.read())
        if attempt in (2, 3):
            raise FileNotFoundError(f"attempt {attempt}")


class NeedsFile(Echo):
    """Loads if its file exists."""

    def __init__(self, path: str) -> None:
        os.stat(path)


class NeedsArguments(Echo):
    def __init__(self, path: str) -> None:
        self._path = path


class RaisesTypeError(Echo):
    def __init__(self, _: str) -> None:
        raise TypeError("the words of the model")


class WarmsUpBadly(Echo):
    def infer(self, inputs: list[Any]) -> list[Any]:
        return inputs[:-1]

    def warmup_inputs(self) -> Sequence[Any]:
        return [1, 2]


class RaisesOnWarmUp(Echo):
    def infer(self, inputs: list[Any]) -> list[Any]:
        raise ValueError("too cold")

    def warmup_inputs(self) -> Sequence[Any]:
        return [1]


class AsyncInfer:
    async def infer(self, inputs: list[Any]) -> list[Any]:
        return inputs


class GeneratorInfer:
    def infer(self, inputs: list[Any]) -> Iterator[Any]:
        yield from inputs


class NoInfer:
    pass
