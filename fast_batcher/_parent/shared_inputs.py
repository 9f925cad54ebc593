"""Sends large batches through shared memory. API process, event loop's thread.

A batch whose inputs are all staged is one frame with their locations, sent as soon as they are
copied. Any other large batch is copied here: up to `MOST_AT_ONCE` bytes by the loop, more by the
copier thread. A frame that is not ready keeps its position among the frames of its worker. If there
is no room or no memory, the batch goes through the pipe, and one warning is logged.

Slabs are leased to a worker, batch by batch. A lease ends when the worker reports that no view of
the batch is left, or when the worker is dead.
"""

import functools
import logging
from collections.abc import Callable

from fast_batcher._core.values import Batch, most_batches
from fast_batcher._parent.input_arena import MOST_AT_ONCE, CopyState, InputArena, StagedInput
from fast_batcher._parent.memory_service import MemoryService
from fast_batcher._parent.worker import WorkerLink
from fast_batcher._shared_memory.inputs import Section, Slab, Slabs
from fast_batcher._transport.frames import Kind
from fast_batcher._transport.loop_channel import Reservation
from fast_batcher._transport.pickling import OutOfBandPickle, dumps
from fast_batcher.settings import Settings

logger = logging.getLogger("fast_batcher")

# On Python 3.11 looking up a member of an enumeration costs as much as a call.
_ROWS = Kind.ROWS

Send = Callable[[Kind, int, bytes], None]
# Sends a batch once its inputs are copied; the argument says whether a copy has failed.
Fill = Callable[[bool], None]


