"""Inputs on their way to the host: pickled, or in the API process's range of the host's memory.

API process, the event loop's thread. Large arrays are copied into the range on arrival, as
`InputArena` does it for workers of its own; the host names the rows to its workers, and tells when
no worker views them any more.
"""

import asyncio
import functools
import logging
import os
from typing import Any

from fast_batcher._core.values import Request
from fast_batcher._host.protocol import Row
from fast_batcher._parent.sending import PicklingWatch, dump_input, make_pickler
from fast_batcher._parent.staging import (
    LEAST_STAGED,
    CopyState,
    InputArena,
    MemoryService,
    StagedInput,
)
from fast_batcher._process import monotonic
from fast_batcher._shared_memory.inputs import Slab, Slabs
from fast_batcher.errors import BatcherError
from fast_batcher.settings import Settings

logger = logging.getLogger("fast_batcher")


class HostInputs:
    """Packs the inputs of one API process for its host.

    Args:
        settings: The batcher's settings.
        loop: The event loop, which is running.
        name: The batcher's name, for logs and the copier thread.
    """

    def __init__(self, settings: Settings, loop: asyncio.AbstractEventLoop, name: str) -> None:
        self._settings = settings
        self._name = name
        self._pickler = make_pickler(settings)
        self._watch = PicklingWatch(name)
        self._memory = MemoryService(loop, 0, name)
        self._arena = InputArena(self._memory, settings, self._warn)
        # Memory of rows that a worker may view, by the request's id.
        self._rows: dict[int, Slab] = {}
        # Memory of dead hosts that is being closed.
        self._lost: list[Slabs] = []
        self._has_large = False
        self._has_warned = False

    def use(self, descriptors: tuple[int, int] | None, start: int, length: int) -> None:
        """Use a range of a host's memory from now on.

        Args:
            descriptors: The memory and the lifeline of the range, owned by this object from now
                on; None without any.
            start: Start of the range in bytes.
            length: Length of the range in bytes.
        """
        if descriptors is not None:
            memory, lifeline = descriptors
            try:
                slabs = self._memory.slabs = Slabs(length, memory, start)
            except OSError as error:
                os.close(lifeline)
                self._warn(error)
            else:
                slabs.when_unmapped(functools.partial(os.close, lifeline))
        self._arena = InputArena(self._memory, self._settings, self._warn)
        if self._has_large:
            self._arena.enable()

    def lose(self) -> None:
        """Forget the memory of a host that is dead."""
        self._rows.clear()
        slabs, self._memory.slabs = self._memory.slabs, None
        if isinstance(slabs, Slabs):
            self._lost.append(slabs)
            self._memory.run_in_thread(slabs.close, lambda _: self._lost.remove(slabs))

    def reconfigure(self, max_batch_size: int) -> None:
        """Keep inputs together for batches of this size."""
        self._arena.batch_size = max_batch_size

    def end_turn(self) -> None:
        """Note that a turn of the loop is over, which limits the bytes that the loop copies."""
        self._arena.end_turn()

    def stage(self, request: Request) -> StagedInput | None:
        """Copy a large input into shared memory.

        Returns:
            The copy if it is not finished, so that the request must not be sent before.
        """
        if type(request.value) not in self._arena.probes:
            return None
        staged = request.staged = self._arena.stage(request.value)
        return staged if staged is not None and staged.state is CopyState.COPYING else None

    def allocate(self, dtype: Any, shape: tuple[int, ...]) -> Any:
        """Make an array in shared memory; None if the caller must make an ordinary one."""
        self._enable()
        return self._arena.allocate(dtype, shape)

    def pack(self, request: Request) -> bytes | Row | BatcherError:
        """Return the input of a request as a row of shared memory or as a pickle, or an error."""
        staged: StagedInput | None = request.staged
        slabs = self._memory.slabs
        if staged is not None and staged.slab is not None and isinstance(slabs, Slabs):
            self._rows[request.id] = staged.slab
            staged.release()
            return staged.layout, slabs.base + staged.start, slabs.base + staged.end
        return self.pickle(request.value)

    def pickle(self, value: Any) -> bytes | BatcherError:
        """Return an input as a pickle, or an error."""
        began_at = monotonic()
        item = dump_input(self._pickler, value, self._settings.max_frame_bytes)
        self._watch.check(began_at)
        if isinstance(item, bytes) and len(item) >= LEAST_STAGED:
            self._enable()
        return item

    def free(self, request_ids: list[int]) -> None:
        """Free the memory of rows that no worker views any more."""
        for request_id in request_ids:
            self._rows.pop(request_id, None)

    def rebind(self, loop: asyncio.AbstractEventLoop) -> None:
        """Continue on another event loop; the previous loop is closed."""
        self._memory.rebind(loop)

    async def aclose(self) -> None:
        """Unmap the memory on the copier thread."""
        await self._memory.aclose()

    def close(self) -> None:
        """Unmap the memory and end the copier thread; may be called again."""
        self._rows.clear()
        self._memory.close()
        for slabs in self._lost:  # the copier thread has ended before it came to them
            slabs.close()
        self._lost.clear()

    def _enable(self) -> None:
        if not self._has_large:
            self._has_large = True
            self._arena.enable()

    def _warn(self, reason: BaseException | str) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s: large inputs go through a socket, which is slower: %s",
                self._name,
                str(reason),
            )
