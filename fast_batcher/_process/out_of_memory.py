"""Out of memory: what says so, and giving back what a batch has left there. Worker process."""

import logging
import sys

from fast_batcher.errors import clear_frames

logger = logging.getLogger("fast_batcher.worker")

# What a message of CUDA's begins with, as PyTorch, Triton and CuPy pass it on. Only what it begins
# with: behind that, and in errors of other types, stand inputs, which may say anything.
_FROM_CUDA = ("CUDA", "cuda", "cuDNN", "CUBLAS", "Triton Error [CUDA]")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether it is about memory."""
    # By name, so that torch need not be here: torch.OutOfMemoryError.
    names = {kind.__name__ for kind in type(error).__mro__}
    return (
        isinstance(error, MemoryError)
        or "OutOfMemoryError" in names
        or "out of memory" in cuda_message(error)
    )


def cuda_message(error: BaseException) -> str:
    """What CUDA said, empty if it was not CUDA."""
    if not isinstance(error, RuntimeError):
        return ""
    try:
        text = str(error)
    except BaseException:  # noqa: BLE001  __str__ is the user's code
        return ""
    return text if text.startswith(_FROM_CUDA) else ""


def let_go(error: BaseException) -> None:
    """Give back what the batch that was too large has left in memory."""
    # Its frames hold the tensors of the batch.
    clear_frames(error)
    _empty_cuda_cache()


def _empty_cuda_cache() -> None:
    """Give back what PyTorch keeps for reuse: in other sizes it may be of use to the next batch."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.empty_cache()
    except Exception:
        logger.exception("torch.cuda.empty_cache() raised")
