"""A model that ends its batch as the inputs order, and its inputs. Worker process."""

import os
from typing import Any

from models.base import AtGate, pass_gate


class Order:
    """Input and output that can be seen to go.

    Args:
        what: "echo", "raise", "drop", "hold", "die" or "unpicklable".
        number: Differs between inputs.
    """

    def __init__(self, what: str, number: int) -> None:
        self.what = what
        self.number = number

    def __getstate__(self) -> dict[str, Any]:
        if self.what == "unpicklable":
            raise RuntimeError("not to be pickled")
        return self.__dict__


class Obeys(AtGate):
    """Echoes a batch of other inputs, and a batch of orders if they do not say otherwise."""

    def infer(self, inputs: list[Any]) -> list[Any]:
        what = getattr(inputs[0], "what", inputs[0])
        if what == "raise":
            raise RuntimeError("as ordered")
        if what == "die":
            os._exit(1)
        if what == "hold":
            pass_gate(self._gate)
        return inputs[1:] if what == "drop" else inputs
