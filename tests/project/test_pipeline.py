"""The pipeline example: its answers, its batches, its one deadline, and clients that leave."""

import io
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest
import raw_http
from paths import ROOT
from PIL import Image, ImageDraw
from servers import ask_until, run_server
from waits import LIMIT, SOON, SOON_IN_WORKER, Gate, Visit

pytestmark = pytest.mark.slow


def encode(image: Image.Image, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


def draw_objects() -> Image.Image:
    """Three objects, one of them between the rows and the columns of another one."""
    paper = Image.new("RGB", (320, 240), "white")
    pen = ImageDraw.Draw(paper)
    pen.ellipse((20, 10, 89, 79), "red")
    pen.rectangle((120, 40, 219, 99), "blue")
    pen.polygon([(60, 220), (140, 220), (100, 90)], "green")
    pen.point((300, 20), "black")  # dust
    return paper


def draw_ellipse() -> bytes:
    paper = Image.new("RGB", (64, 64), "white")
    ImageDraw.Draw(paper).ellipse((10, 20, 49, 39), "red")
    return encode(paper)


OBJECTS = encode(draw_objects())
FOUND = [
    {"box": [20, 10, 90, 80], "label": "ellipse"},
    {"box": [120, 40, 220, 100], "label": "rectangle"},
    {"box": [60, 90, 141, 221], "label": "triangle"},
]
ELLIPSE = draw_ellipse()
FOUND_ELLIPSE = [{"box": [10, 20, 50, 40], "label": "ellipse"}]


# --- the app as it is -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with run_server("examples.pipeline.app:app", ROOT) as address:
        yield address


@pytest.fixture
def client(address: str) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=address, timeout=LIMIT, trust_env=False) as client:
        yield client


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_each_object_has_its_box_and_label(client: httpx2.Client, kind: str) -> None:
    answer = client.post("/objects", content=encode(draw_objects(), kind))
    assert (answer.status_code, answer.json()) == (200, FOUND)


def test_another_endpoint_uses_the_classifier_alone(client: httpx2.Client) -> None:
    before = client.get("/stats").json()
    assert client.post("/classify", content=ELLIPSE).json() == {"label": "ellipse"}
    after = client.get("/stats").json()
    assert after["classifier"]["completed"] == before["classifier"]["completed"] + 1
    assert after["detector"] == before["detector"]


def test_a_picture_without_objects_never_reaches_the_classifier(client: httpx2.Client) -> None:
    before = client.get("/stats").json()["classifier"]
    answer = client.post("/objects", content=encode(Image.new("RGB", (320, 240), "white")))
    assert (answer.status_code, answer.json()) == (200, [])
    assert client.get("/stats").json()["classifier"] == before


@pytest.mark.parametrize("path", ["/objects", "/classify"])
@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "not a JPEG or PNG"),
        (ELLIPSE[: len(ELLIPSE) // 2], "not a JPEG or PNG"),
        (encode(Image.new("1", (4000, 1001))), "at most 4000000 pixels"),
    ],
    ids=["empty", "cut off", "too large"],
)
def test_invalid_picture_is_422(client: httpx2.Client, path: str, body: bytes, reason: str) -> None:
    before = client.get("/stats").json()
    answer = client.post(path, content=body)
    assert answer.status_code == 422
    assert reason in answer.json()["detail"]
    assert client.get("/stats").json() == before


# --- with models that wait at a gate --------------------------------------------------------------


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gate]:
    gate = Gate(str(tmp_path_factory.mktemp("pipeline") / "gate"))
    yield gate
    gate.close()


@pytest.fixture(scope="module")
def held(gate: Gate) -> Iterator[str]:
    """Address of the app whose models wait at the gate; without a header nothing expires."""
    settings = {"GATE": gate.path, "BUDGET": str(LIMIT)}
    with run_server("apps.pipeline:app", ROOT, settings=settings) as address:
        yield address


