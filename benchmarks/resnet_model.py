"""The model of the reference experiment, one class for every system. Runs in their workers.

It also runs with the interpreter of a peer's virtual environment, which has no PyTorch and borrows
ours.
"""

import json
import os
import sys
from dataclasses import dataclass
from typing import Any

# At the end of the path, so that what the peer has installed comes first.
if "LENT_PACKAGES" in os.environ and os.environ["LENT_PACKAGES"] not in sys.path:
    sys.path.append(os.environ["LENT_PACKAGES"])

import torch

from examples.image_classification.resnet import classify, load_network
from fast_batcher import InferenceModel

SHAPE = (3, 224, 224)
# Stands for a network that takes no time, so that only moving and stacking the inputs is measured.
NO_NETWORK = "none"

# The class, its score, and the input's first number, which shows that the answer is its own.
Answer = tuple[int, float, float]


@dataclass(frozen=True)
class Job:
    """What to measure; passed as JSON in the environment, as models are made without arguments."""

    system: str
    arch: str
    requests: int
    # "tensor" or "array": the same floats as `torch.Tensor` or `numpy.ndarray`.
    payload: str
    device: str
    dtype: str
    threads: int
    seed: int = 0

    @classmethod
    def read(cls) -> "Job":
        """Read the job of this process."""
        return cls(**json.loads(os.environ["RESNET_JOB"]))


class Model(InferenceModel[Any, Answer]):
    """The network, or nothing in its place."""

    def __init__(self) -> None:
        job = Job.read()
        torch.set_num_threads(job.threads)
        self._device = torch.device(job.device)
        self._dtype: torch.dtype = getattr(torch, job.dtype)
        self._network = None
        if job.arch != NO_NETWORK:
            self._network = load_network(job.arch, None).to(self._device, self._dtype)

    def infer(self, inputs: list[Any]) -> list[Answer]:
        """Stack, move to the device, compute."""
        batch = torch.stack([torch.as_tensor(value) for value in inputs])
        firsts = batch[:, 0, 0, 0].tolist()
        batch = batch.to(self._device, self._dtype)
        if self._network is None:
            return [(0, 0.0, first) for first in firsts]
        scores, classes = classify(
            self._network, batch.contiguous(memory_format=torch.channels_last)
        )
        return list(zip(classes.tolist(), scores.tolist(), firsts, strict=True))


def make_inputs(job: Job) -> list[Any]:
    """Make one image of floats for each request, all different: an object is pickled once."""
    source = torch.Generator().manual_seed(job.seed)
    tensors = [torch.randn(SHAPE, generator=source) for _ in range(job.requests)]
    return [tensor.numpy() for tensor in tensors] if job.payload == "array" else tensors
