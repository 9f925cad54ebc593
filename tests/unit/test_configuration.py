"""Options from the environment and from a file."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT
from programs import run_command

from fast_batcher import ConfigurationError, DynBatcher, InferenceModel
from fast_batcher.settings import OPTIONS

# A value of each option that can be written as text, and the text.
VALUES: dict[str, tuple[Any, str]] = {
    "max_batch_size": (64, "64"),
    "max_delay": (0.5, "0.5"),
    "num_workers": (2, "2"),
    "policy": ("greedy", "greedy"),
    "max_latency": (0.25, "0.25"),
    "max_queue_size": (77, "77"),
    "timeout": (None, "none"),
    "infer_timeout": (9.0, "9.0"),
    "auto_open": (False, "false"),
    "start_timeout": (1.5, "1.5"),
    "stop_timeout": (0, "0"),
    "drain_timeout": (3.0, "3.0"),
    "idempotent": (False, "no"),
    "isolate_errors": (False, "off"),
    "max_restarts": (0, "0"),
    "max_sessions": (64, "64"),
    "restart_window": (5.0, "5.0"),
    "restart_backoff": (0.2, "0.2"),
    "max_batches_per_worker": (1000, "1000"),
    "max_rss_bytes": (10**9, "1000000000"),
    "max_queue_bytes": (10**6, "1000000"),
    "max_frame_bytes": (2**21, "2097152"),
    "max_batch_cost": (100.0, "100.0"),
    "max_request_cost": (10.0, "10.0"),
    "cost_is_padded": (False, "False"),
    "max_shared_bytes": (0, "0"),
    "shared_memory_threshold": (8192, "8192"),
    "freeze_gc": (False, "0"),
    "shared": ("ours", "ours"),
    "shared_version": ("r7", "r7"),
    "devices": (["cpu:0", "cpu:0"], "cpu:0, cpu:0"),
    "workers_per_device": (1, "1"),
    "mps": (True, "on"),
    "stage_threads": (3, "3"),
    "workers": ("threads", "threads"),
    "enabled": (False, "FALSE"),
    "stepped": (True, "yes"),
}
# Of a class that a text names it is not known what has an effect.
TEXT = {"model": "models.base:Echo"}
# Options that others need.
NEEDS: dict[str, dict[str, Any]] = {
    "max_batch_cost": {"cost": len},
    "max_request_cost": {"cost": len},
    "cost_is_padded": {"cost": len},
    **dict.fromkeys(("stage_threads", "stepped", "max_sessions"), TEXT),
    "shared_version": {"shared": True},
    "workers_per_device": {"devices": "cpu"},
    "mps": {"devices": "cuda:0", "workers_per_device": 2},
}
CAN_BE_TEXT = [name for name, option in OPTIONS.items() if option.types and name != "name"]

every_option = pytest.mark.parametrize("name", CAN_BE_TEXT)


class Echo(InferenceModel[Any, Any]):
    def infer(self, inputs: list[Any]) -> list[Any]:
        return inputs


def construct(model: Any = Echo, **options: Any) -> DynBatcher[Any, Any]:
    return DynBatcher(model, name="re-ranker", **options)


def refusal(**options: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        construct(**options)
    return str(caught.value)


def write(path: Path, name: str, value: Any, *, table: str = "") -> Path:
    """Write a TOML file with one option."""
    text = '"none"' if value is None else json.dumps(value)
    path.write_text((f"[{table}]\n" if table else "") + f"{name} = {text}\n")
    return path


def test_examples_cover_every_text_option() -> None:
    assert sorted(VALUES) == sorted(CAN_BE_TEXT)


@every_option
def test_option_is_set_by_code_environment_or_file(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    value, text = VALUES[name]
    others = NEEDS.get(name, {})
    by_code = construct(**others, **{name: value}).settings[name]
    monkeypatch.setenv(f"FAST_BATCHER_{name.upper()}", text)
    by_environment = construct(**others).settings[name]
    monkeypatch.delenv(f"FAST_BATCHER_{name.upper()}")
    path = write(tmp_path / "batchers.toml", name, value)
    monkeypatch.setenv("FAST_BATCHER_CONFIG", str(path))
    by_file = construct(**others).settings[name]
    assert by_code.value == by_environment.value == by_file.value
    sources = [setting.source for setting in (by_code, by_environment, by_file)]
    assert sources == ["code", f"FAST_BATCHER_{name.upper()}", f"{path}: {name}"]


@every_option
def test_a_wrong_value_is_refused_with_its_source(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wrong = "\t" if str in OPTIONS[name].types else "wrong"
    monkeypatch.setenv(f"FAST_BATCHER_{name.upper()}", wrong)
    assert f"FAST_BATCHER_{name.upper()}=" in refusal(**NEEDS.get(name, {}))
    monkeypatch.delenv(f"FAST_BATCHER_{name.upper()}")
    path = write(tmp_path / "batchers.toml", name, wrong)
    monkeypatch.setenv("FAST_BATCHER_CONFIG", str(path))
    assert f"{path}: {name}=" in refusal(**NEEDS.get(name, {}))


def test_code_wins_over_environment_over_file_over_default(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "batchers.toml"
    path.write_text(
        "max_batch_size = 1\nmax_delay = 0.1\ntimeout = 1.0\nmax_latency = 1.0\n"
        "[batchers.re-ranker]\nmax_delay = 0.2\ntimeout = 2.0\nmax_latency = 2.0\n"
        "[batchers.other]\nmax_delay = 9.0\n"
    )
    monkeypatch.setenv("FAST_BATCHER_CONFIG", str(path))
    monkeypatch.setenv("FAST_BATCHER_TIMEOUT", "3")
    monkeypatch.setenv("FAST_BATCHER_MAX_LATENCY", "3")
    monkeypatch.setenv("FAST_BATCHER_RE_RANKER__MAX_LATENCY", "4")
    monkeypatch.setenv("FAST_BATCHER_OTHER__MAX_LATENCY", "9")
    monkeypatch.setenv("FAST_BATCHER_NUM_WORKERS", "2")
    batcher = construct(num_workers=1)
    used = {
        name: (setting.value, setting.source)
        for name, setting in batcher.settings.items()
        if not setting.source.startswith(("default", "code"))
    }
    assert used == {
        "max_batch_size": (1, f"{path}: max_batch_size"),
        "max_delay": (0.2, f"{path}: batchers.re-ranker.max_delay"),
        "timeout": (3, "FAST_BATCHER_TIMEOUT"),
        "max_latency": (4, "FAST_BATCHER_RE_RANKER__MAX_LATENCY"),
    }
    # An argument counts although it equals the default.
    assert batcher.settings["num_workers"] == (1, "code, not FAST_BATCHER_NUM_WORKERS")
    assert batcher.settings["policy"] == ("adaptive", "default")


def test_worker_range_is_written_with_hyphen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FAST_BATCHER_NUM_WORKERS", "1-2")
    assert construct().settings["num_workers"].value == (1, 2)
    monkeypatch.delenv("FAST_BATCHER_NUM_WORKERS")
    path = write(tmp_path / "batchers.toml", "num_workers", "1 - 2")
    monkeypatch.setenv("FAST_BATCHER_CONFIG", str(path))
    assert construct().settings["num_workers"].value == (1, 2)
    write(path, "num_workers", "2-1")
    assert "num_workers=(2, 1)" in refusal()


def test_a_change_while_running_has_its_source() -> None:
    batcher = construct()
    batcher.reconfigure(max_batch_size=5)
    assert batcher.settings["max_batch_size"] == (5, "reconfigure")


@pytest.mark.slow
@pytest.mark.parametrize("start", [b"", b"\xef\xbb\xbf"], ids=["plain", "byte order mark"])
@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=["LF", "CR LF"])
def test_files_are_utf_8_in_every_locale(start: bytes, end: str, tmp_path: Path) -> None:
    path = tmp_path / "batchers.toml"
    text = f'[batchers."r\u00e9ranker"]{end}max_batch_size = 7{end}'
    path.write_bytes(start + text.encode())
    program = (
        "from fast_batcher import DynBatcher\n"
        'print(DynBatcher("a:B", name="r\\u00e9ranker").settings["max_batch_size"].value)'
    )
    environment = {"FAST_BATCHER_CONFIG": str(path), "LC_ALL": "C", "PYTHONUTF8": "0"}
    environment |= {"PYTHONPATH": str(ROOT), "PYTHONCOERCECLOCALE": "0", "PATH": ""}
    done = run_command([sys.executable, "-c", program], env=environment)
    assert (done.returncode, done.stdout) == (0, "7\n"), done.stderr


@pytest.mark.parametrize("name", ["my-model", "my--model", "my__model", "my model", "My.Model"])
def test_names_of_batchers_have_no_two_underscores(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAST_BATCHER_MY_MODEL__MAX_BATCH_SIZE", "7")
    assert DynBatcher(Echo, name=name).settings["max_batch_size"].value == 7


def test_sharing_can_be_switched_off_by_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAST_BATCHER_SHARED", "none")
    assert construct().settings["shared"] == (False, "FAST_BATCHER_SHARED")


@pytest.mark.parametrize("text", ["Treu", "treu", "truee", "trrue", "falsse", "nonee"])
def test_a_misspelt_switch_is_no_name(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`shared` takes a name too, and processes that should not share would share under this one."""
    monkeypatch.setenv("FAST_BATCHER_SHARED", text)
    with pytest.raises(ConfigurationError, match=r"Did you mean '(true|false|none)'") as caught:
        construct()
    assert str(caught.value).startswith(f"FAST_BATCHER_SHARED='{text}': give ")


