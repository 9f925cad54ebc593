"""What runs in a worker process: load the model, then receive, infer, send.

All of it runs on the main thread of the child, but for one thread that ends the process when the
parent is gone. It imports neither asyncio nor anything of the parent's half.
"""

import ctypes
import importlib
import logging
import multiprocessing
import multiprocessing.util
import os
import signal
import sys
import threading
from time import monotonic
from typing import TYPE_CHECKING, Any

from fast_batcher._arrays import stacking
from fast_batcher._descendants import end_descendants
from fast_batcher._shared_memory.layouts import view_rows
from fast_batcher._transport import codec
from fast_batcher._transport.channel import BlockingChannel
from fast_batcher._transport.codec import RemoteFailure
from fast_batcher._transport.frames import Frame, Kind, pack_header, pack_times
from fast_batcher._transport.pickler import load_items, view_parts
from fast_batcher._transport.progress import WorkerProgress
from fast_batcher._worker.collated_model import collate
from fast_batcher._worker.out_of_memory import free_memory
from fast_batcher._worker.replies import ReplyEncoder
from fast_batcher._worker.warm_up import warm_up
from fast_batcher.errors import (
    OutputMismatchError,
    WorkerStartupError,
    cuda_message,
    forget_frames,
    is_out_of_memory,
)
from fast_batcher.model_spec import describe_arguments, find_model_fault

if TYPE_CHECKING:
    from fast_batcher._shared_memory.outbox_writer import OutboxWriter
    from fast_batcher._shared_memory.views import SlabViews

logger = logging.getLogger("fast_batcher.worker")

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_kept_open: list[Any] = []
# On Python 3.11 looking up a member of an enumeration costs as much as a call.
_STOP, _PING, _FATAL = Kind.STOP, Kind.PING, Kind.FATAL
_INPUT_ATOMS, _INPUTS, _INPUTS_PART = Kind.INPUT_ATOMS, Kind.INPUTS, Kind.INPUTS_PART
_ROWS, _SHARED_INPUTS = Kind.ROWS, Kind.SHARED_INPUTS


def worker_main(
    ends: Any,
    progress: WorkerProgress,
    max_frame_bytes: int,
    max_batch_size: int,
    parent_pid: int,
    slabs: "SlabViews | OSError | None",
    outbox: "OutboxWriter | OSError | None",
) -> None:
    """The target of the worker process; which model to load is the first frame.

    Args:
        ends: The worker's ends of its two pipes.
        progress: Where it says what it is doing.
        max_frame_bytes: Longest frame body either way.
        max_batch_size: Of the warm-up.
        parent_pid: The process to end with.
        slabs: Memory in which large batches arrive, None if there is none, an error if this process
            may not have so much.
        outbox: Memory in which large answers leave, an error if there is none, None if there is to
            be none.
    """
    _set_signals(progress, parent_pid)
    _end_with_parent(parent_pid)
    _log_to_stderr()
    channel = BlockingChannel(ends, max_frame_bytes)
    # They are closed by the end of the process and not before: the parent takes a closed end for a
    # worker that is of no use, and kills it, and libraries of the model would not come to their
    # exit hooks.
    _kept_open.append(ends)
    # Priority 0: `multiprocessing` first lets its pools and managers end their own processes, and
    # afterwards joins what is left. Those of a `concurrent.futures` executor would never end: its
    # exit hook comes later.
    multiprocessing.util.Finalize(None, end_descendants, exitpriority=0)
    try:
        encoder = ReplyEncoder(outbox, max_frame_bytes)
        exit_code = _load_and_serve(channel, progress.numbers, max_batch_size, slabs, encoder)
    except BrokenPipeError:  # the parent has closed its end of the pipe: it wants no answer
        exit_code = 0
    sys.exit(exit_code)


