"""Start of a worker process, and its reaction to signals; real processes and programs."""

import errno
import json
import multiprocessing
import os
import select
import signal
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from models.children import HandlesSigterm, LeavesDescriptors, Terminates
from models.ordinary import Holds
from paths import PYTHONPATH
from programs import PREAMBLE, Start, program, run_command
from waits import LIMIT, Gate, call, one_loop, outcome

from fast_batcher import DynBatcher
from fast_batcher._parent.worker_process import ChildProcess

__all__ = ["program"]

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


def run_script(path: Path, code: str, *arguments: str) -> Any:
    """Run a program to its end, in a session of its own; its text may come from stdin ("-")."""
    text = PREAMBLE + textwrap.dedent(code)
    path.write_text(text)
    return run_command(
        arguments, input=text, env={**os.environ, "PYTHONPATH": PYTHONPATH}, start_new_session=True
    )


# --- where a worker can be started ----------------------------------------------------------------


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_a_daemonic_process_can_have_a_batcher(program: Start, method: str) -> None:
    """As Hypercorn's workers are; the model's process may have children of its own all the same."""
    running = program(
        f"""
        import multiprocessing

        def serve():
            async def main():
                async with DynBatcher(models.children.Reports) as batcher:
                    report = await batcher.process_batched("")
                    tell([multiprocessing.current_process().daemon, report["daemon"]])

            asyncio.run(main())

        if __name__ == "__main__":
            context = multiprocessing.get_context({method!r})
            process = context.Process(target=serve, daemon=True)
            process.start()
            process.join()
            tell(process.exitcode)
        """,
        guarded=False,
    )
    assert running.tells() == [True, False]
    assert running.tells() == 0
    assert running.finish() == (0, "")


def test_program_from_stdin_may_use_imported_class(tmp_path: Path) -> None:
    done = run_script(
        tmp_path / "unused",
        """
        async def main():
            for model in (models.base.Echo, "models.base:Echo"):
                async with DynBatcher(model) as batcher:
                    tell(await batcher.process_batched("echo"))

        asyncio.run(main())
        """,
        sys.executable,
        "-",
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, '"echo"\n' * 2, "")


# --- what a worker gets ---------------------------------------------------------------------------


def test_start_leaves_the_environment_unchanged(program: Start) -> None:
    running = program(
        """
        changes = []

        def listen(event, arguments):
            if event in ("os.putenv", "os.unsetenv"):
                changes.append([event, *map(str, arguments)])

        async def main():
            async with DynBatcher(models.children.Reports, num_workers=2) as batcher:
                report = await batcher.process_batched("")
            tell(int(report["environment"]["OPENBLAS_NUM_THREADS"]))
            tell(changes)

        os.environ.pop("OPENBLAS_NUM_THREADS", None)
        sys.addaudithook(listen)
        asyncio.run(main())
        """
    )
    assert running.tells() >= 1
    assert running.tells() == []
    assert running.finish() == (0, "")


@pytest.mark.parametrize("is_free", [False, True], ids=["taken by the loop", "free"])
def test_native_output_never_reaches_a_request(tmp_path: Path, is_free: bool) -> None:
    """In the program, the numbers 0 to 2 are those of its event loop, or free when it opens."""
    result = tmp_path / "result"
    done = run_script(
        tmp_path / "program.py",
        f"""
        import numpy

        async def main():
            if {is_free}:
                os.closerange(0, 3)
            inputs = [numpy.full(25_000, number, numpy.int32) for number in range(40)]
            async with (
                DynBatcher(models.children.PrintsNatively, 4) as batcher,
                DynBatcher(models.children.Reports) as reports,
            ):
                answers = await batcher.process_many(inputs)
                report = await reports.process_batched("")
                streams = [os.readlink(f"/proc/self/fd/{{number}}") for number in range(3)]
            with open({str(result)!r}, "w") as file:
                json.dump([answers, streams, report["streams"], report["descriptors"]], file)

        if __name__ == "__main__":
            if {is_free}:
                # The loop gets others.
                for number in range(3):
                    os.open(os.devnull, os.O_RDONLY)
            asyncio.run(main())
        """,
        "sh",
        "-c",
        'exec "$0" "$@" <&- >&- 2>&-',
        sys.executable,
        str(tmp_path / "program.py"),
    )
    assert done.returncode == 0
    answers, ours, theirs, descriptors = json.loads(result.read_text())
    assert answers == [[number] for number in range(40)]
    assert theirs == ["/dev/null"] * 3
    assert any(one.startswith("/memfd:") for one in descriptors)
    if is_free:
        assert ours == ["/dev/null"] * 3
    else:
        assert not any(one.startswith(("/memfd:", "pipe:")) for one in ours)