@pytest.mark.parametrize("text", ["0x" + "f" * 6000, "9" * 6000], ids=["hexadecimal", "decimal"])
def test_a_number_of_thousands_of_digits_is_out_of_range(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python writes no such number in a message, and reads it in hexadecimal only."""
    path = tmp_path / "batchers.toml"
    path.write_text(f"max_batch_size = {text}")
    monkeypatch.setenv("FAST_BATCHER_CONFIG", str(path))
    with pytest.raises(ConfigurationError, match=str(path)):
        construct()
    monkeypatch.delenv("FAST_BATCHER_CONFIG")
    for option in ("max_batch_size", "timeout", "num_workers"):
        with pytest.raises(ConfigurationError, match=f"^{option}: give "):
            construct(**{option: int("f" * 6000, 16)})


@pytest.mark.parametrize("service", ["", "API_", "MY_2ND_"])
def test_variables_of_a_kubernetes_service_are_ignored(
    service: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in (
        *("SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_HTTP_METRICS", "PORT", "PORT_8000_TCP"),
        *("PORT_8000_TCP_PROTO", "PORT_8000_TCP_PORT", "PORT_8000_TCP_ADDR", "PORT_53_UDP"),
    ):
        monkeypatch.setenv(f"FAST_BATCHER_{service}{name}", "tcp://10.0.0.1:8000")
    construct()
    assert caplog.messages == []


def test_variables_unlike_any_option_are_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("HOME", "RELEASE", "RE_RANKER__COLOUR"):
        monkeypatch.setenv(f"FAST_BATCHER_{name}", "1")
    construct()
    (message,) = caplog.messages
    assert "FAST_BATCHER_HOME, FAST_BATCHER_RELEASE, FAST_BATCHER_RE_RANKER__COLOUR" in message


@pytest.mark.parametrize(
    ("variable", "is_slip"),
    [
        *(("FASTBATCHER_TIMEOUT", True), ("fast_batcher_ranker__timeout", True)),
        *(("FASTBATCHER_CONFIG", True), ("FASTBATCHER_HOME", False)),
    ],
)
def test_a_slip_in_the_prefix_is_a_warning(
    variable: str,
    is_slip: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv(variable, "1")
    assert construct().settings["timeout"].source == "default"
    assert [f"{variable}: no option" in message for message in caplog.messages] == [True] * is_slip


@pytest.mark.parametrize(
    ("batcher", "owner", "is_slip"),
    [
        *(("reranker", "RERANKERR", True), ("reranker", "RE_RANKER", True)),
        *(("re-ranker", "RERANKER", True), ("embed-en", "EMBEDD_EN", True)),
        # Other batchers.
        *(("embed-en", "EMBED_FR", False), ("ranker1", "RANKER2", False)),
        *(("embedder", "EMBEDDER_LARGE", False), ("embedder", "RERANKER", False)),
    ],
)
def test_a_slip_in_the_name_of_a_batcher_is_a_warning(
    batcher: str,
    owner: str,
    is_slip: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    variable = f"FAST_BATCHER_{owner}__MAX_BATCH_SIZE"
    monkeypatch.setenv(variable, "7")
    assert DynBatcher(Echo, name=batcher).settings["max_batch_size"].value == 32
    assert [variable in message for message in caplog.messages] == [True] * is_slip


def test_a_slip_in_the_name_of_a_table_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    path = tmp_path / "batchers.toml"
    path.write_text("[batchers.rerankerr]\nmax_batch_size = 7")
    monkeypatch.setenv("FAST_BATCHER_CONFIG", str(path))
    DynBatcher(Echo, name="reranker")
    (message,) = caplog.messages
    assert f"{path}: [batchers.rerankerr]" in message


@pytest.mark.parametrize(
    ("variable", "hint"),
    [
        ("MAX_BATCHSIZE", "Did you mean 'max_batch_size'?"),
        ("OTHER__MAX_DELAI", "Did you mean 'max_delay'?"),
        ("RE_RANKER_MAX_DELAY", "Did you mean FAST_BATCHER_RE_RANKER__MAX_DELAY?"),
        ("CONFI", "Did you mean 'config'?"),
        ("CACHE", "cache can only be given in the code"),
        ("NAME", "name can only be given in the code"),
        ("MODEL_ARGS", "model_args can only be given in the code"),
    ],
)
def test_an_unknown_variable_is_refused(
    variable: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"FAST_BATCHER_{variable}", "1")
    text = refusal()
    assert text.startswith(f"FAST_BATCHER_{variable}: ")
    assert text.endswith(hint)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("max_batch = 1", "'max_batch' is not an option of a batcher"),
        ("batch_size = 1", "'batch_size' is not an option of a batcher. Did you mean 'max_batch_"),
        ("[batchers.other]\ncash = 1", "batchers.other.cash: 'cash' is not an option of a batcher"),
        ("batchers = 1", "batchers must be a table with one table for each batcher"),
        ("max_batch_size = ", "Invalid value"),
        ("timeout = " + "[" * 5000, "FAST_BATCHER_CONFIG="),
    ],
)
def test_faulty_file_is_rejected_with_its_path(
    text: str, error: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "batchers.toml"
    path.write_text(text)
    monkeypatch.setenv("FAST_BATCHER_CONFIG", str(path))
    refused = refusal()
    assert str(path) in refused
    assert error in refused


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("/nowhere/a.toml", "FAST_BATCHER_CONFIG='/nowhere/a.toml': "),
        ("", "FAST_BATCHER_CONFIG is e"),
    ],
)
def test_missing_file_is_refused(name: str, error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAST_BATCHER_CONFIG", name)
    assert refusal().startswith(error)


def test_contradicting_options_are_named_with_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAST_BATCHER_RE_RANKER__POLICY", "fixed")
    with pytest.raises(ConfigurationError, match="max_delay=None") as caught:
        construct()
    assert str(caught.value).endswith("; policy is from FAST_BATCHER_RE_RANKER__POLICY")


def test_an_option_for_all_batchers_is_used_where_it_fits(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, text in {"POLICY": "fixed", "MAX_BATCH_COST": "100", "NUM_WORKERS": "2"}.items():
        monkeypatch.setenv(f"FAST_BATCHER_{name}", text)
    fits = construct(max_delay=0.1, cost=len).settings
    assert [fits[name].value for name in ("policy", "max_batch_cost", "num_workers")] == [
        *("fixed", 100, 2)
    ]
    assert caplog.messages == []
    others = construct(devices="cpu").settings
    assert [others[name] for name in ("policy", "max_batch_cost")] == [
        ("adaptive", "default"),
        (None, "default"),
    ]
    assert others["num_workers"] == (1, "default")
    assert [message.partition(" ")[0] for message in caplog.messages] == [
        *("FAST_BATCHER_MAX_BATCH_COST", "FAST_BATCHER_NUM_WORKERS", "FAST_BATCHER_POLICY")
    ]
    # One that needs another one.
    monkeypatch.setenv("FAST_BATCHER_MAX_DELAY", "0.1")
    caplog.clear()
    both = construct().settings
    assert (both["policy"].value, both["max_delay"].value) == ("fixed", 0.1)
    assert len(caplog.messages) == 1


def test_steps_of_all_batchers_are_of_those_that_have_some(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FAST_BATCHER_STEPPED", "true")
    assert DynBatcher("models.stepped:Counter").settings["stepped"].value is True
    assert construct().settings["stepped"] == (False, "default")
    (message,) = caplog.messages
    assert message.startswith("FAST_BATCHER_STEPPED is not used: it does not fit this batcher")
    monkeypatch.setenv("FAST_BATCHER_RE_RANKER__STEPPED", "true")
    with pytest.raises(ConfigurationError, match="no SteppedModel"):
        construct()


@pytest.mark.anyio
async def test_an_option_that_the_code_overrides_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FAST_BATCHER_MAX_BATCH_SIZE", "7")
    caplog.set_level("INFO", "fast_batcher")
    batcher = construct(max_batch_size=8, workers="threads")
    assert batcher.settings["max_batch_size"] == (8, "code, not FAST_BATCHER_MAX_BATCH_SIZE")
    async with batcher:
        pass
    told = [message for message in caplog.messages if "options of the code" in message]
    assert told == [
        "re-ranker: options of the code count: max_batch_size (code, not "
        "FAST_BATCHER_MAX_BATCH_SIZE)"
    ]
