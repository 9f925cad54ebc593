"""The target of a worker process: set the process up, load the model, serve, end.

    parent      worker_main
    LOAD    ->  model_loading: make the model; collated_model, warm_up
            <-  READY, or STARTUP_FAILED and the process ends
    batches ->  serving: inputs --> model.infer --> replies
            <-  answers
    STOP    ->  model.close(), exit hooks, end of the processes that the model has started

Everything runs on the main thread of the process, except a watcher thread that ends the process
when the parent is dead.
"""

import logging
import multiprocessing
import multiprocessing.util
import sys
from typing import Any, NamedTuple

from fast_batcher._collector import freeze_for_good
from fast_batcher._descendants import end_descendants
from fast_batcher._shared_memory.inputs import SlabViews
from fast_batcher._shared_memory.outbox import OutboxWriter
from fast_batcher._transport import pickling
from fast_batcher._transport.blocking_channel import BlockingChannel
from fast_batcher._transport.frames import Kind
from fast_batcher._transport.progress import WorkerProgress
from fast_batcher._worker.collated_model import collate_methods
from fast_batcher._worker.loaded_files import read_module_files
from fast_batcher._worker.log_sending import LogSettings
from fast_batcher._worker.model_loading import load_model
from fast_batcher._worker.process_setup import end_with_parent, set_signals
from fast_batcher._worker.replies import ReplyEncoder
from fast_batcher._worker.serving import BatchLoop, InputReader
from fast_batcher._worker.stages import StageLoop, Stages
from fast_batcher._worker.warm_up import warm_up
from fast_batcher.errors import WorkerStartupError
from fast_batcher.model import MethodOptions, find_methods

logger = logging.getLogger("fast_batcher.worker")

_kept_open: list[Any] = []


class WorkerSettings(NamedTuple):
    """Settings of one worker."""

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


def worker_main(
    ends: Any,
    progress: WorkerProgress,
    logs: LogSettings,
    slabs: SlabViews | OSError | None,
    outbox: OutboxWriter | OSError | None,
    settings: WorkerSettings,
) -> None:
    """Run a worker process from its start to its end; the first frame names the model.

    Args:
        ends: The worker's ends of its two pipes.
        progress: Shared memory in which the worker records the batches it has.
        logs: The socket and the levels of the worker's log.
        slabs: Shared memory for large inputs, None if the settings turn it off, an error if this
            process may not map it.
        outbox: Shared memory for large answers, None if the settings turn it off, an error if it
            could not be made.
        settings: What the worker needs of the batcher's settings.
    """
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
        encoder = ReplyEncoder(outbox, settings.max_frame_bytes)
        exit_code = _load_and_serve(channel, progress, slabs, encoder, settings)
    except BrokenPipeError:  # the parent has closed its ends
        exit_code = 0
    sys.exit(exit_code)


def _load_and_serve(
    channel: BlockingChannel,
    progress: WorkerProgress,
    slabs: SlabViews | OSError | None,
    encoder: ReplyEncoder,
    settings: WorkerSettings,
) -> int:
    """Load the model and serve it; returns the exit code."""
    first = channel.receive()
    if first is None:  # the parent does not need the worker any more
        return 0
    try:
        views = _check_slabs(slabs)
        model = load_model(first.body, settings.device, settings.worker_index)
        models = collate_methods(model)
        stages = Stages(model, settings.stage_threads)
        has_stages = stages.count > 1
        first_model = stages.run_in_turn(models["infer"].infer) if has_stages else models["infer"]
        own_size = find_methods(model).get("infer", MethodOptions()).max_batch_size
        times = warm_up(first_model, own_size or settings.max_batch_size)
        if settings.freeze_gc:
            freeze_for_good()
    except BaseException as error:  # noqa: BLE001  user code, and the parent has to be told
        channel.send(Kind.STARTUP_FAILED, body=pickling.dumps(pickling.describe(error)))
        return 1
    try:
        channel.send(Kind.READY, body=pickling.dumps((times, stages.count, read_module_files())))
        if views is not None:
            views.report_forks(progress)
        loop = BatchLoop(channel, models, progress, InputReader(views), encoder)
        if has_stages:
            StageLoop(loop, stages).run()
        else:
            loop.run()
    finally:
        _close_model(model)
    return 0


def _check_slabs(slabs: SlabViews | OSError | None) -> SlabViews | None:
    if isinstance(slabs, OSError):
        raise WorkerStartupError(
            f"the worker may not have all of max_shared_bytes; lower it: {slabs}"
        )
    return slabs


def _close_model(model: Any) -> None:
    try:
        if hasattr(model, "close"):
            model.close()
    except Exception:
        logger.exception("the model's close() raised")
