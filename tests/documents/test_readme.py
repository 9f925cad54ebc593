"""Programs of README and documents: their format, and runs with an installed package."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import httpx2
import numpy as np
import pytest
from paths import ROOT
from programs import run_command
from servers import run_server
from waits import LIMIT
from websocket_client import open_websocket
from wheels import build, install

README = (ROOT / "README.md").read_text()
PAGES = {page.name: page.read_text() for page in sorted((ROOT / "docs").glob("*.md"))}

# A fenced block: its language and its text. The fence may be indented inside a list.
BLOCK = re.compile(r"^([ ]*)```(\w*)[^\n]*\n(.*?)^\1```[ ]*$", re.MULTILINE | re.DOTALL)


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of this language, without the indentation of their fence."""
    found = []
    for indentation, name, body in BLOCK.findall(text):
        if name == language:
            found.append(re.sub(f"^{indentation}", "", body, flags=re.MULTILINE))
    return found


PROGRAMS = [one for page in (README, *PAGES.values()) for one in blocks(page, "python")]
# Modules of ours that a block imports from must have what it imports.
OURS = "fast_batcher"


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_imported_names_of_programs_exist(number: int) -> None:
    imports = [
        ast.unparse(node)
        for node in ast.walk(ast.parse(PROGRAMS[number]))
        if (isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == OURS)
        or (isinstance(node, ast.Import) and node.names[0].name.split(".")[0] == OURS)
    ]
    for statement in imports:
        exec(statement, {})


@pytest.mark.slow
def test_every_program_is_formatted_as_ours_are(tmp_path: Path) -> None:
    pytest.importorskip("ruff")
    for number, program in enumerate(PROGRAMS):
        (tmp_path / f"program_{number}.py").write_text(program)
    command = [sys.executable, "-m", "ruff", "format", "--diff"]
    done = run_command([*command, "--config", str(ROOT / "pyproject.toml"), str(tmp_path)])
    assert done.returncode == 0, done.stdout + done.stderr


# --- as a reader who has installed the package ----------------------------------------------------

# Programs that are to be saved, by the name of the file, and the command lines that serve them.
SAVED = {
    name[1]: program
    for program in PROGRAMS
    if (name := re.match(r'"""Save as `([^`]+)`', program)) is not None
}
# `test_guides.py` serves two of them, with weights from the disk; one answers over a WebSocket.
ELSEWHERE = {"plain:app", "service:app", "sums:app"}
APPS = [
    app for app in re.findall(r"run `uvicorn ([^`]+)`", "".join(PROGRAMS)) if app not in ELSEWHERE
]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The Python of an environment that has the wheel, and what this one has beside our package."""
    folder = tmp_path_factory.mktemp("installed")
    return install(build("wheel", folder), folder / "env")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A folder with the programs, and the weights of one of them."""
    for name, program in SAVED.items():
        (tmp_path / name).write_text(program)
    (tmp_path / "weights.bin").write_text("3.5")
    return tmp_path


def run(python: str, code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "program.py").write_text(code)
    return run_command([python, "program.py"], cwd=folder, env={})


@pytest.mark.slow
def test_wheel_has_only_the_package(installed: str, tmp_path: Path) -> None:
    found = (
        "from importlib.util import find_spec\nimport fast_batcher\nprint(fast_batcher.__file__)"
    )
    done = run(
        installed, f"{found}\nprint(find_spec('examples'), find_spec('benchmarks'))", tmp_path
    )
    path, others = done.stdout.splitlines()
    assert Path(path).is_relative_to(Path(installed).parents[1])
    page = Path(path).parent / "fastapi" / "status"
    assert all((page / name).exists() for name in ("page.html", "style.css", "script.js"))
    assert others == "None None"


def test_the_table_of_pages_is_complete() -> None:
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"}
    table = README[README.index("## Documentation") :]
    assert pages - set(re.findall(r"docs/(\w+\.md)\)", table)) == set()


