"""`fast-batcher`: the subcommands, their options, and what they print.

Exit codes: 0 nothing is wrong, 1 something is wrong, 2 the command line is wrong.
"""

import asyncio
import io
import json
import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from math import inf, isfinite
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fast_batcher._cli.advice import (
    Wish,
    make_file,
    parse_seconds,
    print_advice,
    read_moments,
    tune_model,
)
from fast_batcher._cli.bench import bench
from fast_batcher._cli.checks import Check
from fast_batcher._cli.files import check_folder, write_file
from fast_batcher._cli.machine import check_machine
from fast_batcher._cli.model import (
    TargetError,
    check_options,
    examine_model,
    find_remedy,
    load_target,
    read_inputs,
)
from fast_batcher.errors import BatcherError

app = typer.Typer(
    help="Look after batchers: see https://pypi.org/project/fast_batcher.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
_SIGNS = {"good": "[green]ok[/]", "warning": "[yellow]warning[/]", "bad": "[red]wrong[/]"}


@app.callback()
def _introduce() -> None:
    """Look after batchers."""
    # A terminal of another encoding gets the report, with its unknown characters described.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    # `asyncio.run` would replace Python's own handler, and only cancel a task: Ctrl-C would wait
    # for the import of a module, or for a simulation.
    signal.signal(signal.SIGINT, _interrupt)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


app.command()(bench)


@app.command()
def doctor(
    target: Annotated[
        str | None, typer.Argument(help="A model or a batcher, as module:Model or module:batcher.")
    ] = None,
    inputs: Annotated[
        str | None,
        typer.Option(help="Inputs to time batches with: a JSON file, or module:list."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check the machine, and a model in a real worker; say what is wrong and what to do.

    Ends with 0 if nothing is wrong (there may be warnings), with 1 otherwise.
    """
    checks = list(check_machine())
    if target is not None:
        with _quiet() as warnings, _reserved_output(as_json):
            checks += asyncio.run(_check_target(target, inputs))
        checks += [Check("log", "warning", text) for text in dict.fromkeys(warnings.found)]
    if as_json:
        _write_json([asdict(check) for check in checks])
    else:
        _print(checks)
    raise typer.Exit(any(check.level == "bad" for check in checks))


class _Warnings(logging.Handler):
    """Keeps the warnings of the library and of its workers."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a warning; errors are in the report anyway."""
        if record.levelno != logging.WARNING:
            return
        try:
            self.found.append(self.format(record))
        except Exception:  # noqa: BLE001  as handlers of Python do: the text may not fit its values
            self.handleError(record)


@contextmanager
def _quiet() -> Iterator[_Warnings]:
    """Collect the warnings of the library instead of logging."""
    logger = logging.getLogger("fast_batcher")
    before = logger.level, logger.propagate
    warnings = _Warnings()
    logger.setLevel(logging.WARNING)
    logger.propagate = False
    logger.addHandler(warnings)
    try:
        yield warnings
    finally:
        logger.removeHandler(warnings)
        logger.setLevel(before[0])
        logger.propagate = before[1]


@contextmanager
def _reserved_output(is_reserved: bool) -> Iterator[None]:
    """Send what the program and its workers print to standard error, beside the JSON."""
    if not is_reserved:
        yield
        return
    sys.stdout.flush()
    before = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(before, 1)
        os.close(before)


def _write_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


async def _check_target(target: str, inputs: str | None) -> list[Check]:
    console = Console(stderr=True)
    checks = []
    try:
        values = [] if inputs is None else read_inputs(inputs)
        batcher = load_target(target)
        checks.append(Check("target", "good", f"{target} can be imported and pickled"))
        checks += check_options(batcher)
        with console.status("") as status:
            async for check in examine_model(batcher, values, status.update):
                checks.append(check)
    except TargetError as error:
        checks.append(Check("target", "bad", str(error)))
    return checks


def _check_rate(rate: float | None) -> float | None:
    if rate is not None and not 0 < rate < inf:
        raise typer.BadParameter(f"{rate:g}: give a number above 0")
    return rate


@app.command()
def tune(
    target: Annotated[
        str, typer.Argument(help="A model or a batcher, as module:Model or module:batcher.")
    ],
    inputs: Annotated[
        str,
        typer.Option(
            help="Inputs: a file with a JSON list or a JSON value in each line, or module:name of "
            "a list or of a function that returns one."
        ),
    ],
    most: Annotated[
        int, typer.Option("--most", min=1, help="Largest max_batch_size to try.")
    ] = 128,
    rate: Annotated[
        float | None,
        typer.Option(
            callback=_check_rate, help="Requests per second to serve; default 80 % of a worker's."
        ),
    ] = None,
    arrivals: Annotated[
        Path | None, typer.Option(help="Moments of real arrivals in seconds, one a line.")
    ] = None,
    within: Annotated[
        str | None, typer.Option("--target", help="Time for 95 % of the answers: 50ms, 0.2s.")
    ] = None,
    workers: Annotated[
        int, typer.Option(min=1, help="Most workers that the machine has room for.")
    ] = 1,
    write: Annotated[
        Path | None,
        typer.Option(callback=check_folder, help="Write the settings to this TOML file."),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Compare the prediction with a real run.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure a model in a real worker, and recommend max_batch_size, num_workers and max_latency.

    The scheduler runs in virtual time with the measured times. Ends with 1 if the model fails.
    """
    console = Console(stderr=True)
    seconds = None if within is None else parse_seconds(within)
    try:
        moments = None if arrivals is None else read_moments(arrivals)
        wish = Wish(rate, moments, seconds, workers, most, check)
        with _quiet(), _reserved_output(as_json), console.status("") as status:
            values = read_inputs(inputs)
            found = asyncio.run(tune_model(target, values, wish, status.update))
    except (TargetError, BatcherError) as error:
        text = "\n".join(filter(None, [str(error).strip(), find_remedy(error)]))
        console.print(f"[red]wrong[/] {escape(text)}", highlight=False)
        raise typer.Exit(1) from None
    if as_json:
        _write_json(_with_null(asdict(found)))
    else:
        print_advice(Console(), found)
    if write is not None:
        write_file(write, make_file(found))


def _with_null(value: Any) -> Any:
    """Replace numbers that are infinite, which JSON does not have, by None."""
    if isinstance(value, dict):
        return {name: _with_null(member) for name, member in value.items()}
    if isinstance(value, list | tuple):
        return [_with_null(member) for member in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def _print(checks: list[Check]) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in checks:
        text = escape(check.text)
        if check.remedy:
            text += f"\n[bold]{escape(check.remedy)}[/]"
        table.add_row(_SIGNS[check.level], check.name, text)
    Console().print(table)
