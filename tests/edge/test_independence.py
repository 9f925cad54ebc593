"""Independence of the batch: the check of the test kit and of `fast-batcher doctor`."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models.dependent import Encoder
from paths import PYTHONPATH, ROOT
from programs import run_command

from examples.embeddings.model import MiniLM
from examples.image_classification.model import ImageClassifier
from fast_batcher import ConfigurationError, InferenceModel, batchable
from fast_batcher._independence import find_change
from fast_batcher.testing import BatcherKit, assert_independent

pytestmark = pytest.mark.slow

COMMAND = [sys.executable, "-m", "fast_batcher", "doctor"]
TEXTS = [[5, 7, 9], [8, 1, 2], [4, 4, 4, 3, 2, 9, 1, 6]]
FAULTS = {
    "mask": "beside a longer one: is the attention mask passed",
    "mean": "beside a longer one: is the attention mask passed, and is padding left out of means?",
    "norm": "beside another of its size: does it use statistics of the batch",
    "dropout": "from batch to batch: is a random layer active",
    "order": "beside another of its size",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_that_batches_expose_are_named(fault: Any) -> None:
    with pytest.raises(AssertionError) as caught:
        assert_independent(Encoder, TEXTS, model_args=[fault])
    assert str(caught.value).startswith("Encoder: the output for an input changes by ")
    assert FAULTS[fault] in str(caught.value)


@pytest.fixture
def no_monitor(monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread of a progress bar outlives the test."""
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)


@pytest.mark.usefixtures("no_monitor")
def test_models_without_a_fault_pass() -> None:
    assert_independent(Encoder, TEXTS)
    with BatcherKit():
        assert_independent(Encoder, TEXTS[:1])
    assert_independent(MiniLM, ["A cat.", "It rains today, and tomorrow, too.", "A dog."])
    images = np.random.default_rng(0).standard_normal((3, 3, 224, 224), np.float32)
    assert_independent(ImageClassifier, list(images), model_kwargs={"arch": "resnet18"})


class Counts(InferenceModel[Any, Any]):
    """Has a method that depends on its batch, one that does not, and no `infer`."""

    @batchable
    def wrong(self, inputs: list[int]) -> list[int]:
        return [len(inputs)] * len(inputs)

    @batchable
    def right(self, inputs: list[int]) -> list[int]:
        return inputs


def test_methods_are_checked() -> None:
    assert_independent(Counts, [1, 2], method="right")
    with pytest.raises(AssertionError, match="the output for an input changes"):
        assert_independent(Counts, [1, 2], method="wrong")


def test_optimised_python_checks_too() -> None:
    done = run_command(
        [sys.executable, "-O", "-c", OPTIMISED], env={"PATH": "", "PYTHONPATH": PYTHONPATH}
    )
    assert done.returncode == 0, done.stderr


OPTIMISED = """
from models.dependent import Encoder
from fast_batcher.testing import assert_independent
try:
    assert_independent(Encoder, [[5, 7, 9], [8, 1, 2]], model_args=["norm"])
except AssertionError:
    pass
else:
    raise SystemExit("it passes")
"""


def test_no_input_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="give one or more inputs"):
        assert_independent(Encoder, [])


@pytest.mark.parametrize(
    ("one", "other", "change"),
    [
        (1.0, 1.005, 0.0),
        (1.0, 1.5, 0.5),
        ([1, 2.0], [1, 2.0], 0.0),
        ([1, 2], [1, 3], 0.5),
        ("cat", "cat", 0.0),
        ("cat", "dog", math.inf),
        ({"a": 1.0}, {"b": 1.0}, math.inf),
        (b'{"vector": [1, 2.0]}', b'{"vector": [1, 2.0001]}', 0.0),
        (np.array([0, 100], np.float32), np.array([0.5, 100], np.float32), 0.0),
        (np.array([math.nan, math.inf]), np.array([math.nan, math.inf]), 0.0),
        (np.array([1.0, 2.0]), np.array([math.nan, 2.0]), math.inf),
        (np.array([1.0, 2.0]), np.array([1.001, math.nan]), math.inf),
        (np.zeros(2), np.zeros(3), math.inf),
        (np.array(["a"]), np.array(["a"]), 0.0),
        (torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([1.03], dtype=torch.bfloat16), 0),
        (torch.tensor([2.0]), torch.tensor([3.0]), 0.5),
        (10**400, 10**400, 0.0),
        (10**400, 2 * 10**400, 1.0),
        (10**400, 1.5, math.inf),
        (np.array([("a", 1)], "U1, i4"), np.array([("a", 1)], "U1, i4"), 0.0),
        (np.array([("a", 1)], "U1, i4"), np.array([("a", 2)], "U1, i4"), math.inf),
        (np.array([[1], None], object), np.array([[1], None], object), 0.0),
        (np.array([np.ones(2), 1], object), np.array([np.ones(2), 1], object), 0.0),
        (np.array([np.ones(2), 1], object), np.array([np.zeros(2), 1], object), math.inf),
        (True, False, math.inf),
        (None, None, 0.0),
    ],
)
def test_changes_beyond_rounding_are_measured(one: Any, other: Any, change: float) -> None:
    assert find_change(one, other) == pytest.approx(change)


def test_doctor_compares_batches(tmp_path: Path) -> None:
    inputs = tmp_path / "inputs.json"
    inputs.write_text(json.dumps(TEXTS))
    (tmp_path / "app.py").write_text(
        "from fast_batcher import DynBatcher\nfrom models.dependent import Encoder\n"
        "right, wrong = (DynBatcher(Encoder, model_args=[fault]) for fault in ('', 'mask'))\n"
    )
    for name, level in (("right", "good"), ("wrong", "bad")):
        done = run_command(
            [*COMMAND, f"app:{name}", "--json", "--inputs", str(inputs)],
            cwd=tmp_path,
            env={"PATH": "", "PYTHONPATH": f"{PYTHONPATH}:{ROOT}"},
        )
        checks = {check["name"]: check for check in json.loads(done.stdout)}
        assert checks["batch independence"]["level"] == level
        assert done.returncode == (level == "bad")
