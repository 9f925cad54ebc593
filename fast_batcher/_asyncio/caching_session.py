"""CachingSession: a session that looks outputs up in a cache before another session computes them.

    DynBatcher --accept--> CachingSession --miss--> LocalSession or RemoteSession
               <--hit----- |         ^              |
                           +- cache -+ <---output---+

API process, on the event loop's thread. `CachedCalls` has the calls; this module connects it with
the session that computes, to which it passes on everything else.
"""

from asyncio import AbstractEventLoop
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fast_batcher._asyncio.binding import LoopBinding
from fast_batcher._asyncio.cached_calls import CachedCalls
from fast_batcher._asyncio.ledger import Ledger
from fast_batcher._asyncio.session import Session
from fast_batcher._core.prediction import Method
from fast_batcher._core.values import Request
from fast_batcher.model import ModelSpec
from fast_batcher.settings import Settings
from fast_batcher.stats import BatcherStats, Explanation


class CachingSession:
    """A `Session` with a cache before another session.

    Args:
        inner: The session that computes.
        settings: The batcher's settings, with a cache.
        ledger: Has the counts.
        name: The batcher's name.
        weights: Part of the keys: see `ModelSpec.weights`.
    """

    def __init__(
        self, inner: Session, settings: Settings, ledger: Ledger, name: str, weights: str
    ) -> None:
        self._inner = inner
        self._settings = settings
        self._counters = ledger.counters
        self._calls = CachedCalls(inner, settings, ledger, name, weights)

    @property
    def binding(self) -> LoopBinding:
        """Process, event loop and thread of the session."""
        return self._inner.binding

    @property
    def methods(self) -> Mapping[str, Method]:
        """The methods of a model that has several, by name."""
        return self._inner.methods

    @property
    def load(self) -> tuple[int, int, int]:
        """Numbers of ready workers, waiting requests and running requests."""
        return self._inner.load

    def read_stats(self) -> BatcherStats:
        """Return the statistics of the session that computes, and the counts of the cache."""
        results = self._counters.cache_results
        return replace(
            self._inner.read_stats(),
            cache_hits=results["hit"],
            cache_misses=results["miss"],
            cache_coalesced=results["coalesced"],
            cache_lookups=self._calls.looked_up,
        )

    def explain(self) -> Explanation:
        """Explain the size of the recent batches."""
        return self._inner.explain()

    def begin(self) -> None:
        """Start the workers, without waiting for them."""
        self._inner.begin()

    def accept(self, request: Request) -> None:
        """Look the output up, or join a computation of an equal input."""
        self._calls.accept(request)

    def abandon(self, request: Request) -> None:
        """Remove a caller; the computation ends with its last caller."""
        self._calls.abandon(request)

    def raise_priority(self, request: Request, priority: int) -> None:
        """Raise the priority of a request of the session that computes."""
        self._inner.raise_priority(request, priority)

    def has_room(self, request: Request, ahead: int = 0) -> bool:
        """Return whether the queue has room for a request that has not been accepted yet."""
        return self._calls.has_room(request, ahead)

    def allocate_input(self, dtype: Any, shape: tuple[int, ...]) -> Any:
        """Make an array in shared memory; None if the caller must make an ordinary one."""
        return self._inner.allocate_input(dtype, shape)

    def reconfigure(self, settings: Settings) -> None:
        """Apply changed settings, which were checked before."""
        self._inner.reconfigure(settings)
        self._settings = self._calls.settings = settings

    def rebind(self, loop: AbstractEventLoop) -> None:
        """Continue on another event loop; the previous loop is closed."""
        self._inner.rebind(loop)
        self._calls.rebind()

    def begin_drain(self) -> None:
        """Expect no further requests, unless accepted ones are looked up and may be misses."""
        if not self._calls.looked_up:
            self._inner.begin_drain()

    async def reload(self, model_spec: ModelSpec) -> None:
        """Replace the workers by workers with another model."""
        with self._calls.reload(model_spec.weights):
            await self._inner.reload(model_spec)

    async def aclose(self) -> None:
        """Wait at most `drain_timeout` for look-ups, and as long for computations; then end."""
        await self._calls.wait_until_looked_up(self._settings.drain_timeout)
        self._inner.begin_drain()
        await self._inner.aclose()
        await self._calls.wait_until_delivered(self._settings.drain_timeout)
        self._calls.end()
        await self._calls.cache.settle(self._settings.stop_timeout)

    def end(self, grace: float) -> None:
        """Release everything, and block until the workers are dead."""
        self._calls.end()
        self._inner.end(grace)
