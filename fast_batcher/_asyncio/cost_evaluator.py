"""Calls the user's functions `cost` and `group_by` for each input, and checks their results.

Runs in the API process, on the event loop's thread. An exception or an invalid result fails that
request alone.
"""

import logging
import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any
from weakref import WeakValueDictionary

from fast_batcher._core.prediction import Method, method_of
from fast_batcher._core.values import Group, Request
from fast_batcher._process import SLOW, monotonic
from fast_batcher._transport.pickling import to_cause
from fast_batcher.errors import BatcherError, ConfigurationError, RequestTooLargeError
from fast_batcher.settings import Settings

logger = logging.getLogger("fast_batcher")

# Sums and products of costs over a whole queue must stay finite. No useful unit of cost reaches
# this value.
MOST_COST = 1e15


class CostEvaluator:
    """Sets the cost and the group of requests with the user's functions.

    Args:
        settings: Its `cost` returns a number above 0, at most `MOST_COST`; its `group_by` a key
            that is hashable and equal to itself; `max_request_cost` limits the cost.
        name: The batcher's name, for the log.
        methods: The methods of a model that has several.
    """

    def __init__(self, settings: Settings, name: str, methods: Sequence[Method] = ()) -> None:
        self._cost = settings.cost
        self._group_by = settings.group_by
        self._max_request_cost = settings.max_request_cost
        self._name = name
        # Whether the user has given any function.
        self.is_needed = self._cost is not None or self._group_by is not None or bool(methods)
        self._methods = methods
        named = {method.name: method for method in methods}
        # The method of calls that name none.
        self._infer = named.get("infer")
        # Groups by key, each as long as a request refers to it.
        self._groups: WeakValueDictionary[object, Group] = WeakValueDictionary()
        self._has_warned = False

    def find_fault(self, request: Request) -> BatcherError | None:
        """Set the request's cost and group; return an error if the request must be rejected."""
        if self._methods and request.group is None:
            if self._infer is None:
                names = ", ".join(f"methods.{one.name}" for one in self._methods)
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
                request.group = self._group_of(key, method_of(request.group))
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
        if not 0 < number <= MOST_COST:
            # Anything but a number may be the input itself, which must not be logged.
            shown = f"{cost!r:.100}" if is_number else f"a {type(cost).__qualname__}"
            raise ConfigurationError(
                f"cost returned {shown}: it must return a number above 0, at most {MOST_COST:g}, "
                "for every input"
            )
        if self._max_request_cost is not None and number > self._max_request_cost:
            raise RequestTooLargeError(
                f"the input costs {number:.6g}, more than max_request_cost="
                f"{self._max_request_cost:.6g}"
            )
        return number

    def _group_of(self, key: Any, method: Method | None) -> Group:
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
