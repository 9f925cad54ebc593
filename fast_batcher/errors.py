"""All errors of the library, as one tree. Runs in every process; imports no other module of it.

    BatcherError
        ConfigurationError (ValueError)        a wrong setting, found at construction
        BatcherClosedError                     called after the end, or while draining
        NotReadyError                          no worker became ready before the deadline
        QueueFullError                         rejected: the queue is full
        DeadlineExceededError (TimeoutError)   the deadline cannot be met, or has passed
        RequestTooLargeError                   the request is too large, or costs too much
        UnsendableValueError (TypeError)       the input cannot be pickled
        SlowReaderError                        a stream was not read
        InferenceError                         the model raised
            InputError                         the model refuses the input
            OutputMismatchError (IndexError)   the model returned the wrong number of outputs
            CollationError (ValueError)        inputs cannot be joined to one batch
        WorkerError
            WorkerStartupError                 a worker could not load its model
            WorkerLostError                    a worker died with the batch
            SessionLostError                   the session of the call has ended
            PoisonRequestError                 this request was on two dying workers
            TransportError                     a channel broke or carried garbage

All errors can be pickled. A class declares its answer over HTTP, which `fast_batcher.fastapi`
sends, and the reason of a rejection, which observers get. A class of a user inherits both.
"""

import builtins
import inspect
from collections.abc import Iterator
from contextlib import suppress
from traceback import walk_tb
from types import MemberDescriptorType
from typing import Any, ClassVar, NamedTuple, TypeGuard, TypeVar

# The public names, which `fast_batcher` has, too.
__all__ = [
    "BatcherClosedError", "BatcherError", "CollationError", "ConfigurationError",
    "DeadlineExceededError", "DynamicBatchIndexError", "InferenceError", "InputError",
    "NotReadyError", "OutputMismatchError", "PoisonRequestError", "QueueFullError",
    "RequestTooLargeError", "SessionLostError", "SlowReaderError", "TransportError",
    "UnsendableValueError", "WorkerError", "WorkerLostError", "WorkerStartupError",
]  # fmt: skip

_ErrorT = TypeVar("_ErrorT", bound=BaseException)

# Most characters of an error's text: a message may contain a whole printed tensor.
MAX_ERROR_TEXT = 64 * 1024
# Flags of code whose frames may be suspended.
_SUSPENDABLE = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
# Attributes that Python's own printing and handling of exceptions reads.
_SHOWN = (
    "__class__",
    "__traceback__",
    "__cause__",
    "__context__",
    "__suppress_context__",
    "__notes__",
)
# Prefixes of CUDA's messages, as PyTorch, Triton and CuPy pass them on. Only the prefix counts: the
# rest of a message, and errors of other types, may quote inputs with any text.
_FROM_CUDA = ("CUDA", "cuda", "cuDNN", "CUBLAS", "Triton Error [CUDA]")


class HttpAnswer(NamedTuple):
    """HTTP answer to an error; `detail` replaces a message that must stay on the server."""

    status: int
    """HTTP status."""
    code: str
    """Name of the error for programs."""
    detail: str | None = None
    """Sentence for people; None for that of the error."""
    may_pass_later: bool = True
    """Whether the same request may succeed later; then the answer has a `Retry-After`."""
    reason: str = ""
    """Reason of a rejection, for observers; "" for errors of accepted calls."""


class BatcherError(Exception):
    """Base class of all errors of this library."""

    _answer: ClassVar = HttpAnswer(500, "internal_error", "internal error")


class ConfigurationError(BatcherError, ValueError):
    """A setting is wrong; the message names the parameter, the value and the remedy."""

    _answer = HttpAnswer(500, "configuration_error", "internal error", reason="invalid input")


