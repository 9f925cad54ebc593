"""The target of a worker process: set the process up, load the model, serve, end.

    parent      worker_main
    LOAD    ->  model: import, construct, collate, warm up
            <-  READY, or STARTUP_FAILED and the process ends
    batches ->  loop: inputs --> model.infer --> outputs
            <-  answers
    STOP    ->  model.close(), exit hooks, end of the processes that the model has started

Everything runs on the main thread of the process, except a watcher thread that ends the process
when the parent is dead, and the stages of a model that has some (`_worker/stages.py`).
"""

import ctypes
import logging
import multiprocessing
import multiprocessing.util
import os
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from fast_batcher._core.values import or_infinite
from fast_batcher._process import end_descendants, freeze_for_good, monotonic, read_rss
from fast_batcher._shared_memory.inputs import SlabViews
from fast_batcher._shared_memory.outbox import OutboxWriter
from fast_batcher._transport import pickling
from fast_batcher._transport.channels import BlockingChannel
from fast_batcher._transport.logs import LogSettings
from fast_batcher._transport.progress import WorkerProgress
from fast_batcher._worker.frames import FramePort, InputReader, ReplyEncoder
from fast_batcher._worker.loop import BatchLoop
from fast_batcher._worker.model import (
    check_places,
    collate_methods,
    construct,
    find_gpu,
    import_model,
    list_allowed_sizes,
    read_module_files,
    warm_up,
    warn_about_unused_gpus,
)
from fast_batcher._worker.port import WorkerPort
from fast_batcher._worker.stages import StageLoop, Stages, StagesInTurn
from fast_batcher.errors import WorkerStartupError
from fast_batcher.model import MethodOptions, ModelKind, find_kind, find_methods

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def set_signals(progress: WorkerProgress, parent_pid: int) -> None:
    """Ignore signals that go to the whole process group; the parent decides when to end.

    Ctrl-C in a terminal and the SIGTERM of a supervisor (systemd, for example) reach this process
    as well as the parent, which still waits for the answers of the batches that it has sent.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _ignore_sigterm(progress, parent_pid)
    # Set, because a child inherits ignored signals through exec.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # Python's own default: EPIPE as an exception
    signal.set_wakeup_fd(-1)
    # The parent blocked these when it started this process, until the handlers are set.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})


def _ignore_sigterm(progress: WorkerProgress, parent_pid: int) -> None:
    """Let SIGTERM end this process only if the parent has sent it, or is dead.

    A model may put another handler in place of this one. It is a handler and not `SIG_IGN`, which
    the processes that the model starts would inherit: they could not be terminated.
    """

    def end_if_wanted(number: int, _: object) -> None:
        if progress.is_to_end or os.getppid() != parent_pid:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    # The signals that each thread had blocked before it forked.
    blocked = threading.local()

    def before_fork() -> None:
        # A SIGTERM for the child waits until the child has the default action.
        blocked.before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def after_fork() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked.before)

    def after_fork_in_child() -> None:
        # A handler of the model stays.
        if signal.getsignal(signal.SIGTERM) is end_if_wanted:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        after_fork()

    signal.signal(signal.SIGTERM, end_if_wanted)
    # A signal that is ignored must not interrupt native code of the model, either.
    signal.siginterrupt(signal.SIGTERM, False)
    os.register_at_fork(
        before=before_fork, after_in_parent=after_fork, after_in_child=after_fork_in_child
    )


def end_with_parent(parent_pid: int) -> None:
    """End this process when its parent dies, even inside a long call into C."""
    if sys.platform == "linux":
        # The kernel sends the signal, so this works while C code holds the GIL.
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent_pid:  # it died before the line above
            os._exit(1)
    # Other systems need this, and a change of credentials, which clears PR_SET_PDEATHSIG.
    threading.Thread(target=_watch_parent, name="fast_batcher-watcher", daemon=True).start()


def _watch_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


if TYPE_CHECKING:
    from fast_batcher._worker.steps import StepLoop

logger = logging.getLogger("fast_batcher.worker")

_kept_open: list[Any] = []


class WorkerSettings(NamedTuple):
    """Settings of one worker. A field with the name of an option has its value, if no other."""

    # Longest frame body in both directions.
    max_frame_bytes: int
    # Inputs of a full batch, for the warm-up.
    max_batch_size: int
    # Exclude the loaded model and its libraries from garbage collections.
    freeze_gc: bool = True
    # `device` and `worker_index` of the model; None for the device of its class.
    device: str | None = None
    worker_index: int = 0
    # Threads for `prepare` and `finish`.
    stage_threads: int = 1
    # Callers get what the model returns, not a copy from a pickle: outputs must not be views.
    copies_outputs: bool = False
    # The kind of the model, as far as the parent knows it.
    kind: ModelKind = ModelKind.BATCHES
    # The highest total cost of the streams of a stepped model; whether they may begin again.
    max_batch_cost: float | None = None
    idempotent: bool = True
    # Name of the batcher, for errors.
    name: str = ""


class Start(NamedTuple):
    """Course of a worker's start, for the log, and the sizes that its model computes."""

    # Seconds of the model's import, of its constructor, and of the warm-up.
    import_seconds: float
    construct_seconds: float
    warm_up_seconds: float
    # The model's device, "" if it is not known.
    device: str
    # Resident memory of the process, and memory that PyTorch has reserved on the GPU.
    rss_bytes: int
    gpu_bytes: int
    # The allowed batch sizes of the model's methods, by name.
    allowed_sizes: dict[str, tuple[int, ...]]


