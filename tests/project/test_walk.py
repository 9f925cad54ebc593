"""The functions that run for one small request: few, and in the files of docs/architecture.md."""

import gc
import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from fast_batcher import DynBatcher, InferenceModel

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

PACKAGE = Path(__file__).parent.parent.parent / "fast_batcher"
PAGE = PACKAGE.parent / "docs" / "architecture.md"
# A reader opens each of these files, and reads each of these functions. The policy still learns
# from an early request; Python 3.11 counts comprehensions.
MOST_FILES, MOST_FUNCTIONS = 20, 76


# A file of the library, a line and the name of the function that begins there.
Function = tuple[str, int, str]


class Trace:
    """Collects the functions of the library that this thread calls, from `begin` to `end`."""

    def __init__(self) -> None:
        self._functions: set[tuple[str, int, str]] = set()

    def begin(self) -> None:
        sys.setprofile(self._note)

    def end(self) -> list[Function]:
        sys.setprofile(None)
        return [
            (str(Path(file).relative_to(PACKAGE)), line, name)
            for file, line, name in sorted(self._functions)
            if Path(file).is_relative_to(PACKAGE)
        ]

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            code = frame.f_code
            self._functions.add((code.co_filename, code.co_firstlineno, code.co_name))


class Traced(InferenceModel[str, Any]):
    """Traces its worker from the end of one batch to the call with the word "end"."""

    def infer(self, inputs: list[str]) -> list[Any]:
        (word,) = inputs
        if word == "begin":
            gc.disable()
            self._trace = Trace()
            self._trace.begin()
        return [self._trace.end()] if word == "end" else inputs


async def test_the_walk_is_that_of_a_request() -> None:
    trace = Trace()
    async with DynBatcher(Traced) as batcher:
        await batcher.process_batched("begin")
        gc.disable()  # a collection would run the hooks of other batchers
        trace.begin()
        assert await batcher.process_batched("a small request") == "a small request"
        functions = {*trace.end(), *await batcher.process_batched("end")}
        gc.enable()
    files = {file for file, _, _ in functions}
    walk = PAGE.read_text().partition("## The walk")[2].partition("\n## ")[0]
    assert files == set(re.findall(r"`(\w+(?:/\w+)?\.py)`", walk))
    assert len(files) <= MOST_FILES
    assert len(functions) <= MOST_FUNCTIONS, sorted(functions)
