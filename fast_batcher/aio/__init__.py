"""Decorators for functions that are called from event loops.

An async function runs on the event loop of its callers, any other in a thread of this process.
"""

from fast_batcher.aio import inference
from fast_batcher.aio.dynamic import AsyncBatchedFunction, dynamically

__all__ = ["AsyncBatchedFunction", "dynamically", "inference"]
