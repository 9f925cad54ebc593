"""Outcomes of requests: rejected inputs, and the words of errors and logs.

    CostEvaluator  calls the user's `cost` and `group_by` for each input
    Reports        makes errors and log lines

Any process with an opening, on the event loop's thread. `ledger` gives the outcomes to callers.
"""

import logging
import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any
from weakref import WeakValueDictionary

from fast_batcher._core.prediction import Method
from fast_batcher._core.values import Expire, ExpiryReason, Group, Request
from fast_batcher._opening.ledger import LateErrors
from fast_batcher._process import SLOW, monotonic
from fast_batcher._transport.pickling import to_cause
from fast_batcher.errors import (
    BatcherError,
    ConfigurationError,
    DeadlineExceededError,
    NotReadyError,
    RequestTooLargeError,
    SlowReaderError,
    WorkerLostError,
)
from fast_batcher.settings import LEAST_COST, MOST_COST, Settings

logger = logging.getLogger("fast_batcher")


class CostEvaluator:
    """Sets the cost and the group of requests with the user's functions."""

    def __init__(self, settings: Settings, name: str, methods: Sequence[Method] = ()) -> None:
        self._cost = settings.cost
        self._group_by = settings.group_by
        self._max_request_cost = settings.max_request_cost
        self._name = name
        # The method of calls that name none, if the model has it; and the names of the others.
        self._infer = next((method for method in methods if method.name == "infer"), None)
        self._others = [method.name for method in methods if method is not self._infer]
        # Whether a function of the user, or the choice of a method, changes any request.
        has_function = self._cost is not None or self._group_by is not None
        self.is_needed = has_function or bool(self._others)
        # Groups by key, each as long as a request refers to it.
        self._groups: WeakValueDictionary[object, Group] = WeakValueDictionary()
        self._has_warned = False

    def evaluate(self, request: Request) -> BatcherError | None:
        """Set the request's cost and group; return an error if the request must be rejected."""
        if self._others and request.group is None:
            if self._infer is None:
                names = ", ".join(f"methods.{name}" for name in self._others)
                return ConfigurationError(
                    f"{self._name}: the model has no infer; call process_batched of {names}"
                )
            request.group = self._infer.group
        began_at = monotonic()
        try:
            if self._cost is not None:
                request.cost = self._checked_cost(_call("cost", self._cost, request.value))
            if self._group_by is not None:
                key = _call("group_by", self._group_by, request.value)
                request.group = self._group_of(key, request.group)
        except BatcherError as error:
            return error
        except BaseException as error:  # noqa: BLE001  even the repr of a result may raise
            return ConfigurationError(
                f"cost or group_by returned something that raises {type(error).__name__} when it "
                "is looked at"
            )
        seconds = monotonic() - began_at
        if seconds > SLOW and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s: cost or group_by took %.3g seconds for one input, and the event loop with all "
                "its requests waited; work it out before the call and make it part of the input",
                self._name,
                seconds,
            )
        return None

    def _checked_cost(self, cost: object) -> float:
        is_number = isinstance(cost, Real) and not isinstance(cost, bool)
        try:
            number = float(cost) if is_number else math.nan  # type: ignore[arg-type]
        except (OverflowError, ValueError, TypeError):
            number = math.nan
        if not 0 <= number <= MOST_COST:
            # Anything but a number may be the input itself, which must not be logged.
            shown = f"{cost!r:.100}" if is_number else f"a {type(cost).__qualname__}"
            raise ConfigurationError(
                f"cost returned {shown}: it must return a number from 0 to {MOST_COST:g} for "
                "every input"
            )
        if self._max_request_cost is not None and number > self._max_request_cost:
            raise RequestTooLargeError(
                f"the input costs {number:.6g}, more than max_request_cost="
                f"{self._max_request_cost:.6g}"
            )
        return max(number, LEAST_COST)

    def _group_of(self, key: Any, own: Group | None) -> Group:
        method = None if own is None else own.method
        # The key's own methods run here, and when the group is removed.
        try:
            is_itself = bool(key == key)  # NaN is not
            group = self._groups.get((method, key)) if is_itself else None
            if is_itself and group is None:
                group = self._groups[method, key] = Group(key, method)
        except BaseException as error:  # noqa: BLE001  the caller gets it
            raise ConfigurationError(
                f"group_by returned a {type(key).__name__} that cannot be a key "
                f"({type(error).__name__}: {error!s:.100}): return a string, a number or a tuple"
            ) from to_cause(error)
        if group is None:
            raise ConfigurationError(
                f"group_by returned a {type(key).__qualname__} that is not equal to itself: no "
                "other request could ever share its batch"
            )
        return group


