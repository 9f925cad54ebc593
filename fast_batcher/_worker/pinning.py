"""Shared memory that CUDA knows, so that copies to the device need not wait. Worker process."""

import importlib
import logging
from collections.abc import Callable
from typing import Any

from fast_batcher.errors import WorkerStartupError

logger = logging.getLogger("fast_batcher.worker")

# cuda_runtime_api.h, cudaHostRegisterPortable: it counts as pinned for every device.
_PORTABLE = 1


def pin(model: Any, address: int, size: int) -> Any:
    """Register memory with CUDA, all of which the system has to find for that, and keep it.

    It stays registered until the process ends.

    Args:
        model: What computes batches that lie there.
        address: Of the memory, at the beginning of a page.
        size: In bytes.

    Returns:
        What computes them, and is done with the memory when it returns. The model itself if there
        is no GPU, and nothing has been registered.

    Raises:
        WorkerStartupError: PyTorch is not there, or CUDA refuses.
    """
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        raise WorkerStartupError(
            f"pin_memory=True is for models that use PyTorch: {error}; leave it out"
        ) from error
    if not torch.cuda.is_available():
        logger.warning("pin_memory=True changes nothing: PyTorch finds no GPU")
        return model
    try:
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, size, _PORTABLE))
    except Exception as error:
        # Not a reason for a warning alone: CUDA would raise it again, from the next kernel.
        raise WorkerStartupError(
            f"pin_memory=True: CUDA does not register the {size} bytes of max_shared_bytes: "
            f"{error}; lower it, or leave pin_memory out"
        ) from error
    return Finishing(model, torch.cuda.synchronize)


class Finishing:
    """A model that returns when its device has done what it was told.

    Outputs on the host have waited for all that they are made of. This is for copies that they are
    not made of, and for those of a batch that fails.

    Args:
        model: The model.
        wait: Returns when the device has done it.
    """

    def __init__(self, model: Any, wait: Callable[[], object]) -> None:
        self._model = model
        self._wait = wait
        # What the model has for that.
        self.warmup_inputs = getattr(model, "warmup_inputs", list)

    def infer(self, inputs: list[Any]) -> Any:
        """The model's outputs.

        Raises:
            Exception: What the model raises, or the device.
        """
        try:
            return self._model.infer(inputs)
        finally:
            self._wait()
