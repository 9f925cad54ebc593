"""Combination of several lifespans. Runs in the API process, on its event loop."""

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, TypeVar

from starlette.types import Lifespan, StatefulLifespan

AppT = TypeVar("AppT")


def combine_lifespans(*lifespans: Lifespan[AppT]) -> StatefulLifespan[AppT]:
    """Combine several lifespans into one: entered in order, left in reverse.

    If a lifespan fails to start, the ones before it are left again and the error stops the server.
    The dicts that they yield are merged; for equal keys the later lifespan wins.
    """

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
