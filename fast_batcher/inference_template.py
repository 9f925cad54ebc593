"""The import path of fast_dynamic_batcher for `InferenceModel`."""

from fast_batcher.model import InferenceModel

__all__ = ["InferenceModel"]