class SharedInputSender:
    """Sends batches through the memory that is shared with the workers, and keeps the leases.

    Args:
        memory: The shared memory, and the thread for large copies.
        settings: The batcher's settings.
        send_in_band: Sends a batch through the pipe, if the system has no memory for it.
        name: The batcher's name, for logs.
    """

    def __init__(
        self,
        memory: MemoryService,
        settings: Settings,
        send_in_band: Callable[[Batch, Send], None],
        name: str,
    ) -> None:
        self._memory = memory
        self._send_in_band = send_in_band
        self._name = name
        self._has_warned = False
        # By ready worker and batch id: the slabs of batches that the worker may still view.
        self._leases: dict[int, dict[int, list[Slab]]] = {}
        # Batches that a worker may have; all workers have the same model.
        self._most_batches = most_batches(stages=1)
        self.arena = InputArena(memory, settings, self._warn)

    def add_worker(self, link: WorkerLink) -> None:
        """Add a worker that is ready."""
        self._leases[link.id] = {}
        self._most_batches = most_batches(link.stages)

    def remove_worker(self, worker_id: int, inherited: int | None) -> None:
        """Remove a dead worker, and end its leases.

        Args:
            worker_id: The worker.
            inherited: Id of the last batch that the worker's children may still view, or None. The
                slabs of this batch and of earlier ones are never freed.
        """
        for batch_id, leased in self._leases.pop(worker_id, {}).items():
            if inherited is not None and batch_id <= inherited:
                for slab in leased:
                    slab.leak()

    def is_available(self) -> bool:
        """Return whether there is shared memory; warn once if it could not be made."""
        slabs = self._memory.slabs
        if isinstance(slabs, OSError):
            self._warn(slabs)
        return isinstance(slabs, Slabs)

    def send_staged(self, batch: Batch, link: WorkerLink) -> bool:
        """Send a batch if all of its inputs are staged; otherwise return False and do nothing.

        Args:
            batch: The batch; its first request has a staged input.
            link: Its worker.
        """
        inputs: list[StagedInput] = []
        leased: dict[Slab, None] = {}
        for request in batch.requests:
            staged: StagedInput | None = request.staged
            slab = None if staged is None else staged.slab
            if staged is None or slab is None:
                return False
            inputs.append(staged)
            leased[slab] = None
        frame = (_ROWS, batch.id, dumps(_name_runs(inputs)))
        pending = [one for one in inputs if one.state is not CopyState.COPIED]
        if pending:
            fill = functools.partial(self._fill, link, link.reserve(), batch, frame)
            for staged in pending:
                staged.when_copied = functools.partial(_fill_if_copied, pending, fill)
        else:
            link.send(*frame)
        # After the send, so that the worker wakes up meanwhile.
        self._leases[link.id][batch.id] = [*leased]
        for slab in leased:
            self.arena.close_slab(slab)
        for staged in inputs:
            staged.release()
        return True

    def send(self, batch: Batch, pickled: OutOfBandPickle, link: WorkerLink) -> bool:
        """Send a batch; if there is no room for it, return False and do nothing.

        Call it only if `is_available` returned True.

        Args:
            batch: The batch.
            pickled: Its pickled inputs, which are released when they have been copied.
            link: Its worker.
        """
        slabs = self._memory.slabs
        assert isinstance(slabs, Slabs), "the caller has asked"
        whole = slabs.take(pickled.size)
        if whole is None:
            self._warn(self._describe_no_room(slabs, pickled.size))
            return False
        named = dumps((whole.start, whole.length, pickled.sizes, pickled.items))
        frame = (Kind.SHARED_INPUTS, batch.id, named)
        if pickled.size > MOST_AT_ONCE:
            fill = functools.partial(self._fill, link, link.reserve(), batch, frame)
            self._memory.run_in_thread(
                functools.partial(_write_pickle, slabs, whole, pickled),
                functools.partial(self._finish, slabs, whole, fill),
            )
        else:
            try:
                slabs.write(whole, pickled, releases_gil=False)
            except OSError as error:
                slabs.mark_uncommitted(whole)
                self._warn(error)
                return False
            pickled.release()
            link.send(*frame)
        self._leases[link.id][batch.id] = [whole.slab]
        return True

    def free(self, worker_id: int, batch_ids: list[int]) -> None:
        """End the leases of batches that a worker does not view any more.

        Raises:
            KeyError: The worker has no lease of one of them.
        """
        leases = self._leases.get(worker_id)
        if leases is not None:
            for batch_id in batch_ids:
                del leases[batch_id]

    def _finish(
        self, slabs: Slabs, whole: Section, fill: Fill, error: BaseException | None
    ) -> None:
        """Send a batch after its copy on the copier thread. Loop's thread."""
        if error is not None:
            slabs.mark_uncommitted(whole)
            self._warn(error)
        fill(error is not None)

    def _fill(
        self,
        link: WorkerLink,
        reservation: Reservation,
        batch: Batch,
        frame: tuple[Kind, int, bytes],
        has_failed: bool,
    ) -> None:
        """Send a batch at its reserved position; through the pipe if a copy has failed."""
        if link.id not in self._leases:  # the worker has died, and its leases have ended
            return
        frames = [frame]
        if has_failed:
            self.free(link.id, [batch.id])
            frames.clear()
            self._send_in_band(batch, lambda *one: frames.append(one))
        link.fill(reservation, frames)

    def _describe_no_room(self, slabs: Slabs, size: int) -> str:
        text = (
            f"{size} bytes find no room, {slabs.taken_bytes} of max_shared_bytes={slabs.size} are "
            "taken"
        )
        kept = max(
            [len(leases) - self._most_batches for leases in self._leases.values()], default=0
        )
        if kept > 0:
            text += (
                "; the model, or a process that it has forked in infer, keeps views of the inputs "
                f"of at least {kept} batches: keep copies (array.copy(), tensor.clone()) instead, "
                "and fork in the constructor"
            )
        return text

    def _warn(self, reason: BaseException | str) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s: large inputs go through a pipe, which is slower, while there is no shared "
                "memory for them: %s",
                self._name,
                # As text: a record that is kept would keep the error's frames, and their slabs.
                str(reason),
            )


def _fill_if_copied(pending: list[StagedInput], fill: Fill) -> None:
    """Send a batch if none of its staged inputs is still being copied."""
    states = {one.state for one in pending}
    if CopyState.COPYING not in states:
        fill(CopyState.FAILED in states)


def _name_runs(inputs: list[StagedInput]) -> list[tuple[bytes, int, int]]:
    """Return layout, start and number of the inputs of each contiguous run."""
    runs: list[tuple[bytes, int, int]] = []
    layout, start, end, count = inputs[0].layout, inputs[0].start, inputs[0].start, 0
    for one in inputs:
        if one.start != end or one.layout != layout:
            runs.append((layout, start, count))
            layout, start, count = one.layout, one.start, 0
        count += 1
        end = one.end
    runs.append((layout, start, count))
    return runs


def _write_pickle(slabs: Slabs, whole: Section, pickled: OutOfBandPickle) -> None:
    """Copy a batch on the copier thread."""
    try:
        slabs.write(whole, pickled, releases_gil=True)
    finally:
        # Released here, not with the last reference, because the inputs are locked until then.
        pickled.release()