def _call(name: str, function: Callable[[Any], Any], value: Any) -> Any:
    try:
        return function(value)
    except BaseException as error:  # noqa: BLE001  the caller gets it
        # Also SystemExit and KeyboardInterrupt, which would end the turn of all other callers.
        raise ConfigurationError(
            f"{name} raised {type(error).__name__} for an input: {error!s:.200}"
        ) from to_cause(error)


def timeout_of(request: Request, settings: Settings) -> float | None:
    """Return the seconds that a request has from its arrival, or a stream from its last chunk."""
    return settings.timeout if request.timeout is None else request.timeout


class Reports:
    """Builds the error messages and log lines of one batcher; workers are named by their index."""

    def __init__(self, name: str, settings: Settings) -> None:
        self._name = name
        self._settings = settings
        self._policy_errors = LateErrors()

    def log_policy_error(self, error: BaseException) -> None:
        """Log that the user's policy has raised, once a minute."""
        is_logged, omitted = self._policy_errors.add(monotonic())
        if is_logged:
            text = (
                "%s: policy.hold raised%s, and its batch was sent at once; one a minute is logged"
            )
            before = f", after {omitted} other errors" if omitted else ""
            logger.error(text, self._name, before, exc_info=error)

    def expiry_error(self, action: Expire) -> BatcherError:
        """Make the error for the caller of an expired request."""
        if action.rejection is not None:
            return action.rejection.to_error()
        if action.reason is ExpiryReason.INFER_TIMEOUT:
            return DeadlineExceededError(
                f"the model ran longer than infer_timeout={self._settings.infer_timeout} seconds"
            )
        if action.reason is ExpiryReason.RETIRED:
            return WorkerLostError(
                "the worker of the stream was replaced or removed, and the stream had not ended "
                f"drain_timeout={self._settings.drain_timeout} seconds later"
            )
        limit = f"its timeout of {timeout_of(action.request, self._settings)} seconds"
        if action.request.has_chunks:
            if action.request.caller.is_paused:
                return SlowReaderError(f"the stream was paused, and was not read for {limit}")
            return DeadlineExceededError(f"the model gave no further chunk within {limit}")
        if action.reason is ExpiryReason.NOT_READY:
            return NotReadyError(f"no worker was ready for the call within {limit}")
        if action.reason is ExpiryReason.WAITING:
            return DeadlineExceededError(f"the request was still waiting after {limit}")
        return DeadlineExceededError(f"the model had not answered within {limit}")

    def log_stall(self, worker: int) -> None:
        """Log that a worker computes for longer than any caller waits."""
        limit = self._settings.infer_timeout
        logger.warning(
            "%s: worker %d is not ready: it has computed one batch for timeout=%s seconds, and no "
            "caller waits for it any more; it gets no other batch before it answers, and is "
            "replaced %s",
            self._name,
            worker,
            self._settings.timeout,
            "by infer_timeout alone, which is not set"
            if limit is None
            else f"after infer_timeout={limit} seconds",
        )

    def log_infer_timeout(self, worker: int) -> None:
        """Log that a worker is replaced because its batch takes too long."""
        limit = self._settings.infer_timeout
        reason = f"its batch took longer than infer_timeout={limit} seconds"
        self._log_replacement(logging.WARNING, worker, reason)

    def log_fatal_error(self, worker: int, error: BaseException | None = None) -> None:
        """Log that a worker is replaced because its device is lost, by an error no caller gets."""
        text = f"its device cannot be used any more{'' if error is None else f': {error}'}"
        self._log_replacement(logging.ERROR, worker, text)

    def _log_replacement(self, level: int, worker: int, reason: str) -> None:
        logger.log(level, "%s: worker %d is replaced: %s", self._name, worker, reason)
