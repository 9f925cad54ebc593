"""The recipes of the images keep what `docs/deployment.md` promises, and build the package."""

import json
import re
import shlex
import shutil
import sys
import zipfile
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


def copy_into(image: Path, text: str) -> None:
    """Do what a COPY instruction does, with the files that `.dockerignore` lets through."""
    *sources, target = shlex.split(text)
    sent = re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    for source in sources:
        assert source.partition("/")[0] in sent
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, image / target, dirs_exist_ok=True)
        else:
            place = image / target / Path(source).name if target.endswith("/") else image / target
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / source, place)


def build_wheel(image: Path, folder: Path) -> list[str]:
    """Build the package of an image's folder as pip does there; return the names in the wheel."""
    offline = ("--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check")
    done = run_command(
        [sys.executable, "-m", "pip", "wheel", *offline, "--wheel-dir", str(folder), "."], cwd=image
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        return file.namelist()


@pytest.mark.slow
@each_image
def test_image_builds_the_package_from_what_it_has_copied(path: Path, tmp_path: Path) -> None:
    """At each layer; the last one has every module, and the app of the command."""
    image, wheels = tmp_path / "image", []
    for number, (name, text) in enumerate(read_steps(path)):
        if name == "COPY":
            copy_into(image, text)
        elif name == "RUN" and (own := re.search(r"(?<=\s)'?\.(?:\[(\w+)\])?'?(?=\s|$)", text)):
            wheels.append(build_wheel(image, tmp_path / f"layer {number}"))
            assert own[1] is None or f"\n{own[1]} = [" in (image / "pyproject.toml").read_text()
    assert len(wheels) == 2
    modules = {str(one.relative_to(ROOT)) for one in (ROOT / "fast_batcher").rglob("*.py")}
    assert modules <= {*wheels[-1]}
    (command,) = values(path, "CMD")
    module = json.loads(command)[1].partition(":")[0].replace(".", "/")
    assert (image / f"{module}.py").exists()


def test_services_are_hardened() -> None:
    services = read_services()
    assert [path.name for path in DOCKERFILES] == [f"{name}.Dockerfile" for name in services]
    for name, service in services.items():
        assert service["init"] is service["read_only"] is True
        assert (service["tmpfs"], service["cap_drop"]) == (["/tmp"], ["ALL"])
        assert service["build"]["dockerfile"] == f"docker/{name}.Dockerfile"


@pytest.mark.slow
def test_compose_file_matches_the_schema() -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    done = run_command([*command, str(ROOT / "docker" / "compose.yaml")])
    assert done.returncode == 0, done.stdout + done.stderr


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
