"""The states that a model keeps for live streams and sessions. Worker, main thread."""

import logging
from collections.abc import Iterable, Sequence
from typing import Any

from fast_batcher._arrays.outputs import list_outputs
from fast_batcher._core.values import CALL_FAILED
from fast_batcher.errors import SessionLostError

logger = logging.getLogger("fast_batcher.worker")


class LiveStates(dict[int, Any]):
    """States of a model by the id of their stream or session, in order of their beginning."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._model = model

    def release(self, ids: Iterable[int]) -> int:
        """Forget some states, as far as they are here, and return their number."""
        states = [self.pop(found) for found in ids if found in self]
        self.leave(states)
        return len(states)

    def release_all(self) -> None:
        """Forget the states that are left when the worker ends, for whatever reason."""
        self.release([*self])

    def leave(self, states: list[Any]) -> None:
        """Let the model release some states."""
        try:
            if states:
                self._model.leave(states)
        except BaseException:
            logger.exception("the model's leave() raised")


class SessionInfer:
    """A `SessionModel` for the loop of the worker: `infer` with the states of sessions."""

    def __init__(self, model: Any, *, copies: bool = False) -> None:
        self._model = model
        # As for `list_outputs`.
        self._copies = copies
        self.states = LiveStates(model)
        self.warmup_inputs = model.warmup_inputs
        # Sessions of failed batches, until the parent ends them: it may send further calls before.
        self._failed: set[int] = set()

    def infer(self, inputs: list[Any]) -> Any:
        """Compute inputs that each have a state for this call alone."""
        return self.infer_in([None] * len(inputs), inputs)

    def infer_in(self, sessions: Sequence[int | None], inputs: list[Any]) -> list[Any]:
        """Compute inputs with the states of their sessions; None is a state for one call alone.

        Returns:
            Outputs, and an error for each input whose session has failed, or whose state could not
            be made.
        """
        outcomes: list[Any] = [None] * len(inputs)
        states: dict[int, Any] = {}
        alone: list[Any] = []
        try:
            for position, session in enumerate(sessions):
                try:
                    states[position] = self._find(session)
                except Exception as error:  # noqa: BLE001  the model's, for this call alone
                    outcomes[position] = error
                else:
                    if session is None:
                        alone.append(states[position])
            if states:
                found = self._model.infer([inputs[at] for at in states], [*states.values()])
                outputs = list_outputs(found, len(states), "infer returned", copies=self._copies)
                for position, output in zip(states, outputs, strict=True):
                    outcomes[position] = output
        finally:
            self.states.leave(alone)
        return outcomes

    def _find(self, session: int | None) -> Any:
        """Return the state of a session, which begins now if it has none and has not failed."""
        if session is None:
            return self._model.begin()
        if session in self._failed:
            raise SessionLostError(f"the session has ended: {CALL_FAILED}")
        if session not in self.states:
            self.states[session] = self._model.begin()
        return self.states[session]

    def fail(self, sessions: Sequence[int]) -> None:
        """Release the states of the sessions of a failed batch, and refuse their further calls."""
        self._failed.update(sessions)
        self.states.release(sessions)

    def end(self, session: int) -> None:
        """Release the state of a session that has ended, of which no further call comes."""
        self._failed.discard(session)
        self.states.release([session])
