"""`fast-batcher bench`: measures an endpoint of a running server under several loads."""

import json
import platform
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import quote, urlsplit

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from fast_batcher._cli.files import check_folder, check_picture, write_file
from fast_batcher._load.bodies import Requests, find_requests, read_requests
from fast_batcher._load.client import Target
from fast_batcher._load.measurement import (
    Case,
    LoadError,
    LoadMeasurement,
    LoadSettings,
    measure_case,
)
from fast_batcher._load.report import (
    BUSY_LIMIT,
    Comparison,
    cases,
    compare,
    describe_lost,
    draw_loads,
    find_busiest,
    spread,
    total,
)
from fast_batcher._load.run import OPEN_CONNECTIONS, WARM_UP, Loads, measure_loads
from fast_batcher._version import __version__
from fast_batcher.stats import number

# A run takes half a minute, with warm-ups and the starts of the clients.
CLIENTS, RATES, SECONDS, REPETITIONS = "1,8,32", "50%,80%", 1.2, 3
# Unmeasured share of each measurement, for the load to settle.
WARM_UP_SHARE = 0.25
# Open files of a client beside its connections: a Python with an event loop has about ten.
OTHER_FILES = 32
# Answers below which a percentile says little.
FEW = 20
# What a status of the first request usually means.
REMEDIES = {
    307: "write the URL that it redirects to",
    308: "write the URL that it redirects to",
    404: "is the path right?",
    405: "is --method right?",
    415: "is --content-type right?",
    422: "give a body that the endpoint accepts: --body FILE",
}
TITLES = {"requests_per_second": "requests/s", "p50_ms": "p50 ms", "p95_ms": "p95 ms"}
COLUMNS = {**TITLES, "p99_ms": "p99 ms", "mean_batch": "batch"}
# The figures of streamed bodies: the time to the first part, and the gap to the next one.
PARTS = {f"{part}_p{at}_ms": f"{part} p{at} ms" for part in ("first", "gap") for at in (50, 99)}


@dataclass(frozen=True)
class Run:
    """A run, as `--json` writes it and `--compare` reads it."""

    url: str
    method: str
    sent: str
    date: str
    versions: dict[str, str]
    settings: dict[str, Any]
    measurements: list[LoadMeasurement]
    warnings: list[str]


