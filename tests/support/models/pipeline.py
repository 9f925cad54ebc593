"""The models of `examples/pipeline`, held at a gate with every batch. Worker process."""

from examples.pipeline.classifier import Classifier
from examples.pipeline.detector import Box, Detector
from examples.pipeline.pictures import Picture
from models.base import pass_gate


class HeldDetector(Detector):
    """Its note at the gate is its name and the size of the batch."""

    def __init__(self, gate: str) -> None:
        self._gate = gate

    def infer(self, inputs: list[Picture]) -> list[list[Box]]:
        pass_gate(self._gate, ["detector", len(inputs)])
        return super().infer(inputs)


class HeldClassifier(Classifier):
    """Its note at the gate is its name and the size of the batch."""

    def __init__(self, gate: str) -> None:
        super().__init__()
        self._gate = gate

    def infer(self, inputs: list[Picture]) -> list[str]:
        pass_gate(self._gate, ["classifier", len(inputs)])
        return super().infer(inputs)
