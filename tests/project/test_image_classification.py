"""The image classification example: the network, what becomes of an image, and the app."""

import hashlib
import io
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import numpy as np
import pytest
import torch
from paths import ROOT
from PIL import Image
from waits import LIMIT

from benchmarks.load.server import serve
from examples.image_classification.model import ImageClassifier, decode, to_input
from examples.image_classification.prediction import ARRAY_SHAPE, Prediction
from examples.image_classification.resnet import ARCHITECTURES

# Of torchvision 0.29.2's models: SHA-256 of a line for each entry of the state dict, its name and
# its shape as a tuple, in order and joined by newlines.
TORCHVISION = {
    "resnet18": "84fb10d9c6905a1cbb020b284537dc97c4f4ec55fb2a780a41152a23a2dd0e9d",
    "resnet50": "d7e4f8bb0a5363446a59c81c3887ccf66900a11651a0ae2dec96d1bb1eb6ea81",
    "resnet101": "02c0f34f4842751f30e27e18a544ca36a8b33358f344c3c3165fd269ce97cd94",
}
# Batches of other sizes add floats in another order.
TOLERANCE = 1e-3


def encode(image: Image.Image, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


def make_image(seed: int) -> bytes:
    """Noise: two seeds, two images that a network tells apart."""
    pixels = np.random.default_rng(seed).integers(0, 256, (64, 96, 3), dtype=np.uint8)
    return encode(Image.fromarray(pixels))


@pytest.fixture
def classifier() -> Iterator[ImageClassifier]:
    classifier = ImageClassifier("resnet18")
    yield classifier
    classifier.close()


# --- the network ----------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", TORCHVISION)
def test_network_has_torchvision_parameters(arch: str) -> None:
    network = ARCHITECTURES[arch](classes=1000).eval()
    state = network.state_dict()
    text = "\n".join(f"{name} {tuple(value.shape)}" for name, value in state.items())
    assert hashlib.sha256(text.encode()).hexdigest() == TORCHVISION[arch]
    if arch != "resnet101":  # which only has more of the same blocks
        with torch.inference_mode():
            assert network(torch.zeros(2, 3, 64, 64)).shape == (2, 1000)


# --- the model ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_batch_and_single_images_give_equal_results(classifier: ImageClassifier) -> None:
    images = [classifier.prepare(make_image(seed)) for seed in range(3)]
    alone = []
    for image in images:
        (answer,) = classifier.infer([image])
        assert isinstance(answer, Prediction)
        alone.append(answer)
    assert len({answer.score for answer in alone}) == 3
    for answer, expected in zip(classifier.infer(images), alone, strict=True):
        assert isinstance(answer, Prediction)
        assert answer.label == expected.label
        assert answer.score == pytest.approx(expected.score, rel=TOLERANCE)


def array_of(image: bytes) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Input of the network for this image."""
    return to_input(torch.tensor(decode(image))[None], torch.float32)[0].contiguous().numpy()


# --- the app --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    labels = tmp_path_factory.mktemp("labels") / "labels.txt"
    labels.write_text("".join(f"name {index}\n" for index in range(1000)))
    settings = {"RESNET_ARCH": "resnet18", "RESNET_LABELS": str(labels), "MAX_BATCH_SIZE": "4"}
    with serve("examples.image_classification.app:app", settings) as server:
        yield f"http://127.0.0.1:{server.port}"


@pytest.fixture
def client(address: str) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=address, timeout=LIMIT, trust_env=False) as client:
        yield client


@pytest.mark.slow
def test_concurrent_images_get_their_own_answers(
    client: httpx2.Client, classifier: ImageClassifier
) -> None:
    images = [make_image(seed) for seed in range(6)]
    sent = [("/classify", image) for image in images] + [("/classify", b"broken")] * 5
    sent += [("/classify-array", array_of(image).tobytes()) for image in images]
    before = client.get("/stats").json()["ImageClassifier"]
    with ThreadPoolExecutor(len(sent)) as pool:
        answers = list(pool.map(lambda one: client.post(one[0], content=one[1]), sent))
    for answer in answers[6:11]:
        assert (answer.status_code, answer.json()["code"]) == (422, "not_an_image")
    del answers[6:11]
    expected_ones = 2 * list(classifier.infer([classifier.prepare(image) for image in images]))
    for answer, expected in zip(answers, expected_ones, strict=True):
        assert isinstance(expected, Prediction)
        assert answer.status_code == 200
        assert answer.json()["label"] == expected.label.replace("class", "name")
        assert answer.json()["score"] == pytest.approx(expected.score, rel=TOLERANCE)
    after = client.get("/stats").json()["ImageClassifier"]
    assert after["completed"] - before["completed"] == 12
    assert after["failed"] - before["failed"] == 5
    assert max(map(int, after["batch_sizes"])) <= 4


@pytest.mark.slow
def test_invalid_array_is_rejected(client: httpx2.Client) -> None:
    answer = client.post("/classify-array", content=bytes(602_111))
    assert answer.status_code == 422
    assert answer.json()["code"] == "wrong_length"
    assert "602112 bytes, the body 602111" in answer.json()["detail"]
    answer = client.post("/classify-array", content=np.full(ARRAY_SHAPE, np.nan, "<f4").tobytes())
    assert (answer.status_code, answer.json()["code"]) == (422, "not_an_image")


@pytest.mark.slow
def test_the_api_process_needs_neither_torch_nor_pillow() -> None:
    code = "import sys, examples.image_classification.app as app; "
    code += "assert not {'torch', 'PIL', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=LIMIT)
