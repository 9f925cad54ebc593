"""Batches on their way through shared memory. The parent's event loop thread, but for the copying.

A batch up to `MOST_AT_ONCE` is copied on the spot. A larger one is copied on a thread of the pool
while the loop goes on; its frame keeps its place in the order of what its worker is sent. What
finds no room, or no memory, goes through the pipe, and that is said once.
"""

import functools
import logging
from collections.abc import Callable, Mapping
from typing import NamedTuple

from fast_batcher._core.messages import Batch
from fast_batcher._core.scheduler import BATCHES_PER_WORKER
from fast_batcher._transport.channel import Place
from fast_batcher._transport.codec import dumps
from fast_batcher._transport.frames import Kind
from fast_batcher._transport.pickler import Parts
from fast_batcher._transport.slabs import Slab, Slabs

logger = logging.getLogger("fast_batcher")

# Bytes; copying so much takes the loop about a tenth of a millisecond, and a millisecond where the
# system has to find the memory first.
MOST_AT_ONCE = 1024 * 1024

Send = Callable[[Kind, int, bytes], None]


class Lane(NamedTuple):
    """How large batches reach one worker."""

    slabs: Slabs
    reserve: Callable[[], Place]
    fill: Callable[[Place, list[tuple[Kind, int, bytes]]], None]


class Sharing:
    """Sends batches through the memory that is shared with their workers.

    Args:
        lanes: Those of each ready worker that has such memory; an error if there is none for it.
        run_aside: Calls its first argument on another thread, and then the second on the loop's,
            with the error or None.
        name: The batcher's name, for logs.
    """

    def __init__(
        self,
        lanes: Mapping[int, Lane | OSError],
        run_aside: Callable[[Callable[[], None], Callable[[BaseException | None], None]], None],
        name: str,
    ) -> None:
        self._lanes = lanes
        self._run_aside = run_aside
        self._name = name
        self._has_warned = False

    def reaches(self, worker: int) -> bool:
        """Whether there is memory that this worker shares."""
        lane = self._lanes.get(worker)
        if isinstance(lane, OSError):
            self._warn(f"{lane}")
        return isinstance(lane, Lane)

    def send(
        self, batch: Batch, parts: Parts, send: Send, send_in_band: Callable[[Batch, Send], None]
    ) -> bool:
        """Send a batch; False, and nothing done, if there is no room for it.

        Args:
            batch: The batch, for a worker that this `reaches`.
            parts: Its pickled inputs, which it releases when they are copied.
            send: Sends a frame to its worker.
            send_in_band: Sends the batch through `Send` if there turns out to be no memory.
        """
        lane = self._lanes[batch.worker]
        assert isinstance(lane, Lane), "the caller has asked"
        slab = lane.slabs.take(parts.size)
        if slab is None:
            self._warn_of_no_room(lane.slabs, parts.size)
            return False
        frame = (Kind.SHARED_INPUTS, batch.id, dumps((slab.start, slab.length, parts.sizes)))
        if parts.size > MOST_AT_ONCE:
            place = lane.reserve()
            done = functools.partial(self._finish, lane, slab, place, frame, batch, send_in_band)
            self._run_aside(functools.partial(_copy, lane.slabs, slab, parts), done)
            return True
        try:
            lane.slabs.write(slab, parts, is_aside=False)
        except OSError as error:
            self._give_up(lane, slab, error)
            return False
        parts.release()
        send(*frame)
        return True

    def free(self, worker: int, starts: list[int]) -> None:
        """The worker has no view of these slabs any more."""
        lane = self._lanes.get(worker)
        if isinstance(lane, Lane):
            for start in starts:
                lane.slabs.give_back(start)

    def _finish(
        self,
        lane: Lane,
        slab: Slab,
        place: Place,
        frame: tuple[Kind, int, bytes],
        batch: Batch,
        send_in_band: Callable[[Batch, Send], None],
        error: BaseException | None,
    ) -> None:
        """On the loop again: a batch has been copied, or could not be."""
        if lane.slabs.is_closed:  # its worker has died, and somebody has seen to the batch
            return
        frames = [frame]
        if error is not None:
            self._give_up(lane, slab, error)
            frames = []
            send_in_band(batch, lambda *one: frames.append(one))
        lane.fill(place, frames)

    def _give_up(self, lane: Lane, slab: Slab, error: BaseException) -> None:
        lane.slabs.discard(slab)
        self._warn(f"{error}")

    def _warn_of_no_room(self, slabs: Slabs, size: int) -> None:
        text = (
            f"{size} bytes find no room, {slabs.taken_bytes} of max_shared_bytes={slabs.size} are "
            "taken"
        )
        kept = slabs.count - BATCHES_PER_WORKER
        if kept > 0:
            text += (
                f"; the model keeps views of the inputs of at least {kept} batches, let it keep "
                "copies (array.copy(), tensor.clone()) instead"
            )
        self._warn(text)

    def _warn(self, reason: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s: large inputs go through a pipe, which is slower, while there is no shared "
                "memory for them: %s",
                self._name,
                reason,
            )


def _copy(slabs: Slabs, slab: Slab, parts: Parts) -> None:
    """On another thread."""
    try:
        slabs.write(slab, parts, is_aside=True)
    finally:
        # At once, and not when the last reference goes: inputs are locked as long.
        parts.release()
