"""Methods of one model, each with a batch size and learned times of its own. Pure.

Requests of different methods never share a batch: each request is in a group of its method.
"""

from fast_batcher._core.batch_times import SizeCap
from fast_batcher._core.messages import Group
from fast_batcher._core.service_model import ServiceModel


class Method:
    """A method of a model that has several.

    Args:
        name: Its name; "infer" for the unnamed one.
        max_batch_size: Most requests in a batch, None for the batcher's.
        default_size: The batcher's `max_batch_size`.
    """

    def __init__(self, name: str, max_batch_size: int | None, default_size: int) -> None:
        self.name = name
        self._max_batch_size = max_batch_size
        self.size_cap = SizeCap(max_batch_size or default_size)
        self.service = ServiceModel()
        # The group of its requests, where there is no `group_by`.
        self.group = Group(None, self)

    def reconfigure(self, default_size: int) -> None:
        """Use another `max_batch_size` of the batcher, unless the method has its own."""
        if self._max_batch_size is None:
            self.size_cap.limit(default_size)


def method_of(group: Group | None) -> Method | None:
    """Return the method of a group; None if the model has only one."""
    return None if group is None else group.method


def cap_of(group: Group | None, default: SizeCap) -> SizeCap:
    """Return the limit of the batches of a group."""
    method = method_of(group)
    return default if method is None else method.size_cap
