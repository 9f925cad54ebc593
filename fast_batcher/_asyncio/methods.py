"""Calls of the `batchable` methods of a model. API process, on the event loop's thread."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, Protocol

from fast_batcher.errors import ConfigurationError
from fast_batcher.model import InputT, OutputT


class CallMany(Protocol):
    """Waits for the outputs of many inputs."""

    async def __call__(
        self, values: Iterable[Any], timeout: float | None, priority: int, method: str, /
    ) -> list[Any]:
        """Wait."""


class BatchMethod(Generic[InputT, OutputT]):
    """A method of a model that is marked with `batchable`, for callers.

    Args:
        call_many: Waits for many outputs.
        name: The method's name.
    """

    def __init__(self, call_many: CallMany, name: str) -> None:
        self._call_many = call_many
        self._name = name

    async def process_batched(
        self, value: InputT, *, timeout: float | None = None, priority: int = 0
    ) -> OutputT:
        """Wait for the method's output for one input, as `DynBatcher.process_batched` does."""
        (output,) = await self._call_many([value], timeout, priority, self._name)
        return output  # type: ignore[no-any-return]

    async def process_many(
        self, values: Iterable[InputT], *, timeout: float | None = None, priority: int = 0
    ) -> list[OutputT]:
        """Wait for the outputs of many inputs, in their order; see `DynBatcher.process_many`."""
        return await self._call_many(values, timeout, priority, self._name)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._name!r}>"


class BatchMethods:
    """The `batchable` methods of a model as attributes.

    Args:
        call_many: Waits for many outputs.
        names: Names of the methods.
    """

    def __init__(self, call_many: CallMany, names: Sequence[str]) -> None:
        self._methods = {name: BatchMethod[Any, Any](call_many, name) for name in names}

    def __getattr__(self, name: str) -> BatchMethod[Any, Any]:
        if name.startswith("_"):  # a copy is asked for special methods before it has attributes
            raise AttributeError(name)
        method = self._methods.get(name)
        if method is None:
            known = ", ".join(self._methods) or (
                "none; mark methods of its class with batchable(), and give the batcher the class, "
                'not a "module:Class" string'
            )
            raise AttributeError(f"no batchable method {name!r}; the model has {known}")
        return method

    def __dir__(self) -> list[str]:
        return sorted(self._methods)

    def find(
        self, function: Callable[[Any, list[InputT]], Sequence[OutputT | Exception]]
    ) -> BatchMethod[InputT, OutputT]:
        """Return the method of the model's class, with its types: `find(Embedder.embed_text)`.

        Raises:
            ConfigurationError: It is no batchable method of the model.
        """
        name = getattr(function, "__name__", "")
        if name not in self._methods:
            raise ConfigurationError(
                f"function={function!r:.100}: give a batchable method of the model's class, one of "
                f"{', '.join(self._methods) or 'none'}"
            )
        return self._methods[name]
