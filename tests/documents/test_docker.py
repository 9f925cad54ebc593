"""The recipes of the images keep what `docs/deployment.md` promises; nothing is built."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from dockerfile_parse import DockerfileParser  # type: ignore[import-untyped]
from paths import ROOT
from programs import run_command

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


def read_yaml(name: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((ROOT / "docker" / name).read_text())
    return content


def read_services() -> dict[str, Any]:
    """The services that are built here."""
    services = read_yaml("compose.yaml")["services"]
    return {name: one for name, one in services.items() if "build" in one}


@each_image
def test_image_is_slim_and_runs_as_numbered_user(path: Path) -> None:
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
def test_image_has_health_check_and_stop_time(path: Path) -> None:
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


def test_services_are_hardened() -> None:
    services = read_services()
    assert [path.name for path in DOCKERFILES] == [f"{name}.Dockerfile" for name in services]
    for name, service in services.items():
        assert service["init"] is service["read_only"] is True
        assert (service["tmpfs"], service["cap_drop"]) == (["/tmp"], ["ALL"])
        assert service["build"]["dockerfile"] == f"docker/{name}.Dockerfile"


@pytest.mark.slow
def test_profile_scrapes_apps_and_shows_dashboard(tmp_path: Path) -> None:
    content = read_yaml("compose.yaml")
    services = content["services"].items()
    profile = {name: one for name, one in services if "profiles" in one}
    assert [*profile] == ["prometheus", "grafana"]
    mounted = {}
    for service in profile.values():
        assert service["profiles"] == ["observability"]
        assert service["read_only"] is True
        assert re.fullmatch(r"[\w/]+:v?\d+\.\d+\.\d+", service["image"])
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        for volume in service["volumes"]:
            source, target, *_ = volume.split(":")
            if source in content["volumes"]:
                continue
            assert (ROOT / "docker" / source).exists(), source
            mounted[target] = (ROOT / "docker" / source).resolve()
    # What the files name is where it is mounted, and is reached under its name.
    (dashboards,) = read_yaml("grafana/dashboards.yml")["providers"]
    assert (mounted[dashboards["options"]["path"]] / "fast_batcher.json").exists()
    (datasource,) = read_yaml("grafana/datasources.yml")["datasources"]
    assert (datasource["type"], datasource["isDefault"]) == ("prometheus", True)
    assert datasource["url"] == "http://prometheus:9090"
    config = read_yaml("prometheus.yml")
    (scraped,) = config["scrape_configs"]
    (lookup,) = scraped["dns_sd_configs"]
    assert (lookup["names"], lookup["port"]) == ([*read_services()], 8000)
    for path in DOCKERFILES:
        (command,) = values(path, "CMD")
        module = json.loads(command)[1].partition(":")[0].replace(".", "/")
        assert "include_router(metrics_router())" in (ROOT / f"{module}.py").read_text()
    for name in ("prometheus.yml", *config["rule_files"]):
        shutil.copy(mounted[f"/etc/prometheus/{name}"], tmp_path / name)
    if shutil.which("promtool") is not None:
        done = run_command(["promtool", "check", "config", str(tmp_path / "prometheus.yml")])
        assert done.returncode == 0, done.stdout + done.stderr
