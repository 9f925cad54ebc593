"""The images' recipes: read strictly, and the CPU image's followed in a fresh virtual environment.

There is no Docker here: `Build` does what a build does, in a folder, with the installed Python.
"""

import fnmatch
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import venv
from importlib import metadata
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import yaml
from dockerfile_parse import DockerfileParser  # type: ignore[import-untyped]
from packaging.requirements import Requirement
from paths import ROOT
from servers import find_free_port
from waits import LIMIT

from fast_batcher.settings import Settings

DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
# Seconds for one step, which may install torch from a slow disk.
STEP_LIMIT = 2 * LIMIT
DEFAULTS = Settings()
# The virtual environment stands for the base, and the test runs the health check.
NOT_BUILT = {"FROM", "USER", "EXPOSE", "HEALTHCHECK"}

each_image = pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)


def read_steps(path: Path) -> list[tuple[str, str]]:
    """All instructions but comments, with their text."""
    with path.open("rb") as file:
        structure = DockerfileParser(fileobj=file).structure
    return [
        (step["instruction"], step["value"])
        for step in structure
        if step["instruction"] != "COMMENT"
    ]


def values(path: Path, instruction: str) -> list[str]:
    return [value for name, value in read_steps(path) if name == instruction]


def read_health_check(path: Path) -> tuple[dict[str, str], list[str]]:
    """Options and command of the only HEALTHCHECK."""
    (value,) = values(path, "HEALTHCHECK")
    options, command = value.split("CMD", 1)
    pairs = [option.removeprefix("--").split("=") for option in options.split()]
    return dict(pairs), json.loads(command)


def seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+)s", text)
    assert match, f"{text}: whole seconds are expected"
    return float(match[1])


def is_ignored(path: Path) -> bool:
    """What `.dockerignore` says of a file below the root; the last line that fits counts."""
    ignored = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        pattern = line.removeprefix("!").removeprefix("**/")
        # A line without `**/` is about the root alone; what fits a folder fits all that is in it.
        parts = path.parts if "**/" in line else path.parts[:1]
        assert "/" not in pattern, f"{line}: this reader knows no paths"
        if any(fnmatch.fnmatchcase(part, pattern) for part in parts):
            ignored = not line.startswith("!")
    return ignored


@each_image
def test_an_image_starts_from_a_slim_python_that_we_support(path: Path) -> None:
    (base,) = values(path, "FROM")
    version = re.fullmatch(r"python:(3\.\d+)-slim", base)
    assert version
    assert f"Python :: {version[1]}" in (ROOT / "pyproject.toml").read_text()
    assert "PYTHONUNBUFFERED=1" in values(path, "ENV")[0]


@each_image
def test_an_image_runs_as_a_numbered_user_that_is_not_root(path: Path) -> None:
    steps = read_steps(path)
    (user,) = values(path, "USER")
    uid, gid = map(int, user.split(":"))
    assert uid > 0
    assert gid > 0
    after = [name for name, _ in steps[steps.index(("USER", user)) :]]
    assert "RUN" not in after
    assert "COPY" not in after


@each_image
def test_the_command_is_in_exec_form_and_grants_less_than_the_grace_period(path: Path) -> None:
    (text,) = values(path, "CMD")
    command = json.loads(text)
    assert command[0] == "uvicorn"
    granted = float(command[command.index("--timeout-graceful-shutdown") + 1])
    for service in read_services().values():
        grace = seconds(service["stop_grace_period"])
        assert grace >= granted + DEFAULTS.stop_timeout + 5
        assert grace >= DEFAULTS.drain_timeout + 5


@each_image
def test_the_health_check_asks_readyz_and_waits_as_long_as_a_model_may_load(path: Path) -> None:
    options, command = read_health_check(path)
    assert seconds(options["start-period"]) >= DEFAULTS.start_timeout
    assert command[0] == "python"
    assert "/readyz" in command[-1]
    (text,) = values(path, "CMD")
    port = json.loads(text)[json.loads(text).index("--port") + 1]
    assert f":{port}/" in command[-1]


@each_image
def test_only_pip_installs_and_torch_before_any_code_is_copied(path: Path) -> None:
    runs = values(path, "RUN")
    assert all(run.startswith("pip install ") for run in runs)
    assert "torch==" in runs[0]
    order = [name for name, _ in read_steps(path) if name in ("RUN", "COPY")]
    code = read_steps(path).index(("COPY", "fast_batcher fast_batcher"))
    assert order[0] == "RUN"
    # All that the code requires, before the code.
    assert ("RUN", runs[1]) in read_steps(path)[:code]


def read_services() -> dict[str, Any]:
    compose: dict[str, dict[str, Any]]
    compose = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())
    return compose["services"]


