"""The worker's loops: `BatchLoop` and `StageLoop` in a thread, with real pipes.

What it does to its process (signals, the end with the parent) is tested with real processes.
"""

import fcntl
import multiprocessing
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from models.base import Echo
from models.raising import Alarmed, Says, StreamsInput
from waits import LIMIT, Gate

from fast_batcher import InferenceModel
from fast_batcher._core.values import Failed
from fast_batcher._transport import pickling
from fast_batcher._transport.channels import BlockingChannel, Frame, Kind, open_pipes
from fast_batcher._transport.logs import LogSettings, open_log_sockets
from fast_batcher._transport.pickling import SerializedError
from fast_batcher._transport.progress import WorkerProgress
from fast_batcher._worker.frames import FramePort, InputReader, ReplyEncoder
from fast_batcher._worker.loop import BatchLoop
from fast_batcher._worker.main import WorkerSettings, worker_main
from fast_batcher._worker.stages import StageLoop, Stages

MEBI = 2**20


class Passes:
    """Stages that change nothing."""

    def prepare(self, value: Any) -> Any:
        return value

    def finish(self, value: Any) -> Any:
        return value


class RunsOut:
    """A stage that has too little memory."""

    def prepare(self, value: Any) -> Any:
        raise RuntimeError("CUDA error: out of memory")


class Returns(InferenceModel[Any, Any]):
    """Returns the same object for each batch."""

    def __init__(self, outputs: Any) -> None:
        self._outputs = outputs

    def infer(self, inputs: list[Any]) -> Any:
        return self._outputs


class Served:
    """The parent's side of a model that is served in a thread."""

    def __init__(self, model: Any, stages: Any) -> None:
        ours, theirs = open_pipes(multiprocessing.get_context())
        self.channel = BlockingChannel(ours, 2**30)
        self._theirs = BlockingChannel(theirs, MEBI)
        self.progress = WorkerProgress()
        encoder = ReplyEncoder(None, MEBI)
        port = FramePort(self._theirs, self.progress, InputReader(None), encoder)
        loop = BatchLoop(port, {"infer": model}, self.progress)
        run = StageLoop(loop, port, Stages(stages, 1)).run if stages else loop.run
        self.thread = threading.Thread(target=run)
        self.thread.start()

    def answer(self) -> Frame:
        frame = self.channel.receive()
        assert frame is not None, "it has ended"
        return frame._replace(body=bytes(frame.body))

    def ask(self, *inputs: Any) -> Frame:
        """Send a batch; return its answer."""
        self.channel.send(Kind.ATOMS, 5, pickling.dumps(list(inputs)))
        return self.answer()

    def close(self) -> None:
        self.channel.close()
        self.thread.join(LIMIT)
        assert not self.thread.is_alive()
        for thread in threading.enumerate():
            if thread.name == "fast_batcher-reader":  # outlives the loop after a fatal error
                thread.join(LIMIT)
        self._theirs.close()
        self.progress.close()


@pytest.fixture
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    """The model that the test is parametrised with, in each of the two loops."""
    make, stages = request.param
    served = Served(make(), stages)
    yield served
    served.close()


def serves(model: Any) -> pytest.MarkDecorator:
    loops = [(model, None), (model, Passes())]
    return pytest.mark.parametrize("served", loops, indirect=True, ids=["plain", "stages"])


def failure_in(frame: Frame, expected: Failed) -> Any:
    assert frame.kind == Kind.ITEMS
    (error,), report = pickling.loads(frame.body)
    assert report.failed is expected
    return SerializedError(*error).to_error()


def outcomes_in(frame: Frame) -> list[Any]:
    """Outputs, and errors where there are none."""
    if frame.kind == Kind.ATOMS:
        return list(pickling.loads(frame.body))
    assert frame.kind == Kind.ITEMS
    return [
        pickling.loads(item) if isinstance(item, bytes) else SerializedError(*item).to_error()
        for item in pickling.loads(frame.body)[0]
    ]


def test_a_stage_is_a_method_of_the_class() -> None:
    model = Returns([])
    vars(model).update(prepare=str.upper, finish=False)
    assert Stages(model, 1).count == 1
    assert Stages(Passes(), 1).count == 3


# --- serving --------------------------------------------------------------------------------------


@serves(lambda: Returns(torch.ones((2, 3), requires_grad=True) * 2))
def test_rows_of_a_tensor_have_no_gradients(served: Served) -> None:
    rows = outcomes_in(served.ask(1, 2))
    assert [row.tolist() for row in rows] == [[2.0] * 3] * 2
    assert not any(row.requires_grad for row in rows)


@pytest.mark.slow
def test_signals_do_not_truncate_answers(gate: Gate) -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = open_pipes(context)
    # One page, so that the worker waits in the middle of its answer until somebody reads.
    fcntl.fcntl(ours[0].fileno(), fcntl.F_SETPIPE_SZ, 4096)
    progress = WorkerProgress()
    receiver, sender = open_log_sockets()
    logs = LogSettings.of_this_process(sender)
    arguments = (theirs, progress, logs, None, None, WorkerSettings(MEBI, 32))
    process = context.Process(target=worker_main, args=arguments)
    process.start()
    for end in (*theirs, receiver, sender):
        end.close()
    channel = BlockingChannel(ours, MEBI)
    channel.send(Kind.LOAD, 0, pickling.dumps((Alarmed, (gate.path,), {})))
    ready = channel.receive()
    assert ready is not None
    assert ready.kind == Kind.READY
    inputs = [b"x" * 50_000]
    channel.send(Kind.ATOMS, 1, pickling.dumps(inputs))
    for _ in range(3):
        gate.wait().let_on()
    answer = channel.receive()
    assert answer is not None
    assert pickling.loads(answer.body) == inputs
    assert (progress.taken, progress.begun) == (1, 1)
    progress.close()
    channel.close()
    process.join(LIMIT)
    assert process.exitcode == 0
    process.close()


@serves(Says)
@pytest.mark.parametrize(
    ("how", "text"),
    [
        (Failed.FATAL, "CUDA error: device-side assert triggered"),
        (Failed.FATAL, "CUDA error: an illegal memory access was encountered"),
        (Failed.FATAL, "cuDNN: unspecified launch failure"),
        # Inputs may say anything.
        (Failed.RAISED, "cannot read 'CUDA error: device-side assert triggered'"),
        (Failed.RAISED, "cannot read 'CUDA out of memory'"),
        (Failed.OUT_OF_MEMORY, "CUDA out of memory. Tried to allocate 20.00 MiB"),
        (Failed.OUT_OF_MEMORY, "CUDA error: out of memory"),
        (Failed.RAISED, "the file system is out of memory cards"),
        (Failed.RAISED, "cuda is nice"),
    ],
)
def test_model_errors_have_their_consequences(served: Served, how: Failed, text: str) -> None:
    assert text in str(failure_in(served.ask(text), how))


@pytest.mark.parametrize("served", [(Echo, RunsOut())], indirect=True, ids=["stages"])
def test_worker_survives_out_of_memory_in_a_stage(served: Served) -> None:
    for _ in range(2):
        assert "out of memory" in str(outcomes_in(served.ask("a"))[0])


@serves(StreamsInput)
def test_models_generator_survives_out_of_memory(served: Served) -> None:
    failure_in(served.ask("large"), Failed.OUT_OF_MEMORY)
    assert pickling.loads(served.ask("small").body) == [1]
