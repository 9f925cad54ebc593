"""`ModelActor`: a worker on a node of a Ray cluster. Runs in the actor's process.

    place            process, node, versions     ->  the host compares the versions
    load             the model                   ->  READY, or STARTUP_FAILED
    compute          frames of a batch           ->  frames of its answer
    step             frames of streams, orders   ->  frames of a step, and whether streams are left
    ping             (idle)                      ->  PONG
    stop             model.close()               ->  the host ends the actor
    watch            never returns: it fails when the actor is dead

The calls run one after the other on one thread, but for `watch` and `skip`, which have a thread
each. Log records go to the host with the next answer.
"""

import ctypes
import logging
import os
import platform
import sys
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import ray

from fast_batcher._arrays.stacking import Piece, make_piece
from fast_batcher._shared_memory.inputs import unpack_layout, view_rows
from fast_batcher._transport import pickling
from fast_batcher._transport.channels import BlockingChannel, Frame
from fast_batcher._transport.logs import pack_record
from fast_batcher._transport.progress import WorkerProgress
from fast_batcher._version import __version__
from fast_batcher._worker.frames import FramePort, InputReader, ReplyEncoder
from fast_batcher._worker.loop import BatchLoop
from fast_batcher._worker.main import (
    WorkerSettings,
    close_model,
    load_warm,
    make_step_loop,
)
from fast_batcher._worker.port import BatchJob
from fast_batcher.errors import WorkerStartupError

if TYPE_CHECKING:
    from fast_batcher._worker.steps import StepLoop

# Most log records that wait for the next answer.
MOST_RECORDS = 1000


class Levels(NamedTuple):
    """Logging settings of the host, which has them from the API process."""

    root: int
    library: int
    captures_warnings: bool


class RecordKeeper(logging.Handler):
    """Handler that keeps records for the next answer; the oldest are dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.packed: deque[bytes] = deque(maxlen=MOST_RECORDS)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record; any thread."""
        try:
            self.packed.append(pack_record(record))
        except Exception:  # noqa: BLE001  as every handler does
            self.handleError(record)


class CallChannel:
    """The frames of one call, and of its answer, in place of a `BlockingChannel`."""

    def __init__(self, records: RecordKeeper) -> None:
        self.received: deque[Frame] = deque()
        self._records = records
        self._sent: list[Frame] = []

    def receive(self) -> Frame | None:
        """Return the next frame of the call."""
        return self.received.popleft() if self.received else None

    def has_arrived(self) -> bool:
        """Return whether a frame of the call is left."""
        return bool(self.received)

    def send(
        self,
        kind: int,
        batch_id: int = 0,
        body: bytes = b"",
        seconds: float = 0.0,
    ) -> None:
        """Add a frame to the answer."""
        self._sent.append(Frame(kind, batch_id, seconds, body))

    def take_answer(self) -> bytes:
        """Return the log records since the last call, and the frames of the answer."""
        frames, self._sent = self._sent, []
        records = [self._records.packed.popleft() for _ in range(len(self._records.packed))]
        return pickling.dumps((records, frames))


class RowReader(InputReader):
    """Reads inputs of which the large ones came as buffers of the call."""

    def __init__(self) -> None:
        super().__init__(None)
        self.buffers: deque[Any] = deque()

    def _load_shared(self, _: Frame, named: Any, pieces: list[Piece]) -> list[Any]:
        inputs: list[Any] = []
        for packed, _, _ in named:
            buffer = self.buffers.popleft()
            # A copy: the object store's memory is read-only, and a model may write into its inputs.
            view = memoryview(bytearray(buffer))
            rows, whole = view_rows(unpack_layout(packed), view)
            inputs += rows
            address = ctypes.addressof(ctypes.c_ubyte.from_buffer(view))
            pieces.append(make_piece(address, view, whole, () if whole is None else rows))
        return inputs


