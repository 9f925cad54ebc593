"""Values whose every attribute raises, as those of a lazy proxy whose target is gone."""

from collections.abc import Iterator
from typing import Any

from fast_batcher import InferenceModel, SessionModel, StreamedModel, batchable


class Hostile:
    """Nothing but its type can be asked."""

    def __getattribute__(self, name: str) -> Any:
        if name == "__reduce_ex__":  # it can be sent all the same
            return lambda _: (Hostile, ())
        raise RuntimeError("the target of this proxy is gone")


class Answers(InferenceModel[Any, Any]):
    def infer(self, inputs: list[Any]) -> list[Any]:
        return [Hostile() if value == "hostile" else value for value in inputs]

    @batchable
    def other(self, inputs: list[Any]) -> list[Any]:
        return self.infer(inputs)


class Staged(Answers):
    def finish(self, output: Any) -> Any:
        return output


class Chunks(StreamedModel[Any, Any]):
    def infer_stream(self, inputs: list[Any]) -> Iterator[list[Any]]:
        for _ in range(3):
            yield [Hostile() if value == "hostile" else value for value in inputs]


class Remembers(SessionModel[Any, Any, None]):
    def begin(self) -> None:
        return None

    def infer(self, inputs: list[Any], states: list[None]) -> list[Any]:
        return [Hostile() if value == "hostile" else value for value in inputs]
