"""`InferenceModel`, the base of the models that users write. Runs in the worker process."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

from fast_batcher._arrays.collation import Collation

InputT = TypeVar("InputT")
OutputT = TypeVar("OutputT")


class InferenceModel(ABC, Generic[InputT, OutputT]):
    """A model that computes many inputs at once.

    Subclass it, load the weights in `__init__`, and pass the *class* to a `DynBatcher`. Every
    worker process makes one instance and calls its methods from one thread, one after the other.
    """

    # How inputs become one batch. `infer` then takes and returns one array, tensor or structure of
    # them instead of lists; with None it takes and returns lists. May be set in `__init__`.
    collation: Collation | None = None
    # Device of the worker, for `torch.device`: "cuda:0" or "cpu". A worker sees only the GPU that
    # `devices` gives it, so its number is 0 on every GPU. "cpu" without `devices`. Set before
    # `__init__` runs.
    device: str = "cpu"
    # Index of the worker among those of the batcher, from 0; a replacement has the same index. Set
    # before `__init__` runs.
    worker_index: int = 0

    @abstractmethod
    def infer(self, inputs: list[InputT]) -> Sequence[OutputT | Exception]:
        """Compute one batch.

        Args:
            inputs: 1 to `max_batch_size` inputs, in order of arrival; with a `collation`, the batch
                that they were joined to. Large arrays and tensors may be views of shared memory,
                which is occupied until the last view is gone: copy them to keep them. Inputs may be
                changed in place; a retry gets the original values. `fast_batcher.stack` joins them,
                usually without a copy.

        Returns:
            One output per input, in the same order: a list, tuple, or an array or tensor whose
            first axis is the batch. An exception instance at a position fails that request alone.
            With a `collation` also a dict or other structure of arrays with a batch axis.

        Raises:
            Exception: Any exception reaches the callers of this batch as an `InferenceError` that
                is also an instance of the raised type. The worker goes on serving.
        """

    def warmup_inputs(self) -> Sequence[InputT]:
        """Return inputs to compute before the worker counts as ready; none by default.

        `infer` gets the first input alone, then all inputs, repeated as needed, in batches of
        `max_batch_size`; then one batch of each size again, to measure its time. The batches hold
        copies, if the inputs can be pickled. `group_by` and `max_batch_cost` do not apply.
        """
        return ()

    def close(self) -> None:
        """Release the model's resources; called when the worker stops, not when it is killed.

        After that, processes that the model started and did not end get SIGTERM, and SIGKILL half a
        second later, except for a process in another session (`start_new_session=True`).
        """
