"""What the scheduler tells its policy about itself. A pure value."""

from typing import NamedTuple

from fast_batcher._core.service_model import ServiceModel


class Load(NamedTuple):
    """What the scheduler has besides the queue."""

    # Requests waiting in the queue.
    waiting: int
    # Requests that workers have and whose callers still wait.
    running: int
    # Workers that are not retired.
    workers: int
    max_batch_size: int
    # How long batches take. It learns from every batch while the policy learns.
    service: ServiceModel
