"""`SessionModel`, the base class of models with a state for each session. Every process.

`_worker/states.py` keeps the states and calls the model; `DynBatcher.session` begins a session.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

from fast_batcher.model import InputT, Model, OutputT
from fast_batcher.types import Rows

StateT = TypeVar("StateT")


class SessionModel(Model[InputT, OutputT], Generic[InputT, OutputT, StateT]):
    """A model that remembers: each session has a state of its own, kept in its worker.

    Speech, video and games over a WebSocket, for example: the calls of a session come one after the
    other, and each goes on where the previous one ended. `infer` computes the calls of many
    sessions at once.

        class Recognizer(SessionModel[bytes, str, Decoder]):
            def begin(self):
                return Decoder()

            def infer(self, inputs, states):
                features = encode(inputs)  # all sessions together
                return [state.decode(row) for state, row in zip(states, features)]

    A call outside of a session gets a state for itself alone.
    """

    @abstractmethod
    def begin(self) -> StateT:
        """Make the state of a new session: any object, for example a dict or a cache on the GPU.

        If it raises, the first call of the session fails, and the next call begins it again.
        """

    @abstractmethod
    def infer(
        self, inputs: list[InputT], states: list[StateT]
    ) -> Sequence[OutputT | Exception] | Rows:
        """Compute one batch, of different sessions.

        Args:
            inputs: As for `InferenceModel.infer`.
            states: For each input the state of its session, the object that `begin` has returned.
                Change it in place.

        Returns:
            As for `InferenceModel.infer`. A session goes on after an exception instance.

        Raises:
            Exception: As for `InferenceModel.infer`; the sessions of the batch end, because their
                states are unknown. Return exception instances for inputs that are wrong.
        """

    def leave(self, states: list[StateT]) -> None:
        """Release what the states of ended sessions hold, beyond what Python frees.

        It gets each state once, at the latest before the model's `close`.
        """
