"""`InferenceModel`, the base class of models, and the checks of the model argument. Every process.

`check_model` runs in the API process when the batcher is constructed. The worker calls
`find_model_fault` for a model that was given as a "module:Class" string.
"""

import inspect
import os
import pickle
import re
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Generic, TypeVar, overload

from fast_batcher._arrays.collation import Collation, check_sizes
from fast_batcher._arrays.ragged import count_positions
from fast_batcher.errors import ConfigurationError
from fast_batcher.settings import BATCH_SIZE, find_similar_name
from fast_batcher.types import Rows

# Attribute of marked functions.
MARK = "_fast_batcher_method"

InputT = TypeVar("InputT")
OutputT = TypeVar("OutputT")
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


@dataclass(frozen=True)
class MethodOptions:
    """Options of a method that is marked with `batchable`."""

    max_batch_size: int | None = None
    """Most inputs of a batch, None for the batcher's `max_batch_size`."""
    collation: Collation | None = None
    """Rules that join inputs of the method."""


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

    The method has the signature of `infer`: it takes a list with 1 to `max_batch_size` inputs, and
    returns one output per input. Call it with `batcher.methods.NAME.process_batched(value)`.
    Batches of all methods run on the same workers, one at a time, the oldest request first.

    Args:
        function: The method, if `@batchable` is written without parentheses.
        max_batch_size: Most inputs of a batch, 1 to 2**20, None for the batcher's.
        collation: Rules that join the inputs of this method, like the attribute for `infer`.

    Raises:
        ConfigurationError: A value is wrong.
    """
    if max_batch_size is not None:
        BATCH_SIZE.check("max_batch_size", max_batch_size)
    if collation is not None and not isinstance(collation, Collation):
        raise ConfigurationError(
            f"collation={collation!r:.100}: make one with Collation.stack(), pad() or concatenate()"
        )

    def mark(function: FunctionT) -> FunctionT:
        try:
            vars(function)[MARK] = MethodOptions(max_batch_size, collation)
        except TypeError as error:
            raise ConfigurationError(
                f"batchable: {function!r:.100} is not a function; write @batchable() above a "
                "method of the model's class"
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


class Model(ABC, Generic[InputT, OutputT]):
    """The base class of `InferenceModel` and `SessionModel`: what they have in common."""

    device: str = "cpu"
    """Device of the worker, for `torch.device`: "cuda:0" or "cpu". A worker sees only the GPU that
    `devices` gives it, so its number is 0 on every GPU. "cpu" without `devices`. Set before
    `__init__` runs.
    """
    worker_index: int = 0
    """Index of the worker among those of the batcher, from 0; a replacement has the same index. Set
    before `__init__` runs.
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


