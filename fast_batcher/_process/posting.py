"""Outputs on their way to the parent, in one piece: by the pipe or, if they are large, the outbox.

The main thread of the worker.
"""

import copyreg
import logging
import sys
from typing import TYPE_CHECKING, Any

from fast_batcher._transport.codec import RemoteFailure, dumps
from fast_batcher._transport.frames import Kind
from fast_batcher._transport.pickler import LEAST_SHARED, Alike, Lifted, Parts, PartsPickler
from fast_batcher.config import SHARED_MEMORY_THRESHOLD

if TYPE_CHECKING:
    from fast_batcher._transport.outbox import OutboxWriter

logger = logging.getLogger("fast_batcher.worker")


class Posting:
    """Packs the outputs of batches.

    Args:
        outbox: Where large ones go, an error if there is none, None if there is to be none.
        max_frame_bytes: Longest body of a frame, and most bytes of an answer in the outbox.
    """

    def __init__(self, outbox: "OutboxWriter | OSError | None", max_frame_bytes: int) -> None:
        self._outbox = outbox
        self._max_frame_bytes = max_frame_bytes
        # Outputs whose pickle is not longer are sent as they are.
        self.most_whole = max_frame_bytes
        least = SHARED_MEMORY_THRESHOLD
        if outbox is not None:
            self.most_whole = min(max_frame_bytes, LEAST_SHARED - 1)
        if outbox is not None and not isinstance(outbox, OSError):
            least = outbox.least
        self._pickler = PartsPickler(least)
        # Whether an answer was large: from then on none is pickled before it has come here.
        self.expects_large = False
        self._has_warned = False

    def pack(
        self, outputs: list[Any], failures: dict[int, RemoteFailure]
    ) -> tuple[Kind, bytes] | None:
        """The frame that answers with all of them; None if it takes one for each.

        Args:
            outputs: None where there is a failure.
            failures: Those by position.
        """
        if failures and self._outbox is None:
            return None
        pickler = self._pickler
        try:
            pickler.dump(_lift(outputs, pickler.least) if self.expects_large else outputs)
            if pickler.has_enough() and self._has_outbox():
                self.expects_large = True
                if pickler.learn_buffers():
                    return self.pack(outputs, failures)
                return self._pack_parts(outputs, failures, pickler.take_parts())
            body = pickler.take_whole()
        except BaseException:  # noqa: BLE001  pickling is the user's code; item by item then
            pickler.renew()
            return None
        return self._pack_whole(body, failures)

    def rest(self) -> None:
        """There is nothing to do."""
        if self._outbox is not None and not isinstance(self._outbox, OSError):
            self._outbox.rest()

    def _has_outbox(self) -> bool:
        if isinstance(self._outbox, OSError):
            self._warn(f"{self._outbox}")
            self._outbox, self.most_whole = None, self._max_frame_bytes
        return self._outbox is not None

    def _pack_parts(
        self, outputs: list[Any], failures: dict[int, RemoteFailure], parts: Parts
    ) -> tuple[Kind, bytes] | None:
        """One frame for what has been pickled in parts."""
        # What is wrong with some goes into the frame, beside the few bytes about the others.
        most = self._max_frame_bytes
        fits = parts.size <= most and len(dumps(failures)) <= most // 2
        start = self._put(parts) if fits else None
        if start is not None:
            body = dumps((start, parts.sizes, parts.find_frozen(), failures))
            return Kind.SHARED_OUTPUTS, body
        if failures:
            return None
        # The whole is somewhat shorter than its parts, and may fit where they do not.
        whole = parts.join()
        return self._pack_whole(dumps(outputs) if whole is None else whole, failures)

    def _put(self, parts: Parts) -> int | None:
        assert self._outbox is not None
        assert not isinstance(self._outbox, OSError)
        try:
            start = self._outbox.put(parts)
        except OSError as error:
            self._warn(f"{error}")
            return None
        if start is None:
            self._warn(
                f"{parts.size} bytes find no room, {self._outbox.describe_room()} by answers that "
                "the app has not copied yet"
            )
        return start

    def _pack_whole(
        self, body: bytes | None, failures: dict[int, RemoteFailure]
    ) -> tuple[Kind, bytes] | None:
        if body is None or failures or len(body) > self._max_frame_bytes:
            return None
        return Kind.OUTPUTS, body

    def _warn(self, reason: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "large outputs go through a pipe, which is slower, while there is no shared "
                "memory for them: %s",
                reason,
            )


def _lift(outputs: list[Any], least: int) -> Any:
    """What is pickled as the same outputs, in less time.

    Long `bytes` are not copied into the pickle, nor by who reads it, and arrays are described once.
    """
    kinds = set(map(type, outputs))
    array = getattr(sys.modules.get("numpy"), "ndarray", None)
    # The model may have a way of its own to pickle arrays.
    if kinds == {array} and array not in copyreg.dispatch_table:
        return Alike(outputs) if _are_alike(outputs) else outputs
    if bytes not in kinds:
        return outputs
    # What answers several requests is copied once.
    lifted: dict[int, Lifted] = {}
    return [
        lifted.setdefault(id(one), Lifted(one))
        if one.__class__ is bytes and len(one) >= least
        else one
        for one in outputs
    ]


def _are_alike(arrays: list[Any]) -> bool:
    first = arrays[0]
    dtype, shape = first.dtype, first.shape
    try:
        memoryview(first)
    except (BufferError, ValueError):  # those of dates, among others, have no buffer
        return False
    return (
        not dtype.hasobject
        and first.nbytes > 0
        and all(
            one.dtype is dtype and one.shape == shape and one.flags.c_contiguous for one in arrays
        )
        # What answers several requests is copied once.
        and len(set(map(id, arrays))) == len(arrays)
    )
