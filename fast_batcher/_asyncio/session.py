"""`Session`: the interface between `DynBatcher` and whatever computes its requests.

A session exists from one opening of a batcher to the next close. `LocalSession` schedules the
requests in this process and owns the workers; `RemoteSession` passes them to the host process of a
shared batcher.
API process. Every method runs on the event loop's thread, except `end`, which may run on any thread
once the loop is closed.
"""

from asyncio import AbstractEventLoop
from collections.abc import Mapping
from typing import Any, Protocol

from fast_batcher._asyncio.binding import LoopBinding
from fast_batcher._core.prediction import Method
from fast_batcher._core.values import Request
from fast_batcher.model import ModelSpec
from fast_batcher.settings import Settings
from fast_batcher.stats import BatcherStats, Explanation


class Session(Protocol):
    """An opening of a batcher, bound to one event loop at a time."""

    @property
    def binding(self) -> LoopBinding:
        """Process, event loop and thread of the session."""

    @property
    def methods(self) -> Mapping[str, Method]:
        """The methods of a model that has several, by name."""

    @property
    def load(self) -> tuple[int, int, int]:
        """Numbers of ready workers, waiting requests and running requests."""

    def read_stats(self) -> BatcherStats:
        """Return a snapshot of counts and quantiles."""

    def explain(self) -> Explanation:
        """Explain the size of the recent batches."""

    def begin(self) -> None:
        """Start the workers, without waiting for them."""

    def accept(self, request: Request) -> None:
        """Take over a request, whose caller gets exactly one outcome.

        Called in the caller's context, which the user's functions see.
        """

    def abandon(self, request: Request) -> None:
        """Cancel a request whose caller has gone; must not await."""

    def raise_priority(self, request: Request, priority: int) -> None:
        """Raise the priority of an accepted request, which may have been sent or have ended."""

    def has_room(self, request: Request, ahead: int = 0) -> bool:
        """Return whether the queue has room for a request that has not been accepted yet.

        Args:
            request: The request.
            ahead: Further requests that may be accepted before it.
        """

    def allocate_input(self, dtype: Any, shape: tuple[int, ...]) -> Any:
        """Make an array in shared memory; None if the caller must make an ordinary one."""

    def reconfigure(self, settings: Settings) -> None:
        """Apply changed settings, which were checked before."""

    def begin_drain(self) -> None:
        """Expect no further requests, and finish the accepted ones."""

    async def reload(self, model_spec: ModelSpec) -> None:
        """Replace the workers by workers with another model."""

    async def aclose(self) -> None:
        """Wait at most `drain_timeout` for the accepted requests, then end the workers."""

    def end(self, grace: float) -> None:
        """Release everything, and block until the workers are dead.

        Args:
            grace: Seconds that the workers may take to end by themselves.
        """

    def rebind(self, loop: AbstractEventLoop) -> None:
        """Continue on another event loop; the previous loop is closed.

        Callers that waited on the closed loop get no outcome.
        """
