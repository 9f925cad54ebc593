"""Batches on their way through shared memory. The parent's event loop thread, but for the copying.

A batch whose inputs all have rows is named to its worker, as soon as they are copied. Any other is
copied here: up to `MOST_AT_ONCE` on the spot, a larger one on a thread of the pool while the loop
goes on. A frame that is not ready keeps its place in the order of what its worker is sent. What
finds no room, or no memory, goes through the pipe, and that is said once.

What a worker may read is a *lease*: the slabs of a batch. It ends when the worker says that no view
of the batch is left, or is dead.
"""

import functools
import logging
from collections.abc import Callable, Mapping
from typing import NamedTuple

from fast_batcher._core.limits import BATCHES_PER_WORKER
from fast_batcher._core.messages import Batch
from fast_batcher._parent.input_arena import MOST_AT_ONCE, InputArena, RunInThread, StagedInput
from fast_batcher._shared_memory.slabs import Part, Slab, Slabs
from fast_batcher._transport.channel import Reservation
from fast_batcher._transport.codec import dumps
from fast_batcher._transport.frames import Kind
from fast_batcher._transport.pickler import Parts

logger = logging.getLogger("fast_batcher")

# Beside its bytes a pickled array takes less than this, so one that has a row may also go without.
MOST_AROUND = 4096

# On Python 3.11 looking up a member of an enumeration costs as much as a call.
_ROWS = Kind.ROWS

Send = Callable[[Kind, int, bytes], None]
SendInBand = Callable[[Batch, Send], None]


class ReservedSend(NamedTuple):
    """How frames that are not ready yet reach one worker."""

    reserve: Callable[[], Reservation]
    fill: Callable[[Reservation, list[tuple[Kind, int, bytes]]], None]


