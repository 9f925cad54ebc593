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
        What computes them, and is done with the memory when it returns: a copy to the device may
        still be reading it when the model's code has gone on. The model itself if there is no GPU,
        and nothing has been registered.

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
    return Finishing(model, lambda: torch.cuda.current_stream().synchronize())


class Finishing:
    """A model that returns when its device has done what it was told.

    Args:
        model: The model.
        wait: Returns then.
    """

    def __init__(self, model: Any, wait: Callable[[], object]) -> None:
        self._model = model
        self._wait = wait

    def warmup_inputs(self) -> list[Any]:
        """What the model has for that."""
        warmup_inputs = getattr(self._model, "warmup_inputs", None)
        return [] if warmup_inputs is None else list(warmup_inputs())

    def infer(self, inputs: list[Any]) -> Any:
        """The model's outputs.

        Raises:
            Exception: What the model raises, or the device.
        """
        outputs = self._model.infer(inputs)
        self._wait()
        return outputs
