"""`DynBatcher` under the import path of fast_dynamic_batcher."""

from fast_batcher.batcher import DynBatcher

__all__ = ["DynBatcher"]
