"""`fast-batcher doctor`, run as a command."""

import json
import logging
import os
import shlex
import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from paths import PYTHONPATH, ROOT
from programs import run_command
from typer.testing import CliRunner
from waits import LIMIT, Gate

from fast_batcher import __version__
from fast_batcher._cli.machine import check_machine
from fast_batcher._cli.main import app
from fast_batcher._cli.model import read_inputs

pytestmark = pytest.mark.slow

COMMAND = (sys.executable, "-m", "fast_batcher")
HERE = Path(__file__).parent


def run(
    *arguments: str, name: str = "doctor", descriptors: int | None = None
) -> subprocess.CompletedProcess[str]:
    command = shlex.join([*COMMAND, name, *arguments])
    if descriptors is not None:
        command = f"ulimit -n {descriptors}; {command}"
    return run_command(["sh", "-c", command], cwd=HERE)


def examine(*arguments: str, descriptors: int | None = None) -> tuple[int, dict[str, Any]]:
    """Return the exit code, and the checks by their names."""
    done = run(*arguments, "--json", descriptors=descriptors)
    assert done.stdout, done.stderr
    return done.returncode, {check["name"]: check for check in json.loads(done.stdout)}


def test_a_machine_is_described() -> None:
    code, checks = examine()
    assert code == 0
    assert {"Python", "shared memory", "descriptors", "memory", "cores", "packages"} < set(checks)
    assert checks["shared memory"]["level"] == "good"
    assert "fast_batcher" in checks["packages"]["text"]


