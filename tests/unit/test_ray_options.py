"""`RayWorkers` and the options beside it: what is refused, and with which remedy."""

from typing import Any

import pytest
from models.base import Echo

from fast_batcher import ConfigurationError, DynBatcher
from fast_batcher._ray.handle import list_differing
from fast_batcher.ray import RayWorkers


def test_versions_that_differ_are_named() -> None:
    ours = {"Python": "3.11", "ray": "2.60.0", "fast_batcher": "0.1.0"}
    assert list_differing(ours, {**ours, "more": "1"}) == []
    assert list_differing(ours, {"Python": "3.12", "ray": "2.60.0"}) == [
        "Python 3.12 in place of the 3.11",
        "fast_batcher without a version in place of the 0.1.0",
    ]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"devices": ["cpu"]}, "num_gpus="),
        ({"mps": True}, "start MPS on the nodes"),
        ({"max_rss_bytes": 1}, "max_batches_per_worker="),
        ({"num_workers": 3}, "num_workers=3"),
        ({"workers": 3}, "RayWorkers"),
    ],
)
def test_local_options_are_rejected_with_remedy(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        DynBatcher(Echo, **{"workers": RayWorkers(2), **options})


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"num_workers": 0}, "num_workers=0"),
        ({"num_gpus": -1}, "num_gpus=-1"),
        ({"resources": [1]}, "resources="),
        ({"runtime_env": "."}, "runtime_env="),
        ({"address": ""}, "address="),
        ({"placement_timeout": 0}, "placement_timeout=0"),
    ],
)
def test_arguments_of_workers_are_checked(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        RayWorkers(**arguments)
