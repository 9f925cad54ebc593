"""The worker's main loop: takes batches, calls the model, answers. Main thread.

    FramePort   frames of the parent  -->  BatchJob
    BatchLoop   BatchJob  -->  model  -->  the same job, with outputs
    FramePort   the job  -->  frames to the parent

One batch at a time; `stages` runs the same steps on several threads. The worker makes no decisions
about requests: the parent forms batches, and decides what follows from a failure. `steps.StepLoop`
alone decides which streams run in a step.
"""

from collections.abc import Mapping
from functools import partial
from time import monotonic
from typing import Any

from fast_batcher._arrays.outputs import list_outputs
from fast_batcher._arrays.stacking import lend
from fast_batcher._core.values import Failed, Order
from fast_batcher._observers import NO_CONTEXTS, BatchContexts
from fast_batcher._transport import pickling
from fast_batcher._transport.pickling import SerializedError
from fast_batcher._transport.progress import BEGUN, WorkerProgress
from fast_batcher._worker.model import CollatedModel, free_memory
from fast_batcher._worker.port import BatchJob, Told, WorkerPort
from fast_batcher._worker.states import SessionInfer
from fast_batcher.errors import ConfigurationError, cuda_message, forget_frames, is_out_of_memory

# Texts of CUDA errors after which the process cannot use its device any more.
_FATAL_SIGNS = (
    "device-side assert",
    "illegal memory access",
    "unspecified launch failure",
    "CUDA error",
)


class BatchLoop:
    """Main loop of a worker: answers batches with a model until the parent says stop."""

    def __init__(
        self,
        port: WorkerPort,
        models: Mapping[str, Any],
        progress: WorkerProgress,
        name: str = "",
        *,
        copies: bool = False,
    ) -> None:
        self._port = port
        self._models = models
        # Name of the batcher, for errors.
        self._name = name
        # Whether outputs must not be views of an array that the model may fill again.
        self._copies = copies
        self._progress = progress.numbers
        self._is_skipped = progress.is_skipped
        self._contexts = BatchContexts()

    def run(self) -> None:
        """Answer batches until the parent says stop or is gone, or until a fatal error."""
        while (arrived := self._port.receive()) is not None:
            if isinstance(arrived, BatchJob):
                self.compute(arrived)
                self._port.answer(arrived)
                if arrived.failed is Failed.FATAL:
                    return
            elif not self.obey(arrived):
                return

    def obey(self, told: Told) -> bool:
        """Release the state of a session that has ended; return False at the end."""
        order, session_id = told
        infer = self._models["infer"]
        if order is Order.LEAVE and isinstance(infer, SessionInfer):
            infer.end(session_id)
        return order is Order.LEAVE

    def release_all(self) -> None:
        """Release the states of the sessions that are left, before the model is closed."""
        if isinstance(infer := self._models["infer"], SessionInfer):
            infer.states.release_all()

    def compute(self, job: BatchJob) -> None:
        """Call the model's method on a batch, and end the sessions of a batch that has failed."""
        if job.failed is None:
            self._call_method(job)
        if job.failed is not None and isinstance(infer := self._models["infer"], SessionInfer):
            infer.fail(job.sessions)

    def _call_method(self, job: BatchJob) -> None:
        if self._is_skipped(job.batch_id):
            job.skip()
            return
        self._progress[BEGUN] = job.batch_id + 1
        inputs = job.inputs
        # Read now: the method may change the list that it is given.
        count = len(inputs)
        # From here on the model alone has the inputs.
        job.inputs = []
        if job.pieces:
            lend(job.pieces)
        contexts = self._contexts.join_pickled(job.contexts) if job.contexts else NO_CONTEXTS
        started = monotonic()
        try:
            with contexts:
                model = self._models[job.method]
                infer = partial(self._infer_in, model, job) if job.sessions else model.infer
                outputs = infer(inputs) if inputs else []
        except BaseException as error:  # noqa: BLE001  sys.exit() in a model must not end the worker
            job.seconds = monotonic() - started
            job.fail(*judge(error))
            return
        finally:
            if job.pieces:
                lend(())
                job.pieces = []
        job.seconds = monotonic() - started
        if count and isinstance(model, CollatedModel):
            job.elements = model.elements
        try:
            job.outputs = list_outputs(
                outputs, count, f"{job.method} returned", copies=self._copies
            )
        except BaseException as error:  # noqa: BLE001  a sequence of the user's may raise anything
            job.fail(Failed.FOR_GOOD, pickling.describe(error))

    def _infer_in(self, model: Any, job: BatchJob, inputs: list[Any]) -> Any:
        """Compute inputs with the states of their sessions."""
        if not isinstance(model, SessionInfer):
            text = f"{self._name}: session() needs a SessionModel; derive the model's class from it"
            raise ConfigurationError(text)
        positions = job.list_open(len(inputs))
        return model.infer_in([job.sessions[at] for at in positions], inputs)


def judge(error: BaseException) -> tuple[Failed, SerializedError]:
    """Return the consequence of an error of `infer`, and the error as data, without its frames."""
    failure = pickling.describe(error)
    how = Failed.RAISED
    if is_out_of_memory(error):
        how = Failed.OUT_OF_MEMORY
        free_memory(error)
    elif breaks_device(error):
        how = Failed.FATAL
    # A frame often keeps the error, and its frames keep the inputs.
    forget_frames(error)
    return how, failure


def breaks_device(error: BaseException) -> bool:
    """Return whether the process cannot use its device any more after this error."""
    if is_out_of_memory(error):  # also with the text "CUDA error: out of memory"
        return False
    return any(sign in cuda_message(error) for sign in _FATAL_SIGNS)