def test_a_package_on_the_path_need_not_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_none(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", find_none)
    (packages,) = [check for check in check_machine() if check.name == "packages"]
    assert packages.text == f"fast_batcher {__version__}; extras: none; besides: none"


def test_refused_memory_files_are_reported() -> None:
    program = ROOT / "tests" / "support" / "without_memfd.py"
    done = run_command(
        [sys.executable, str(program), *COMMAND[2:], "doctor", "command_models:Doubler", "--json"],
        cwd=HERE,
    )
    if "prctl" in done.stderr:
        pytest.skip("the kernel has no such filters")
    checks = {check["name"]: check for check in json.loads(done.stdout)}
    assert checks["shared memory"]["level"] == "warning"
    assert "Operation not permitted" in checks["shared memory"]["text"]
    assert "--shm-size" in checks["shared memory"]["remedy"]
    # Workers start all the same.
    assert done.returncode == 0
    assert checks["model"]["level"] == "good"


def test_too_few_descriptors_are_wrong() -> None:
    code, checks = examine(descriptors=64)
    assert code == 1
    assert checks["descriptors"]["level"] == "bad"
    assert "64 files and sockets" in checks["descriptors"]["text"]
    assert "hard limit, 64" in checks["descriptors"]["remedy"]


@pytest.mark.parametrize("target", ["command_models:Doubler", "command_models:batcher"])
def test_a_model_is_loaded_and_timed(target: str, tmp_path: Path) -> None:
    inputs = tmp_path / "inputs.json"
    inputs.write_text("[1, 2, 3]")
    code, checks = examine(target, "--inputs", str(inputs))
    assert code == 0
    assert "was loaded in" in checks["model"]["text"]
    assert "MiB" in checks["worker"]["text"]
    sizes = (1, 2, 4) if target.endswith("batcher") else (1, 2, 4, 8, 16, 32)
    for size in sizes:
        assert f"t({size}) = " in checks["batches"]["text"]


@pytest.mark.parametrize("target", ["command_models:Streams", "command_models:named"])
def test_steps_are_timed_by_their_streams(target: str) -> None:
    code, checks = examine(target, "--inputs", "command_models:LENGTHS")
    assert code == 0
    for size in (1, 2, 4, 8, 16, 32):
        assert f"t({size}) = " in checks["steps"]["text"]
    assert "times as many chunks per second" in checks["steps"]["text"]
    assert checks["batch independence"]["level"] == "good"


def test_steps_are_not_timed_without_inputs() -> None:
    code, checks = examine("command_models:Streams")
    assert (code, checks["steps"]["level"]) == (0, "warning")
    assert checks["steps"]["remedy"] == "give --inputs FILE with inputs as JSON"


def test_answers_of_one_chunk_have_no_step_to_time() -> None:
    code, checks = examine("command_models:Streams", "--inputs", "command_models:ONES")
    assert code == 1
    assert checks["target"]["text"].startswith("no answer has a second chunk")


def test_inputs_come_from_a_module() -> None:
    for source in ("command_models:INPUTS", "command_models:make_inputs"):
        code, checks = examine("command_models:batcher", "--inputs", source)
        assert code == 0
        assert "t(4) = " in checks["batches"]["text"]


def test_inputs_of_json_may_be_too_plain(tmp_path: Path) -> None:
    path = tmp_path / "inputs.json"
    path.write_text('[{"text": "cat"}]')
    code, checks = examine("command_models:TakesObjects", "--inputs", str(path))
    assert code == 1
    (wrong,) = [one for one in checks.values() if one["level"] == "bad"]
    assert "'dict' object has no attribute 'text'" in wrong["text"]
    assert wrong["remedy"].endswith("give other objects as --inputs module:name")


def test_texts_of_inputs_may_have_ends_of_lines(tmp_path: Path) -> None:
    path = tmp_path / "inputs.jsonl"
    texts = ["first\N{LINE SEPARATOR}second\x85", "another"]
    lines = [json.dumps(text, ensure_ascii=False) for text in texts]
    path.write_text("\n".join(lines), encoding="utf-8-sig")
    assert read_inputs(str(path)) == texts


@pytest.mark.parametrize("command", ["doctor", "tune"])
def test_json_alone_is_written_whatever_the_model_prints(command: str) -> None:
    inputs = ("--inputs", "command_models:print_inputs")
    done = run("command_models:Prints", *inputs, "--json", name=command)
    assert json.loads(done.stdout)
    for text in ("printed by the model", "printed by the inputs"):
        assert text in done.stderr


@pytest.mark.parametrize(
    ("target", "inputs", "text"),
    [
        ("command_models:text.more", "command_models:INPUTS", "has no 'text.more'"),
        ("command_models:Doubler", "command_models:leave", "leave() raised SystemExit"),
    ],
)
def test_what_the_program_does_ends_in_one_line(target: str, inputs: str, text: str) -> None:
    code, checks = examine(target, "--inputs", inputs)
    assert (code, text in checks["target"]["text"]) == (1, True)


@pytest.mark.parametrize("command", ["doctor", "tune"])
def test_the_first_interrupt_ends_the_import_of_a_module(command: str, gate: Gate) -> None:
    process = subprocess.Popen(
        [*COMMAND, command, "waits_on_import:Model", "--inputs", "waits_on_import:INPUTS"],
        cwd=HERE,
        env={**os.environ, "PYTHONPATH": PYTHONPATH, "GATE": str(gate.path)},
        stderr=subprocess.PIPE,
        text=True,
    )
    gate.wait()
    process.send_signal(signal.SIGINT)
    _, complaint = process.communicate(timeout=LIMIT)
    assert (process.returncode, "Traceback" in complaint) == (130, False)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_the_report_is_printed_in_any_encoding(
    encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", encoding)
    done = run("command_models:Unspeakable")
    assert done.returncode == 1
    assert "\\u6a21" in done.stdout
    assert "Traceback" not in done.stderr


def test_a_broken_message_is_no_finding_and_no_error() -> None:
    code, checks = examine("logs_badly:Model")
    assert (code, checks["log"]["text"]) == (0, "a warning after it")


def test_batches_that_fail_are_not_timed(tmp_path: Path) -> None:
    done = run("command_models:UpToSix", "--inputs", "command_models:INPUTS", "--json")
    batches = [one for one in json.loads(done.stdout) if one["name"] == "batches"]
    assert [one["level"] for one in batches] == ["good", "warning"]
    assert "t(4) = " in batches[0]["text"]
    assert "t(6)" not in batches[0]["text"]
    assert "batches of 8 fail" in batches[1]["text"]
    inputs = ("--inputs", "command_models:INPUTS", "--most", "8", "--json")
    done = run("command_models:UpToSix", *inputs, name="tune")
    found = json.loads(done.stdout)
    assert [one["max_batch_size"] for one in found["advice"]["candidates"]] == [1, 2, 4]
    assert found["fails_from"] == 8


def test_log_level_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(HERE)
    level = logging.getLogger("fast_batcher").level
    assert CliRunner().invoke(app, ["doctor", "command_models:Missing"]).exit_code == 1
    assert logging.getLogger("fast_batcher").level == level


def test_options_from_outside_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAST_BATCHER_DOUBLER__TIMEOUT", "5")
    monkeypatch.setenv("FAST_BATCHER_DUBLER__TIMEOUT", "6")
    monkeypatch.setenv("FAST_BATCHER_RERANKER__TIMEOUT", "7")
    done = run("command_models:Doubler", "--json")
    found = [check for check in json.loads(done.stdout) if check["name"] == "options"]
    assert [check["level"] for check in found] == ["good", "warning"]
    assert "timeout=5 (FAST_BATCHER_DOUBLER__TIMEOUT)" in found[0]["text"]
    assert found[1]["text"].startswith("FAST_BATCHER_DUBLER__TIMEOUT is not for")


def test_options_that_the_code_overrides_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAST_BATCHER_MAX_BATCH_SIZE", "5")
    code, checks = examine("command_models:batcher")
    assert code == 0
    assert checks["options"]["level"] == "warning"
    assert "FAST_BATCHER_MAX_BATCH_SIZE has no effect" in checks["options"]["text"]


def test_a_gpu_that_is_not_used_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    code, checks = examine("command_models:OnTheCpu")
    assert code == 0
    assert checks["log"]["level"] == "warning"
    assert "this process sees cuda:0" in checks["log"]["text"]
    assert 'devices="auto"' in checks["log"]["text"]


def test_warm_up_is_measured_without_inputs() -> None:
    code, checks = examine("command_models:Doubler")
    assert code == 0
    assert "t(1) = " in checks["batches"]["text"]
    assert "t(32) = " in checks["batches"]["text"]


@pytest.mark.parametrize(
    ("target", "name", "text", "remedy"),
    [
        ("command_models:NoWeights", "model", "FileNotFoundError: weights.pt", "in __init__"),
        ("command_models:OneAnswer", "batches", "1 outputs for 2 inputs; return one per input", ""),
        ("command_models:Missing", "target", "has no 'Missing'; it has Constant, Doubler", ""),
        ("command_models:NeedsPath", "model", "missing 1 required", "that has the model's model_"),
        ("command_models:text", "target", "is a str: name a DynBatcher or a subclass", ""),
        ("no_such_module:Model", "target", "run the command in the folder that has it", ""),
        ("command_models", "target", "write it as module:Model or module:batcher", ""),
    ],
)
def test_problem_is_reported_in_one_line(
    target: str, name: str, text: str, remedy: str, tmp_path: Path
) -> None:
    inputs = tmp_path / "inputs.jsonl"
    inputs.write_text("1\n2\n")
    code, checks = examine(target, "--inputs", str(inputs))
    assert code == 1
    assert checks[name]["level"] == "bad"
    assert text in checks[name]["text"]
    assert remedy in checks[name]["remedy"]
    assert "\n" not in checks[name]["text"]


def test_the_report_fits_a_terminal_of_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    done = run("command_models:NoWeights")
    assert done.returncode == 1
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "wrong" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_a_file_without_inputs_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "empty.json"
    path.write_text("[]")
    code, checks = examine("command_models:Doubler", "--inputs", str(path))
    assert code == 1
    assert "empty.json has no input" in checks["target"]["text"]


def test_an_unknown_option_is_a_usage_error() -> None:
    assert run("--nonsense").returncode == 2
