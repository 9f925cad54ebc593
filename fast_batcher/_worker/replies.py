"""Outputs to frames: for the pipe or, if they are large, through the outbox. Worker process.

Each output is pickled by itself, so that one that cannot be sent fails alone, and no two callers
get the same object.
"""

import logging
from collections.abc import Sequence
from typing import Any

from fast_batcher._shared_memory.outbox_writer import OutboxWriter
from fast_batcher._transport import codec
from fast_batcher._transport.codec import RemoteFailure, dump_atoms, dumps
from fast_batcher._transport.frames import Kind
from fast_batcher._transport.pickler import LEAST_SHARED, Parts, PartsPickler
from fast_batcher.errors import InferenceError, forget_frames
from fast_batcher.settings import SHARED_MEMORY_THRESHOLD

# The frames that answer a batch, as kinds and bodies; one or more.
Reply = list[tuple[Kind, bytes]]

logger = logging.getLogger("fast_batcher.worker")


class ReplyEncoder:
    """Packs the outputs of batches.

    Args:
        outbox: Where large outputs go, an error if there is no memory, None if the settings want
            none.
        max_frame_bytes: Longest body of a frame, and most bytes of an answer in the outbox.
    """

    def __init__(self, outbox: OutboxWriter | OSError | None, max_frame_bytes: int) -> None:
        self._outbox = outbox if isinstance(outbox, OutboxWriter) else None
        # Why there is no outbox, if the settings want one.
        self._no_outbox = outbox if isinstance(outbox, OSError) else None
        self._max_frame_bytes = max_frame_bytes
        self._pickler = PartsPickler(
            self._outbox.least if self._outbox else SHARED_MEMORY_THRESHOLD
        )
        self._has_warned = False

    def pack(self, outputs: list[Any], failures: dict[int, RemoteFailure]) -> Reply:
        """Return the frames that answer a batch.

        Args:
            outputs: One per input; anything where there is a failure. An exception is the failure
                of its request.
            failures: The failures that are known, by position; the ones found here are added.
        """
        body = None if failures else dump_atoms(outputs, LEAST_SHARED)
        if body is not None and len(body) <= self._max_frame_bytes:
            return [(Kind.OUTPUT_ATOMS, body)]
        # By type: an object of the model may lie about its class, and there are few types.
        if any(issubclass(kind, BaseException) for kind in set(map(type, outputs))):
            for position, output in enumerate(outputs):
                if issubclass(type(output), BaseException):
                    failures.setdefault(position, codec.describe(output))
        if failures:
            outputs = [None if at in failures else output for at, output in enumerate(outputs)]
        pickled = self._pickle(outputs)
        if isinstance(pickled, Parts):
            start = self._put(pickled, failures)
            if start is not None:
                where = (start, pickled.sizes, pickled.find_frozen(), pickled.items)
                return [(Kind.SHARED_OUTPUTS, dumps((*where, failures)))]
            pickled = [self._pickle_item(output) for output in outputs]
        return self._pack_items(pickled, failures)

    def give_back_unused(self) -> None:
        """Give back memory that no answer has used for long. To be called while idle."""
        if self._outbox is not None:
            self._outbox.rest()

    def _pickle(self, outputs: list[Any]) -> Sequence[bytes | RemoteFailure] | Parts:
        """Pickle outputs for the pipe or, if they are large, for the outbox."""
        try:
            return self._pickler.pickle(outputs, self._has_outbox)
        except BaseException as error:  # noqa: BLE001  pickling is the user's code; item by item then
            # A frame often keeps the error, and its frames keep the outputs.
            forget_frames(error)
            return [self._pickle_item(output) for output in outputs]

    def _pickle_item(self, output: Any) -> bytes | RemoteFailure:
        try:
            return dumps(output)
        except BaseException as error:  # noqa: BLE001  pickling is the user's code too
            failure = codec.describe(_unsendable(output, error))
            forget_frames(error)
            return failure

    def _pack_items(
        self, items: Sequence[bytes | RemoteFailure], failures: dict[int, RemoteFailure]
    ) -> Reply:
        """Return the frames for outputs that have been pickled one by one."""
        if not failures:
            body = dumps(items)
            if len(body) <= self._max_frame_bytes:
                return [(Kind.OUTPUTS, body)]
        outcomes = [
            failures[at] if at in failures else self._limited(item) for at, item in enumerate(items)
        ]
        bodies = list(codec.split_parts(outcomes, self._max_frame_bytes))
        parts = [(Kind.OUTPUTS_PART, body) for body in bodies[:-1]]
        return [*parts, (Kind.OUTPUTS, bodies[-1])]

    def _limited(self, item: bytes | RemoteFailure) -> bytes | RemoteFailure:
        if isinstance(item, RemoteFailure) or codec.fits(len(item), self._max_frame_bytes):
            return item
        return codec.describe(
            InferenceError(
                f"the output takes {len(item)} bytes, more than max_frame_bytes="
                f"{self._max_frame_bytes} allows; return less or raise max_frame_bytes"
            )
        )

    def _has_outbox(self) -> bool:
        """Whether there is an outbox; warns once if there should be."""
        if self._no_outbox is not None:
            self._warn(f"{self._no_outbox}")
        return self._outbox is not None

    def _put(self, parts: Parts, failures: dict[int, RemoteFailure]) -> int | None:
        """Put pickled outputs into the outbox; return where, or None if there is no room."""
        assert self._outbox is not None, "the caller has asked"
        # The failures go into the frame, beside the few bytes about the outputs.
        most = self._max_frame_bytes
        if parts.size > most or len(dumps(failures)) > most // 2:
            return None
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

    def _warn(self, reason: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "large outputs go through a pipe, which is slower, while there is no shared "
                "memory for them: %s",
                reason,
            )


def _unsendable(output: Any, error: BaseException) -> InferenceError:
    result = InferenceError(
        f"the output, a {type(output).__qualname__}, cannot be pickled: {codec.one_line(error)}; "
        "return plain data, arrays or tensors"
    )
    result.__cause__ = error
    return result
