"""Inputs of an API process on their way to its host: pickles, or rows of the host's shared memory.

API process, on the event loop's thread; a thread of `MemoryService` copies large arrays.
"""

import functools
import logging
import os
from asyncio import AbstractEventLoop
from collections.abc import Callable
from typing import Any

from fast_batcher._core.host import OpenCalls
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
    """Packs the inputs of one API process for its host."""

    def __init__(
        self,
        settings: Settings,
        loop: AbstractEventLoop,
        name: str,
        open_calls: OpenCalls,
        send: Callable[[Request], None],
    ) -> None:
        self._open = open_calls
        # Called with each request that could not be sent at once, when it can be.
        self._send = send
        self._settings = settings
        self._name = name
        self._pickler = make_pickler(settings)
        self._watch = PicklingWatch(name)
        self.memory = MemoryService(loop, 0, name)
        self.arena = InputArena(self.memory, settings, self._warn)
        # Memory of rows that a worker may view, by the request's id.
        self._rows: dict[int, Slab] = {}
        # Memory of dead hosts that is being closed.
        self._lost: list[Slabs] = []
        self._has_large = False
        self._has_warned = False

    def use(self, descriptors: tuple[int, int] | None, start: int, length: int) -> None:
        """Use a range of a host's memory from now on."""
        if descriptors is not None:
            memory, lifeline = descriptors
            try:
                slabs = self.memory.slabs = Slabs(length, memory, start)
            except OSError as error:
                os.close(lifeline)
                self._warn(error)
            else:
                slabs.when_unmapped(functools.partial(os.close, lifeline))
        # The range is for staged inputs alone: all others go through the socket.
        self.arena = InputArena(self.memory, self._settings, self._warn, most_of_all=1.0)
        if self._has_large:
            self.arena.enable()

    def lose(self) -> None:
        """Forget the memory of a host that is dead."""
        self._rows.clear()
        self.memory.close_slabs()
        slabs, self.memory.slabs = self.memory.slabs, None
        if isinstance(slabs, Slabs):
            self._lost.append(slabs)
            self.memory.run_in_thread(slabs.close, lambda _: self._lost.remove(slabs))

    def stage(self, request: Request) -> bool:
        """Copy a large input into shared memory; return whether the request can be sent now.

        If not, `send` gets it once a thread has copied it, or after others have left room for it.
        It waits for room only while the input of a call that will end by itself has some, so that
        it waits for the end of a call, and not for a model that keeps its inputs.
        """
        if type(request.value) not in self.arena.probes:
            return True
        crowded = self._open.crowded
        is_next = next(iter(crowded), request.id) == request.id
        staged = request.staged = self.arena.stage(request.value, takes_room=is_next)
        if staged is not None and staged.state is CopyState.CROWDED:
            if not is_next or any(map(_has_room, self._open)):
                crowded[request.id] = request
                return False
            staged = request.staged = None
        crowded.pop(request.id, None)
        if staged is None or staged.state is CopyState.COPIED:
            return True
        staged.when_copied = functools.partial(self._send, request)
        return False

    def stage_waiting(self) -> None:
        """Copy inputs that have waited for room, in order of arrival, as long as there is some."""
        crowded = self._open.crowded
        while crowded:
            request = next(iter(crowded.values()))
            if self.stage(request):
                self._send(request)
            elif request.id in crowded:
                return

    def allocate(self, dtype: Any, shape: tuple[int, ...]) -> Any:
        """Make an array in shared memory; None if the caller must make an ordinary one."""
        self._enable()
        return None if self._open.crowded else self.arena.allocate(dtype, shape)

    def pack(self, request: Request) -> bytes | Row | BatcherError:
        """Return the input of a request as a row of shared memory or as a pickle, or an error."""
        staged: StagedInput | None = request.staged
        slabs = self.memory.slabs
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

    def close(self) -> None:
        """Unmap the memory and end the copier thread; may be called again."""
        self._rows.clear()
        self.memory.close()
        for slabs in self._lost:  # the copier thread has ended before it came to them
            slabs.close()
        self._lost.clear()

    def _enable(self) -> None:
        if not self._has_large:
            self._has_large = True
            self.arena.enable()

    def _warn(self, reason: BaseException | str) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s: large inputs go through a socket, which is slower: %s",
                self._name,
                str(reason),
            )


def _has_room(call: Request) -> bool:
    """Return whether an open call has room that it gives up, whatever its caller does.

    A stream with a chunk may wait for its reader.
    """
    staged: StagedInput | None = call.staged
    is_found = staged is not None and staged.state in (CopyState.COPYING, CopyState.COPIED)
    return is_found and not call.has_chunks
