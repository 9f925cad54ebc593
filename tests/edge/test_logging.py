"""Log records of workers reach the loggers of the app, and never hold the model up."""

import asyncio
import logging
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from time import monotonic
from typing import Any

import pytest
from logging_models import Floods, Logs, LogsOddAttributes
from models.ordinary import GatedOnLoad, Warm
from programs import run_command
from shared_hosts import hosts
from waits import LIMIT, MEASURED, Gate, both_loops, until

from fast_batcher import DynBatcher
from fast_batcher._opening import life
from fast_batcher._parent.worker_handle import SLOW_START, describe_start
from fast_batcher._worker.main import Start

__all__ = ["hosts"]

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


@pytest.fixture
def _captured_warnings() -> Iterator[None]:
    logging.captureWarnings(True)
    yield
    logging.captureWarnings(False)


@both_loops
@pytest.mark.usefixtures("_captured_warnings")
async def test_records_arrive_with_their_level_attributes_and_worker(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.ERROR, "fast_batcher")
    caplog.set_level(logging.INFO)
    async with DynBatcher(Logs, name="tiny", stop_timeout=LIMIT) as batcher:
        assert await batcher.process_batched("one") == "one"
    records = [one for one in caplog.records if one.process != os.getpid()]
    texts = [one.getMessage()[:30] for one in records]
    assert texts[:3] == ["loaded", "1 inputs", "caught"]
    assert texts[3].startswith("long long")
    assert "UserWarning: old argument" in records[4].getMessage()
    assert texts[5:] == ["closed"]
    for one in records:
        assert (one.worker, one.worker_pid) == (0, one.process)  # type: ignore[attr-defined]
    # The model's own attribute of this name stays.
    assert [one.model for one in records] == ["tiny", "?", *["tiny"] * 4]  # type: ignore[attr-defined]
    assert (records[1].tenant, records[1].odd) == ({"id": 7}, "{1}")  # type: ignore[attr-defined]
    assert "KeyError: 'lost key'" in logging.Formatter().format(records[2])
    assert records[3].getMessage().endswith("[shortened]")
    assert [one.name for one in records] == [*["models.tiny"] * 4, "py.warnings", "models.tiny"]
    assert capfd.readouterr().err == "printed\nprinted natively\n"


async def test_a_message_arrives_whatever_is_attached_to_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with DynBatcher(LogsOddAttributes, name="odd", stop_timeout=LIMIT) as batcher:
        await batcher.process_many(["cycle", "deep", "no text"])
    records = {one.getMessage(): one for one in caplog.records if one.name == "models.odd"}
    shown = {text: one.data for text, one in records.items()}  # type: ignore[attr-defined]
    assert shown == {"cycle": "<dict>", "deep": "<list>", "no text": "<NoText>"}
    assert {one.tenant for one in records.values()} == {7}  # type: ignore[attr-defined]