class InferenceModel(Model[InputT, OutputT]):
    """A model that computes many inputs at once.

    Subclass it, load the weights in `__init__`, and pass the *class* to a `DynBatcher`. Every
    worker process makes one instance and calls its methods from one thread, one after the other.

    A model may also have `prepare(self, value)`, which converts an input for `infer`, and
    `finish(self, output)`, which converts an output for the caller. These run in other threads, one
    call per request, while `infer` computes another batch; an error fails only that request. See
    docs/stages.md.
    """

    collation: Collation | None = None
    """Rules that join inputs. `infer` then takes and returns one array, tensor or structure of them
    instead of lists; with None it takes and returns lists. May be set in `__init__`.
    """
    allowed_batch_sizes: tuple[int, ...] | None = None
    """The sizes that a compiled model without a `collation` computes: the model itself fills up a
    batch to the next one, and gets no batch that is larger than the largest. May be set in
    `__init__`. With a collation they are an argument of `Collation.stack`. For a `SteppedModel`
    they are numbers of streams, and the largest is at least `max_batch_size`.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Let a class with `batchable` methods do without `infer`."""
        super().__init_subclass__(**kwargs)
        if cls.infer is InferenceModel.infer and find_methods(cls):
            cls.infer = no_infer  # type: ignore[method-assign]

    @abstractmethod
    def infer(self, inputs: list[InputT]) -> Sequence[OutputT | Exception] | Rows:
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
                is also an instance of the raised type. The worker continues to serve.
        """


def no_infer(self: Any, inputs: Any) -> Any:
    """Stand for `infer` in a model that has `batchable` methods only."""
    raise NotImplementedError(f"{type(self).__qualname__} has no infer")


# The error for a class or function of a `__main__` that no worker can import.
NOT_IN_WORKER = (
    "what is defined in a notebook, at a prompt, in `python -c`, in a program read from standard "
    "input or in the __main__.py of a package does not exist in the worker process; put it into "
    'another .py file and import it from there, or give workers="threads"'
)

# Optional methods and attributes of a model, besides `infer`.
_HOOKS = ("warmup_inputs", "close", "cost", "collation", "allowed_batch_sizes", "prepare", "finish")
# Names of `infer` in other libraries: LitServe, PyTorch and Mosec, Triton.
_OTHER_INFERS = ("predict", "forward", "execute", "__call__")
# Names that a `batchable` method cannot have: attributes of a model or of `batcher.methods`.
_RESERVED = {*_HOOKS, "device", "find", "worker_index"}
# Methods that the worker calls with one argument: what they take, and what they return.
_BATCH = ("the list of inputs", "a list with one output per input")
_METHODS = (
    ("infer", *_BATCH),
    ("prepare", "an input", "what infer gets for it"),
    ("finish", "an output", "what the caller gets for it"),
)
_STEPPED_METHODS = (
    ("join", "the list of inputs", "a list with one state per input"),
    ("step", "the list of states", "a list with one chunk per state"),
)
_SESSION_METHODS = (
    ("infer", "the list of inputs and the list of states", _BATCH[1]),
    ("begin", "which makes a state", "a state"),
    ("leave", "the list of states", "nothing"),
)


class ModelKind(Enum):
    """Kind of a model, by the module and the name of its base class."""

    BATCHES = ("fast_batcher.model", "InferenceModel")
    STEPS = ("fast_batcher.stepped", "SteppedModel")  # its requests are streams
    SESSIONS = ("fast_batcher.sessions", "SessionModel")


# The methods that the worker calls of models with states.
_STATEFUL = {
    ModelKind.STEPS: (*_METHODS, *_STEPPED_METHODS),
    ModelKind.SESSIONS: _SESSION_METHODS,
}
# Attributes that a model with states cannot have; a step may be compiled for numbers of streams.
_NOT_STATEFUL = {
    ModelKind.STEPS: ("collation", "prepare", "finish"),
    ModelKind.SESSIONS: ("collation", "allowed_batch_sizes", "prepare", "finish"),
}
_MODEL_STRING = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


# The methods of a model without `batchable` methods.
INFER_ALONE: tuple[tuple[str, int | None], ...] = (("infer", None),)


@dataclass(frozen=True)
class ModelSpec:
    """A model and its arguments, pickled for the workers.

    `pickled` holds (class or "module:Class", args, kwargs). It is pickled once, in the parent, and
    unpickled in the worker inside a `try`, so that a failing import becomes a clear error. It is
    empty for threads of this process, which take `model` and `arguments`.
    """

    name: str
    pickled: bytes
    model: Any = field(default=None, repr=False, compare=False)
    # Dotted name of the module that has the class.
    module: str = ""
    # The methods of the model, each with its `max_batch_size` or None for the batcher's; "infer" is
    # the first if the model has it.
    methods: tuple[tuple[str, int | None], ...] = INFER_ALONE
    # Only `STEPS` is known of a class that a text names.
    kind: ModelKind = ModelKind.BATCHES
    # See `_identity`; "" if nothing asks for it.
    identity: str = ""
    # The arguments of the constructor; None if another process has given them.
    arguments: tuple[Sequence[Any], Mapping[str, Any]] | None = field(
        default=None, repr=False, compare=False
    )

    def read_arguments(self) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Return the arguments of the constructor; unpickle those of another process."""
        if self.arguments is not None:
            return self.arguments
        _, args, kwargs = pickle.loads(self.pickled)
        return args, kwargs


