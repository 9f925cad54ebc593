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
from models.ordinary import Slow
from models.raising import Alarmed, BrokenAndRaises, Says, StreamsInput
from models.returning import BrokenOnArrival
from waits import LIMIT, Gate

from fast_batcher import InferenceModel
from fast_batcher._transport import pickling
from fast_batcher._transport.channels import BlockingChannel, Frame, Kind, open_pipes
from fast_batcher._transport.logs import LogSettings, open_log_sockets
from fast_batcher._transport.pickling import SerializedError
from fast_batcher._transport.progress import WorkerProgress
from fast_batcher._worker.loop import BatchLoop, FramePort, InputReader, ReplyEncoder
from fast_batcher._worker.main import WorkerSettings, worker_main
from fast_batcher._worker.stages import StageLoop, Stages
from fast_batcher.errors import InferenceError

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

    def __init__(
        self,
        model: Any,
        max_frame_bytes: int = MEBI,
        encoder: ReplyEncoder | None = None,
        *,
        stages: Any = None,
    ) -> None:
        ours, theirs = open_pipes(multiprocessing.get_context())
        self.channel = BlockingChannel(ours, 2**30)
        self._theirs = BlockingChannel(theirs, max_frame_bytes)
        self.progress = WorkerProgress()
        encoder = encoder or ReplyEncoder(None, max_frame_bytes)
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
        """Send a batch in one pickle, which is for inputs that cannot be changed; its answer."""
        self.channel.send(Kind.INPUT_ATOMS, 5, pickling.dumps(list(inputs)))
        return self.answer()

    def ask_items(self, *inputs: Any) -> Frame:
        """Send a batch item by item; its answer."""
        self.channel.send(Kind.INPUTS, 6, pickling.dumps([pickling.dumps(one) for one in inputs]))
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
    served = Served(make(), stages=stages)
    yield served
    served.close()


def serves(model: Any) -> pytest.MarkDecorator:
    loops = [(model, None), (model, Passes())]
    return pytest.mark.parametrize("served", loops, indirect=True, ids=["plain", "stages"])


def failure_in(frame: Frame, kind: int = Kind.FAILED) -> Any:
    assert frame.kind == kind
    return SerializedError(*pickling.loads(frame.body)).to_error()


def outcomes_in(frame: Frame) -> list[Any]:
    """Outputs, and errors where there are none."""
    if frame.kind == Kind.OUTPUT_ATOMS:
        return list(pickling.loads(frame.body))
    assert frame.kind == Kind.OUTPUTS
    return [
        pickling.loads(item) if isinstance(item, bytes) else SerializedError(*item).to_error()
        for item in pickling.loads(frame.body)
    ]


def test_a_stage_is_a_method_of_the_class() -> None:
    model = Returns([])
    vars(model).update(prepare=str.upper, finish=False)
    assert Stages(model, 1).count == 1
    assert Stages(Passes(), 1).count == 3


# --- serving --------------------------------------------------------------------------------------


@serves(lambda: Slow(0.02))
def test_the_answer_tells_how_long_the_model_took(served: Served) -> None:
    assert served.ask(1, 2).seconds >= 0.04
    assert served.ask_items(1).seconds >= 0.02


@serves(Echo)
def test_batches_are_answered_in_their_order(served: Served) -> None:
    for number in range(20):
        served.channel.send(Kind.INPUT_ATOMS, number, pickling.dumps([number]))
    for number in range(20):
        frame = served.answer()
        assert (frame.batch_id, pickling.loads(frame.body)) == (number, [number])


@serves(lambda: Returns(torch.ones((2, 3), requires_grad=True) * 2))
def test_rows_of_a_tensor_have_no_gradients(served: Served) -> None:
    rows = outcomes_in(served.ask(1, 2))
    assert [row.tolist() for row in rows] == [[2.0] * 3] * 2
    assert not any(row.requires_grad for row in rows)


