"""The recipes of the images keep what `docs/deployment.md` promises; nothing is built."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from dockerfile_parse import DockerfileParser  # type: ignore[import-untyped]
from paths import ROOT

from fast_batcher.settings import Settings

DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
DEFAULTS = Settings()

each_image = pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)


def read_steps(path: Path) -> list[tuple[str, str]]:
    """All instructions but comments, with their text."""
    with path.open("rb") as file:
        steps = DockerfileParser(fileobj=file).structure
    return [(one["instruction"], one["value"]) for one in steps if one["instruction"] != "COMMENT"]


def values(path: Path, instruction: str) -> list[str]:
    return [value for name, value in read_steps(path) if name == instruction]


def read_services() -> dict[str, Any]:
    services: dict[str, Any]
    services = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())["services"]
    return services


@each_image
def test_an_image_is_slim_runs_as_a_numbered_user_and_installs_before_any_code(path: Path) -> None:
    (base,) = values(path, "FROM")
    version = re.fullmatch(r"python:(3\.\d+)-slim", base)
    assert version
    assert f"Python :: {version[1]}" in (ROOT / "pyproject.toml").read_text()
    (user,) = values(path, "USER")
    assert all(int(number) > 0 for number in user.split(":"))
    order = [name for name, _ in read_steps(path) if name in ("RUN", "COPY", "USER")]
    assert (order[0], order[-1]) == ("RUN", "USER")
    installs = values(path, "RUN")
    assert all(run.startswith("pip install ") for run in installs)
    assert "torch==" in installs[0]


@each_image
def test_an_image_is_healthy_in_time_and_is_granted_the_time_to_end(path: Path) -> None:
    (text,) = values(path, "CMD")
    command = json.loads(text)
    granted = float(command[command.index("--timeout-graceful-shutdown") + 1])
    for service in read_services().values():
        grace = float(service["stop_grace_period"].removesuffix("s"))
        assert grace >= granted + DEFAULTS.stop_timeout + 5
        assert grace >= DEFAULTS.drain_timeout + 5
    (check,) = values(path, "HEALTHCHECK")
    started = re.search(r"--start-period=(\d+)s", check)
    assert started
    assert float(started[1]) >= DEFAULTS.start_timeout
    assert f":{command[command.index('--port') + 1]}/readyz" in check


def test_the_services_are_hardened_and_built_from_the_images() -> None:
    services = read_services()
    assert [path.name for path in DOCKERFILES] == [f"{name}.Dockerfile" for name in services]
    for name, service in services.items():
        assert service["init"] is service["read_only"] is True
        assert (service["tmpfs"], service["cap_drop"]) == (["/tmp"], ["ALL"])
        assert service["build"]["dockerfile"] == f"docker/{name}.Dockerfile"
