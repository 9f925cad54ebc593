"""`RayWorkers`: the workers of a `DynBatcher` as actors of a Ray cluster. Every process.

It does not import Ray, which only the host process and the actors do. See docs/ray.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Annotated, Any

from fast_batcher.errors import ConfigurationError
from fast_batcher.settings import NUM_WORKERS, SECONDS, Range, RemoteWorkers, check_fields


def _is_amount(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < inf


def _check_amount(name: str, value: object) -> None:
    if not _is_amount(value):
        raise ConfigurationError(f"{name}={value!r:.100}: give a number, 0 or more")


def _check_resources(name: str, value: Any) -> None:
    if not isinstance(value, Mapping) or not all(map(_is_amount, value.values())):
        raise ConfigurationError(
            f"{name}={value!r:.100}: give the amount of each custom resource, as {{'disk': 1}}"
        )


def _check_environment(name: str, value: object) -> None:
    if not isinstance(value, Mapping):
        raise ConfigurationError(
            f"{name}={value!r:.100}: give a dict of Ray's, as {{'working_dir': '.'}}"
        )


def _check_address(name: str, value: object) -> None:
    if not isinstance(value, str) or not value:
        raise ConfigurationError(
            f"{name}={value!r:.100}: give 'auto' or the head's address, as '10.0.0.1:6379'"
        )


AMOUNT = Range("0 or more", _check_amount)


@dataclass(frozen=True)
class RayWorkers(RemoteWorkers):
    """Workers of a `DynBatcher` as Ray actors: `DynBatcher(..., workers=RayWorkers(2))`.

    This machine must be a node of the cluster: `ray start --address=HEAD:6379 --num-cpus=0`.

    Args:
        num_workers: Number of actors, each with a copy of the model; or the fewest and the most.
        num_cpus: CPUs that Ray reserves for each; numeric libraries use as many threads.
        num_gpus: GPUs that Ray reserves for each actor, the only ones it sees; may be a fraction.
        resources: Amounts of custom resources that Ray reserves for each.
        scheduling_strategy: As in Ray: "DEFAULT", "SPREAD", or an object of Ray's.
        runtime_env: As in Ray: "working_dir", "py_modules", "pip", "env_vars" and others. It brings
            the model's module to the other nodes.
        address: Address of the cluster; "auto" for the one that this machine belongs to. None for
            the environment variable `RAY_ADDRESS`, or "auto".
        placement_timeout: Seconds until an actor must have a node: long enough for Ray's autoscaler
            to start one. `start_timeout` counts from then on.

    Raises:
        ConfigurationError: An argument is wrong.
    """

    num_workers: Annotated[int | tuple[int, int], NUM_WORKERS] = 1
    num_cpus: Annotated[float, AMOUNT] = 1
    num_gpus: Annotated[float, AMOUNT] = 0
    resources: Annotated[Mapping[str, float] | None, Range("amounts", _check_resources)] = None
    scheduling_strategy: Annotated[Any, Range("as in Ray", lambda *_: None)] = None
    runtime_env: Annotated[Mapping[str, Any] | None, Range("a dict", _check_environment)] = None
    address: Annotated[str | None, Range("an address", _check_address)] = None
    placement_timeout: Annotated[float, SECONDS] = 600.0

    def __post_init__(self) -> None:
        """Check each field."""
        check_fields(self)

    @property
    def demand(self) -> dict[str, float]:
        """Amounts of resources that each actor asks for, by name; nothing that is 0."""
        named = {"CPU": self.num_cpus, "GPU": self.num_gpus, **(self.resources or {})}
        return {name: amount for name, amount in named.items() if amount}
