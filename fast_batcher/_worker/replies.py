"""Encodes the outputs of a batch as frames; large outputs go into the outbox.

Runs in a worker process, on its main thread. Each output is pickled separately, so that an output
that cannot be pickled fails alone, and no two callers get the same object. This module does not
write to the pipe, which `serving` does.
"""

import logging
from collections.abc import Sequence
from typing import Any

from fast_batcher._shared_memory.outbox import OutboxWriter
from fast_batcher._transport import pickling
from fast_batcher._transport.frames import Kind
from fast_batcher._transport.pickling import (
    LEAST_SHARED,
    OutOfBandPickle,
    OutOfBandPickler,
    SerializedError,
    dump_atoms,
    dumps,
)
from fast_batcher.errors import InferenceError, forget_frames
from fast_batcher.settings import SHARED_MEMORY_THRESHOLD

# The frames that answer a batch, as kinds and bodies; one or more.
Reply = list[tuple[Kind, bytes]]

logger = logging.getLogger("fast_batcher.worker")


class ReplyEncoder:
    """Encodes the outputs of batches as frames.

    Args:
        outbox: Shared memory for large outputs, an error if it could not be made, None if the
            settings turn it off.
        max_frame_bytes: Longest body of a frame, and most bytes of an answer in the outbox.
    """

    def __init__(self, outbox: OutboxWriter | OSError | None, max_frame_bytes: int) -> None:
        self._outbox = outbox if isinstance(outbox, OutboxWriter) else None
        # The error that prevented an outbox, if the settings ask for one.
        self._no_outbox = outbox if isinstance(outbox, OSError) else None
        self._max_frame_bytes = max_frame_bytes
        self._pickler = OutOfBandPickler(
            self._outbox.least if self._outbox else SHARED_MEMORY_THRESHOLD
        )
        self._has_warned = False

    def pack(self, outputs: list[Any], errors: dict[int, SerializedError]) -> Reply:
        """Return the frames that answer a batch.

        Args:
            outputs: One per input; ignored at the positions of `errors`. An output that is an
                exception fails its request.
            errors: Known errors by position; errors found here are added.
        """
        body = None if errors else dump_atoms(outputs, LEAST_SHARED)
        if body is not None and len(body) <= self._max_frame_bytes:
            return [(Kind.OUTPUT_ATOMS, body)]
        # By `type`: `isinstance` asks `__class__`, which is the user's code, and types are few.
        if any(issubclass(kind, BaseException) for kind in set(map(type, outputs))):
            for position, output in enumerate(outputs):
                if issubclass(type(output), BaseException):
                    errors.setdefault(position, pickling.describe(output))
        if errors:
            outputs = [None if at in errors else output for at, output in enumerate(outputs)]
        pickled = self._pickle(outputs)
        if isinstance(pickled, OutOfBandPickle):
            start = self._put(pickled, errors)
            if start is not None:
                where = (start, pickled.sizes, pickled.find_frozen(), pickled.items)
                return [(Kind.SHARED_OUTPUTS, dumps((*where, errors)))]
            pickled = [self._pickle_item(output) for output in outputs]
        return self._pack_items(pickled, errors)

    def give_back_unused(self) -> None:
        """Return memory that no answer has used recently to the system. Call it while idle."""
        if self._outbox is not None:
            self._outbox.rest()

    def _pickle(self, outputs: list[Any]) -> Sequence[bytes | SerializedError] | OutOfBandPickle:
        """Pickle outputs for the pipe or, if they are large, for the outbox."""
        try:
            return self._pickler.pickle(outputs, self._has_outbox)
        except BaseException as error:  # noqa: BLE001  user code; each output is tried separately
            # A frame often keeps the error, and its frames keep the outputs.
            forget_frames(error)
            return [self._pickle_item(output) for output in outputs]

    def _pickle_item(self, output: Any) -> bytes | SerializedError:
        try:
            return dumps(output)
        except BaseException as error:  # noqa: BLE001  pickling is the user's code too
            failure = pickling.describe(_unsendable(output, error))
            forget_frames(error)
            return failure

    def _pack_items(
        self, items: Sequence[bytes | SerializedError], errors: dict[int, SerializedError]
    ) -> Reply:
        """Return the frames for outputs that have been pickled one by one."""
        if not errors:
            body = dumps(items)
            if len(body) <= self._max_frame_bytes:
                return [(Kind.OUTPUTS, body)]
        outcomes = [
            errors[at] if at in errors else self._limited(item) for at, item in enumerate(items)
        ]
        bodies = list(pickling.fragment(outcomes, self._max_frame_bytes))
        earlier = [(Kind.OUTPUTS_FRAGMENT, body) for body in bodies[:-1]]
        return [*earlier, (Kind.OUTPUTS, bodies[-1])]

    def _limited(self, item: bytes | SerializedError) -> bytes | SerializedError:
        if isinstance(item, SerializedError) or pickling.fits(len(item), self._max_frame_bytes):
            return item
        return pickling.describe(
            InferenceError(
                f"the output takes {len(item)} bytes, more than max_frame_bytes="
                f"{self._max_frame_bytes} allows; return less or raise max_frame_bytes"
            )
        )

    def _has_outbox(self) -> bool:
        """Return whether there is an outbox; warn once if it could not be made."""
        if self._no_outbox is not None:
            self._warn(f"{self._no_outbox}")
        return self._outbox is not None

    def _put(self, pickled: OutOfBandPickle, errors: dict[int, SerializedError]) -> int | None:
        """Put pickled outputs into the outbox; return their start, or None if there is no room."""
        assert self._outbox is not None, "the caller has asked"
        # The errors go into the frame, next to the location of the outputs.
        most = self._max_frame_bytes
        if pickled.size > most or len(dumps(errors)) > most // 2:
            return None
        try:
            start = self._outbox.put(pickled)
        except OSError as error:
            self._warn(f"{error}")
            return None
        if start is None:
            self._warn(
                f"{pickled.size} bytes find no room, {self._outbox.describe_room()} by answers "
                "that the app has not copied yet"
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
        f"the output, a {type(output).__qualname__}, cannot be pickled: "
        f"{pickling.one_line(error)}; "
        "return plain data, arrays or tensors"
    )
    result.__cause__ = error
    return result