@pytest.fixture
def clients() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


# Waits until a model is at the gate with a batch of this size.
Arrive = Callable[..., Visit]


# Needs `clients` so that, where a test has failed, the models go on before clients are waited for.
@pytest.fixture
def arrive(gate: Gate, clients: ThreadPoolExecutor) -> Iterator[Arrive]:
    visits: list[Visit] = []

    def wait(model: str, size: int = 1) -> Visit:
        visits.append(gate.wait())
        assert visits[-1].note == [model, size]
        return visits[-1]

    yield wait
    for visit in visits:
        visit.let_on()


def post(address: str, picture: bytes, timeout: float | None = None) -> httpx2.Response:
    headers = {} if timeout is None else {"X-Request-Timeout": str(timeout)}
    return httpx2.post(f"{address}/objects", content=picture, headers=headers, timeout=LIMIT)


def assert_goes_on(address: str, clients: ThreadPoolExecutor, arrive: Arrive) -> None:
    """Both models answer the next request."""
    answer = clients.submit(post, address, ELLIPSE)
    arrive("detector").let_on()
    arrive("classifier").let_on()
    assert answer.result(LIMIT).json() == FOUND_ELLIPSE


def test_objects_of_several_pictures_share_a_batch(
    held: str, clients: ThreadPoolExecutor, arrive: Arrive
) -> None:
    answers = [clients.submit(post, held, ELLIPSE)]
    arrive("detector").let_on()
    running = arrive("classifier")
    for waiting in (3, 6, 9):
        answers.append(clients.submit(post, held, OBJECTS))
        arrive("detector").let_on()
        ask_until(held, classifier_waiting=waiting)
    running.let_on()
    arrive("classifier", size=9).let_on()
    assert [one.result(LIMIT).json() for one in answers] == [FOUND_ELLIPSE] + 3 * [FOUND]


def test_deadline_in_first_model_ends_the_chain(
    held: str, clients: ThreadPoolExecutor, arrive: Arrive
) -> None:
    before = ask_until(held)
    answer = clients.submit(post, held, OBJECTS, SOON)
    visit = arrive("detector")
    assert answer.result(LIMIT).status_code == 504
    visit.let_on()
    after = ask_until(held, detector_expired=before["detector_expired"] + 1)
    assert after["classifier_submitted"] == before["classifier_submitted"]
    assert_goes_on(held, clients, arrive)


def test_second_model_gets_the_remaining_time(
    held: str, clients: ThreadPoolExecutor, arrive: Arrive
) -> None:
    before = ask_until(held)
    answer = clients.submit(post, held, ELLIPSE, SOON_IN_WORKER)
    arrive("detector").let_on()
    visit = arrive("classifier")
    assert answer.result(LIMIT).status_code == 504
    (left,) = re.findall(r"its timeout of ([\d.]+) seconds", answer.result().json()["detail"])
    assert float(left) < SOON_IN_WORKER
    visit.let_on()
    ask_until(held, classifier_expired=before["classifier_expired"] + 1)
    assert_goes_on(held, clients, arrive)


@pytest.mark.parametrize(("model", "requests"), [("detector", 1), ("classifier", 3)])
def test_disconnect_cancels_the_running_call(
    held: str, clients: ThreadPoolExecutor, arrive: Arrive, model: str, requests: int
) -> None:
    before = ask_until(held)
    with raw_http.connect(held) as leaving:
        length = f"Content-Length: {len(OBJECTS)}"
        leaving.sendall(raw_http.head("/objects", length) + OBJECTS)
        visit = arrive("detector")
        if model == "classifier":
            visit.let_on()
            visit = arrive("classifier", requests)
    cancelled = f"{model}_cancelled"
    ask_until(held, **{cancelled: before[cancelled] + requests, f"{model}_running": 0})
    visit.let_on()
    # A chain that went on would send its objects to the gate before these.
    assert_goes_on(held, clients, arrive)
