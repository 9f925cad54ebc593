"""The states that a model keeps for live streams and sessions. Worker, main thread."""

import logging
from collections.abc import Iterable, Sequence
from typing import Any

from fast_batcher._arrays.joining import list_outputs
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

    def leave(self, states: list[Any]) -> None:
        """Let the model release some states."""
        try:
            if states:
                self._model.leave(states)
        except BaseException:
            logger.exception("the model's leave() raised")


# The session of a request, None for a request without one; and whether it has a state.
Session = tuple[int, bool] | None


class SessionInfer:
    """A `SessionModel` for the loop of the worker: `infer` with the states of sessions."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.states = LiveStates(model)
        self.warmup_inputs = model.warmup_inputs
        # Sessions for which `begin` has raised: their next calls try again.
        self._without: set[int] = set()

    def infer(self, inputs: list[Any]) -> Any:
        """Compute inputs that each have a state for this call alone."""
        return self.infer_in([None] * len(inputs), inputs)

    def infer_in(self, sessions: Sequence[Session], inputs: list[Any]) -> list[Any]:
        """Compute inputs with the states of their sessions.

        If the model raises, the sessions of the batch end.

        Returns:
            Outputs, and an error for each input whose session has no state any more, or whose state
            could not be made.
        """
        outcomes: list[Any] = [None] * len(inputs)
        states: dict[int, Any] = {}
        alone: list[Any] = []
        for position, session in enumerate(sessions):
            try:
                states[position] = self._find(session)
            except Exception as error:  # noqa: BLE001  the model's, for this call alone
                outcomes[position] = error
            else:
                if session is None:
                    alone.append(states[position])
        try:
            if states:
                found = self._model.infer([inputs[at] for at in states], [*states.values()])
                outputs = list_outputs(found, len(states), "infer returned", copies=False)
                for position, output in zip(states, outputs, strict=True):
                    outcomes[position] = output
        except BaseException:
            self.release([session[0] for session in sessions if session is not None])
            raise
        finally:
            self.states.leave(alone)
        return outcomes

    def _find(self, session: Session) -> Any:
        """Return the state of a session, which begins now if it has none."""
        if session is None:
            return self._model.begin()
        session_id, has_state = session
        if session_id not in self.states:
            if has_state and session_id not in self._without:
                raise SessionLostError("the worker has no state of this session")
            self._without.add(session_id)
            self.states[session_id] = self._model.begin()
            self._without.discard(session_id)
        return self.states[session_id]

    def release(self, session_ids: Sequence[int]) -> None:
        """Release the states of sessions that have ended."""
        self._without.difference_update(session_ids)
        self.states.release(session_ids)