def _load_and_serve(
    channel: BlockingChannel,
    progress: "memoryview[int]",
    max_batch_size: int,
    slabs: "SlabViews | OSError | None",
    encoder: ReplyEncoder,
) -> int:
    """The life of a worker; returns its exit code."""
    first = channel.receive()
    if first is None:  # the parent has thought better of it
        return 0
    try:
        views = _check_views(slabs)
        model = load_model(first.body)
        computing = collate(model)
        times = warm_up(computing, max_batch_size)
    except BaseException as error:  # noqa: BLE001  user code, and the parent has to be told
        channel.send(Kind.STARTUP_FAILED, body=codec.dumps(codec.describe(error)))
        return 1
    try:
        channel.send(Kind.READY, body=pack_times(times))
        if views is not None:
            views.on_fork = lambda batch_id: progress.__setitem__(2, batch_id + 1)
        serve(channel, computing, progress, views, encoder)
    finally:
        _close_model(model)
    return 0


def _check_views(slabs: "SlabViews | OSError | None") -> "SlabViews | None":
    if isinstance(slabs, OSError):
        raise WorkerStartupError(
            f"the worker may not have all of max_shared_bytes; lower it: {slabs}"
        )
    return slabs


def load_model(pickled: bytes | bytearray | memoryview) -> Any:
    """Make the model's instance.

    Args:
        pickled: `(class or "module:Class", args, kwargs)`.

    Raises:
        WorkerStartupError: The string names nothing that could be a model.
        Exception: What the import or the constructor raised.
    """
    model, args, kwargs = codec.loads(pickled)
    if isinstance(model, str):
        cls = _resolve(model)
        fault = "it is not a class" if not isinstance(cls, type) else find_model_fault(cls)
        if fault is not None:
            raise WorkerStartupError(f"model={model!r}: {fault}")
        model_name, model = model, cls
    else:
        model_name = f"{model.__module__}:{model.__qualname__}"
    try:
        return model(*args, **kwargs)
    except TypeError as error:
        error.add_note(f"while calling {model_name} with {describe_arguments(args, kwargs)}")
        raise


def serve(  # noqa: C901  flat on purpose
    channel: BlockingChannel,
    model: Any,
    progress: "memoryview[int]",
    slabs: "SlabViews | None" = None,
    encoder: ReplyEncoder | None = None,
) -> None:
    """Answer batches until the parent says STOP or closes its end.

    `progress` is where the parent reads, after the death of this process, what it had in hand: the
    ids, plus one, of the batch that was read last and of the one whose computation began last.

    What every batch goes through is in few functions: after a pause each call of one costs about
    five microseconds, and it is a lone request that waits for them (docs/decisions/0008).
    """
    if encoder is None:
        encoder = ReplyEncoder(None, channel.max_frame_bytes)
    # Parts of batches that are larger than one frame.
    parts: _Parts = {}
    answer: _Answer = []
    failures: dict[int, RemoteFailure]
    # After a fatal error nothing that waits can be computed here.
    while not answer or answer[-1][0] is not _FATAL:
        if slabs is not None and (slabs.freed or slabs.forks):
            # What the model has dropped since the last answer.
            channel.write_rest(_pack_freed(slabs), 0)
        frame = channel.receive()
        if frame is None or frame.kind is _STOP:
            return
        if frame.kind is _PING:
            channel.send(Kind.PONG)
            encoder.rest()
            continue
        if frame.kind is _INPUTS_PART:
            parts.setdefault(frame.batch_id, []).extend(codec.loads(frame.body))
            continue
        batch_id = frame.batch_id
        is_shared = frame.kind is _ROWS or frame.kind is _SHARED_INPUTS
        progress[0] = batch_id + 1
        try:
            if frame.kind is _INPUT_ATOMS:
                inputs, failures = codec.loads(frame.body), {}
            else:
                inputs, failures = _read_inputs(frame, parts, slabs)
        except BaseException as error:  # noqa: BLE001  a dtype may be of the user's code, too
            answer, seconds = [(Kind.FAILED, codec.dumps(codec.describe(error)))], 0.0
            forget_frames(error)
        else:
            progress[1] = batch_id + 1
            answer, seconds = _compute(model, inputs, failures, encoder, is_shared=is_shared)
            del inputs
        ahead = b""
        if is_shared:
            stacking.lent.clear()
            # A batch of which the model keeps nothing is free when its answer arrives.
            ahead = _pack_freed(slabs)
        for kind, body in answer:
            channel.send(kind, batch_id, body, seconds, ahead)
            ahead = b""