class SharedInputSender:
    """Sends batches through the memory that is shared with the workers.

    Args:
        find_slabs: Gives that memory; an error if there is none, None if there is to be none.
        lanes: Those of the ready workers.
        run_in_thread: Calls its first argument on another thread, and then the second on the
            loop's, with the error or None.
        name: The batcher's name, for logs.
        threshold: Bytes from which on an input has a row.
        max_frame_bytes: Bytes that it takes at most, pickled.
        max_batch_size: Most inputs of a batch.
    """

    def __init__(
        self,
        find_slabs: Callable[[], Slabs | OSError | None],
        lanes: Mapping[int, ReservedSend],
        run_in_thread: RunInThread,
        name: str,
        threshold: int,
        max_frame_bytes: int,
        max_batch_size: int,
    ) -> None:
        self._find_slabs = find_slabs
        self._lanes = lanes
        self._run_in_thread = run_in_thread
        self._name = name
        self._has_warned = False
        # The slabs of each batch that a worker may have views of, by worker.
        self._leases: dict[int, dict[int, list[Slab]]] = {}
        self.rows = InputArena(
            find_slabs,
            run_in_thread,
            lambda error: self._warn(f"{error}"),
            threshold,
            max_frame_bytes - MOST_AROUND,
            max_batch_size,
        )

    def is_there(self) -> bool:
        """Whether there is memory to share."""
        slabs = self._find_slabs()
        if isinstance(slabs, OSError):
            self._warn(f"{slabs}")
        return isinstance(slabs, Slabs)

    def send_staged(self, batch: Batch, send: Send, send_in_band: SendInBand) -> bool:
        """Send a batch whose inputs all have rows; False, and nothing done, if one has none.

        Args:
            batch: The batch; its first request has had a row.
            send: Sends a frame to its worker.
            send_in_band: Sends the batch through `Send` if there turns out to be no memory.
        """
        rows: list[StagedInput] = []
        leased: dict[Slab, None] = {}
        for request in batch.requests:
            row: StagedInput | None = request.staged
            slab = None if row is None else row.slab
            if row is None or slab is None:
                return False
            rows.append(row)
            leased[slab] = None
        body = dumps(_name_runs(rows))
        pending = [row for row in rows if not row.is_copied]
        if pending:
            lane = self._lanes[batch.worker]
            fill = functools.partial(
                self._fill_staged, lane, lane.reserve(), body, batch, pending, send_in_band
            )
            for row in pending:
                row.on_copied = fill
        else:
            send(_ROWS, batch.id, body)
        # The worker wakes up meanwhile.
        self._lease(batch, [*leased])
        for slab in leased:
            self.rows.close(slab)
        for row in rows:
            row.give_up()
        return True

    def send(self, batch: Batch, parts: Parts, send: Send, send_in_band: SendInBand) -> bool:
        """Send a batch; False, and nothing done, if there is no room for it.

        Args:
            batch: The batch; it `is_there`.
            parts: Its pickled inputs, which it releases when they are copied.
            send: As for `send_staged`.
            send_in_band: As for `send_staged`.
        """
        slabs = self._find_slabs()
        assert isinstance(slabs, Slabs), "the caller has asked"
        whole = slabs.take(parts.size)
        if whole is None:
            self._warn_of_no_room(slabs, parts.size)
            return False
        named = dumps((whole.start, whole.length, parts.sizes, parts.items))
        frame = (Kind.SHARED_INPUTS, batch.id, named)
        if parts.size > MOST_AT_ONCE:
            lane = self._lanes[batch.worker]
            place = lane.reserve()
            done = functools.partial(
                self._finish, slabs, lane, whole, place, frame, batch, send_in_band
            )
            self._run_in_thread(functools.partial(_copy, slabs, whole, parts), done)
            return True
        try:
            slabs.write(whole, parts, releases_gil=False)
        except OSError as error:
            self._give_up(slabs, whole, error)
            return False
        parts.release()
        self._lease(batch, [whole.slab])
        send(*frame)
        return True

    def free(self, worker: int, batch_ids: list[int]) -> None:
        """The worker has no view of these batches any more.

        Raises:
            KeyError: It never had one.
        """
        leases = self._leases.get(worker)
        if leases is not None:
            for batch_id in batch_ids:
                del leases[batch_id]

    def forget(self, worker: int, inherited: int | None) -> None:
        """The worker is dead.

        Args:
            worker: Which.
            inherited: The last batch of which children of it may have views, so that it and those
                before it are never free; None if there is none.
        """
        for batch_id, leased in self._leases.pop(worker, {}).items():
            if inherited is not None and batch_id <= inherited:
                for slab in leased:
                    slab.leak()

    def _lease(self, batch: Batch, leased: list[Slab]) -> None:
        """From now on the worker has these slabs."""
        self._leases.setdefault(batch.worker, {})[batch.id] = leased

    def _fill_staged(
        self,
        lane: ReservedSend,
        place: Reservation,
        body: bytes,
        batch: Batch,
        pending: list[StagedInput],
        send_in_band: SendInBand,
    ) -> None:
        """One of the rows that a batch waits for has been copied, or could not be."""
        if not all(row.is_copied or row.has_failed for row in pending):
            return
        if self._lanes.get(batch.worker) is not lane:  # it has died, and its leases have ended
            return
        frames = [(_ROWS, batch.id, body)]
        if any(row.has_failed for row in pending):
            self.free(batch.worker, [batch.id])
            frames.clear()
            send_in_band(batch, lambda *one: frames.append(one))
        lane.fill(place, frames)

    def _finish(
        self,
        slabs: Slabs,
        lane: ReservedSend,
        whole: Part,
        place: Reservation,
        frame: tuple[Kind, int, bytes],
        batch: Batch,
        send_in_band: SendInBand,
        error: BaseException | None,
    ) -> None:
        """On the loop again: a batch has been copied, or could not be."""
        if self._lanes.get(batch.worker) is not lane:  # it has died: somebody has seen to the batch
            if error is not None:
                slabs.discard(whole)
            return
        frames = [frame]
        if error is None:
            self._lease(batch, [whole.slab])
        else:
            self._give_up(slabs, whole, error)
            frames.clear()
            send_in_band(batch, lambda *one: frames.append(one))
        lane.fill(place, frames)

    def _give_up(self, slabs: Slabs, whole: Part, error: BaseException) -> None:
        slabs.discard(whole)
        self._warn(f"{error}")

    def _warn_of_no_room(self, slabs: Slabs, size: int) -> None:
        text = (
            f"{size} bytes find no room, {slabs.taken_bytes} of max_shared_bytes={slabs.size} are "
            "taken"
        )
        kept = max(
            [len(leases) - BATCHES_PER_WORKER for leases in self._leases.values()], default=0
        )
        if kept > 0:
            text += (
                "; the model, or a process that it has forked in infer, keeps views of the inputs "
                f"of at least {kept} batches: keep copies (array.copy(), tensor.clone()) instead, "
                "and fork in the constructor"
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


def _name_runs(rows: list[StagedInput]) -> list[tuple[bytes, int, int]]:
    """Where rows lie: layout, start and number of those that lie one behind the other."""
    runs: list[tuple[bytes, int, int]] = []
    layout, start, end, count = rows[0].layout, rows[0].start, rows[0].start, 0
    for row in rows:
        if row.start != end or row.layout != layout:
            runs.append((layout, start, count))
            layout, start, count = row.layout, row.start, 0
        count += 1
        end = row.end
    runs.append((layout, start, count))
    return runs


def _copy(slabs: Slabs, whole: Part, parts: Parts) -> None:
    """On another thread."""
    try:
        slabs.write(whole, parts, releases_gil=True)
    finally:
        # At once, and not when the last reference goes: inputs are locked as long.
        parts.release()
