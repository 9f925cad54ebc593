"""A Ray cluster of two nodes on this machine, for all tests of a run."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
from paths import PYTHONPATH
from ray_nodes import FAST, OTHER, RayCluster
from shared_hosts import hosts
from waits import ONE_LOOP

__all__ = ["hosts"]


@pytest.fixture(scope="module")
def anyio_backend() -> Any:
    return ONE_LOOP


@pytest.fixture(scope="session")
def nodes() -> Iterator[RayCluster]:
    """The cluster; it is the same for all tests, which leave it as it was."""
    cluster = RayCluster(PYTHONPATH)
    try:
        cluster.start(OTHER)
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def cluster(nodes: RayCluster, hosts: Any, monkeypatch: pytest.MonkeyPatch) -> RayCluster:
    """The cluster, for batchers of this test, whose hosts end with it."""
    for name, value in FAST.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RAY_ADDRESS", nodes.address)
    assert "RAY_ADDRESS" in os.environ
    return nodes
