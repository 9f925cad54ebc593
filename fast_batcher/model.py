"""`InferenceModel`, the base of the models that users write. Runs in the worker process."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, overload

from fast_batcher._arrays.collation import Collation
from fast_batcher.errors import ConfigurationError

# Attribute of marked functions.
MARK = "_fast_batcher_method"

InputT = TypeVar("InputT")
OutputT = TypeVar("OutputT")
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


@dataclass(frozen=True)
class MethodOptions:
    """Options of a method that is marked with `batchable`."""

    # Most inputs of a batch, None for the batcher's `max_batch_size`.
    max_batch_size: int | None = None
    collation: Collation | None = None


@overload
def batchable(function: FunctionT, /) -> FunctionT: ...


@overload
def batchable(
    *, max_batch_size: int | None = None, collation: Collation | None = None
) -> Callable[[FunctionT], FunctionT]: ...


def batchable(
    function: Any = None,
    /,
    *,
    max_batch_size: int | None = None,
    collation: Collation | None = None,
) -> Any:
    """Mark a method of an `InferenceModel` whose calls are batched, besides `infer`.

    The method takes and returns what `infer` does: a list with 1 to `max_batch_size` inputs, and
    one output per input. Call it with `batcher.methods.NAME.process_batched(value)`. Batches of all
    methods run on the same workers, one at a time, the oldest request first.

    Args:
        function: The method, if `@batchable` is written without parentheses.
        max_batch_size: Most inputs of a batch, 1 to 2**20, None for the batcher's.
        collation: How inputs become one batch, as the attribute of that name for `infer`.

    Raises:
        ConfigurationError: A value is wrong.
    """
    is_size = isinstance(max_batch_size, int) and not isinstance(max_batch_size, bool)
    if max_batch_size is not None and not (is_size and 1 <= max_batch_size <= 2**20):
        raise ConfigurationError(f"max_batch_size={max_batch_size!r:.100}: give 1 to 2**20")
    if collation is not None and not isinstance(collation, Collation):
        raise ConfigurationError(
            f"collation={collation!r:.100}: make one with Collation.stack() or Collation.pad()"
        )

    def mark(function: FunctionT) -> FunctionT:
        try:
            vars(function)[MARK] = MethodOptions(max_batch_size, collation)
        except TypeError as error:
            raise ConfigurationError(
                f"batchable: {function!r:.100} is no function; write @batchable() above a method "
                "of the model's class"
            ) from error
        return function

    return mark if function is None else mark(function)


def find_methods(model: object) -> dict[str, MethodOptions]:
    """Return the methods of a model class, or of a model, that are marked with `batchable`."""
    found = {}
    for name in dir(model):
        options = getattr(inspect.getattr_static(model, name, None), MARK, None)
        if isinstance(options, MethodOptions):
            found[name] = options
    return found


class InferenceModel(ABC, Generic[InputT, OutputT]):
    """A model that computes many inputs at once.

    Subclass it, load the weights in `__init__`, and pass the *class* to a `DynBatcher`. Every
    worker process makes one instance and calls its methods from one thread, one after the other.

    A model may also have `prepare(self, value)`, which makes of an input what `infer` gets, and
    `finish(self, output)`, which makes of an output what the caller gets. These run in other
    threads, one call per request, while `infer` computes another batch; an error fails that request
    alone. See docs/stages.md.
    """

    # How inputs become one batch. `infer` then takes and returns one array, tensor or structure of
    # them instead of lists; with None it takes and returns lists. May be set in `__init__`.
    collation: Collation | None = None
    # Device of the worker, for `torch.device`: "cuda:0" or "cpu". A worker sees only the GPU that
    # `devices` gives it, so its number is 0 on every GPU. "cpu" without `devices`. Set before
    # `__init__` runs.
    device: str = "cpu"
    # Index of the worker among those of the batcher, from 0; a replacement has the same index. Set
    # before `__init__` runs.
    worker_index: int = 0

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Let a class with `batchable` methods do without `infer`."""
        super().__init_subclass__(**kwargs)
        if cls.infer is InferenceModel.infer and find_methods(cls):
            cls.infer = no_infer  # type: ignore[method-assign]

    @abstractmethod
    def infer(self, inputs: list[InputT]) -> Sequence[OutputT | Exception]:
        """Compute one batch.

        Args:
            inputs: 1 to `max_batch_size` inputs, in order of arrival; with a `collation`, the batch
                that they were joined to. Large arrays and tensors may be views of shared memory,
                which is occupied until the last view is gone: copy them to keep them. Inputs may be
                changed in place; a retry gets the original values. `fast_batcher.stack` joins them,
                usually without a copy.

        Returns:
            One output per input, in the same order: a list, tuple, or an array or tensor whose
            first axis is the batch. An exception instance at a position fails that request alone.
            With a `collation` also a dict or other structure of arrays with a batch axis.

        Raises:
            Exception: Any exception reaches the callers of this batch as an `InferenceError` that
                is also an instance of the raised type. The worker goes on serving.
        """

    def warmup_inputs(self) -> Sequence[InputT]:
        """Return inputs to compute before the worker counts as ready; none by default.

        `infer` gets the first input alone, then all inputs, repeated as needed, in batches of
        `max_batch_size`; then one batch of each size again, to measure its time. The batches hold
        copies, if the inputs can be pickled. `group_by` and `max_batch_cost` do not apply.
        """
        return ()

    def close(self) -> None:
        """Release the model's resources; called when the worker stops, not when it is killed.

        After that, processes that the model started and did not end get SIGTERM, and SIGKILL half a
        second later, except for a process in another session (`start_new_session=True`).
        """


def no_infer(self: Any, inputs: Any) -> Any:
    """Stand for `infer` in a model that has `batchable` methods only."""
    raise NotImplementedError(f"{type(self).__qualname__} has no infer")
