"""`Replica`: the state of one worker of a pool, over the processes that follow each other.

API process, event loop's thread.
"""

import itertools
import os
from typing import TYPE_CHECKING

from fast_batcher._core.supervision import Restarts
from fast_batcher._devices import Placement, place_workers
from fast_batcher.model_spec import ModelSpec
from fast_batcher.settings import Settings

if TYPE_CHECKING:
    from asyncio import TimerHandle

    from fast_batcher._parent.worker import WorkerHandle


class Replica:
    """A worker of a batcher, over the processes that follow each other."""

    def __init__(
        self, index: int, model_spec: ModelSpec, settings: Settings, placement: Placement
    ) -> None:
        self.index = index
        # The model of the next process.
        self.model_spec = model_spec
        # The device of every process of this replica.
        self.placement = placement
        # Ids for the processes of this replica; no two processes of a pool share an id.
        self.ids = itertools.count(index, settings.num_workers)
        # None while the replica waits for a restart.
        self.worker: WorkerHandle | None = None
        # A process that loads its model while the worker that it will replace still serves.
        self.successor: WorkerHandle | None = None
        self.restart_timer: TimerHandle | None = None
        self.restarts = Restarts(
            settings.max_restarts, settings.restart_window, settings.restart_backoff
        )
        # The restart budget is spent, and no worker has been ready since.
        self.is_given_up = False


def make_replicas(model_spec: ModelSpec, settings: Settings) -> list[Replica]:
    """Make the replicas of a pool, each with its device."""
    placements = place_workers(settings.devices, settings.num_workers, os.environ)
    return [
        Replica(index, model_spec, settings, placement)
        for index, placement in enumerate(placements)
    ]
