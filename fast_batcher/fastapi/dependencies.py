"""Dependencies for endpoints: the batcher, and a client's own timeout. API process."""

import re
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, TypeVar

from fastapi import Header
from starlette.exceptions import HTTPException

from fast_batcher.batcher import DynBatcher
from fast_batcher.errors import ConfigurationError
from fast_batcher.settings import MAX_SECONDS

InputT = TypeVar("InputT")
OutputT = TypeVar("OutputT")

# Header in which a client sends the seconds that it will wait. No standard defines one.
TIMEOUT_HEADER = "X-Request-Timeout"
# A decimal number without sign or space, and without Python's other notations (1_000, inf).
_SECONDS = re.compile(r"[0-9]{1,20}(\.[0-9]{0,20})?(e-?[0-9]{1,3})?", re.ASCII | re.IGNORECASE)


def dependency(
    batcher: DynBatcher[InputT, OutputT],
) -> Callable[[], Awaitable[DynBatcher[InputT, OutputT]]]:
    """Make a dependency for `Depends` that returns the batcher, also for WebSocket endpoints.

    Keep it in a variable, so that tests can replace it in `app.dependency_overrides`. It has no
    parameters, so OpenAPI shows none.
    """

    # A coroutine function: FastAPI runs a plain function in a thread at every request.
    async def get_batcher() -> DynBatcher[InputT, OutputT]:
        return batcher

    return get_batcher


def request_timeout(
    batcher: DynBatcher[Any, Any], *, header: str = TIMEOUT_HEADER
) -> Callable[..., Awaitable[float | None]]:
    """Make a dependency that lets a client shorten its deadline by a header.

    Declare `timeout: Annotated[float | None, Depends(request_timeout(batcher))]` and pass it to
    `process_batched`. A call that cannot be answered in that time is rejected at once.

    Args:
        batcher: The batcher whose `timeout` the header can shorten. Without the header, or with a
            longer time, the dependency's value is None, which stands for the batcher's timeout.
        header: Name of the header. Its value is a decimal number of seconds, above 0 and at most a
            year; anything else is answered with 400.
    """
    if not re.fullmatch(r"[A-Za-z0-9-]+", header):
        raise ConfigurationError(
            f"header={header!r}: letters, digits and hyphens, for example {TIMEOUT_HEADER!r}"
        )
    description = "Seconds that the client will wait; it can shorten the server's own limit."

    async def get_timeout(
        value: Annotated[str | None, Header(alias=header, description=description)] = None,
    ) -> float | None:
        if value is None:
            return None
        seconds = float(value) if _SECONDS.fullmatch(value) else 0.0
        if not 0 < seconds <= MAX_SECONDS:
            text = f"{header}: {value!r:.100}: give seconds as a decimal number above 0"
            raise HTTPException(400, text)
        limit = batcher.timeout
        return None if limit is not None and seconds >= limit else seconds

    return get_timeout
