"""The model in its worker: import, construction, collation and warm-up. Main thread."""

import contextlib
import copy
import importlib
import logging
import os
import site
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import cycle, islice, product
from time import monotonic
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

from fast_batcher._arrays.collation import Collation, check_sizes
from fast_batcher._arrays.joining import (
    Row,
    count_elements,
    describe_difference,
    join_leaves,
    make_filler,
    make_row,
)
from fast_batcher._arrays.outputs import is_one_value, list_outputs, split
from fast_batcher._arrays.trees import flatten
from fast_batcher._devices import find_gpus
from fast_batcher._file_state import FileState, read_state
from fast_batcher._transport import pickling
from fast_batcher._worker.states import SessionInfer
from fast_batcher.errors import (
    CollationError,
    ConfigurationError,
    OutputMismatchError,
    WorkerStartupError,
    clear_frames,
    is_kind,
    is_out_of_memory,
)
from fast_batcher.model import (
    ModelKind,
    describe_arguments,
    find_kind,
    find_methods,
    find_model_fault,
    warn_about_hooks,
)

logger = logging.getLogger("fast_batcher.worker")


def free_memory(error: BaseException) -> None:
    """Free the memory that is left of the batch that raised this error."""
    # The frames of the error hold the tensors of the batch.
    clear_frames(error)
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return
    # Free PyTorch's cached blocks: the next batch may need other sizes.
    try:
        torch.cuda.empty_cache()
    except Exception:
        logger.exception("torch.cuda.empty_cache() raised")


def read_module_files() -> dict[str, FileState]:
    """Return the states of all imported files but those of Python and of installed packages."""
    installed = tuple(f"{path}{os.sep}" for path in _list_installed())
    found = {}
    # `__dict__`: an attribute of a lazy module may import it.
    for module in [*sys.modules.values()]:
        file = getattr(module, "__dict__", {}).get("__file__")
        if isinstance(file, str) and not file.startswith(installed):
            state = read_state(file)
            if state is not None:
                found[os.path.abspath(file)] = state
    return found


def _list_installed() -> set[str]:
    """Return the directories of the standard library and of installed packages."""
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    paths = {sysconfig.get_path(name) for name in names}
    paths |= {*site.getsitepackages(), site.getusersitepackages()}
    return paths | {os.path.realpath(path) for path in paths}


def find_gpu() -> tuple[str, int]:
    """Return the GPU that PyTorch uses, and its reserved bytes on all; "" and 0 without one."""
    torch = sys.modules.get("torch")
    # A worker starts whatever a library says of its devices.
    with contextlib.suppress(Exception):
        if torch is not None and torch.cuda.is_initialized():
            count = sum(map(torch.cuda.memory_reserved, range(torch.cuda.device_count())))
            return f"cuda:{torch.cuda.current_device()}", count
    return "", 0


def warn_about_unused_gpus() -> None:
    """Warn if PyTorch is loaded and uses none of the GPUs that this process can see."""
    gpus = find_gpus(os.environ)
    if gpus and "torch" in sys.modules:
        logger.warning(
            "the model has loaded without a GPU, and this process sees %s: without devices= "
            'self.device is "cpu"; give the batcher devices="auto" and move the model to '
            'self.device, or devices="cpu" if the CPU is wanted',
            ", ".join(gpus),
        )


class ModelCall(NamedTuple):
    """A model's class, and the arguments of its constructor."""

    cls: Any
    # Name of the class in errors.
    name: str
    args: Any
    kwargs: Any


def import_model(body: bytes | bytearray | memoryview | tuple[Any, Any, Any]) -> ModelCall:
    """Import the model's class, and whatever its arguments need; a thread gets them as they are."""
    model, args, kwargs = body if isinstance(body, tuple) else pickling.loads(body)
    if isinstance(model, str):
        cls = _resolve(model)
        fault = "it is not a class" if not isinstance(cls, type) else find_model_fault(cls)
        if fault is not None:
            raise WorkerStartupError(f"model={model!r}: {fault}")
        warn_about_hooks(cls)
        return ModelCall(cls, model, args, kwargs)
    return ModelCall(model, f"{model.__module__}:{model.__qualname__}", args, kwargs)


def construct(call: ModelCall, device: str | None = None, worker_index: int = 0) -> Any:
    """Construct the model."""
    model, name, args, kwargs = call
    place = {"worker_index": worker_index} | ({} if device is None else {"device": device})
    try:
        instance = model.__new__(model, *args, **kwargs)
        # This precedes `__init__`, which loads the weights. `setattr` would not do: a frozen
        # dataclass refuses it, and a class may have a property `device` of its own, which stays.
        getattr(instance, "__dict__", {}).update(place)
        instance.__init__(*args, **kwargs)
    except TypeError as error:
        error.add_note(f"while calling {name} with {describe_arguments(args, kwargs)}")
        raise
    return instance


def _resolve(name: str) -> Any:
    """Import the object that "module:Class" names."""
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