def test_the_services_are_hardened_and_built_from_the_images() -> None:
    services = read_services()
    assert [path.name for path in DOCKERFILES] == [f"{name}.Dockerfile" for name in services]
    for name, service in services.items():
        assert service["init"] is service["read_only"] is True
        assert (service["tmpfs"], service["cap_drop"]) == (["/tmp"], ["ALL"])
        assert (ROOT / "docker" / service["build"]["context"]).resolve() == ROOT
        assert service["build"]["dockerfile"] == f"docker/{name}.Dockerfile"
    (device,) = services["cuda"]["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}
    assert "deploy" not in services["cpu"]


@pytest.mark.parametrize(
    ("name", "ignored"),
    [
        ("pyproject.toml", False),
        ("fast_batcher/_core/policy.py", False),
        ("fast_batcher/_core/__pycache__/policy.pyc", True),
        ("examples/image_classification/app.py", False),
        (".git/config", True),
        (".venv/bin/python", True),
        ("tests/project/test_docker.py", True),
    ],
)
def test_the_context_holds_what_the_images_need_and_no_more(name: str, ignored: bool) -> None:
    assert is_ignored(Path(name)) is ignored


def with_requirements(name: str) -> set[str]:
    """An installed package and all that it needs."""
    names = {name}
    for requirement in map(Requirement, metadata.requires(name) or ()):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            names |= with_requirements(requirement.name)
    return names


class Build:
    """An image as a folder, and a virtual environment in place of the base's Python.

    Args:
        folder: Empty.
        path: The recipe.
        arguments: As after `docker build --build-arg`.
    """

    def __init__(self, folder: Path, path: Path, arguments: dict[str, str]) -> None:
        self._folder = folder
        self._arguments = arguments
        self.workdir = folder
        # The machine's own settings of pip stay, as those of a build machine would. Compiling what
        # nobody imports takes a third of the time.
        self.environment = os.environ | {"PIP_NO_COMPILE": "1"}
        self.command: list[str] = []
        self._log = folder / "build.log"
        venv.create(folder / "venv", with_pip=True)
        self.environment["PATH"] = f"{folder / 'venv' / 'bin'}:{os.defpath}"
        for name in ("PYTHONPATH", "VIRTUAL_ENV"):
            self.environment.pop(name, None)
        for instruction, value in read_steps(path):
            if instruction not in NOT_BUILT:
                getattr(self, f"_do_{instruction.lower()}")(value)

    def _do_env(self, value: str) -> None:
        pairs = dict(pair.split("=", 1) for pair in shlex.split(value))
        assert pairs.pop("HOME") == "/tmp"  # the machine's own is not ours to fill
        self.environment |= pairs | {"HOME": str(self._folder)}

    def _do_arg(self, value: str) -> None:
        name, default = value.split("=", 1)
        self.environment[name] = self._arguments.get(name, default)

    def _do_workdir(self, value: str) -> None:
        self.workdir = self._folder / value.removeprefix("/")
        self.workdir.mkdir()

    def _do_copy(self, value: str) -> None:
        *sources, target = value.split()
        for source in sources:
            files = [ROOT / source] if (ROOT / source).is_file() else (ROOT / source).rglob("*")
            for file in files:
                relative = file.relative_to(ROOT)
                if file.is_dir() or is_ignored(relative):
                    continue
                # A folder's content goes into the target, as in a real build.
                is_whole = file == ROOT / source
                inside = file.name if is_whole else file.relative_to(ROOT / source)
                to = self.workdir / target / inside
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, to)

    def _do_run(self, value: str) -> None:
        if f" torch=={metadata.version('torch').partition('+')[0]}" in value:
            self._share_torch()
        with self._log.open("ab") as log:
            status = self.start(["/bin/sh", "-c", value], stdout=log).wait(STEP_LIMIT)
        assert status == 0, f"RUN {value}\n{self._log.read_text()[-3000:]}"

    def _share_torch(self) -> None:
        """Let pip find the torch that it is told to install: it is installed here, from there.

        To fetch and unpack it once more takes longer than all the rest.
        """
        shared = self._folder / "shared"
        shared.mkdir()
        for name in with_requirements("torch"):
            package = metadata.distribution(name)
            for top in {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}:
                if not (shared / top).is_symlink():  # several may have a part of one folder
                    (shared / top).symlink_to(Path(str(package.locate_file(top))))
        # Outside the environment, so that pip removes nothing of it.
        (packages,) = (self._folder / "venv").glob("lib/python*/site-packages")
        (packages / "shared.pth").write_text(f"{shared}\n")

    def _do_cmd(self, value: str) -> None:
        self.command = json.loads(value)

    def start(self, command: list[str], stdout: Any = None, **more: str) -> subprocess.Popen[bytes]:
        """Start a command inside."""
        environment = self.environment | more
        # A command is looked up by the PATH of who starts it, so by hand.
        program = shutil.which(command[0], path=environment["PATH"])
        assert program, f"{command[0]} is not installed"
        return subprocess.Popen(
            [program, *command[1:]],
            cwd=self.workdir,
            env=environment,
            stdout=stdout,
            stderr=subprocess.STDOUT if stdout else None,
        )


@pytest.mark.slow
@pytest.mark.timeout(STEP_LIMIT * 3)
def test_the_cpu_image_installs_serves_and_is_healthy(tmp_path: Path) -> None:
    path = ROOT / "docker" / "cpu.Dockerfile"
    # The index that this machine installs torch from, with whatever else pip is told about it: so
    # no more is fetched than for the environment that runs this test.
    build = Build(
        tmp_path, path, {"TORCH_INDEX": os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple")}
    )
    _, health_check = read_health_check(path)
    # As if the container had this port.
    port = str(find_free_port())
    command = [part.replace("8000", port) for part in build.command]
    health_check = [part.replace("8000", port) for part in health_check]

    def is_healthy() -> bool:
        with (tmp_path / "health.log").open("ab") as log:
            return build.start(health_check, stdout=log).wait(LIMIT) == 0

    assert not is_healthy()
    with (tmp_path / "server.log").open("ab") as log:
        server = build.start(command, stdout=log, RESNET_ARCH="resnet18")
    try:
        deadline = monotonic() + LIMIT
        while not is_healthy():  # each try takes the time of an interpreter's start
            assert server.poll() is None, (tmp_path / "server.log").read_text()
            assert monotonic() < deadline, (tmp_path / "server.log").read_text()
        server.send_signal(signal.SIGTERM)
        status = server.wait(LIMIT)
    finally:
        server.kill()
        server.wait()
    assert status in (0, -signal.SIGTERM)
    assert "Application shutdown complete" in (tmp_path / "server.log").read_text()
    assert not is_healthy()
    shutil.rmtree(tmp_path / "venv")  # 1 GB that nobody reads
