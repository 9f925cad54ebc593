"""The manifests, the unit and the recipe for apps of users are valid, and their times add up."""

import configparser
import json
import os
import re
import shlex
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml
from dockerfile_parse import DockerfileParser  # type: ignore[import-untyped]
from paths import ROOT
from programs import run_command
from servers import Server, find_free_port, get

from fast_batcher.fastapi import BROKEN_TIMEOUT
from fast_batcher.settings import Settings

MANIFESTS = ROOT / "deploy" / "kubernetes"
UNIT = ROOT / "deploy" / "systemd" / "model.service"
DEFAULTS = Settings()
DOCS = ROOT / "docs"
GRACE = "--timeout-graceful-shutdown"


def seconds_to_end(command: Sequence[str]) -> float:
    """The time that the server and the batcher may take from SIGTERM on."""
    served = float(command[command.index(GRACE) + 1])
    return served + DEFAULTS.drain_timeout + DEFAULTS.stop_timeout


def read_manifest(name: str) -> Any:
    return yaml.safe_load((MANIFESTS / name).read_text())


def read_container() -> tuple[dict[str, Any], dict[str, Any]]:
    pod = read_manifest("deployment.yaml")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    return pod, container


def read_wanted_metrics() -> list[str]:
    metrics = read_manifest("autoscaler.yaml")["spec"]["metrics"]
    return [metric["pods"]["metric"]["name"] for metric in metrics]


# --- Kubernetes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["1.30", kubernetes_validate.latest_version()])
def test_manifests_match_their_schemas(version: str) -> None:
    others = {"keda.yaml", "prometheus_adapter.yaml"}
    names = {path.name for path in MANIFESTS.glob("*.yaml")} - others
    assert len(names) == 5
    for name in names:
        kubernetes_validate.validate(read_manifest(name), version, strict=True)


def test_manifests_name_each_other() -> None:
    deployment, service = read_manifest("deployment.yaml"), read_manifest("service.yaml")
    _, container = read_container()
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == service["spec"]["selector"] == labels
    (port,), (opened, metrics) = service["spec"]["ports"], container["ports"]
    assert port["targetPort"] == opened["name"]
    (rule,) = read_manifest("ingress.yaml")["spec"]["rules"]
    backend = rule["http"]["paths"][0]["backend"]["service"]
    assert backend == {"name": service["metadata"]["name"], "port": {"name": port["name"]}}
    target = read_manifest("autoscaler.yaml")["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("Deployment", deployment["metadata"]["name"])
    spread = deployment["spec"]["template"]["spec"]["topologySpreadConstraints"]
    budget = read_manifest("disruption_budget.yaml")["spec"]["selector"]
    selectors = [budget, *(one["labelSelector"] for one in spread)]
    assert selectors == [deployment["spec"]["selector"]] * 3
    command = container["command"]
    assert int(command[command.index("--port") + 1]) == opened["containerPort"]
    notes = deployment["spec"]["template"]["metadata"]["annotations"]
    assert notes["prometheus.io/port"] == str(metrics["containerPort"])


def test_pod_has_time_to_end() -> None:
    pod, container = read_container()
    name, slept = container["lifecycle"]["preStop"]["exec"]["command"]
    needed = float(slept) + seconds_to_end(container["command"])
    assert name == "sleep"
    assert pod["terminationGracePeriodSeconds"] >= needed + 5
    page = (DOCS / "kubernetes.md").read_text()
    steps = re.findall(r"^\| .* \| (\d+) \| ", page.split("### The end")[1], re.MULTILINE)
    *parts, total = map(float, steps)
    assert total == sum(parts) == needed
    assert f"`terminationGracePeriodSeconds: {pod['terminationGracePeriodSeconds']}`" in page


def test_pod_has_time_to_load_its_model() -> None:
    _, container = read_container()
    startup, live = container["startupProbe"], container["livenessProbe"]
    waited = startup["failureThreshold"] * startup["periodSeconds"]
    assert waited >= DEFAULTS.start_timeout + 5
    page = (DOCS / "kubernetes.md").read_text()
    assert f"{waited} s are more than `start_timeout`" in page
    assert f"broken for {BROKEN_TIMEOUT:g} s" in page
    assert startup["httpGet"] == live["httpGet"] == {"path": "/livez", "port": "http"}
    assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "http"}


def test_pod_has_room_for_shared_memory() -> None:
    _, container = read_container()
    limit = int(container["resources"]["limits"]["memory"].removesuffix("Gi")) * 2**30
    # Inputs, the outputs of one worker, and a GiB for the app and the model.
    assert limit >= DEFAULTS.max_shared_bytes * (1 + 1) + 2**30


def test_the_autoscaler_reads_metrics_of_the_adapter() -> None:
    wanted = read_wanted_metrics()
    rules = read_manifest("prometheus_adapter.yaml")["rules"]["custom"]
    assert [rule["seriesQuery"].partition("{")[0] for rule in rules] == wanted
    listed = re.findall(
        r"^\| `(\w+)` \| gauge", (DOCS / "observability.md").read_text(), re.MULTILINE
    )
    assert set(wanted) < set(listed)


