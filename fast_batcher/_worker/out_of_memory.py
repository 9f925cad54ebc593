"""Frees the memory of a batch that was too large. Worker process."""

import logging
import sys

from fast_batcher.errors import clear_frames

logger = logging.getLogger("fast_batcher.worker")


def free_memory(error: BaseException) -> None:
    """Free the memory that is left of the batch that raised this error."""
    # The frames of the error hold the tensors of the batch.
    clear_frames(error)
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return
    # Free PyTorch's cached blocks: the next batch may need other sizes.
    try:
        torch.cuda.empty_cache()
    except Exception:
        logger.exception("torch.cuda.empty_cache() raised")