@serves(Echo)
def test_stop_follows_frames_sent_before(served: Served) -> None:
    served.channel.send(Kind.INPUT_ATOMS, 1, pickling.dumps(["last"]))
    served.channel.send(Kind.STOP)
    served.channel.send(Kind.INPUT_ATOMS, 2, pickling.dumps(["never read"]))
    assert pickling.loads(served.answer().body) == ["last"]
    served.thread.join(LIMIT)
    assert not served.thread.is_alive()


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
    channel.send(Kind.INPUT_ATOMS, 1, pickling.dumps(inputs))
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
    ("kind", "text"),
    [
        (Kind.FATAL, "CUDA error: device-side assert triggered"),
        (Kind.FATAL, "CUDA error: an illegal memory access was encountered"),
        (Kind.FATAL, "cuDNN: unspecified launch failure"),
        # Inputs may say anything.
        (Kind.RAISED, "cannot read 'CUDA error: device-side assert triggered'"),
        (Kind.RAISED, "cannot read 'CUDA out of memory'"),
        (Kind.OUT_OF_MEMORY, "CUDA out of memory. Tried to allocate 20.00 MiB"),
        (Kind.OUT_OF_MEMORY, "CUDA error: out of memory"),
        (Kind.RAISED, "the file system is out of memory cards"),
        (Kind.RAISED, "cuda is nice"),
    ],
)
def test_model_errors_have_their_frame_kinds(served: Served, kind: int, text: str) -> None:
    assert text in str(failure_in(served.ask(text), kind))


@pytest.mark.parametrize("served", [(Echo, RunsOut())], indirect=True, ids=["stages"])
def test_worker_survives_out_of_memory_in_a_stage(served: Served) -> None:
    for _ in range(2):
        assert "out of memory" in str(outcomes_in(served.ask("a"))[0])


@serves(StreamsInput)
def test_models_generator_survives_out_of_memory(served: Served) -> None:
    assert served.ask("large").kind == Kind.OUT_OF_MEMORY
    assert pickling.loads(served.ask("small").body) == [1]


@serves(Says)
def test_worker_ends_after_a_fatal_error(served: Served) -> None:
    fatal = pickling.dumps(["CUDA error: unspecified launch failure"])
    served.channel.send(Kind.INPUT_ATOMS, 1, fatal)
    served.channel.send(Kind.INPUT_ATOMS, 2, pickling.dumps(["fine"]))
    assert served.answer().kind == Kind.FATAL
    served.thread.join(LIMIT)
    assert not served.thread.is_alive()
    assert served.progress.begun == 1


@serves(BrokenAndRaises)
def test_unreadable_input_does_not_prevent_retries(
    served: Served,
) -> None:
    bad = BrokenOnArrival("parent", KeyError("its own"))
    assert isinstance(failure_in(served.ask_items("a", bad), Kind.RAISED), ValueError)
    assert isinstance(outcomes_in(served.ask_items(bad))[0], KeyError)


@serves(Echo)
def test_worker_writes_progress_to_shared_memory(served: Served) -> None:
    assert (served.progress.taken, served.progress.begun) == (None, None)
    served.ask("a")
    assert (served.progress.taken, served.progress.begun) == (5, 5)
    served.ask_items("a")
    assert (served.progress.taken, served.progress.begun) == (6, 6)


@serves(Echo)
def test_a_ping_is_answered(served: Served) -> None:
    served.channel.send(Kind.PING)
    assert served.answer().kind == Kind.PONG


@serves(Echo)
def test_an_exception_is_found_whatever_outputs_came_before(served: Served) -> None:
    batches: list[list[Any]] = [[1, 2], ["one", 2.0], [None, (), {}], [b"", 1]]
    for outputs in batches * 2:
        assert outcomes_in(served.ask(*outputs)) == outputs
    first, second = outcomes_in(served.ask(1, KeyError("second")))
    assert first == 1
    assert isinstance(second, InferenceError)
    (lone,) = outcomes_in(served.ask(KeyError("lone")))
    assert isinstance(lone, InferenceError)
    assert outcomes_in(served.ask(1, "two")) == [1, "two"]


@serves(Echo)
def test_batch_parts_are_joined_by_number(served: Served) -> None:
    def part(*values: str) -> bytes:
        return pickling.dumps([pickling.dumps(value) for value in values])

    send = served.channel.send
    send(Kind.INPUTS_FRAGMENT, 1, part("a"))
    send(Kind.INPUTS_FRAGMENT, 1, part("b", "c"))
    send(Kind.INPUTS, 1, part("d"))
    assert outcomes_in(served.answer()) == ["a", "b", "c", "d"]
    send(Kind.INPUTS, 1, part("e"))
    assert outcomes_in(served.answer()) == ["e"]
