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
from itertools import repeat
from time import monotonic
from typing import TYPE_CHECKING, Any

from fast_batcher._arrays import stacking
from fast_batcher._process.collated_model import collate
from fast_batcher._process.descendants import end_descendants
from fast_batcher._process.out_of_memory import let_go
from fast_batcher._process.pinning import pin
from fast_batcher._process.posting import Posting
from fast_batcher._process.warm_up import warm_up
from fast_batcher._transport import codec
from fast_batcher._transport.channel import BlockingChannel
from fast_batcher._transport.codec import RemoteFailure
from fast_batcher._transport.frames import MAX_JOINED, Frame, Kind, pack_header, pack_times
from fast_batcher._transport.layouts import view_rows
from fast_batcher._transport.mark import Mark
from fast_batcher._transport.pickler import load as load_parts
from fast_batcher.config import find_model_fault
from fast_batcher.errors import (
    InferenceError,
    OutputMismatchError,
    WorkerStartupError,
    cuda_message,
    is_out_of_memory,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fast_batcher._transport.outbox import OutboxWriter
    from fast_batcher._transport.slabs import SlabViews

logger = logging.getLogger("fast_batcher.worker")

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_kept_open: list[Any] = []
# On Python 3.11 looking up a member of an enumeration costs as much as a call.
_STOP, _ROWS, _SHARED_INPUTS, _FATAL = Kind.STOP, Kind.ROWS, Kind.SHARED_INPUTS, Kind.FATAL
# Far more types than a model answers with, unless it makes them as it goes; those it would keep.
MOST_HARMLESS = 100


def worker_main(
    ends: Any,
    mark: Mark,
    max_frame_bytes: int,
    max_batch_size: int,
    parent_pid: int,
    slabs: "SlabViews | OSError | None",
    outbox: "OutboxWriter | OSError | None",
    pin_memory: bool,
) -> None:
    """The target of the worker process; which model to load is the first frame.

    Args:
        ends: The worker's ends of its two pipes.
        mark: Where it says what it is doing.
        max_frame_bytes: Longest frame body either way.
        max_batch_size: Of the warm-up.
        parent_pid: The process to end with.
        slabs: Memory in which large batches arrive, None if there is none, an error if this process
            may not have so much.
        outbox: Memory in which large answers leave, an error if there is none, None if there is to
            be none.
        pin_memory: Whether `slabs` are registered with CUDA.
    """
    _set_signals()
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
        posting = Posting(outbox, max_frame_bytes)
        exit_code = _load_and_serve(
            channel, mark.numbers, max_batch_size, slabs, posting, pin_memory=pin_memory
        )
    except BrokenPipeError:  # the parent has closed its end of the pipe: it wants no answer
        exit_code = 0
    sys.exit(exit_code)


def _load_and_serve(
    channel: BlockingChannel,
    mark: "memoryview[int]",
    max_batch_size: int,
    slabs: "SlabViews | OSError | None",
    posting: Posting,
    *,
    pin_memory: bool,
) -> int:
    """The life of a worker; returns its exit code."""
    first = channel.receive()
    if first is None:  # the parent has thought better of it
        return 0
    try:
        views = _check_views(slabs)
        model = load_model(first.body)
        computing = collate(model)
        if pin_memory and views is not None:
            computing = pin(computing, views.address, views.size)
        times = warm_up(computing, max_batch_size)
    except BaseException as error:  # noqa: BLE001  user code, and the parent has to be told
        channel.send(Kind.STARTUP_FAILED, body=codec.dumps(codec.describe(error)))
        return 1
    try:
        channel.send(Kind.READY, body=pack_times(times))
        if views is not None:
            views.on_fork = lambda batch_id: mark.__setitem__(2, batch_id + 1)
        serve(channel, computing, mark, views, posting)
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
        error.add_note(f"while calling {model_name} with model_args={args} and {kwargs}")
        raise


def serve(  # noqa: C901, PLR0912, PLR0915  flat on purpose
    channel: BlockingChannel,
    model: Any,
    mark: "memoryview[int]",
    slabs: "SlabViews | None" = None,
    posting: Posting | None = None,
) -> None:
    """Answer batches until the parent says STOP or closes its end.

    `mark` is where the parent reads, after the death of this process, what it had in hand: the ids,
    plus one, of the batch that was read last and of the one whose computation began last.

    The usual batch is handled in this one function: after a pause every Python call costs about
    five microseconds, and it is a lone request that waits for them (`benchmarks/idle_latency.py`).
    """
    reader, read, receive = channel.reader, channel.reader.read, channel.receive
    send, write, infer = channel.send, channel.write, model.infer
    loads, dumps = codec.loads, codec.dumps
    most_joined = min(MAX_JOINED, channel.max_frame_bytes)
    if posting is None:
        posting = Posting(None, channel.max_frame_bytes)
    inputs_kind, outputs_kind = Kind.INPUTS, Kind.OUTPUTS
    # Types of outputs that have been seen not to be exceptions: what a model answers with is of few
    # types, and this question is asked of each output.
    harmless: set[type] = set()
    # Parts of batches, and batches of which the last view has died, which the answers tell, but for
    # those that the model or a child of it has kept for longer.
    parts, freed = _Parts(), [] if slabs is None else slabs.freed
    forks = [] if slabs is None else slabs.forks
    while True:
        if freed or forks:
            channel.write_rest(_pack_freed(slabs), 0)
        try:
            frame = None if reader.rest else read()
        except (EOFError, ConnectionError):
            return
        if frame is None and (frame := receive()) is None:
            return
        if frame.kind is not inputs_kind:
            if frame.kind is _STOP:
                return
            if frame.kind is _ROWS or frame.kind is _SHARED_INPUTS:
                kind = _answer_shared(channel, model, frame, slabs, posting, mark)
            else:
                kind = _answer_other(channel, model, frame, parts, posting, mark)
            if kind is _FATAL:
                return
            continue
        batch_id = frame.batch_id
        mark[0] = batch_id + 1
        try:
            inputs = loads(frame.body)
        except BaseException:  # noqa: BLE001  unpickling is the user's code too
            send(Kind.UNREADABLE, batch_id)
            continue
        count = len(inputs)  # `infer` may change the list that it is given
        mark[1] = batch_id + 1
        started = monotonic()
        try:
            outputs = infer(inputs)
        except BaseException as error:  # noqa: BLE001  sys.exit() in a model must not end the worker
            kind, failure = _judge(error)
            send(kind, batch_id, failure, monotonic() - started)
            if kind is Kind.FATAL:  # nothing that waits behind it can be computed here
                return
            continue
        seconds = monotonic() - started
        if (
            not posting.expects_large
            and outputs.__class__ is list
            and len(outputs) == count
            and (harmless.issuperset(map(type, outputs)) or _learn_harmless(outputs, harmless))
        ):
            try:
                body = dumps(outputs)
            except BaseException:  # noqa: BLE001  item by item then, to find the guilty one
                body = None
            if body is not None and len(body) <= most_joined:
                data = pack_header(outputs_kind, len(body), batch_id, seconds) + body
                written = write(data)
                if written != len(data):
                    channel.write_rest(data, written)
                continue
            if body is not None and len(body) <= posting.most_whole:
                send(outputs_kind, batch_id, body, seconds)
                continue
            body = None
        _send_answer(channel, batch_id, _pack_answer(channel, posting, outputs, count), seconds)


def _answer_other(
    channel: BlockingChannel,
    model: Any,
    frame: Frame,
    parts: "_Parts",
    posting: Posting,
    mark: "memoryview[int]",
) -> Kind | None:
    """Answer a ping, or a batch whose items were pickled apart.

    Returns:
        How bad it is if `infer` raised, None if it did not.
    """
    if frame.kind is Kind.PING:
        channel.send(Kind.PONG)
        posting.rest()
        return None
    return _answer_items(channel, model, frame, parts, mark)


def _answer_shared(
    channel: BlockingChannel,
    model: Any,
    frame: Frame,
    slabs: "SlabViews | None",
    posting: Posting,
    mark: "memoryview[int]",
) -> Kind | None:
    """Compute a batch that lies in shared memory, and tell of it before the answer if it is free.

    Returns:
        How bad it is if `infer` raised, None if it did not.
    """
    assert slabs is not None, "the parent knows that it shares no memory"
    mark[0] = frame.batch_id + 1
    inputs: list[Any] | None
    try:
        inputs = _load_shared(slabs, frame)
    except BaseException:  # noqa: BLE001  unpickling is the user's code too
        inputs = None
    if inputs is None:
        stacking.lent.clear()
        channel.send(Kind.UNREADABLE, frame.batch_id, ahead=_pack_freed(slabs))
        return None
    count = len(inputs)
    mark[1] = frame.batch_id + 1
    started = monotonic()
    kind: Kind | None = None
    try:
        outputs = model.infer(inputs)
    except BaseException as error:  # noqa: BLE001  sys.exit() in a model must not end the worker
        seconds = monotonic() - started
        kind, failure = _judge(error)
        # An error is often kept by a frame of its own, and they hold the inputs.
        _forget_frames(error)
        answer = [(kind, failure)]
    else:
        seconds = monotonic() - started
        answer = _pack_answer(channel, posting, outputs, count)
        # They may be views of the inputs.
        del outputs
    del inputs
    stacking.lent.clear()
    _send_answer(channel, frame.batch_id, answer, seconds, ahead=_pack_freed(slabs))
    return kind


def _load_shared(slabs: "SlabViews", frame: Frame) -> list[Any]:
    """The inputs of a batch that lies in shared memory, which is lent to `stack`."""
    named = codec.loads(frame.body)
    view = memory = slabs.view(frame.batch_id)
    try:
        if frame.kind is _SHARED_INPUTS:
            start, length, sizes = named
            view = memory[start : start + length]
            stacking.lend(slabs.address + start, view)
            inputs: list[Any] = load_parts(view, sizes)
            return inputs
        inputs = []
        for layout, start, count in named:
            rows, view, whole = view_rows(layout, memory, start, count)
            inputs += rows
            stacking.lend(slabs.address + start, view, whole, () if whole is None else rows)
        return inputs
    finally:
        # An error keeps this frame, and is often kept by one of its own.
        del view, memory


def _forget_frames(error: BaseException | None) -> None:
    """Cut an error, and those in it and behind it, from their frames.

    A frame may belong to a coroutine that goes on, so it must not be cleared.
    """
    seen = set()
    errors = [error]
    while errors:
        error = errors.pop()
        if error is None or id(error) in seen:
            continue
        seen.add(id(error))
        BaseException.with_traceback(error, None)
        errors += (error.__cause__, error.__context__)
        if isinstance(error, BaseExceptionGroup):
            errors += error.exceptions


def _pack_freed(slabs: "SlabViews | None") -> bytes:
    """A frame that says which batches are free, empty if none has become so."""
    freed = [] if slabs is None else slabs.take_freed()
    if not freed:
        return b""
    body = codec.dumps(freed)
    return pack_header(Kind.FREED, len(body), 0, 0.0) + body


_Parts = dict[int, list[bytes]]


def _has_error(outputs: list[Any]) -> bool:
    # By type: a batch has few of them and many outputs.
    return any(issubclass(kind, BaseException) for kind in set(map(type, outputs)))


def _learn_harmless(outputs: list[Any], harmless: set[type]) -> bool:
    """Whether no output is an exception; then their types need not be looked at again."""
    if _has_error(outputs):
        return False
    if len(harmless) < MOST_HARMLESS:
        harmless.update(map(type, outputs))
    return True


_Answer = list[tuple[Kind, bytes]]


def _pack_answer(channel: BlockingChannel, posting: Posting, outputs: Any, count: int) -> _Answer:
    """The frames, as kinds and bodies, that answer a batch with these outputs of any kind.

    If not in one, then exceptions and what cannot be pickled go apart.
    """
    checked = _check(outputs, count)
    if isinstance(checked, RemoteFailure):
        return [(Kind.FAILED, codec.dumps(checked))]
    failures: dict[int, RemoteFailure] = {}
    if _has_error(checked):
        failures = {
            position: codec.describe(output)
            for position, output in enumerate(checked)
            if isinstance(output, BaseException)
        }
        checked = [
            None if position in failures else output for position, output in enumerate(checked)
        ]
    answer = posting.pack(checked, failures)
    if answer is not None:
        return [answer]
    return _pack_items(
        channel,
        [
            failures[position] if position in failures else _pack(channel, output)
            for position, output in enumerate(checked)
        ],
    )


def _send_answer(
    channel: BlockingChannel,
    batch_id: int,
    answer: _Answer,
    seconds: float,
    ahead: bytes = b"",
) -> None:
    for kind, body in answer:
        channel.send(kind, batch_id, body, seconds, ahead)
        ahead = b""


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


def _judge(error: BaseException) -> tuple[Kind, bytes]:
    """How bad it is that `infer` raised this, as the kind of a frame, and the frame's body."""
    failure = codec.describe(error)
    kind = Kind.RAISED
    if is_out_of_memory(error):
        kind = Kind.OUT_OF_MEMORY
        let_go(error)
    elif any(sign in cuda_message(error) for sign in _FATAL_SIGNS):
        kind = Kind.FATAL
    return kind, codec.dumps(failure)


def _answer_items(
    channel: BlockingChannel, model: Any, frame: Frame, parts: _Parts, mark: "memoryview[int]"
) -> Kind | None:
    """Compute a batch whose items were pickled apart; those that cannot be read fail alone.

    Returns:
        How bad it is if `infer` raised, None if it did not.
    """
    if frame.kind is Kind.INPUT_ITEMS_PART:
        parts.setdefault(frame.batch_id, []).extend(codec.loads(frame.body))
        return None
    inputs: list[Any] = []
    outcomes: list[bytes | RemoteFailure | None] = []
    mark[0] = frame.batch_id + 1
    for item in (*parts.pop(frame.batch_id, ()), *codec.loads(frame.body)):
        try:
            inputs.append(codec.loads(item))
            outcomes.append(None)
        except BaseException as error:  # noqa: BLE001  unpickling is the user's code too
            outcomes.append(codec.describe(error))
    mark[1] = frame.batch_id + 1
    started = monotonic()
    if inputs:
        count = len(inputs)
        try:
            outputs = model.infer(inputs)
        except BaseException as error:  # noqa: BLE001  sys.exit() in a model must not end the worker
            kind, failure = _judge(error)
            if count == len(outcomes) or kind is Kind.FATAL:
                channel.send(kind, frame.batch_id, failure, monotonic() - started)
                return kind
            # Those that could not be read are not the model's fault, and keep their own.
            described = codec.describe(error)
            outcomes = [described if known is None else known for known in outcomes]
        else:
            computed = _pack_outputs(channel, outputs, count)
            outcomes = [next(computed) if known is None else known for known in outcomes]
    seconds = monotonic() - started
    _send_answer(channel, frame.batch_id, _pack_items(channel, outcomes), seconds)
    return None


def _pack_outputs(
    channel: BlockingChannel, outputs: Any, count: int
) -> "Iterator[bytes | RemoteFailure]":
    checked = _check(outputs, count)
    if isinstance(checked, RemoteFailure):
        return repeat(checked)
    return iter([_pack(channel, output) for output in checked])


def _pack(channel: BlockingChannel, output: Any) -> bytes | RemoteFailure:
    if isinstance(output, BaseException):
        return codec.describe(output)
    try:
        item = codec.dumps(output)
    except BaseException as error:  # noqa: BLE001  pickling is the user's code too
        return codec.describe(_unsendable(output, error))
    if not codec.fits(item, channel.max_frame_bytes):
        return codec.describe(
            InferenceError(
                f"the output takes {len(item)} bytes, more than max_frame_bytes="
                f"{channel.max_frame_bytes} allows; return less or raise max_frame_bytes"
            )
        )
    return item


def _unsendable(output: Any, error: BaseException) -> InferenceError:
    result = InferenceError(
        f"the output, a {type(output).__qualname__}, cannot be pickled: {codec.one_line(error)}; "
        "return plain data, arrays or tensors"
    )
    result.__cause__ = error
    return result


def _pack_items(channel: BlockingChannel, outcomes: list[Any]) -> _Answer:
    bodies = list(codec.split_parts(outcomes, channel.max_frame_bytes))
    parts = [(Kind.OUTPUT_ITEMS_PART, body) for body in bodies[:-1]]
    return [*parts, (Kind.OUTPUT_ITEMS, bodies[-1])]


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


def _set_signals() -> None:
    """Ctrl-C goes to the whole process group, and the parent decides what follows from it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A parent that ignores these hands that down through exec.
    for number in (signal.SIGTERM, signal.SIGPIPE, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # Python's own default: EPIPE as an exception
    signal.set_wakeup_fd(-1)
    # The starter thread blocks SIGINT so that it is harmless before this point.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _end_with_parent(parent_pid: int) -> None:
    """See to it that this process does not outlive its parent, even inside a long call into C."""
    if sys.platform == "linux":
        # The kernel's own: works while C code holds the GIL.
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent_pid:  # it died before the line above
            os._exit(1)
    # Elsewhere, and after a change of credentials, which clears the former.
    threading.Thread(target=_watch_parent, name="fast_batcher-watcher", daemon=True).start()


def _watch_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