def _read_inputs(
    frame: Frame, parts: "_Parts", slabs: "SlabViews | None"
) -> tuple[list[Any], dict[int, RemoteFailure]]:
    """The inputs of a batch that can be unpickled, and by position why the others cannot."""
    if frame.kind is _INPUTS:
        items = codec.loads(frame.body)
        if parts:
            items = parts.pop(frame.batch_id, []) + items
        values = _read_items(items)
    else:
        assert slabs is not None, "the parent knows that it shares no memory"
        values = _load_shared(slabs, frame)
    failures = {at: one for at, one in enumerate(values) if type(one) is RemoteFailure}
    if failures:
        values = [one for one in values if type(one) is not RemoteFailure]
    return values, failures


def _read_items(items: list[bytes]) -> list[Any]:
    """The inputs that were pickled one by one; a `RemoteFailure` if one cannot be unpickled."""
    values = []
    for item in items:
        try:
            values.append(codec.loads(item))
        except BaseException as error:  # noqa: BLE001  unpickling is the user's code too
            values.append(codec.describe(error))
    return values


def _load_shared(slabs: "SlabViews", frame: Frame) -> list[Any]:
    """The inputs of a batch that lies in shared memory, which is lent to `stack`.

    One that cannot be unpickled is a `RemoteFailure`.
    """
    named = codec.loads(frame.body)
    memory = slabs.view(frame.batch_id)
    if frame.kind is _SHARED_INPUTS:
        start, length, sizes, items = named
        view = memory[start : start + length]
        stacking.lend(slabs.address + start, view)
        stream, buffers = view_parts(view, sizes)
        return load_items(stream, buffers, items, codec.describe)
    inputs: list[Any] = []
    for layout, start, count in named:
        rows, view, whole = view_rows(layout, memory, start, count)
        inputs += rows
        stacking.lend(slabs.address + start, view, whole, () if whole is None else rows)
    return inputs


def _compute(
    model: Any,
    inputs: list[Any],
    failures: dict[int, RemoteFailure],
    encoder: ReplyEncoder,
    *,
    is_shared: bool,
) -> tuple["_Answer", float]:
    """Let the model compute a batch.

    Args:
        model: The model.
        inputs: Those that could be read.
        failures: Why the others could not, by position in the batch.
        encoder: Packs the outputs.
        is_shared: Whether inputs may be views of shared memory, which an error must not keep.

    Returns:
        The frames that answer the batch, and the seconds that `infer` took.
    """
    # Read now: `infer` may change the list that it is given.
    count = len(inputs)
    total = count + len(failures)
    started = monotonic()
    try:
        outputs = model.infer(inputs) if inputs else []
    except BaseException as error:  # noqa: BLE001  sys.exit() in a model must not end the worker
        seconds = monotonic() - started
        kind, failure = _judge(error)
        if is_shared:
            # An error is often kept by a frame of its own, and they hold the inputs.
            forget_frames(error)
    else:
        seconds = monotonic() - started
        # The usual list needs no look.
        is_list = outputs.__class__ is list and len(outputs) == count
        checked = outputs if is_list else _check(outputs, count)
        if not isinstance(checked, RemoteFailure):
            if failures:
                computed = iter(checked)
                checked = [None if at in failures else next(computed) for at in range(total)]
            return encoder.pack(checked, failures), seconds
        kind, failure = Kind.FAILED, checked
    if failures and kind is not _FATAL:
        # Another try of the batch would not help inputs that cannot be read: each has its error.
        failures = {at: failures.get(at, failure) for at in range(total)}
        return encoder.pack([None] * total, failures), seconds
    return [(kind, codec.dumps(failure))], seconds


def _pack_freed(slabs: "SlabViews | None") -> bytes:
    """A frame that says which batches are free, empty if none has become so."""
    if slabs is None:
        return b""
    freed = slabs.take_freed()
    if not freed:  # a child that the model has forked still has views
        return b""
    body = codec.dumps(freed)
    return pack_header(Kind.FREED, len(body), 0, 0.0) + body


