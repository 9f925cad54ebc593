"""`InferenceModel` under the import path of fast_dynamic_batcher."""

from fast_batcher.model import InferenceModel

__all__ = ["InferenceModel"]