def collate_methods(model: Any, *, copies: bool = False) -> dict[str, Any]:
    """Return an object for each method of a model by name, whose `infer` takes and returns lists.

    "infer" is the first; without a collation its object is the model.
    """
    if find_kind(type(model)) is ModelKind.SESSIONS:
        return {"infer": SessionInfer(model, copies=copies)}
    collations = {name: options.collation for name, options in find_methods(model).items()}
    own = collations.pop("infer", None) or getattr(model, "collation", None)
    name = type(model).__qualname__
    if own is not None and not isinstance(own, Collation):
        raise ConfigurationError(
            f"collation={own!r:.100} of {name}: make one with Collation.stack(), pad() or "
            "concatenate()"
        )
    sizes = getattr(model, "allowed_batch_sizes", None)
    if own is not None and sizes is not None:
        raise ConfigurationError(
            f"allowed_batch_sizes={sizes!r:.100} of {name}: it has a collation, which takes them "
            "as an argument: Collation.stack(allowed_batch_sizes=...)"
        )
    found = {"infer": model if own is None else CollatedModel(model, own, copies=copies)}
    for name, collation in collations.items():
        method = SimpleNamespace(infer=getattr(model, name))
        found[name] = CollatedModel(method, collation, copies=copies) if collation else method
    return found


# Most shapes that a warm-up computes where several axes are padded: a compiler takes some seconds
# for each, and `start_timeout` is five minutes by default.
MOST_SHAPES: Final = 64


