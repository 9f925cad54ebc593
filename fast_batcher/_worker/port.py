"""The batches of a worker, and its parent as the worker sees it. Main thread.

`frames.FramePort` is the port of a worker process. A worker that is a thread of the parent has a
port without frames (`_parent/worker_thread.py`).
"""

from typing import TYPE_CHECKING, Any, Protocol

from fast_batcher._core.values import BatchNote, Failed, Order, Step
from fast_batcher._transport import pickling
from fast_batcher._transport.pickling import SerializedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fast_batcher._arrays.stacking import Piece

# Errors by position.
Errors = dict[int, SerializedError]
# Batch id of a ping: it takes the way of a batch, so that its answer says that all threads live.
PING_ID = 2**64 - 1


class BatchJob:
    """A batch in the worker, from its arrival to its answer."""

    __slots__ = (
        *("batch_id", "contexts", "cost", "elements", "errors", "failed", "inputs", "method"),
        *("outputs", "pieces", "seconds", "sessions", "step"),
    )

    def __init__(self, batch_id: int) -> None:
        self.batch_id = batch_id
        self.method = "infer"
        # The sessions of the requests, empty if none has one.
        self.sessions: Sequence[int] = ()
        # The pickled context managers of the observers that follow the batch.
        self.contexts: Sequence[bytes] = ()
        # The cost of a stream.
        self.cost = 0.0
        # The inputs of the positions that have no error, in their order. The model takes the inputs
        # away.
        self.inputs: list[Any] = []
        self.outputs: list[Any] = []
        # The errors, by position in the batch.
        self.errors: Errors = {}
        # Shared memory of the inputs, for `stack`.
        self.pieces: list[Piece] = []
        # Set if the whole batch has failed; its error is the first.
        self.failed: Failed | None = None
        # Seconds in the method.
        self.seconds = 0.0
        # As in `Report`.
        self.elements = (0, 0)
        self.step: Step | None = None

    @classmethod
    def make_ping(cls) -> "BatchJob":
        """Make a ping, which comes while no batch is there."""
        ping = cls(PING_ID)
        ping.skip()
        return ping

    def take_note(self, note: BatchNote) -> None:
        """Set what the batch has beside its inputs."""
        self.method, self.sessions, self.contexts, self.cost = note

    def take_inputs(self, values: list[Any]) -> None:
        """Set the inputs; values that are a `SerializedError` are errors."""
        errors = {at: value for at, value in enumerate(values) if type(value) is SerializedError}
        if errors:
            values = [value for value in values if type(value) is not SerializedError]
        self.inputs, self.errors = values, errors

    def spread(self, outputs: list[Any]) -> list[Any]:
        """Return the outputs with None at the positions of errors."""
        found = dict(zip(self.list_open(len(outputs)), outputs, strict=True))
        return [found.get(at) for at in range(len(found) + len(self.errors))]

    def fail(self, how: Failed, *error: SerializedError) -> None:
        """Answer all requests of the batch with an error."""
        self.inputs, self.outputs, self.errors = [], [], dict(enumerate(error))
        self.failed = how

    def skip(self) -> None:
        """Answer that the batch was not computed."""
        self.fail(Failed.SKIPPED)
        # The sessions go on: their states have not changed.
        self.pieces, self.sessions = [], ()

    def list_open(self, count: int) -> list[int]:
        """Return the positions of the `count` inputs or outputs that have no error."""
        positions = range(count + len(self.errors))
        return [position for position in positions if position not in self.errors]


# An order of the parent other than a ping, and the batch that it is about.
Told = tuple[Order, int]


class WorkerPort(Protocol):
    """The parent of a worker, as the worker sees it."""

    def receive_model(self) -> Any:
        """Wait for the model, for `load_warm`; None if the worker is not needed any more."""

    def fail_start(self, error: SerializedError) -> None:
        """Report that the model could not be loaded."""

    def report_ready(self, *course: Any) -> None:
        """Report readiness: the arguments of `WorkerHandle._loaded`."""

    def receive(self) -> BatchJob | Told | None:
        """Wait for the next batch or order; None after the last one."""

    def has_arrived(self) -> bool:
        """Return whether `receive` need not wait."""

    def answer(self, job: BatchJob) -> None:
        """Answer a batch; or send the chunks of a step, and end streams."""

    def report_freed(self) -> None:
        """Report the batches whose inputs in shared memory have no view left."""


def describe_errors(outputs: list[Any], errors: Errors) -> None:
    """Add the exceptions among the outputs to the errors by position."""
    # The check uses `type`: `isinstance` asks `__class__`, which is the user's code.
    if any(issubclass(kind, BaseException) for kind in set(map(type, outputs))):
        for position, output in enumerate(outputs):
            if issubclass(type(output), BaseException):
                errors.setdefault(position, pickling.describe(output))