def check_model(
    model: object,
    model_args: object,
    model_kwargs: object,
    max_frame_bytes: int,
    *,
    in_threads: bool = False,
) -> ModelSpec:
    """Check a model and its arguments without running its code, and pickle them for the workers.

    Threads of this process get the class and the arguments themselves.
    """
    name = name_of(model)
    if isinstance(model, type) and not in_threads:
        _check_importable(model)
    if isinstance(model_args, str | bytes) or not isinstance(model_args, Sequence):
        raise ConfigurationError(
            f"model_args is of type {type(model_args).__qualname__}: give a tuple, for example "
            "('weights.pt',)"
        )
    kwargs = {} if model_kwargs is None else model_kwargs
    if not isinstance(kwargs, Mapping) or not all(isinstance(name, str) for name in kwargs):
        raise ConfigurationError(
            f"model_kwargs is of type {type(kwargs).__qualname__}: give a dict whose keys are all "
            "names, as strings"
        )
    args, kwargs = tuple(model_args), dict(kwargs)
    pickled = b"" if in_threads else _pickle_call(model, args, kwargs, max_frame_bytes)
    module = model.__module__ if isinstance(model, type) else str(model).partition(":")[0]
    return ModelSpec(
        name=name,
        pickled=pickled,
        model=model,
        module=module,
        methods=_list_methods(model),
        kind=find_kind(model),
        arguments=(args, kwargs),
    )


