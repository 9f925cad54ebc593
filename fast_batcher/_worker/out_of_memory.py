"""Out of memory: giving back what a batch has left there. Worker process."""

import logging
import sys

from fast_batcher.errors import clear_frames

logger = logging.getLogger("fast_batcher.worker")


def free_memory(error: BaseException) -> None:
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