@one_loop
async def test_child_programs_inherit_no_descriptors() -> None:
    async with DynBatcher(LeavesDescriptors) as batcher:
        files, pipes = await batcher.process_batched(None)
    assert not set(files) & set(pipes)
    assert not any("memfd" in file for file in files)


# --- its end --------------------------------------------------------------------------------------


@pytest.fixture(params=["a pidfd", "no pidfd"])
def _death_is_told_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some systems and sandboxes have no pidfds."""

    def refuse(pid: int) -> int:
        raise OSError(errno.ENOSYS, "Function not implemented")

    if request.param == "no pidfd":
        monkeypatch.setattr(os, "pidfd_open", refuse)


def start_and_wait(function: Callable[..., Any], *arguments: Any) -> ChildProcess:
    """Start a process that calls the function, and wait for its death."""
    process = multiprocessing.get_context("spawn").Process(target=function, args=arguments)
    child = ChildProcess(process, os.environ)
    assert select.select([child.death_fd], [], [], LIMIT)[0]
    return child


@pytest.mark.usefixtures("_death_is_told_by")
@pytest.mark.parametrize(
    ("function", "argument", "code"),
    [(os._exit, 3, 3), (sys.exit, 0, 0), (signal.raise_signal, signal.SIGKILL, -signal.SIGKILL)],
    ids=["_exit", "exit", "signal"],
)
def test_exited_worker_leaves_no_zombie(
    function: Callable[..., Any], argument: int, code: int
) -> None:
    child = start_and_wait(function, argument)
    assert child.take_exit_code() == code
    with pytest.raises(ChildProcessError):
        os.waitpid(child.pid, os.WNOHANG)
    child.close()


@pytest.mark.usefixtures("_death_is_told_by")
def test_exit_code_reaped_elsewhere_is_unknown() -> None:
    child = start_and_wait(os._exit, 3)
    os.waitpid(child.pid, 0)
    assert child.take_exit_code() is None
    child.close()


# --- signals --------------------------------------------------------------------------------------


@one_loop
async def test_worker_ignores_sigterm_and_answers(gate: Gate) -> None:
    async with DynBatcher(Holds, model_args=(gate.path,)) as batcher:
        held = call(batcher, "hold")
        visit = await gate.visit()
        os.kill(visit.pid, signal.SIGTERM)
        visit.let_on()
        assert await outcome(held) == "hold"
        # Idle, it is waiting for the next batch.
        os.kill(visit.pid, signal.SIGTERM)
        assert await batcher.process_batched("next") == "next"
        assert batcher.stats.restarts == 0


def test_worker_importing_main_survives_sigterm(program: Start, gate: Gate) -> None:
    running = program(
        f"""
        if __name__ != "__main__":
            models.base.pass_gate({gate.path!r})

        async def main():
            async with DynBatcher(models.ordinary.Whereabouts) as batcher:
                tell(await batcher.process_batched(""))

        if __name__ == "__main__":
            asyncio.run(main())
        """,
        guarded=False,
    )
    visit = gate.wait()
    os.kill(visit.pid, signal.SIGTERM)
    visit.let_on()
    assert running.tells() == visit.pid
    assert running.finish() == (0, "")


@one_loop
async def test_model_keeps_its_sigterm_handler(gate: Gate) -> None:
    async with DynBatcher(HandlesSigterm, model_args=(gate.path,)) as batcher:
        held = call(batcher, "hold")
        visit = await gate.visit()
        os.kill(visit.pid, signal.SIGTERM)
        handler = await gate.visit()
        assert (handler.pid, handler.note) == (visit.pid, "SIGTERM")
        handler.let_on()
        visit.let_on()
        assert await outcome(held) == "hold"


@one_loop
@pytest.mark.parametrize("way", ["fork", "exec"])
async def test_processes_that_a_model_starts_can_be_terminated(way: str) -> None:
    async with DynBatcher(Terminates) as batcher:
        assert await batcher.process_batched(way) == -signal.SIGTERM
