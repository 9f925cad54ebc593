"""Settings of a decorated function, checked when it is decorated. Pure."""

from dataclasses import dataclass
from math import inf

from fast_batcher.errors import ConfigurationError
from fast_batcher.settings import MAX_BATCH_SIZE, MAX_SECONDS
from fast_batcher.types import PriorityStrategy


@dataclass(frozen=True)
class LocalSettings:
    """What the decorators take; see `fast_batcher.dynamically` for what each means.

    Raises:
        ConfigurationError: A value is wrong.
    """

    batch_size: int = 32
    timeout_ms: float = 5.0
    small_batch_threshold: int = 8
    max_batch_length: int | None = None
    max_queue_size: int | None = None
    priority_strategy: PriorityStrategy = PriorityStrategy.NONE
    isolate_errors: bool = True

    def __post_init__(self) -> None:
        _check_count("batch_size", self.batch_size, 1, MAX_BATCH_SIZE)
        _check_count("small_batch_threshold", self.small_batch_threshold, 0, inf)
        for name in ("max_batch_length", "max_queue_size"):
            if getattr(self, name) is not None:
                _check_count(name, getattr(self, name), 1, inf)
        milliseconds: object = self.timeout_ms
        is_number = isinstance(milliseconds, int | float) and not isinstance(milliseconds, bool)
        if not is_number or not 0 <= self.timeout_ms <= 1000 * MAX_SECONDS:  # false for NaN too
            raise ConfigurationError(
                f"timeout_ms={milliseconds!r:.100}: give milliseconds, 0 or more and at most a year"
            )
        if not isinstance(self.priority_strategy, PriorityStrategy):
            raise ConfigurationError(
                f"priority_strategy={self.priority_strategy!r:.100}: choose one of "
                f"{', '.join(f'PriorityStrategy.{one.name}' for one in PriorityStrategy)}"
            )
        if not isinstance(self.isolate_errors, bool):
            raise ConfigurationError(f"isolate_errors={self.isolate_errors!r}: give True or False")

    @property
    def is_ranked(self) -> bool:
        """Whether the order in which items wait is another than that of their arrival."""
        return self.priority_strategy is not PriorityStrategy.NONE

    def priority(self, item: object) -> int:
        """That of an item of a large call, below the 0 of small calls."""
        return -length_of(item) if self.priority_strategy is PriorityStrategy.LENGTH else -1


def length_of(item: object) -> int:
    """The length of an item, for `max_batch_length` and `PriorityStrategy.LENGTH`.

    A dict of features counts as long as its first feature, and what has no length counts 1. So
    `batched` means to count, but it comes to the number of features.
    """
    if isinstance(item, dict):
        item = next(iter(item.values()), ())
    try:
        return len(item)  # type: ignore[arg-type]  # what has none raises
    except TypeError:
        return 1


def cost_of(item: object) -> int:
    """What an item adds to `max_batch_length`: its length, and 1 if that is 0."""
    return max(1, length_of(item))


def _check_count(name: str, value: object, least: int, most: float) -> None:
    # bool is an int to Python, and never a count to a person.
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        limits = f"{least} or more" if most == inf else f"{least} to {most}"
        raise ConfigurationError(f"{name}={value!r:.100}: give a whole number, {limits}")
