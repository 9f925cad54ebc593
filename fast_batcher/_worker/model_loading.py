"""Imports and instantiates the model in the worker process."""

import importlib
from typing import Any

from fast_batcher._transport import pickling
from fast_batcher.errors import WorkerStartupError
from fast_batcher.model_spec import describe_arguments, find_model_fault, warn_about_hooks


def load_model(
    pickled: bytes | bytearray | memoryview, device: str | None = None, worker_index: int = 0
) -> Any:
    """Instantiate the model.

    Args:
        pickled: `(class or "module:Class", args, kwargs)`.
        device: The model's `device`, None for the one of its class.
        worker_index: The model's `worker_index`.

    Raises:
        WorkerStartupError: The string does not name a model.
        Exception: Any exception of the import or the constructor.
    """
    model, args, kwargs = pickling.loads(pickled)
    if isinstance(model, str):
        cls = _resolve(model)
        fault = "it is not a class" if not isinstance(cls, type) else find_model_fault(cls)
        if fault is not None:
            raise WorkerStartupError(f"model={model!r}: {fault}")
        warn_about_hooks(cls)
        model_name, model = model, cls
    else:
        model_name = f"{model.__module__}:{model.__qualname__}"
    place = {"worker_index": worker_index} | ({} if device is None else {"device": device})
    try:
        instance = model.__new__(model, *args, **kwargs)
        # Before `__init__`, which loads the weights. Not with `setattr`: a frozen dataclass refuses
        # it, and a class may have a property `device` of its own, which stays.
        getattr(instance, "__dict__", {}).update(place)
        instance.__init__(*args, **kwargs)
    except TypeError as error:
        error.add_note(f"while calling {model_name} with {describe_arguments(args, kwargs)}")
        raise
    return instance


def _resolve(name: str) -> Any:
    """Import the object that "module:Class" names.

    Raises:
        WorkerStartupError: There is no such module or attribute.
        Exception: Any exception of an existing module during its import.
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
