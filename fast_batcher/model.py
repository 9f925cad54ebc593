"""What the user writes: a model that answers a list of inputs. Runs in the worker process."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

from fast_batcher._arrays.collation import Collation

InputT = TypeVar("InputT")
OutputT = TypeVar("OutputT")


class InferenceModel(ABC, Generic[InputT, OutputT]):
    """A model that computes many inputs at once.

    Subclass it, load the weights in `__init__`, and hand the *class* to a `DynBatcher`: an instance
    is made in every worker process, and no method of it ever runs anywhere else. All calls come
    from one thread, one after the other.
    """

    # How inputs become one batch: `infer` then takes one array, tensor or structure of them and
    # returns one, in place of lists. None: it takes lists. May be set in `__init__`.
    collation: Collation | None = None

    @abstractmethod
    def infer(self, inputs: list[InputT]) -> Sequence[OutputT | Exception]:
        """Compute one batch.

        Args:
            inputs: 1 to `max_batch_size` inputs, in order of arrival; with a `collation`, the batch
                that they were joined to. Large arrays and tensors may be views of memory that is
                used again when there are none: change them in place if you like (those that
                `DynBatcher.allocate_input` made are read-only), and copy what is to be kept.
                `fast_batcher.stack` makes one of them, mostly without a copy.

        Returns:
            One output per input, in the same order: a list, tuple, or an array or tensor whose
            first axis is the batch. An exception instance at a position fails that request alone.
            With a `collation` also a dict or other structure of arrays with a batch axis.

        Raises:
            Exception: Whatever it raises reaches the callers of this batch as an `InferenceError`
                that is also an instance of the raised type. The worker goes on serving.
        """

    def warmup_inputs(self) -> Sequence[InputT]:
        """Inputs to compute before the worker is called ready; none by default.

        `infer` gets the first of them alone, and all of them, repeated as needed, in batches of
        `max_batch_size`; then one batch of either size again, to see how long it takes. Each time
        it gets copies, as far as they can be pickled. They share batches, whatever `group_by` and
        `max_batch_cost` say.
        """
        return ()

    def close(self) -> None:
        """Release what the model holds; called when the worker ends in order, not when it dies.

        After that, processes that the model has started and not ended get SIGTERM, and SIGKILL half
        a second later; one with a session of its own (`start_new_session=True`) is left alone.
        """