# By batch id, items that came ahead of the last frame of their batch.
_Parts = dict[int, list[bytes]]
# Frames, as kinds and bodies.
_Answer = list[tuple[Kind, bytes]]


def _check(outputs: Any, count: int) -> list[Any] | RemoteFailure:
    try:
        checked = codec.check_outputs(outputs, count)
    except BaseException as error:  # noqa: BLE001  a sequence of the user's may raise anything
        return codec.describe(error)
    return codec.describe(OutputMismatchError(checked)) if isinstance(checked, str) else checked


# The process cannot use its device any more.
_FATAL_SIGNS = (
    "device-side assert",
    "illegal memory access",
    "unspecified launch failure",
    "CUDA error",
)


def _judge(error: BaseException) -> tuple[Kind, RemoteFailure]:
    """How bad it is that `infer` raised this, as the kind of a frame, and the error as data."""
    failure = codec.describe(error)
    kind = Kind.RAISED
    if is_out_of_memory(error):
        kind = Kind.OUT_OF_MEMORY
        free_memory(error)
    elif any(sign in cuda_message(error) for sign in _FATAL_SIGNS):
        kind = Kind.FATAL
    return kind, failure


def _resolve(name: str) -> Any:
    """The object that "module:Class" names.

    Raises:
        WorkerStartupError: There is no such module or attribute; a module that exists and fails to
            import raises what it raises.
    """
    module_name, _, path = name.partition(":")
    try:
        target: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise WorkerStartupError(
            f"model={name!r}: there is no module {error.name!r} on the worker's path; write the "
            "name as you would import it"
        ) from error
    for attribute in path.split("."):
        try:
            target = getattr(target, attribute)
        except AttributeError as error:
            raise WorkerStartupError(
                f"model={name!r}: module {module_name!r} has no {path!r}"
            ) from error
    return target


def _close_model(model: Any) -> None:
    close = getattr(model, "close", None)
    if close is None:
        return
    try:
        close()
    except Exception:
        logger.exception("the model's close() raised")


def _log_to_stderr() -> None:
    """Show our own log where the model's output goes; the program's handlers are in the parent."""
    handler = logging.StreamHandler()
    handler.setFormatter(
        logging.Formatter("%(levelname)s %(processName)s (pid %(process)d): %(message)s")
    )
    library = logging.getLogger("fast_batcher")
    library.addHandler(handler)
    library.propagate = False  # or a model that configures logging would have it twice


def _set_signals(progress: WorkerProgress, parent_pid: int) -> None:
    """Ignore what goes to the whole process group: the parent decides what follows from it.

    Ctrl-C in a terminal and the SIGTERM of a supervisor, systemd for example, come here as well as
    to the parent, which still wants the answers of the batches that it has sent.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _ignore_sigterm(progress, parent_pid)
    # A parent that ignores these hands that down through exec.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # Python's own default: EPIPE as an exception
    signal.set_wakeup_fd(-1)
    # Blocked by the parent when it started this process, so that they are harmless until here.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})


def _ignore_sigterm(progress: WorkerProgress, parent_pid: int) -> None:
    """Let SIGTERM end this process only if it is the parent that sends it, or if that is dead.

    A model may put a handler of its own in place of this one. It is a handler and not `SIG_IGN`,
    which the processes that the model starts would inherit: they could not be terminated.
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
        # Not the handler of a model.
        if signal.getsignal(signal.SIGTERM) is end_if_wanted:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        after_fork()

    signal.signal(signal.SIGTERM, end_if_wanted)
    # A signal that is ignored is not to interrupt the native code of a model, either.
    signal.siginterrupt(signal.SIGTERM, False)
    os.register_at_fork(
        before=before_fork, after_in_parent=after_fork, after_in_child=after_fork_in_child
    )


def _end_with_parent(parent_pid: int) -> None:
    """See to it that this process does not outlive its parent, even inside a long call into C."""
    if sys.platform == "linux":
        # The kernel's own: works while C code holds the GIL.
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent_pid:  # it died before the line above
            os._exit(1)
    # Elsewhere, and after a change of credentials, which clears the packer.
    threading.Thread(target=_watch_parent, name="fast_batcher-watcher", daemon=True).start()


def _watch_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