def list_allowed_sizes(models: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the allowed batch sizes of the methods that have some."""
    sizes = {name: getattr(model, "allowed_batch_sizes", None) for name, model in models.items()}
    found = {name: check_sizes(allowed) for name, allowed in sizes.items() if allowed is not None}
    return {name: allowed for name, allowed in found.items() if allowed}


def check_places(name: str, places: int, sizes: Sequence[int]) -> None:
    """Check that a model which answers in steps is compiled for all of its places.

    Raises:
        ConfigurationError: It is not.
    """
    if sizes and places > sizes[-1]:
        raise ConfigurationError(
            f"max_batch_size={places} gives {name} more streams at a time than the largest of its "
            f"allowed_batch_sizes, {sizes[-1]}; give max_batch_size={sizes[-1]}, or a larger size"
        )


class CollatedModel:
    """Model that joins inputs before `infer`, and splits its outputs."""

    def __init__(self, model: Any, collation: Collation, *, copies: bool = False) -> None:
        self._model = model
        self._collation = collation
        # Whether outputs must not be views of the arrays that the model returns.
        self._copies = copies
        self.allowed_batch_sizes = collation.allowed_batch_sizes
        self.warmup_inputs = getattr(model, "warmup_inputs", list)
        # Elements of the inputs of the last `infer`, and of the batches that were made of them; 0
        # where nothing is filled.
        self.elements = (0, 0)

    def at_lengths(self, sizes: int) -> Iterator[tuple[int, ...]]:
        """Yield allowed lengths of the padded axes; meanwhile batches are at least as long."""
        collation, padding = self._collation, self._collation.padding
        if padding is None:
            return
        shapes = [*product(padding.lengths, repeat=len(padding.dims))]
        equal = [lengths for lengths in shapes if len({*lengths}) == 1]
        if len(equal) < len(shapes) and len(shapes) * sizes > MOST_SHAPES:
            text = "the warm-up computes %d equal lengths of the padded axes, and not all %d shapes"
            logger.warning(text, len(equal), len(shapes) * sizes)
            shapes = equal
        for lengths in shapes:
            least = dict(zip(padding.dims, lengths, strict=True))
            self._collation = replace(collation, padding=replace(padding, least=least))
            yield lengths
        self._collation = collation

    def infer(self, inputs: list[Any]) -> list[Any]:
        """Compute inputs in one or more calls of the model; return an output or error for each."""
        self.elements = (0, 0)
        outcomes: list[Any] = [None] * len(inputs)
        rows: dict[int, Row] = {}
        for position, value in enumerate(inputs):
            try:
                rows[position] = make_row(value, self._collation)
            except CollationError as error:
                outcomes[position] = error
        calls = self._divide(rows, outcomes)
        for positions in calls:
            computed = self._infer_rows([rows[position] for position in positions])
            if len(calls) > 1:
                # The next call may return its outputs in the same memory.
                computed = copy.deepcopy(computed)
            for position, outcome in zip(positions, computed, strict=True):
                outcomes[position] = outcome
        return outcomes

    def _divide(self, rows: dict[int, Row], outcomes: list[Any]) -> list[list[int]]:
        """Return the positions of each call's inputs; set errors for inputs that no call gets."""
        groups: dict[Any, list[int]] = {}
        for position, row in rows.items():
            groups.setdefault(row.signature, []).append(position)
        kinds = sorted(groups.values(), key=len, reverse=True)
        if len(kinds) > 1 and self._collation.unequal == "error":
            most, *others = kinds
            if 2 * len(most) <= len(rows):  # no majority, so no input is known to be the wrong one
                raise self._difference(rows, most, others[0])
            for few in others:
                for position in few:
                    outcomes[position] = self._difference(rows, most, few)
            kinds = [most]
        return kinds

    def _difference(self, rows: dict[int, Row], most: list[int], few: list[int]) -> CollationError:
        difference = describe_difference(rows[most[0]], rows[few[0]])
        return CollationError(f"{difference}; send inputs of one kind, or use unequal='group'")

    def _infer_rows(self, rows: list[Row]) -> list[Any]:
        """Return the outputs of one call."""
        count = len(rows)
        sizes = self.allowed_batch_sizes
        size = next((allowed for allowed in sizes if allowed >= count), count)
        rows = [*rows, *rows[-1:] * (size - count)]
        lengths: list[int] = []
        if self._collation.lengths is not None:
            if sum([row.length for row in rows]) == count:
                # The length of an output would not tell its meaning.
                rows.append(make_filler(rows))
            lengths = [row.length for row in rows]
        leaves = [row.leaves for row in rows]
        batch = join_leaves(rows[0], leaves, self._collation)
        if sizes or self._collation.padding is not None:
            own, computed = self.elements
            own += sum(map(count_elements, leaves[:count]))
            self.elements = (own, computed + count_elements(flatten(batch)[0]))
        outputs = self._model.infer(batch)
        try:
            found = split(
                outputs,
                len(rows),
                self._collation,
                lengths=lengths,
                to_cpu=True,
                copy=self._copies,
            )
            return found[:count]
        except OutputMismatchError as error:
            # A retry with fewer inputs cannot succeed.
            return [error] * count


def warm_up(
    model: Any, most: int, allowed: Sequence[int] = (), infer: Callable[[Any], Any] | None = None
) -> list[tuple[int, float]]:
    """Compute batches of `warmup_inputs`: of one, of each allowed size and length, full ones.

    Another `infer` may run further stages of the model.

    Each size is computed at least twice, and the last time counts: the first may compile. A worker
    that runs out of memory starts without the larger sizes: the scheduler makes batches smaller
    when requests run out of memory, too.

    Returns:
        Sizes and seconds.
    """
    try:
        return _compute_all(model, most, allowed, infer or model.infer)
    except Exception as error:
        raise WorkerStartupError(
            f"during warm-up with the inputs of warmup_inputs(): {pickling.one_line(error)}"
        ) from error


def _compute_all(
    model: Any, most: int, allowed: Sequence[int], infer: Callable[[Any], Any]
) -> list[tuple[int, float]]:
    found: Any = getattr(model, "warmup_inputs", list)()
    if is_one_value(found):
        raise TypeError(f"they are a {type(found).__name__}; return a list of inputs")
    inputs = list(found)
    if not inputs:
        return []
    most = min([most, *allowed[-1:]])
    sizes = sorted({1, most, *(size for size in allowed if size < most)})
    times: list[tuple[int, float]] = []
    _compute_lengths(model, infer, inputs, sizes)
    for size in sizes:
        # All inputs are computed in full batches.
        count = size if size < most else -(-len(inputs) // size) * size
        repeated = list(islice(cycle(inputs), count))
        began = monotonic()
        try:
            for start in range(0, count, size):
                _time_batch(infer, repeated[start : start + size])
            times.append((size, _time_batch(infer, repeated[:size])))
        except BaseException as error:
            if size == 1 or not is_out_of_memory(error):
                raise
            free_memory(error)
            logger.warning("the warm-up ran out of memory with %d inputs: %s", size, error)
            break
        if allowed:
            logger.info("warm-up of batches of %d took %.1f s", size, monotonic() - began)
    return times


def _compute_lengths(
    model: Any, infer: Callable[[Any], Any], inputs: list[Any], sizes: Sequence[int]
) -> None:
    """Compute a batch of each allowed length and size, so that no request waits for its shape."""
    # A longer one would hide the shorter lengths.
    shortest = min(inputs, key=pickling.measure_size)
    for lengths in model.at_lengths(len(sizes)) if isinstance(model, CollatedModel) else ():
        began = monotonic()
        for size in sizes:
            _time_batch(infer, [shortest] * size)
        logger.info("warm-up of inputs of lengths %s took %.1f s", lengths, monotonic() - began)


def _time_batch(infer: Callable[[Any], Any], inputs: list[Any]) -> float:
    """Compute a batch, check its outputs, and return the seconds that `infer` took."""
    count = len(inputs)
    batch = [_copy_input(value) for value in inputs]
    started = monotonic()
    outputs = infer(batch)
    seconds = monotonic() - started
    for output in list_outputs(outputs, count, "infer returned", copies=False):
        # There is no request yet, so the cause is the declaration or the model.
        if is_kind(output, CollationError) or is_kind(output, OutputMismatchError):
            raise output
    return seconds


def _copy_input(value: Any) -> Any:
    """Copy an input, as sending it does: `infer` may change its inputs, or consume them."""
    try:
        return pickling.loads(pickling.dumps(value))
    except Exception:  # noqa: BLE001  an example that cannot be sent will do
        return value
