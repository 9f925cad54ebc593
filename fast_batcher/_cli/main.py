"""`fast-batcher`: the subcommands, their options, and what they print.

Exit codes: 0 nothing is wrong, 1 something is wrong, 2 the command line is wrong.
"""

import asyncio
import json
import logging
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from fast_batcher._cli.checks import Check
from fast_batcher._cli.machine import check_machine
from fast_batcher._cli.model import TargetError, examine_model, load_target, read_inputs

app = typer.Typer(
    help="Look after batchers: see https://pypi.org/project/fast_batcher.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
_SIGNS = {"good": "[green]ok[/]", "warning": "[yellow]warning[/]", "bad": "[red]wrong[/]"}


@app.callback()
def _introduce() -> None:
    """Look after batchers."""


@app.command()
def doctor(
    target: Annotated[
        str | None, typer.Argument(help="A model or a batcher, as module:Model or module:batcher.")
    ] = None,
    inputs: Annotated[
        Path | None,
        typer.Option(help="Inputs to time batches with: a JSON list, or a JSON value a line."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check the machine, and a model in a real worker; say what is wrong and what to do.

    Ends with 0 if nothing is wrong (there may be warnings), with 1 otherwise.
    """
    checks = list(check_machine())
    if target is not None:
        checks += asyncio.run(_check_target(target, inputs))
    if as_json:
        sys.stdout.write(json.dumps([asdict(check) for check in checks], indent=2) + "\n")
    else:
        _print(checks)
    raise typer.Exit(any(check.level == "bad" for check in checks))


async def _check_target(target: str, inputs: Path | None) -> list[Check]:
    # What the worker logs about a failed start is in the report.
    logging.getLogger("fast_batcher").setLevel(logging.CRITICAL)
    console = Console(stderr=True)
    checks = []
    try:
        values = [] if inputs is None else read_inputs(inputs)
        batcher = load_target(target)
        checks.append(Check("target", "good", f"{target} can be imported and pickled"))
        with console.status("") as status:
            async for check in examine_model(batcher, values, status.update):
                checks.append(check)  # noqa: PERF401  shown one by one in the end
    except TargetError as error:
        checks.append(Check("target", "bad", str(error)))
    return checks


def _print(checks: list[Check]) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in checks:
        text = f"{check.text}\n[bold]{check.remedy}[/]" if check.remedy else check.text
        table.add_row(_SIGNS[check.level], check.name, text)
    Console().print(table)
