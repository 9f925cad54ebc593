"""Main loop of a worker: receive a batch, call the model's `infer`, send the outputs.

Runs in a worker process, on its main thread, one batch at a time. It makes no decisions about
requests: the parent forms batches, and decides what follows from a failure.
"""

from time import monotonic
from typing import Any

from fast_batcher._arrays.outputs import list_outputs
from fast_batcher._transport import codec
from fast_batcher._transport.blocking_channel import BlockingChannel
from fast_batcher._transport.codec import RemoteFailure
from fast_batcher._transport.frames import Frame, Kind
from fast_batcher._transport.progress import WorkerProgress
from fast_batcher._worker.inputs import Failures, InputReader
from fast_batcher._worker.out_of_memory import free_memory
from fast_batcher._worker.replies import Reply, ReplyEncoder
from fast_batcher.errors import (
    cuda_message,
    forget_frames,
    is_out_of_memory,
)

# Looked up once: on Python 3.11 a member of an enumeration costs as much as a call.
_STOP, _PING, _INPUTS_PART, _FATAL = Kind.STOP, Kind.PING, Kind.INPUTS_PART, Kind.FATAL

# Texts of CUDA errors after which the process cannot use its device any more.
_FATAL_SIGNS = (
    "device-side assert",
    "illegal memory access",
    "unspecified launch failure",
    "CUDA error",
)


class BatchLoop:
    """Main loop of a worker: answers batches with a model until the parent sends STOP.

    Args:
        channel: Channel to the parent.
        model: The model, as `collate` returned it.
        progress: Shared memory from which the parent reads the current batches after this process
            has died.
        inputs: Reads the inputs of batches.
        encoder: Encodes outputs as frames.
    """

    def __init__(
        self,
        channel: BlockingChannel,
        model: Any,
        progress: WorkerProgress,
        inputs: InputReader,
        encoder: ReplyEncoder,
    ) -> None:
        self._channel = channel
        self._model = model
        self._progress = progress
        self._inputs = inputs
        self._encoder = encoder

    def run(self) -> None:
        """Answer batches until STOP, until the parent closes its end, or until a fatal error."""
        while True:
            # Batches whose last view the model has dropped since the last answer.
            freed = self._inputs.pack_freed()
            if freed:
                self._channel.send_packed(freed)
            frame = self._channel.receive()
            if frame is None or frame.kind is _STOP:
                return
            if frame.kind is _PING:
                self._channel.send(Kind.PONG)
                self._encoder.give_back_unused()
            elif frame.kind is _INPUTS_PART:
                self._inputs.keep_part(frame)
            elif self._answer(frame) is _FATAL:
                return

    def _answer(self, frame: Frame) -> Kind:
        """Compute a batch and send its outputs; return the kind of the last frame."""
        batch_id = frame.batch_id
        self._progress.taken = batch_id
        try:
            inputs, failures = self._inputs.read(frame)
        except BaseException as error:  # noqa: BLE001  a dtype may be the user's code, too
            frames: Reply = [(Kind.FAILED, codec.dumps(codec.describe(error)))]
            seconds = 0.0
            forget_frames(error)
        else:
            self._progress.begun = batch_id
            frames, seconds = self._compute(inputs, failures)
            del inputs
        self._inputs.forget_lent()
        # If the model keeps no view of the batch, its memory is free when the answer arrives.
        ahead = self._inputs.pack_freed()
        for kind, body in frames:
            self._channel.send(kind, batch_id, body, seconds, ahead)
            ahead = b""
        return frames[-1][0]

    def _compute(self, inputs: list[Any], failures: Failures) -> tuple[Reply, float]:
        """Call the model's `infer` on a batch, and encode its outputs or its error.

        Args:
            inputs: The inputs that could be read.
            failures: Errors of the other inputs, by position in the batch.

        Returns:
            The frames that answer the batch, and the seconds that `infer` took.
        """
        # Read now: `infer` may change the list that it is given.
        count = len(inputs)
        started = monotonic()
        try:
            outputs = self._model.infer(inputs) if inputs else []
        except BaseException as error:  # noqa: BLE001  sys.exit() in a model must not end the worker
            seconds = monotonic() - started
            kind, failure = _judge(error)
            # A frame often keeps the error, and its frames keep the inputs.
            forget_frames(error)
            return [(kind, codec.dumps(failure))], seconds
        seconds = monotonic() - started
        checked = _check(outputs, count)
        if isinstance(checked, RemoteFailure):
            return [(Kind.FAILED, codec.dumps(checked))], seconds
        if failures:
            total, computed = count + len(failures), iter(checked)
            checked = [None if at in failures else next(computed) for at in range(total)]
        return self._encoder.pack(checked, failures), seconds


def _check(outputs: Any, count: int) -> list[Any] | RemoteFailure:
    try:
        return list_outputs(outputs, count, "infer returned", copies=False)
    except BaseException as error:  # noqa: BLE001  a sequence of the user's may raise anything
        return codec.describe(error)


def _judge(error: BaseException) -> tuple[Kind, RemoteFailure]:
    """Return the kind of frame that reports an error of `infer`, and the error as data."""
    failure = codec.describe(error)
    kind = Kind.RAISED
    if is_out_of_memory(error):
        kind = Kind.OUT_OF_MEMORY
        free_memory(error)
    elif any(sign in cuda_message(error) for sign in _FATAL_SIGNS):
        kind = Kind.FATAL
    return kind, failure