class ModelActor:
    """A worker on a node of the cluster."""

    def __init__(self) -> None:
        self._records = RecordKeeper()
        self._channel = CallChannel(self._records)
        self._progress = WorkerProgress()
        self._reader = RowReader()
        # Set by `load`.
        self._port: FramePort
        self._model: Any = None
        self._loop: BatchLoop | None = None
        self._steps: StepLoop | None = None

    def place(self) -> dict[str, Any]:
        """Tell where this is, and with which versions."""
        context = ray.get_runtime_context()
        return {
            "pid": os.getpid(),
            "node_id": context.get_node_id(),
            "node": _find_address(),
            "versions": find_versions(),
        }

    def load(
        self, sys_path: list[str], pickled: bytes, settings: WorkerSettings, levels: Levels
    ) -> bytes:
        """Load the model; the answer is READY or STARTUP_FAILED."""
        root = logging.getLogger()
        root.addHandler(self._records)
        root.setLevel(levels.root)
        logging.getLogger("fast_batcher").setLevel(levels.library)
        logging.captureWarnings(levels.captures_warnings)
        sys.path += [path for path in sys_path if path not in sys.path]
        device = "cuda:0" if ray.get_gpu_ids() else None
        encoder = ReplyEncoder(None, settings.max_frame_bytes)
        channel = cast("BlockingChannel", self._channel)
        self._port = FramePort(channel, self._progress, self._reader, encoder)
        try:
            loaded = load_warm(pickled, settings._replace(device=device))
        except BaseException as error:  # noqa: BLE001  user code, and the host has to be told
            failure = pickling.describe(_explain_missing_module(error))
            self._port.fail_start(failure)
            return self._channel.take_answer()
        self._model = loaded.model
        models = {**loaded.models, "infer": loaded.in_turn}
        self._loop = BatchLoop(self._port, models, self._progress, settings.name)
        self._steps = make_step_loop(self._port, self._model, self._progress, settings)
        # One stage: each batch passes all of them before the next one begins. No files: those of
        # another machine cannot be compared.
        self._port.report_ready(loaded.times, 1, {}, loaded.start)
        return self._channel.take_answer()

    def compute(self, frames: bytes, *buffers: Any) -> bytes:
        """Compute a batch."""
        assert self._loop is not None, "the host has READY"
        self._channel.received.extend(pickling.loads(frames))
        self._reader.buffers.extend(buffers)
        while not isinstance(job := self._port.receive(), BatchJob):
            assert job is not None, "a call has a batch"
            self._loop.obey(job)
        self._loop.compute(job)
        self._port.answer(job)
        return self._channel.take_answer()

    def step(self, frames: bytes, *buffers: Any) -> tuple[bytes, bool]:
        """Take streams and orders, and compute a step; tell whether another one can follow."""
        assert self._steps is not None, "the host has READY of a `SteppedModel`"
        self._channel.received.extend(pickling.loads(frames))
        self._reader.buffers.extend(buffers)
        goes_on = self._steps.advance()
        return self._channel.take_answer(), goes_on

    def ping(self) -> bytes:
        """Answer a ping, which comes while there is no batch."""
        self._port.answer(BatchJob.make_ping())
        return self._channel.take_answer()

    def stop(self) -> bytes:
        """Close the model."""
        if (loop := self._steps or self._loop) is not None:
            close_model(self._model, loop)
        return self._channel.take_answer()

    @ray.method(concurrency_group="skip")
    def skip(self, batch_id: int) -> None:
        """Do not compute a batch, unless it has begun."""
        self._progress.skip(batch_id)

    @ray.method(concurrency_group="watch")
    def watch(self) -> None:
        """Never return."""
        threading.Event().wait()


def find_versions() -> dict[str, str]:
    """Return the versions that host and actor must have in common, by name."""
    major, minor, _ = platform.python_version_tuple()
    return {"Python": f"{major}.{minor}", "ray": ray.__version__, "fast_batcher": __version__}


def _find_address() -> str:
    address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return address


def _explain_missing_module(error: BaseException) -> BaseException:
    """Tell how a module comes to the node, if the model failed because of a missing one."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ModuleNotFoundError):
        cause = cause.__cause__
    if cause is None:
        return error
    explained = WorkerStartupError(
        f"the node {_find_address()} has no module {cause.name!r}; install it "
        "there, or bring it with RayWorkers(runtime_env={'working_dir': '.'}) or with 'pip'"
    )
    explained.__cause__ = error
    return explained
