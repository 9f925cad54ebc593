"""The errors that callers may get, by the values of a case. Data, and one function."""

from typing import Any

from fast_batcher import errors
from pairing.dimensions import STEPPED, Case

_LOST = (errors.WorkerLostError, errors.SessionLostError, errors.PoisonRequestError)
# By a value of a case: errors that any of its calls may get.
ALLOWED: dict[tuple[str, str], tuple[type[BaseException], ...]] = {
    # Documented: sessions and streams end with their worker.
    ("event", "reload"): (errors.WorkerLostError, errors.SessionLostError),
    ("event", "failed reload"): (errors.WorkerLostError, errors.SessionLostError),
    ("event", "scale"): (errors.WorkerLostError, errors.SessionLostError),
    ("event", "kill"): _LOST,
    ("event", "kill host"): _LOST,
    ("recycling", "batches"): (errors.SessionLostError,),
    ("event", "lost way back"): (errors.WorkerLostError, errors.SessionLostError),
    ("places", "few"): (errors.QueueFullError,),
    ("latency", "target"): (errors.DeadlineExceededError,),
    # A timeout of the call's own is a target, too.
    ("callers", "impatient"): (errors.DeadlineExceededError,),
}
# What the end of a batcher gives to calls that it does not answer.
AT_THE_END = (errors.BatcherClosedError, errors.SessionLostError, errors.NotReadyError)


def may_fail(case: Case, error: BaseException, *, is_own: bool, has_ended: bool) -> bool:
    """Return whether a call may get an error; deadlines that have passed are judged elsewhere.

    Args:
        case: The case.
        error: The error.
        is_own: Whether the input of the call, or one of its session, asks for an error.
        has_ended: Whether the end of the batcher had begun before the error came.
    """
    kinds: list[Any] = [kind for choice in case.items() for kind in ALLOWED.get(choice, ())]
    if case["event"] == "scale" and case["count"] == "1-2" and case["recycling"] == "none":
        # The library itself removes no worker that has a session or a stream.
        kinds = [kind for kind in kinds if kind is not errors.SessionLostError]
    if has_ended:
        kinds += AT_THE_END
    raises = case["inputs"] == "raising" or (
        case["inputs"] == "failing" and case["outputs"] == "buffer"
    )
    shares_errors = case["isolation"] == "off" or case["model"] in (*STEPPED, "Remembering")
    if is_own or (raises and shares_errors):
        kinds += [errors.InferenceError]
    if raises and case["model"] == "Remembering":
        kinds += [errors.SessionLostError]  # the states of a batch that raised are unknown
    return isinstance(error, tuple(kinds))
