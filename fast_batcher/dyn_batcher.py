"""The import path of fast_dynamic_batcher for `DynBatcher`."""

from fast_batcher.batcher import DynBatcher

__all__ = ["DynBatcher"]
