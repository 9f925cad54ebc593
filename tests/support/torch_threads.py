"""Models that limit PyTorch's threads, in the process of the tests."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="module", autouse=True)
def threads_as_before() -> Iterator[None]:
    """Give PyTorch the number of threads back that it had before the module's tests."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
