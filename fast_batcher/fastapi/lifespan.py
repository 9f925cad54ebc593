"""Several lifespans as one. Runs in the API process, on its event loop."""

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, TypeVar

from starlette.types import Lifespan, StatefulLifespan

AppT = TypeVar("AppT")


def combine_lifespans(*lifespans: Lifespan[AppT]) -> StatefulLifespan[AppT]:
    """Make one lifespan of several: entered in order, left in reverse.

    If one fails to start, those before it are left again and the error stops the server. The dicts
    they yield are merged; a later one wins where two use the same key.
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
