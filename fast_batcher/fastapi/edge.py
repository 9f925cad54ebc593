"""Lifespans, dependencies, health probes and array responses of an app. API process, event loop."""

import math
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Header
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.types import Lifespan, StatefulLifespan

from fast_batcher.batcher import DynBatcher, check_batchers
from fast_batcher.encoding import to_json
from fast_batcher.errors import ConfigurationError
from fast_batcher.fastapi.errors import RETRY_AFTER, find_answer, public_text
from fast_batcher.settings import MAX_SECONDS


class ArrayResponse(Response):
    """JSON response that may hold NumPy arrays and tensors: `return ArrayResponse({"row": row})`.

    Needs the extra `json`, which installs orjson. FastAPI sends a response unchanged, so the
    endpoint's response model is documented in OpenAPI, but not checked.

    Args:
        content: A value for `fast_batcher.encoding.to_json`; or bytes that it has written, for
            example in a worker.
    """

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Write the content."""
        return content if isinstance(content, bytes) else to_json(content)


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
    check_batchers("dependency", batcher)

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
    check_batchers("request_timeout", batcher)
    if not re.fullmatch(r"[A-Za-z0-9-]+", header):
        raise ConfigurationError(
            f"header={header!r}: give letters, digits and hyphens, for example {TIMEOUT_HEADER!r}"
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


# Seconds that a batcher may be broken before its pod should be restarted. Twice the default
# restart_window: the batcher itself tries again after one window, and its model has another to
# load.
BROKEN_TIMEOUT = 120.0


def health_router(
    *batchers: DynBatcher[Any, Any],
    prefix: str = "",
    include_in_schema: bool = False,
    broken_timeout: float | None = BROKEN_TIMEOUT,
) -> APIRouter:
    """Make the routes `/livez` and `/readyz` for a supervisor's probes.

    `/livez` answers 200 while the event loop runs and no batcher was broken for `broken_timeout`.
    `/readyz` answers 200 while every batcher is ready. Otherwise they answer 503. Each 503, and
    every answer of `/readyz`, has the state of each batcher in its body, and what a batcher waits
    for. HEAD is answered like GET. The model is not called.

    Args:
        batchers: One or more batchers, which must all be ready.
        prefix: Prefix of the paths.
        include_in_schema: Whether OpenAPI shows the routes.
        broken_timeout: Seconds for which a batcher must be continuously broken until `/livez`
            answers 503, so that the supervisor restarts the server; None for never. The time
            starts at a failed start, which is not retried, or when the workers have used up their
            restarts. The batcher then starts a worker every `restart_window` seconds. Choose more
            than this window plus the load time of the model.
    """
    if not batchers:
        raise ConfigurationError("health_router: give the batchers that must be ready")
    check_batchers("health_router", *batchers)
    if broken_timeout is not None and not broken_timeout >= 0:
        raise ConfigurationError(
            f"health_router: broken_timeout={broken_timeout!r}: give 0 or more seconds, or None"
        )
    router = APIRouter(prefix=prefix, include_in_schema=include_in_schema, tags=["health"])

    headers = {"Cache-Control": "no-store"}

    # Supervisors may ask for the status alone.
    @router.head("/livez", include_in_schema=False)
    @router.get("/livez")
    async def livez() -> JSONResponse:
        broken = [batcher._status.broken_seconds for batcher in batchers]  # noqa: SLF001
        limit = math.inf if broken_timeout is None else broken_timeout
        if all(seconds is None or seconds < limit for seconds in broken):
            return JSONResponse({"status": "alive"}, headers=headers)
        reports = [_report(batcher) for batcher in batchers]
        return JSONResponse({"status": "broken", "batchers": reports}, 503, headers)

    @router.head("/readyz", include_in_schema=False)
    @router.get("/readyz")
    async def readyz() -> JSONResponse:
        ready = all(batcher.is_ready for batcher in batchers)
        content = {
            "status": "ready" if ready else "not ready",
            "batchers": [_report(batcher) for batcher in batchers],
        }
        if ready:
            return JSONResponse(content, headers=headers)
        failures = [batcher.start_error for batcher in batchers]
        if all(failure is None or find_answer(failure, 503).may_pass_later for failure in failures):
            return JSONResponse(content, 503, {**headers, "Retry-After": str(RETRY_AFTER)})
        return JSONResponse(content, 503, headers)

    return router


def _report(batcher: DynBatcher[Any, Any]) -> dict[str, Any]:
    stats, failure = batcher.stats, batcher.start_error
    waits_for = batcher._status.waits_for  # noqa: SLF001  as above
    if stats.state == "new":
        waits_for = "an opening, by FastAPI(lifespan=batcher.lifespan) or await batcher.open()"
    return {
        "name": batcher.name,
        "state": stats.state,
        "workers_ready": stats.workers_ready,
        "num_workers": stats.num_workers,
        "waiting": stats.waiting,
        "start_error": failure and public_text(failure),
        **({"waits_for": waits_for} if waits_for else {}),
    }


AppT = TypeVar("AppT")


def combine_lifespans(*lifespans: Lifespan[AppT]) -> StatefulLifespan[AppT]:
    """Combine several lifespans into one: entered in order, left in reverse.

    If a lifespan fails to start, the ones before it are left again and the error stops the server.
    The dicts that they yield are merged; for equal keys the later lifespan wins.

    Raises:
        ConfigurationError: An argument is a batcher, or cannot be called.
    """
    given: tuple[object, ...] = lifespans
    for found in given:
        if isinstance(found, DynBatcher) or not callable(found):
            raise ConfigurationError(
                f"combine_lifespans: {found!r:.100} is of type {type(found).__name__}: give "
                "functions of the app, for example batcher.lifespan"
            )

    @asynccontextmanager
    async def combined(app: AppT) -> AsyncIterator[Any]:
        state: dict[str, Any] | None = None
        async with AsyncExitStack() as stack:
            for lifespan in lifespans:
                part: Mapping[str, Any] | None = await stack.enter_async_context(lifespan(app))
                if part is not None:
                    state = {**(state or {}), **part}
            # None if no lifespan has state: Starlette refuses even {} on a server without state.
            yield state

    return combined
