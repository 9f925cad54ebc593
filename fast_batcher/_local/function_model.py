"""A decorated function as the model of a `DynBatcher`. Runs in the worker process."""

import asyncio
import importlib
import inspect
from typing import Any

from fast_batcher._arrays.leaves import own
from fast_batcher._local.decorated import Decorated
from fast_batcher._local.function import Failure, Function, is_async
from fast_batcher.model import InferenceModel


class FunctionModel(InferenceModel[Any, Any]):
    """Calls a function that it imports.

    Args:
        module: Where the function is.
        qualname: What it is called there.
        form: Makes a function of rows out of one of features; None for a function of a list.
    """

    def __init__(self, module: str, qualname: str, form: Any = None) -> None:
        target: Any = importlib.import_module(module)
        for name in qualname.split("."):
            target = getattr(target, name)
        # The decorated function stands in its place, and knows it.
        if isinstance(target, Decorated):
            target = target.__wrapped__
        self._function: Function = (
            Function(target, qualname, is_async=is_async(target))
            if form is None
            else form.function(target, qualname, is_async=is_async(target), to_cpu=True)
        )
        self._runner: asyncio.Runner | None = None

    def infer(self, inputs: list[Any]) -> list[Any]:
        """Compute a batch."""
        result = self._function.call(inputs)
        if inspect.isawaitable(result):
            result = self._wait_for(result)
        outcomes = self._function.outcomes(result, len(inputs))
        # A row of a tensor would be sent with all of its batch.
        return [
            one.error.__cause__ if type(one) is Failure else own(one, to_cpu=True)
            for one in outcomes
        ]

    def close(self) -> None:
        """End the event loop, if there is one."""
        if self._runner is not None:
            self._runner.close()

    def _wait_for(self, awaitable: Any) -> Any:
        if self._runner is None:
            self._runner = asyncio.Runner()

        async def wait() -> Any:
            return await awaitable

        return self._runner.run(wait())