def _pickle_call(
    model: object, args: tuple[Any, ...], kwargs: dict[str, Any], max_frame_bytes: int
) -> bytes:
    """Pickle what a worker process needs to construct the model."""
    try:
        pickled = pickle.dumps((model, args, kwargs), protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise ConfigurationError(
            f"{describe_arguments(args, kwargs)}: they cannot be pickled ({error}), so they cannot "
            "reach the worker; pass a path or a name instead and load the object in the model's "
            "__init__"
        ) from error
    if len(pickled) > max_frame_bytes:
        raise ConfigurationError(
            f"model_args and model_kwargs take {len(pickled)} bytes, more than max_frame_bytes="
            f"{max_frame_bytes}; pass a path and load the data in the model's __init__"
        )
    return pickled


def _list_methods(model: object) -> tuple[tuple[str, int | None], ...]:
    methods = find_methods(model) if isinstance(model, type) else {}
    sizes = {name: options.max_batch_size for name, options in methods.items()}
    if getattr(model, "infer", None) is no_infer:
        return tuple(sizes.items())
    return tuple(
        {**dict(INFER_ALONE), **sizes}.items()
    )  # the size of an `infer` that is marked, too


def describe_arguments(args: Sequence[object], kwargs: Mapping[str, object]) -> str:
    """Describe the arguments of a model's constructor by types and names; values may be secrets."""
    types = ", ".join(type(value).__qualname__ for value in args)
    named = ", ".join(f"{name}: {type(value).__qualname__}" for name, value in kwargs.items())
    return f"model_args of types ({types}) and model_kwargs of types {{{named}}}"


def _list_stateful(model: object) -> list[ModelKind]:
    """Return the kinds with states that a class is; their modules need not be imported."""
    bases = [(base.__module__, base.__name__) for base in getattr(model, "__mro__", ())]
    return [kind for kind in _STATEFUL if kind.value in bases]


def find_kind(model: object) -> ModelKind:
    """Return the kind of a model, `BATCHES` if only the name of its class is known."""
    return next(iter(_list_stateful(model)), ModelKind.BATCHES)


def list_kinds(model: object, stepped: bool) -> list[str]:
    """Return the kinds of models that a model is, by their names in `settings`.

    Of a class that a text names only `stepped` is known.
    """
    kind = find_kind(model)
    if stepped or kind is ModelKind.STEPS:
        return ["a SteppedModel", "a model without sessions", "a model without stages"]
    if not isinstance(model, type):
        return []
    has_stages = any(getattr(model, name, None) is not None for name in ("prepare", "finish"))
    return [
        "a SessionModel" if kind is ModelKind.SESSIONS else "a model without sessions",
        *([] if has_stages else ["a model without stages"]),
    ]


def find_model_fault(model: type) -> str | None:
    """Describe why a class cannot be a model; None if it can. Parent and worker."""
    infer = getattr(model, "infer", None)
    if not callable(infer):
        return f"it has no method infer(self, inputs){_suggest_infer(model)}"
    abstract = sorted(getattr(model, "__abstractmethods__", ()))
    if abstract:
        hint = _suggest_infer(model) if "infer" in abstract else ""
        return f"it does not implement {', '.join(abstract)}{hint}"
    collation = getattr(model, "collation", None)
    if (fault := _find_collation_fault(collation, model)) is not None:
        return fault
    marked = [name for name in find_methods(model) if name != "infer"]
    for name in marked:
        if name in _RESERVED or name[0] == "_":
            reason = "it begins with an underscore" if name[0] == "_" else "the library has its own"
            return f"{name} cannot be the name of a batchable method: {reason}; rename it"
    if (fault := _find_stateful_fault(model, marked)) is not None:
        return fault
    called = _STATEFUL.get(find_kind(model), _METHODS)
    called = (*called, *((name, *_BATCH) for name in marked))
    faults = (_find_method_fault(model, *method) for method in called)
    return next((fault for fault in faults if fault is not None), None)


def _suggest_infer(model: type) -> str:
    """Return the end of an error message about a model without `infer`."""
    own = {name for kind in model.__mro__ for name in vars(kind)}
    found = next((name for name in _OTHER_INFERS if name in own), None)
    return f"; rename {found} to infer, which gets the inputs of a batch as a list" if found else ""


def _find_stateful_fault(model: type, marked: list[str]) -> str | None:
    """Describe the parts that a model with states cannot have, None without any."""
    kinds = _list_stateful(model)
    if len(kinds) > 1:
        return "it is both a SteppedModel and a SessionModel; derive it from one of them"
    lacked = _NOT_STATEFUL[kinds[0]] if kinds else ()
    others = [*marked, *(name for name in lacked if getattr(model, name, None))]
    return f"a {kinds[0].value[1]} cannot have {', '.join(others)}" if kinds and others else None


def _find_collation_fault(collation: object, model: type) -> str | None:
    """Describe why a model's collation or its allowed batch sizes are wrong, None if they are not.

    A property has its value only on an instance, which the worker makes.
    """
    if collation is not None and not isinstance(collation, Collation | property):
        return (
            f"its collation is {collation!r:.100}; make one with Collation.stack(), pad() or "
            "concatenate()"
        )
    sizes = getattr(model, "allowed_batch_sizes", None)
    if sizes is None or isinstance(sizes, property):
        return None
    if isinstance(collation, Collation):
        if collation.lengths is not None:
            return (
                "its collation joins inputs end to end, whose lengths differ from batch to batch: "
                "omit allowed_batch_sizes"
            )
        return "it has a collation, which takes allowed_batch_sizes as an argument"
    try:
        check_sizes(sizes)
    except ConfigurationError as error:
        return f"its {error}"
    return None


def warn_about_hooks(model: object) -> None:
    """Warn about names that look like misspelt hooks, at the line that constructs the batcher."""
    if not isinstance(model, type):  # a string: the worker warns after the import
        return
    own = {
        name for kind in model.__mro__ if kind not in (Model, InferenceModel) for name in vars(kind)
    }
    names = sorted(name for name in own if name[0] != "_")
    for name in names:
        hook = find_similar_name(name, set(_HOOKS) - own)
        if hook is not None:
            warnings.warn(
                f"{model.__qualname__}.{name} looks like {hook}, which the library uses, and is "
                "not used; rename it, or let its name begin with an underscore",
                RuntimeWarning,
                stacklevel=4,
            )


def is_main_importable() -> bool:
    """Return whether a worker process can import this process's `__main__`, under another name."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return spec.name != "__main__" and not spec.name.endswith(".__main__")
    # A prompt has no file; a program from standard input has the file name "<stdin>".
    return os.path.isfile(getattr(main, "__file__", None) or "")


def name_of(model: object) -> str:
    """Check a model argument; return the name of the class."""
    if isinstance(model, type):
        fault = find_model_fault(model)
        if fault is not None:
            raise ConfigurationError(f"model={model!r}: {fault}")
        return model.__name__
    if not isinstance(model, str):
        raise ConfigurationError(
            f"model is of type {type(model).__qualname__}: give a subclass of InferenceModel or a "
            "'module:Class' string. Each worker makes its own instance, with model_args and "
            "model_kwargs"
        )
    if not _MODEL_STRING.fullmatch(model):
        raise ConfigurationError(
            f"model={model!r}: write 'package.module:Class', as in 'app.models:Embedder'"
        )
    return model.rpartition(":")[2]


def _find_method_fault(model: type, name: str, taken: str, returned: str) -> str | None:
    """Describe why the worker cannot call a method, if the model has it, with one argument."""
    method = getattr(model, name, None)
    if method is None:
        return None
    if not callable(method):
        return f"{name} is not a method; rename the attribute, or write {name}(self, value)"
    if inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method):
        return f"{name} is async; the worker has no event loop, write a plain def"
    if inspect.isgeneratorfunction(method):
        return f"{name} is a generator; return {returned}"
    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError):  # written in C: the first batch shows whether it fits
        return None
    count = {"infer": 2, "begin": 0}.get(name, 1) if find_kind(model) is ModelKind.SESSIONS else 1
    is_static = isinstance(inspect.getattr_static(model, name), staticmethod | classmethod)
    try:
        signature.bind(*([] if is_static else [None]), *[()] * count)
    except TypeError:
        number = ("no argument", "one argument", "two arguments")[count]
        return f"{name}{signature} must take exactly {number} besides self, {taken}"
    return None


def _check_importable(model: type) -> None:
    """Raise if a worker process cannot import a class."""
    if model.__module__ == "__main__" and not is_main_importable():
        raise ConfigurationError(f"model={model!r}: {NOT_IN_WORKER}")
    try:
        pickle.dumps(model)
    except Exception as error:
        raise ConfigurationError(
            f"model={model!r}: the worker process cannot import it ({error}); move the class to "
            'the top level of a module, under its own name, or give workers="threads"'
        ) from error


def concatenates(model: object) -> bool:
    """Return whether a model class takes batches of `Collation.concatenate`."""
    collation = getattr(model, "collation", None) if isinstance(model, type) else None
    return isinstance(collation, Collation) and collation.lengths is not None


def find_cost(model: object) -> Callable[[Any], float] | None:
    """Return the static or class method `cost` of a model class, or the default for its collation.

    None without one: each input costs the same.
    """
    own = inspect.getattr_static(model, "cost", None) if isinstance(model, type) else None
    if own is None:
        return count_positions if concatenates(model) else None
    if not isinstance(own, staticmethod | classmethod):
        raise ConfigurationError(
            f"model={model!r}: its cost is called without an instance, so it must be a "
            "staticmethod or classmethod; or give another function as cost="
        )
    found: Callable[[Any], float] = getattr(model, "cost")  # noqa: B009  of any class
    return found