def test_the_first_command_serves_the_first_program() -> None:
    (install, start) = blocks(README, "console")[0].splitlines()
    assert install == "pip install '.[fastapi]' uvicorn"
    assert start == f"uvicorn {APPS[0]}"
    assert next(iter(SAVED)) == f"{APPS[0].partition(':')[0]}.py"
    assert SAVED["app.py"] == PROGRAMS[0]


# A path of some apps, and the text of the answer.
ANSWERS = {
    "chain:app": ("/shout-words/hello-world", '["HELLO!","WORLD!"]'),
    "chunks:app": ("/events/ab", 'id: 0\n\ndata: "a"\n\ndata: "b"\n\n'),
}


@pytest.mark.slow
@pytest.mark.parametrize("app", APPS)
def test_an_installed_package_serves_each_app(app: str, installed: str, saved: Path) -> None:
    with (
        run_server(app, saved, python=installed) as address,
        httpx2.Client(base_url=address, timeout=LIMIT) as client,
    ):
        if app == "pixels:app":
            pixels = np.full((3, 224, 224), 0.5, "<f4").tobytes()
            assert client.post("/brightness", content=pixels).json() == 0.5
            assert client.post("/mean-byte", content=bytes([3]) * 100_000).json() == 3
            assert client.post("/brightness", content=pixels[1:]).status_code == 422
        elif app == "rows:app":
            answer = client.post("/embed", json={"text": "hello"})
            assert answer.json() == {"embedding": [1.0] * 384}
            assert client.post("/embed", json={"text": 5}).status_code == 422
        elif app == "short:app":
            answer = client.post("/shout", json={"text": "hello"})
            assert answer.json() == {"text": "HELLO!"}
            assert client.post("/shout", json={"text": 5}).status_code == 422
        elif app == "scores:app":
            item = {"features": [1, 2, 3, 4], "temperature": 2}
            scores = client.post("/scores", json=item).json()
            assert len(scores) == 3
            assert sum(scores) == pytest.approx(1)
            assert client.post("/scores", json={**item, "temperature": 0}).status_code == 422
        elif app in ANSWERS:
            path, text = ANSWERS[app]
            assert client.get(path).text == text
        else:
            assert client.get("/shout/hello").json() == "HELLO!"
        if app == "shared:app":
            answer = client.get("/shout/hello", headers={"X-Request-Timeout": "1e-9"})
            assert answer.json()["code"].startswith("deadline")
            assert answer.status_code in (503, 504)
        if app == "scores:app":
            assert client.get("/livez").json() == {"status": "alive"}
            assert client.get("/readyz").json()["status"] == "ready"


@pytest.mark.slow
def test_an_installed_package_serves_sessions(installed: str, saved: Path) -> None:
    with (
        run_server("sums:app", saved, python=installed) as address,
        open_websocket(address, "/sum") as socket,
    ):
        for number in "12":
            socket.send(number)
        assert [socket.receive() for _ in "12"] == ["1", "3"]


@pytest.mark.slow
def test_an_installed_package_runs_the_model(installed: str, saved: Path) -> None:
    (program,) = [one for one in PROGRAMS if "from models import" in one]
    use = """
import asyncio


async def main():
    async with batcher:
        print(await batcher.process_many(["a", "few", "texts"]))


if __name__ == "__main__":
    asyncio.run(main())
"""
    # It makes two batchers: each of them is used.
    for line in re.findall(r"^batcher = .*\n", program, re.MULTILINE):
        done = run(installed, program.partition("batcher =")[0] + line + use, saved)
        assert (done.stdout, done.returncode) == ("[1.0, 3.0, 5.0]\n", 0), done.stderr


@pytest.mark.slow
def test_an_installed_package_runs_a_decorated_function(installed: str, tmp_path: Path) -> None:
    program, *_ = blocks(PAGES["decorators.md"], "python")
    done = run(installed, program, tmp_path)
    assert (done.stdout, done.stderr, done.returncode) == ("3 [2, 7]\n", "", 0)


@pytest.mark.slow
def test_installed_package_passes_app_tests(installed: str, saved: Path) -> None:
    done = run_command(
        [installed, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_app.py"], cwd=saved
    )
    assert "3 passed" in done.stdout, done.stdout + done.stderr