async def test_records_arrive_where_the_models_module_configures_logging(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Once: the app's handlers get them, and not those that the module has set in the worker."""
    async with DynBatcher[Any, Any](
        "configures_logging:Model", name="set", stop_timeout=LIMIT
    ) as batcher:
        await batcher.process_batched("one")
    (record,) = [one for one in caplog.records if one.getMessage() == "infer one"]
    assert (record.worker, record.model) == (0, "set")  # type: ignore[attr-defined]
    assert "infer one" not in capfd.readouterr().err


@both_loops
async def test_log_flood_loses_no_answer(caplog: pytest.LogCaptureFixture) -> None:
    received: Counter[str] = Counter()

    class Counts(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            received[record.getMessage()] += 1

    lags = []

    async def measure_lag() -> None:
        while True:
            due = monotonic() + 0.005
            await asyncio.sleep(0.005)
            lags.append(monotonic() - due)

    flood, counting = logging.getLogger("flood"), Counts()
    flood.addHandler(counting)
    flood.propagate = False
    try:
        async with asyncio.timeout(LIMIT), DynBatcher(Floods, 8, timeout=LIMIT) as batcher:
            lag = asyncio.create_task(measure_lag())
            started = monotonic()
            assert await batcher.process_many([1000] * 25) == [1000] * 25
            seconds = monotonic() - started
            lag.cancel()
            with suppress(asyncio.CancelledError):
                await lag
    finally:
        flood.removeHandler(counting)
        flood.propagate = True
    lost = [one.args[1] for one in caplog.records if "records of worker" in one.msg]  # type: ignore[index]
    assert received.total() + sum(lost) == 25_000  # type: ignore[arg-type]
    assert received.total() > 0
    MEASURED.append(("a worker logs 25,000 records", seconds, 0.5))
    MEASURED.append(("the loop's longest lag meanwhile", max(lags), 0.02))


@both_loops
async def test_each_start_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fast_batcher")
    devices = [f"cpu:{min(os.sched_getaffinity(0))}", "cpu"]
    options: dict[str, Any] = {"devices": devices, "model_args": [[1, 2]]}
    async with DynBatcher(Warm, 4, name="tiny", **options):
        lines = [one.getMessage() for one in caplog.records if "worker" in one.getMessage()]
    for index, device in enumerate(devices):
        (line,) = [one for one in lines if one.startswith(f"tiny: worker {index} ")]
        assert re.search(rf"pid \d+\) ready in \d+\.\d s on {device}, \d+ MiB, warm-up ", line)
        assert re.search(r"warm-up t\(1\)=\S+ ms t\(4\)=\S+ ms$", line)


@pytest.mark.parametrize(
    ("seconds", "times", "start", "text"),
    [
        (0.31, [], Start(0.1, 0.1, 0.0, "", 0, 0, {}), "0.3 s"),
        (
            4.1,
            [(1, 0.0031), (32, 0.0114)],
            Start(2.0, 1.0, 0.1, "cuda:0", 612 * 2**20, 90 * 2**20, {}),
            "4.1 s on cuda:0, 612 MiB, 90 MiB of the GPU, warm-up t(1)=3.1 ms t(32)=11 ms",
        ),
        (
            SLOW_START + 1,
            [(1, 0.25)],
            Start(6.0, 3.0, 0.5, "", 2**30, 0, {}),
            "11.0 s, 1024 MiB, warm-up t(1)=250 ms; "
            "process start 1.5 s, import 6.0 s, constructor 3.0 s, warm-up 0.5 s",
        ),
    ],
)
async def test_a_slow_start_names_its_steps(
    seconds: float, times: list[tuple[int, float]], start: Start, text: str
) -> None:
    assert describe_start(seconds, times, start) == text


# --- the start of a server ------------------------------------------------------------------------

PROGRAM = """
import asyncio, logging, sys
from fast_batcher import DynBatcher, InferenceModel

class Shouter(InferenceModel):
    def infer(self, inputs):
        return [text.upper() for text in inputs]

async def main():
    async with DynBatcher(Shouter, workers="threads").lifespan()(None):
        pass

"""


@pytest.mark.parametrize(
    ("configure", "is_told"),
    [
        ("", True),
        ("logging.getLogger('uvicorn').addHandler(logging.StreamHandler())", True),
        ("logging.basicConfig()", False),
        ("logging.getLogger('fast_batcher').addHandler(logging.NullHandler())", False),
        ("logging.getLogger('fast_batcher').setLevel(logging.WARNING)", False),
        ("logging.disable(logging.INFO)", False),
    ],
)
def test_start_and_readiness_are_visible_without_handlers(configure: str, is_told: bool) -> None:
    """As under uvicorn, which configures its own loggers alone."""
    program = f"{PROGRAM}{configure}\nasyncio.run(main())"
    told = run_command([sys.executable, "-c", program]).stderr
    lines = [
        r"INFO:     fast_batcher: Shouter: loading the model",
        r"INFO:     fast_batcher: Shouter: ready after \d+\.\d s",
    ]
    assert re.fullmatch("\n".join(lines) + "\n", told) if is_told else told == ""


def test_a_script_and_a_test_client_start_in_silence() -> None:
    for call in (
        "asyncio.run(DynBatcher(Shouter, workers='threads').process_batched('a'))",
        "from concurrent.futures import ThreadPoolExecutor as Pool\n"
        "Pool().submit(lambda: asyncio.run(main())).result()",
    ):
        assert run_command([sys.executable, "-c", PROGRAM + call]).stderr == ""


@pytest.mark.parametrize("shared", [False, True])
async def test_a_slow_start_says_what_it_waits_for(
    shared: bool,
    gate: Gate,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    hosts: object,
) -> None:
    monkeypatch.setattr(life, "SLOW_LOAD", 0.01)
    caplog.set_level(logging.INFO, "fast_batcher")
    batcher = DynBatcher(GatedOnLoad, model_args=(gate.path,), shared=shared)

    def told() -> list[str]:
        return [text for text in caplog.messages if "still loading" in text]

    async with batcher.lifespan(wait_ready=False)(None):
        visit = await gate.visit()
        await until(lambda: bool(told()))
        visit.let_on()
        await until(lambda: batcher.is_ready)
    (message,) = told()
    assert re.match(r"GatedOnLoad: still loading after \d+ s: waiting for ", message)
    assert ("the host process" if shared else "worker 0") in message