class _RefusalError(BatcherError):
    """Base of errors of rejected calls, with the seconds after which a retry makes sense."""

    def __init__(self, message: str = "", *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        """Seconds after which the same call may succeed, None if that is unknown."""


class BatcherClosedError(_RefusalError):
    """The batcher is draining or closed and takes no more requests."""

    _answer = HttpAnswer(503, "closed", reason="closed")


class NotReadyError(_RefusalError):
    """No worker is ready: the batcher is starting, broken, or was restarting until the deadline."""

    _answer = HttpAnswer(503, "not_ready", reason="not ready")


class QueueFullError(_RefusalError):
    """`max_queue_size` requests wait already; nothing was queued."""

    _answer = HttpAnswer(503, "queue_full", reason="queue full")


class DeadlineExceededError(_RefusalError, TimeoutError):
    """The request's deadline passed, or (`retry_after` is set) it was rejected as unreachable."""

    _answer = HttpAnswer(504, "deadline_exceeded", reason="unreachable")


class SlowReaderError(BatcherError):
    """A stream was not read for its timeout, and had filled its buffer."""

    _answer = HttpAnswer(500, "slow_reader", "internal error")


class RequestTooLargeError(BatcherError):
    """The request is larger than `max_frame_bytes`, or costs more than `max_request_cost`."""

    _answer = HttpAnswer(413, "request_too_large", reason="invalid input")


class UnsendableValueError(BatcherError, TypeError):
    """The input cannot be pickled, so it cannot reach the worker process."""

    _answer = HttpAnswer(500, "unsendable_value", "internal error")


class InferenceError(BatcherError):
    """The model raised while it computed this request; see `__cause__` for its traceback.

    A model's own exception arrives as an instance of a class that derives from `InferenceError` and
    from the type that the model raised, so `except ValueError` and `except InferenceError` both
    catch it.
    """

    _answer = HttpAnswer(500, "inference_failed", "the model failed")


class InputError(InferenceError):
    """The model refuses an input, by the fault of the client.

    Raise it, or a subclass, in the model. It counts as refused and not as failed, and its text is
    for the client.
    """

    _answer = HttpAnswer(422, "invalid_input", may_pass_later=False)


class OutputMismatchError(InferenceError, IndexError):
    """The model returned something other than one output per input."""

    _answer = HttpAnswer(500, "output_mismatch", "the model failed")

    @property
    def message(self) -> str:
        """The text of the error, under the name that it has in fast_dynamic_batcher."""
        return str(self)


class CollationError(InferenceError, ValueError):
    """Rows cannot be joined to one batch, or a batch cannot be split into rows.

    The message names the feature and the remedy. See `Collation`.
    """

    _answer = HttpAnswer(500, "collation_failed", "the input does not fit the model")


class WorkerError(BatcherError):
    """A worker process failed, not a request."""

    _answer = HttpAnswer(503, "worker_failed")


class WorkerStartupError(WorkerError):
    """A worker could not load its model, or took longer than `start_timeout`."""

    # Its message carries the traceback of the model's constructor. The model is not loaded again
    # until the batcher is opened again.
    _answer = HttpAnswer(
        503, "worker_startup_failed", "the model did not load", may_pass_later=False
    )


class WorkerLostError(WorkerError):
    """The worker process died while it computed this request; the message has the cause."""

    _answer = HttpAnswer(503, "worker_lost")


class SessionLostError(WorkerError, _RefusalError):
    """The session has ended, and its state is lost: its worker died, for example."""

    _answer = HttpAnswer(503, "session_lost", reason="session lost")


class PoisonRequestError(WorkerError):
    """Two workers died while they computed this request, or three before they began it.

    The request is not retried.
    """

    _answer = HttpAnswer(500, "poison_request", "the model failed")


class TransportError(WorkerError):
    """The channel to a worker broke, or carried bytes that break the protocol."""

    _answer = HttpAnswer(503, "transport_failed")


# The name that fast_dynamic_batcher uses for a wrong number of outputs.
DynamicBatchIndexError = OutputMismatchError


class RemoteTraceback(Exception):
    """The traceback of a worker process, or of a function of the user, as text.

    It is the `__cause__` of a caller's error. An exception itself would keep its frames, and with
    them the input and the caller.
    """

    def __str__(self) -> str:
        return f"\n\n{self.args[0].rstrip()}\n"


def read_answer(error: BatcherError | type[BatcherError]) -> HttpAnswer:
    """Return the answer to an error."""
    return error._answer  # noqa: SLF001  of this module


def from_model(original: Exception | None, text: str, remote_traceback: str) -> InferenceError:
    """Make the error of one caller from the model's exception, or from its text if it is None."""
    error = _as_inference_error(original) if original is not None else None
    if error is None:
        error = InferenceError(text)
    assign(error, "__cause__", RemoteTraceback(remote_traceback) if remote_traceback else None)
    return error


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a model ran out of memory, so that a smaller batch may succeed."""
    # `torch.OutOfMemoryError` is found by its name, so that torch need not be installed.
    names = {kind.__name__ for kind in type(error).__mro__}
    return (
        is_kind(error, MemoryError)
        or "OutOfMemoryError" in names
        or "out of memory" in cuda_message(error)
    )


def cuda_message(error: BaseException) -> str:
    """Return the message of an error that CUDA raised, "" for any other error."""
    if not is_kind(error, RuntimeError):
        return ""
    try:
        text = f"{error!s}"
        return text if text.startswith(_FROM_CUDA) else ""
    except BaseException:  # noqa: BLE001  __str__, and what it returns, is the user's code
        return ""


def clear_frames(error: BaseException) -> None:
    """Clear the local variables of the functions that an error passed through.

    Frames of generators and coroutines are not cleared. One that caught the error may be suspended,
    which its frame does not show, and clearing the frame would end it.
    """
    for frame, _ in walk_tb(read(error, "__traceback__")):
        if not frame.f_code.co_flags & _SUSPENDABLE:
            with suppress(RuntimeError):  # it still runs
                frame.clear()


def forget_frames(error: BaseException | None) -> None:
    """Remove the tracebacks of an error, its causes and its members; their frames hold inputs.

    A frame may belong to a coroutine that continues, so the frames themselves are not cleared.
    """
    for member in () if error is None else _chain(error):
        BaseException.with_traceback(member, None)


def is_kind(error: object, kind: type[_ErrorT]) -> TypeGuard[_ErrorT]:
    """Return whether an object is an exception of a kind.

    Unlike `isinstance` this does not read `__class__`, which may be the user's code and raise.
    """
    return issubclass(type(error), kind)


def read(error: BaseException, name: str) -> Any:
    """Read an attribute that every exception has, even if its class has a property of this name."""
    return vars(BaseException)[name].__get__(error)


def assign(error: BaseException, name: str, value: object) -> None:
    """Set an attribute of an exception even if its class forbids it, as a frozen dataclass does."""
    own = vars(BaseException).get(name)
    if own is None:
        BaseException.__setattr__(error, name, value)
    else:  # the class may have a property of this name
        own.__set__(error, value)


def can_be_shown(error: BaseException) -> bool:
    """Return whether an exception can be printed, logged and handled without raising another.

    Its causes and contexts count too, because they are printed with it.
    """
    try:
        for member in _chain(error):
            str(member)
            bool(member)  # as `traceback` of Python 3.11 does
            for name in _SHOWN:
                getattr(member, name, None)
    except BaseException:  # noqa: BLE001  the user's code
        return False
    return True


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Iterate over an error, its causes and contexts, and the members of groups."""
    seen = set()
    errors: list[BaseException | None] = [error]
    while errors:
        member = errors.pop()
        if member is None or id(member) in seen:
            continue
        seen.add(id(member))
        yield member
        errors += (read(member, "__cause__"), read(member, "__context__"))
        if is_kind(member, BaseExceptionGroup):
            errors += BaseExceptionGroup.exceptions.__get__(member)


def take_apart(error: Exception) -> tuple[type[Exception], tuple[Any, ...], dict[str, Any]]:
    """Return type, args and state of an exception, from which `rebuild` makes an equal one."""
    # A built-in type may keep state outside `args`, as OSError keeps its file name.
    _, args, *state = _builtin_base(type(error)).__reduce__(error)
    return type(error), args, _read_slots(error) | (state[0] if state else {})


def _read_slots(error: BaseException) -> dict[str, Any]:
    """Return the attributes that classes of the user keep in slots."""
    found = {}
    for owner in type(error).__mro__:
        if owner.__module__ != "builtins":
            for name, member in vars(owner).items():
                if isinstance(member, MemberDescriptorType):
                    with suppress(AttributeError):  # it was never set
                        found[name] = member.__get__(error)
    return found


def copy_error(error: BaseException) -> BaseException:
    """Copy an error for another caller: every `raise` of a shared error adds to its traceback."""
    if not is_kind(error, Exception):
        return error
    new = rebuild(*take_apart(error))
    assign(new, "__cause__", read(error, "__cause__"))
    return new


def rebuild(kind: type[Exception], args: tuple[Any, ...], state: dict[str, Any]) -> Exception:
    """Make an exception from its parts, without calling an `__init__` of the user.

    A user's `__init__` may take other arguments than `args`, which is why many exceptions do not
    survive pickling.
    """
    # MemoryError keeps freed instances for reuse, so its __new__ refuses a combined class.
    is_refused = issubclass(kind, MemoryError) and issubclass(kind, InferenceError)
    new: Any = Exception.__new__ if is_refused else kind.__new__
    error: Exception = new(kind, *args)
    _builtin_base(kind).__init__(error, *args)
    for name, value in state.items():
        assign(error, name, value)
    return error


def _builtin_base(kind: type[BaseException]) -> Any:
    # Names cannot tell classes apart: a combined class has the module and name of its original.
    return next(base for base in kind.__mro__ if vars(builtins).get(base.__name__) is base)


def _as_inference_error(original: Exception) -> InferenceError | None:
    """Copy an exception as one that is also an `InferenceError`, None if its class forbids it."""
    if is_kind(original, StopIteration):  # a future refuses it
        return None
    try:
        kind, args, state = take_apart(original)
        error = rebuild(_combined_class(kind), args, state)
    except BaseException:  # noqa: BLE001  a class of the user may refuse to be combined
        return None
    return error if is_kind(error, InferenceError) and can_be_shown(error) else None


# Combined class by the raised type; bounded by the exception classes of the user's code.
_combined_classes: dict[type[Exception], type[InferenceError]] = {}


def _combined_class(kind: type[Exception]) -> type[InferenceError]:
    if issubclass(kind, InferenceError):
        return kind
    if kind in _combined_classes:
        return _combined_classes[kind]
    namespace = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "__reduce__": _reduce_combined,
        "original_class": kind,
    }
    combined = type(kind.__name__, (InferenceError, kind), namespace)
    _combined_classes[kind] = combined
    return combined


def _reduce_combined(error: Any) -> tuple[Any, ...]:
    """Pickle a combined error by its parts: its class exists in this process only."""
    cause = read(error, "__cause__")
    traceback = cause.args[0] if isinstance(cause, RemoteTraceback) else ""
    _, args, state = take_apart(error)
    return _rebuild_combined, (error.original_class, args, state, traceback)


def _rebuild_combined(
    kind: type[Exception], args: tuple[Any, ...], state: dict[str, Any], traceback: str
) -> Exception:
    error = rebuild(_combined_class(kind), args, state)
    assign(error, "__cause__", RemoteTraceback(traceback) if traceback else None)
    return error
