"""The walk of `docs/architecture.md` names every file whose functions run for one small request."""

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
# A reader has to open each of them.
MOST_FILES = 17


class Trace:
    """Collects the files of this thread's calls, from `begin` to `end`."""

    def __init__(self) -> None:
        self._files: set[str] = set()

    def begin(self) -> None:
        sys.setprofile(self._note)

    def end(self) -> set[str]:
        """The files of the library."""
        sys.setprofile(None)
        paths = [Path(name) for name in self._files]
        return {str(path.relative_to(PACKAGE)) for path in paths if path.is_relative_to(PACKAGE)}

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            self._files.add(frame.f_code.co_filename)


class Traced(InferenceModel[str, Any]):
    """Traces its worker from the end of one batch to the call with the word "end"."""

    def infer(self, inputs: list[str]) -> list[Any]:
        (word,) = inputs
        if word == "begin":
            gc.disable()
            self._trace = Trace()
            self._trace.begin()
        return [sorted(self._trace.end())] if word == "end" else inputs


async def test_the_walk_is_that_of_a_request() -> None:
    trace = Trace()
    async with DynBatcher(Traced) as batcher:
        await batcher.process_batched("begin")
        gc.disable()  # a collection would run the hooks of other batchers
        trace.begin()
        assert await batcher.process_batched("a small request") == "a small request"
        run = trace.end() | set(await batcher.process_batched("end"))
        gc.enable()
    walk = PAGE.read_text().partition("## The walk")[2].partition("\n## ")[0]
    assert run == set(re.findall(r"`(\w+(?:/\w+)?\.py)`", walk))
    assert len(run) <= MOST_FILES