def bench(
    url: Annotated[str, typer.Argument(help="The endpoint, like http://127.0.0.1:8000/embed.")],
    clients: Annotated[
        str | None, typer.Option(help=f"Closed loops, by their clients, or none.  [{CLIENTS}]")
    ] = None,
    rates: Annotated[
        str | None,
        typer.Option(
            help="Open loops: requests per second, or shares of the best closed loop, or none."
            f"  [{RATES}]"
        ),
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(min=0.1, help=f"Of each measurement.  [{SECONDS}]")
    ] = None,
    repetitions: Annotated[
        int | None, typer.Option(min=1, help=f"Of each measurement.  [{REPETITIONS}]")
    ] = None,
    body: Annotated[
        list[Path] | None,
        typer.Option(
            help="Bodies, instead of the examples of the app's OpenAPI schema: the items of a "
            ".json list, the lines of a .jsonl file, or the whole file. Repeatable."
        ),
    ] = None,
    content_type: Annotated[
        str | None, typer.Option(help="Of the bodies; by default from the file's name.")
    ] = None,
    method: Annotated[
        Literal["GET", "POST", "PUT", "PATCH"] | None,
        typer.Option(
            case_sensitive=False, help="By default POST with --body, else as in the schema."
        ),
    ] = None,
    header: Annotated[
        list[str] | None,
        typer.Option(help='Sent with each request, as "Authorization: Bearer ...". Repeatable.'),
    ] = None,
    unix_socket: Annotated[
        Path | None, typer.Option(help="Of the server, instead of the URL's host and port.")
    ] = None,
    late: Annotated[float, typer.Option(help="Seconds after which an answer is late.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of arrivals, and of the order of bodies.")] = 1,
    client_processes: Annotated[
        int, typer.Option(min=1, help="Raise it if the client is the limit.")
    ] = 1,
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json", callback=check_folder, help="Write all figures to a file; - for stdout."
        ),
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option(callback=check_picture, help="Draw throughput and latency; needs matplotlib."),
    ] = None,
    earlier_file: Annotated[
        Path | None,
        typer.Option(
            "--compare", help="A file of --json to compare with; its loads become the default."
        ),
    ] = None,
) -> None:
    """Load an endpoint of a running server; show throughput and latency.

    In a closed loop each client asks again when it is answered; in an open loop requests arrive at
    random, whether or not earlier ones are answered. Ends with 1 if nothing can be measured.
    """
    target, path = _parse_url(url)
    target = replace(
        target,
        headers=tuple(map(_parse_header, header or [])),
        socket_path=None if unix_socket is None else str(unix_socket),
    )
    console = Console(stderr=True)
    try:
        earlier = None if earlier_file is None else _read_run(earlier_file)
        loads, seconds = _choose_loads(earlier, clients, rates, repetitions, seconds)
        _allow_connections(loads)
        requests = _choose_requests(target, path, method, body, content_type)
        _check_endpoint(target, path, requests)
        settings = LoadSettings(
            bodies=requests.bodies,
            content_type=requests.content_type,
            seconds=seconds,
            warm_up=seconds * WARM_UP_SHARE,
            late=late,
            client_processes=client_processes,
            seed=seed,
            method=requests.method,
        )
        measurements = _measure_all(console, target, path, loads, settings)
    except (LoadError, OSError) as error:
        text = str(error) or type(error).__name__
        if not isinstance(error, LoadError):
            text = f"no server answers at {url}: {text}"
        console.print(f"[red]wrong[/] {escape(text)}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None
    told = {"seconds": seconds, "late": late, "seed": seed, "client_processes": client_processes}
    run = Run(
        url=url,
        method=requests.method,
        sent=requests.describe(),
        date=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        versions={"fast_batcher": __version__, "python": platform.python_version()},
        settings=asdict(loads) | told,
        measurements=measurements,
        warnings=_find_warnings(measurements),
    )
    _write_report(run, earlier, json_file, picture)


def _parse_url(url: str) -> tuple[Target, str]:
    try:
        parts = urlsplit(url)
        is_encrypted = parts.scheme == "https"
        port = parts.port or (443 if is_encrypted else 80)
    except ValueError as error:
        raise typer.BadParameter(f"{url}: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise typer.BadParameter(f"{url}: write it like http://127.0.0.1:8000/embed")
    # What is percent-encoded already stays as it is.
    path = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~")
    query = f"?{quote(parts.query, safe='/%:@!$&()*+,;=~?')}" if parts.query else ""
    return Target(parts.hostname, port, is_encrypted=is_encrypted), path + query


def _parse_header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not (colon and name.strip() and text.isprintable() and text.isascii()):
        raise typer.BadParameter(f'--header {text!r}: write it like "Authorization: Bearer ..."')
    return name.strip(), value.strip()


def _allow_connections(loads: Loads) -> None:
    """Raise the limit of open files, which the clients inherit, to what the loads need.

    Raises:
        LoadError: The hard limit is too low.
    """
    has_open_loops = loads.rates or loads.shares
    connections = max([*loads.clients, OPEN_CONNECTIONS if has_open_loops else 0])
    needed = connections + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise LoadError(
            f"{connections} connections need {needed} open files, and this process may have "
            f"{hard}: raise the hard limit (ulimit -Hn), or lower --clients and give --rates none"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _read_run(path: Path) -> Run:
    try:
        found = json.loads(path.read_text(encoding="utf-8-sig"))
        measurements = [
            LoadMeasurement(**{**one, "case": Case(**one["case"])}) for one in found["measurements"]
        ]
        names = Run.__dataclass_fields__
        return Run(**{name: found[name] for name in names} | {"measurements": measurements})
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise LoadError(
            f"--compare {path}: it is not a file written by bench --json: {error}"
        ) from None


def _choose_loads(
    earlier: Run | None,
    clients: str | None,
    rates: str | None,
    repetitions: int | None,
    seconds: float | None,
) -> tuple[Loads, float]:
    """Read the options; the default is the earlier run's, or ours."""
    chosen = _read_numbers("--clients", clients or CLIENTS)
    per_second, shares = _parse_rates(rates or RATES)
    if earlier is not None:
        kept = [m.case for m in earlier.measurements]
        if clients is None:
            chosen = list(dict.fromkeys(case.clients for case in kept if case.rate is None))
        if rates is None:
            # The same arrivals, whatever share of the capacity they are now.
            per_second = list(dict.fromkeys(case.rate for case in kept if case.rate is not None))
            shares = []
        repetitions = repetitions or earlier.settings["repetitions"]
        seconds = seconds or earlier.settings["seconds"]
    if shares and not chosen:
        raise typer.BadParameter("--rates: shares need the rate of a closed loop: --clients")
    if not (chosen or per_second):
        raise typer.BadParameter("--clients none --rates none: nothing is left to measure")
    loads = Loads(list(map(round, chosen)), per_second, shares, repetitions or REPETITIONS)
    return loads, seconds or SECONDS


def _parse_rates(text: str) -> tuple[list[float], list[float]]:
    words = text.replace(" ", "").split(",")
    per_second = [word for word in words if not word.endswith("%")]
    shares = [word.removesuffix("%") for word in words if word.endswith("%")]
    return (
        _read_numbers("--rates", ",".join(per_second) or "none"),
        [share / 100 for share in _read_numbers("--rates", ",".join(shares) or "none")],
    )


def _read_numbers(option: str, text: str) -> list[float]:
    """Read numbers above 0 from a list with commas."""
    if text == "none":
        return []
    try:
        found = list(map(float, text.split(",")))
    except ValueError:
        found = []
    if not found or not all(0 < one < 1e9 for one in found):
        raise typer.BadParameter(f"{option} {text}: write numbers above 0 with commas, or none")
    if option == "--clients" and any(one % 1 for one in found):
        raise typer.BadParameter(f"{option} {text}: write whole numbers")
    return found


def _choose_requests(
    target: Target, path: str, method: str | None, body: list[Path] | None, content_type: str | None
) -> Requests:
    if body:
        return read_requests(body, method or "POST", content_type)
    if method == "GET":
        return Requests("GET", [b""], "", "")
    return find_requests(target, path.partition("?")[0], method)


def _check_endpoint(target: Target, path: str, requests: Requests) -> None:
    """Send one request.

    Raises:
        LoadError: The answer is an error.
        OSError: The server cannot be reached.
    """
    status, answer = target.ask(requests.method, path, requests.bodies[0], requests.content_type)
    if not 200 <= status < 300:
        text = " ".join(answer[:300].decode(errors="replace").split())
        remedy = f"; {REMEDIES[status]}" if status in REMEDIES else ""
        raise LoadError(f"{requests.method} {path} answers {status} {text}{remedy}")


def _measure_all(
    console: Console, target: Target, path: str, loads: Loads, settings: LoadSettings
) -> list[LoadMeasurement]:
    """Measure everything, with a progress bar."""
    open_loops = len(loads.rates) + len(loads.shares)
    count = loads.repetitions * (len(loads.clients) + open_loops) + bool(loads.clients)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    is_shown = console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=not is_shown) as progress:
        task = progress.add_task("warming up", total=count)

        def measure_one(case: Case, repetition: int) -> LoadMeasurement:
            text = f"{case.load}, {repetition + 1} of {loads.repetitions}"
            progress.update(task, description="warming up" if repetition == WARM_UP else text)
            found = measure_case(target, case, repetition, settings)
            progress.advance(task)
            return found

        return measure_loads({path: path}, loads, measure_one)


def _find_warnings(measurements: Sequence[LoadMeasurement]) -> list[str]:
    found = []
    lost = describe_lost(measurements)
    if lost:
        found.append(f"requests without a good answer: {lost}")
    busiest = find_busiest(measurements)
    if busiest > BUSY_LIMIT:
        found.append(
            f"the client was busy for {busiest:.0%} of the time, and may be the limit: raise "
            "--client-processes"
        )
    few = [case.load for case in cases(measurements) if total(measurements, case, "requests") < FEW]
    if few:
        found.append(f"fewer than {FEW} requests at {', '.join(few)}: raise --seconds")
    return found


def _write_report(
    run: Run, earlier: Run | None, json_file: Path | None, picture: Path | None
) -> None:
    compared = [] if earlier is None else compare(run.measurements, earlier.measurements)
    stored = asdict(run) | {"comparison": [asdict(one) for one in compared]}
    text = json.dumps(stored, indent=1) + "\n"
    if str(json_file) == "-":
        sys.stdout.write(text)
    else:
        console = Console(highlight=False)
        _print_run(console, run)
        if earlier is not None:
            _print_comparison(console, run, earlier, compared)
        if json_file is not None:
            write_file(json_file, text)
    if picture is not None:
        draw_loads(run.measurements, picture, f"{run.method} {run.url}")


def _print_run(console: Console, run: Run) -> None:
    console.print(f"{run.method} {escape(run.url)}: {escape(run.sent)}", soft_wrap=True)
    _print_table(console, run.measurements, COLUMNS, "late", "lost")
    if any("first_p50_ms" in m.figures for m in run.measurements):
        _print_table(console, run.measurements, PARTS)
    told = run.settings
    console.print(
        f"Median (range) of {told['repetitions']} x {told['seconds']:g} s; late: after "
        f"{told['late']:g} s; at N/s requests arrive at random."
    )
    for warning in run.warnings:
        console.print(f"[yellow]warning[/] {escape(warning)}", soft_wrap=True)


def _print_table(
    console: Console, measurements: Sequence[LoadMeasurement], titles: dict[str, str], *totals: str
) -> None:
    """Print a row for each load: some figures, and sums over the repetitions."""
    measured = {figure for m in measurements for figure in m.figures}
    columns = {figure: title for figure, title in titles.items() if figure in measured}
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("load")
    for title in (*columns.values(), *totals):
        table.add_column(title, justify="right")
    for case in cases(measurements):
        spreads = {figure: spread(measurements, case, figure) for figure in columns}
        rate = [str(spreads.pop(figure)) for figure in columns if figure == "requests_per_second"]
        table.add_row(
            case.load,
            *rate,
            *("-" if one is None else number(one.median) for one in spreads.values()),
            *(f"{total(measurements, case, figure):.0f}" for figure in totals),
        )
    console.print(table)


def _print_comparison(
    console: Console, run: Run, earlier: Run, compared: Sequence[Comparison]
) -> None:
    console.print(
        f"\nCompared with {earlier.method} {escape(earlier.url)} of {earlier.date}:", soft_wrap=True
    )
    if earlier.sent != run.sent:
        console.print(
            f"[yellow]warning[/] it sent something else: {escape(earlier.sent)}", soft_wrap=True
        )
    if not compared:
        console.print("[yellow]warning[/] no load is in both: leave out --clients and --rates")
        return
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for title in ("load", "figure"):
        table.add_column(title)
    for title in ("earlier", "now", "ratio (range)"):
        table.add_column(title, justify="right")
    table.add_column("")
    for one in compared:
        verdict = {True: "[green]better[/]", False: "[red]worse[/]", None: "no difference seen"}
        table.add_row(
            one.load,
            (TITLES | PARTS)[one.figure],
            number(one.earlier.median),
            number(one.now.median),
            f"{one.ratio.median:.2f} ({one.ratio.low:.2f}-{one.ratio.high:.2f})",
            verdict[one.is_better],
        )
    console.print(table)
    if min(run.settings["repetitions"], earlier.settings["repetitions"]) < 2:
        console.print("[yellow]warning[/] one repetition has no range: raise --repetitions")