class Loaded(NamedTuple):
    """A model that is loaded and warm."""

    model: Any
    # The model for each of its methods by name.
    models: dict[str, Any]
    stages: Stages
    # The model whose `infer` runs all stages.
    in_turn: Any
    # Sizes and seconds of the warm-up batches.
    times: list[tuple[int, float]]
    start: Start


def load_warm(
    body: Any, settings: WorkerSettings, after_import: Callable[[], None] = lambda: None
) -> Loaded:
    """Load the model, and warm it up; `body` names it, as in a LOAD frame."""
    began = monotonic()
    call = import_model(body)
    after_import()
    kind = find_kind(call.cls)
    if kind is not settings.kind and ModelKind.STEPS in (kind, settings.kind):
        needed = kind is ModelKind.STEPS
        raise WorkerStartupError(
            f"{call.name} is {'a' if needed else 'no'} SteppedModel, and is named by a text: give "
            f"DynBatcher stepped={needed}"
        )
    imported = monotonic()
    model = construct(call, settings.device, settings.worker_index)
    constructed = monotonic()
    models = collate_methods(model, copies=settings.copies_outputs)
    stages = Stages(model, settings.stage_threads)
    in_turn = models["infer"]
    if stages.count > 1:
        in_turn = StagesInTurn(stages, in_turn.infer)
    own_size = find_methods(model).get("infer", MethodOptions()).max_batch_size
    allowed = list_allowed_sizes(models)
    most, sizes = own_size or settings.max_batch_size, allowed.get("infer", ())
    if kind is ModelKind.STEPS:
        check_places(call.name, most, sizes)
    times = warm_up(models["infer"], most, sizes, in_turn.infer)
    warm = monotonic()
    if settings.freeze_gc:
        freeze_for_good()
    gpu, gpu_bytes = find_gpu()
    if settings.device is None and not gpu:
        warn_about_unused_gpus()
    start = Start(
        imported - began,
        constructed - imported,
        warm - constructed,
        settings.device or gpu,
        read_rss(os.getpid()),
        gpu_bytes,
        allowed,
    )
    return Loaded(model, models, stages, in_turn, times, start)


def worker_main(
    ends: Any,
    progress: WorkerProgress,
    logs: LogSettings,
    slabs: SlabViews | OSError | None,
    outbox: OutboxWriter | OSError | None,
    settings: WorkerSettings,
) -> None:
    """Run a worker process from its start to its end; the first frame names the model."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "this is a child process"
    assert parent.pid is not None, "it was started"
    set_signals(progress, parent.pid)
    end_with_parent(parent.pid)
    logs.apply(progress)
    channel = BlockingChannel(ends, settings.max_frame_bytes)
    # Kept open until the process ends: the parent kills a worker that has closed its ends, and exit
    # hooks of the model's libraries would not run.
    _kept_open.append(ends)
    # Priority 0: `multiprocessing` first lets its pools and managers end their own processes, and
    # afterwards joins the remaining ones. That would hang on the processes of a
    # `concurrent.futures` executor, whose exit hook runs later.
    multiprocessing.util.Finalize(None, end_descendants, exitpriority=0)
    try:
        inputs = InputReader(slabs)
        encoder = ReplyEncoder(outbox, settings.max_frame_bytes)
        port = FramePort(channel, progress, inputs, encoder)
        exit_code = load_and_serve(port, progress, settings, partial(logs.apply, progress))
    except BrokenPipeError:  # the parent has closed its ends
        exit_code = 0
    sys.exit(exit_code)


def load_and_serve(
    port: WorkerPort,
    progress: WorkerProgress,
    settings: WorkerSettings,
    after_import: Callable[[], None] = lambda: None,
) -> int:
    """Load the model and serve it; returns the exit code."""
    try:
        body = port.receive_model()
        if body is None:  # the parent does not need the worker any more
            return 0
        loaded = load_warm(body, settings, after_import)
    except BaseException as error:  # noqa: BLE001  user code, and the parent has to be told
        port.fail_start(pickling.describe(error))
        return 1
    stages = loaded.stages
    copies = settings.copies_outputs or stages.count > 1
    batches = BatchLoop(port, loaded.models, progress, settings.name, copies=copies)
    loop = make_step_loop(port, loaded.model, progress, settings) or batches
    try:
        port.report_ready(loaded.times, stages.count, read_module_files(), loaded.start)
        if stages.count > 1 and loop is batches:
            StageLoop(batches, port, stages).run()
        else:
            loop.run()
    finally:
        close_model(loaded.model, loop)
    return 0


def make_step_loop(
    port: WorkerPort, model: Any, progress: WorkerProgress, settings: WorkerSettings
) -> "StepLoop | None":
    """Make the loop of a `SteppedModel`, None for another kind."""
    if settings.kind is not ModelKind.STEPS:
        return None
    # A worker that needs no steps need not import the module.
    from fast_batcher._worker.steps import StepLoop

    limits = settings.max_batch_size, or_infinite(settings.max_batch_cost)
    options = {"copies": settings.copies_outputs, "begins_again": settings.idempotent}
    return StepLoop(port, model, *limits, progress, **options)


def close_model(model: Any, loop: "BatchLoop | StepLoop") -> None:
    """Let the model release the states that are left, and call its `close`, if it has one."""
    loop.release_all()
    try:
        if hasattr(model, "close"):
            model.close()
    except Exception:
        logger.exception("the model's close() raised")
