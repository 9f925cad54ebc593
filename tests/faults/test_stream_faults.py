"""Every place of a `SteppedModel` that is the user's code, and every way in which it goes wrong.

The stream with the fault ends with its error, and so do streams that cannot go on without it; every
other one has its chunks, and nothing is left.
"""

import asyncio
from typing import Any

import psutil
import pytest
from models.crashing import HOWS, Bomb, SteppedMinefield
from openings import pids_of
from waits import LIMIT, SOON_IN_WORKER, assert_balance, until

from fast_batcher import (
    BatcherError,
    DeadlineExceededError,
    DynBatcher,
    InferenceError,
    PoisonRequestError,
    UnsendableValueError,
    WorkerLostError,
)

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

CASES = [
    ("dump task", "raise"),
    *((where, how) for where in ("load task", "join", "step", "dump result") for how in HOWS),
    ("step", "truncate"),
    ("load result", "raise"),
]
CHUNKS = [0, 1, 2]


def expected(where: str, how: str) -> type[BatcherError]:
    if how in ("crash", "exit", "truncate"):
        # A stream with chunks is not begun again; one without is, and kills the next worker, too.
        return WorkerLostError if where in ("step", "dump result") else PoisonRequestError
    if how == "hang":
        return DeadlineExceededError
    return UnsendableValueError if where == "dump task" else InferenceError


async def read(batcher: DynBatcher[Any, list[Any]], value: Any) -> tuple[list[Any], Any]:
    """Return the chunks of a stream, and its error."""
    chunks: list[Any] = []
    try:
        async for chunk in await batcher.stream(value):
            chunks += [chunk]
    except BatcherError as error:
        return chunks, error
    return chunks, None


# A host takes no part in what goes wrong elsewhere.
SHARED = [case for case in CASES if case[0] in ("step", "load result")]


@pytest.mark.parametrize(
    ("where", "how", "place"),
    [*((*case, {}) for case in CASES), *((*case, {"shared": True}) for case in SHARED)],
)
async def test_faulty_stream_ends_with_its_error(where: str, how: str, place: Any) -> None:
    options: dict[str, Any] = {"infer_timeout": SOON_IN_WORKER, "stop_timeout": 0.2, **place}
    async with DynBatcher(SteppedMinefield, 4, timeout=LIMIT, **options) as batcher:
        calls = [read(batcher, value) for value in ("first", Bomb(where, how), "last")]
        (first, bad, last) = await asyncio.gather(*calls)
        assert isinstance(bad[1], expected(where, how)), bad
        for chunks, error in (first, last):
            # They share the step, and the worker.
            assert (chunks == CHUNKS) if error is None else (chunks == CHUNKS[: len(chunks)])
            assert error is None or where == "step" or how not in ("raise", "BaseException")
        assert await read(batcher, "next") == (CHUNKS, None)
        assert await batcher.process_batched("left") == [[1]]
        if not place:
            assert_balance(batcher)
            pids = pids_of(batcher)
    if not place:
        await until(lambda: not any(map(psutil.pid_exists, pids)))
