"""Files that hosts and citation tools read: they can be parsed, and say what the project does."""

import re
import tomllib
from typing import Any

import pytest
import yaml
from paths import ROOT

import fast_batcher

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = ROOT / ".github" / "workflows"
FILES = [
    ROOT / "CITATION.cff",
    ROOT / ".pre-commit-config.yaml",
    *sorted((ROOT / ".github").rglob("*.yml")),
]


def read(name: str) -> dict[str, Any]:
    """Read a YAML file; the key `on` of a workflow is a boolean of YAML 1.1."""
    content = yaml.safe_load((ROOT / name).read_text())
    return {"on" if key is True else key: value for key, value in content.items()}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_file_is_a_mapping_in_yaml(path: Any) -> None:
    content = yaml.safe_load(path.read_text())
    assert isinstance(content, dict)
    assert content


def test_citation_agrees_with_package() -> None:
    citation = read("CITATION.cff")
    required = {"cff-version", "message", "title", "authors"}
    assert required <= citation.keys()
    assert citation["version"] == fast_batcher.__version__
    assert citation["license"] == PROJECT["license"]
    assert citation["authors"] == PROJECT["authors"]
    assert citation["repository-code"] == PROJECT["urls"]["Source"]
    assert citation["url"] == PROJECT["urls"]["Documentation"]


def test_ci_runs_the_documented_commands() -> None:
    workflow = read(".github/workflows/ci.yml")
    assert {"push", "pull_request"} <= workflow["on"].keys()
    (job,) = workflow["jobs"].values()
    assert job["steps"][-1] == {"run": "bash .ci/run"}
    script = (ROOT / ".ci" / "run").read_text().splitlines()
    (command,) = re.findall(r"`(make test[^`]*)`", (ROOT / "README.md").read_text())
    assert command in script
    names = [
        f"Programming Language :: Python :: {one}" for one in job["strategy"]["matrix"]["python"]
    ]
    assert names == [one for one in PROJECT["classifiers"] if "Python :: 3." in one]


def test_tag_is_published_by_trusted_publishing() -> None:
    workflow = read(".github/workflows/publish.yml")
    assert workflow["on"] == {"push": {"tags": ["v*"]}}
    build, publish = workflow["jobs"]["build"], workflow["jobs"]["publish"]
    commands = [step.get("run") for step in build["steps"]]
    assert commands.index("bash .ci/run") < commands.index("make dist")
    assert (publish["needs"], publish["permissions"]) == ("build", {"id-token": "write"})
    last = publish["steps"][-1]
    assert last["uses"].startswith("pypa/gh-action-pypi-publish@")
    # No secret: PyPI trusts the workflow.
    assert last["with"] == {"attestations": True}


def test_workflow_may_only_read_unless_it_publishes() -> None:
    for path in WORKFLOWS.glob("*.yml"):
        workflow = read(str(path.relative_to(ROOT)))
        assert workflow["permissions"] == {"contents": "read"}
        own = {name: job.get("permissions") for name, job in workflow["jobs"].items()}
        assert {name: found for name, found in own.items() if found} == (
            {"publish": {"id-token": "write"}} if path.stem == "publish" else {}
        )
        assert "secrets." not in path.read_text()


def test_bug_form_asks_for_the_doctor() -> None:
    form = read(".github/ISSUE_TEMPLATE/bug.yml")
    (doctor,) = [one for one in form["body"] if one["id"] == "doctor"]
    assert "fast-batcher doctor" in doctor["attributes"]["label"]
    assert doctor["validations"] == {"required": True}
