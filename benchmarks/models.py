"""The models that are measured, without any library. They run in the systems' workers.

Every one answers each input with itself, so that a system that mixes up answers is noticed.
"""

import time


class NoOp:
    """Takes no time: what remains is the batching itself."""

    def infer(self, inputs: list[str]) -> list[str]:
        """Answer each input with itself."""
        return inputs


class Flat5ms:
    """5 ms whatever the size, as a small network on a GPU."""

    def infer(self, inputs: list[str]) -> list[str]:
        """Answer each input with itself, after the model's time."""
        time.sleep(0.005)
        return inputs


class Linear5ms:
    """5 ms and 0.1 ms for each input: gains from batching, yet never for free."""

    def infer(self, inputs: list[str]) -> list[str]:
        """Answer each input with itself, after the model's time."""
        time.sleep(0.005 + 0.0001 * len(inputs))
        return inputs


MODELS: dict[str, type[NoOp] | type[Flat5ms] | type[Linear5ms]] = {
    model.__name__: model for model in (NoOp, Flat5ms, Linear5ms)
}