def test_keda_scales_as_the_autoscaler_does() -> None:
    """By one of its metrics, with the same target and speed."""
    keda, hpa = read_manifest("keda.yaml")["spec"], read_manifest("autoscaler.yaml")["spec"]
    assert keda["scaleTargetRef"]["name"] == hpa["scaleTargetRef"]["name"]
    assert (keda["minReplicaCount"], keda["maxReplicaCount"]) == (
        hpa["minReplicas"],
        hpa["maxReplicas"],
    )
    assert keda["advanced"]["horizontalPodAutoscalerConfig"]["behavior"] == hpa["behavior"]
    (trigger,) = keda["triggers"]
    first = hpa["metrics"][0]["pods"]
    assert f"sum({first['metric']['name']}{{" in trigger["metadata"]["query"]
    target = first["target"]["averageValue"]
    assert float(trigger["metadata"]["threshold"]) == float(target.removesuffix("m")) / 1000


def test_numeric_libraries_do_not_take_the_cores_of_the_node() -> None:
    _, container = read_container()
    assert "cpu" not in container["resources"]["limits"]
    (threads,) = [one["value"] for one in container["env"] if one["name"] == "OMP_NUM_THREADS"]
    assert int(threads) == int(container["resources"]["requests"]["cpu"]) - 1


@pytest.mark.slow
def test_the_command_of_a_pod_serves_and_ends(tmp_path: Path) -> None:
    _, container = read_container()
    page = (DOCS / "tutorial.md").read_text()
    for code, name in re.findall(r'^```python\n("""Save as `([^`]+)`.*?)^```', page, re.M | re.S):
        (tmp_path / name).write_text(code)
    (metrics,) = re.findall(
        r"^```python\n(.*?)^```", (DOCS / "kubernetes.md").read_text(), re.M | re.S
    )
    notes = read_manifest("deployment.yaml")["spec"]["template"]["metadata"]["annotations"]
    own_port = notes["prometheus.io/port"]
    assert f'"METRICS_PORT", "{own_port}"' in metrics
    free = find_free_port()
    program = (tmp_path / "server.py").read_text()
    line = "app = FastAPI(lifespan=batcher.lifespan)\n"
    assert line in program
    (tmp_path / "server.py").write_text(program.replace(line, metrics))
    command = ["127.0.0.1" if one == "0.0.0.0" else one for one in container["command"]]
    command[command.index("--port") + 1] = "0"
    paths = os.pathsep.join([str(ROOT), str(tmp_path)])
    settings = {"PYTHONPATH": paths, "STATUS_PASSWORD": "secret", "METRICS_PORT": str(free)}
    server = Server("", command=command, settings=settings)
    try:
        url = server.url()
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            path = container[probe]["httpGet"]["path"]
            assert get(f"{url}{path}").status_code == 200
        assert get(f"{url}/metrics").status_code == 404
        shown = get(f"http://127.0.0.1:{free}/metrics").text
        assert all(name in shown for name in read_wanted_metrics())
        assert get(f"{url}/batchers").status_code == 401
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_for_exit() in (0, -signal.SIGTERM)
        assert "Application shutdown complete" in server.output
    finally:
        server.close()


# --- systemd --------------------------------------------------------------------------------------


def test_the_unit_has_the_time_to_end() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(UNIT)
    service = unit["Service"]
    command = shlex.split(service["ExecStart"])
    assert float(service["TimeoutStopSec"]) >= seconds_to_end(command) + 5
    assert (service["Restart"], service["KillMode"]) == ("always", "mixed")
    assert command[1] == read_container()[1]["command"][1]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    text = UNIT.read_text()
    # The app of the unit is not installed here.
    text = text.replace("/srv/model/.venv/bin/uvicorn", "/usr/bin/env").replace(
        "/srv/model", "/tmp"
    )
    unit = tmp_path / UNIT.name
    unit.write_text(text)
    done = run_command(["systemd-analyze", "verify", str(unit)])
    assert (done.returncode, done.stderr) == (0, "")


# --- Docker ---------------------------------------------------------------------------------------


def test_container_has_time_to_start_and_end(tmp_path: Path) -> None:
    page = (DOCS / "docker.md").read_text()
    (recipe,) = re.findall(r"^```dockerfile\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    with (tmp_path / "Dockerfile").open("w+b") as file:
        file.write(recipe.encode())
        file.seek(0)
        steps = DockerfileParser(fileobj=file).structure
    found = {step["instruction"]: step["value"] for step in steps}
    command = json.loads(found["CMD"])
    assert command == read_container()[1]["command"]
    (granted,) = re.findall(r"--stop-timeout (\d+)", page.split("```console")[1].split("```")[0])
    assert float(granted) >= seconds_to_end(command) + 5
    (started,) = re.findall(r"--start-period=(\d+)s", found["HEALTHCHECK"])
    assert float(started) >= DEFAULTS.start_timeout
    assert f":{command[command.index('--port') + 1]}/readyz" in found["HEALTHCHECK"]
    assert all(int(number) > 0 for number in found["USER"].split(":"))
    assert f"torch=={torch_of_makefile()}" in recipe


def torch_of_makefile() -> str:
    (version,) = re.findall(r"^TORCH \?= torch==(.*)$", (ROOT / "Makefile").read_text(), re.M)
    return str(version)
