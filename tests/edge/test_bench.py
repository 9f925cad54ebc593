"""`fast-batcher bench`: what it sends, how it compares, and the command at real servers."""

import json
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import typer
from fastapi import FastAPI
from paths import PYTHONPATH
from programs import run_command
from pydantic import BaseModel, ConfigDict, Field
from servers import Server

from fast_batcher._cli.bench import _find_warnings, _parse_rates, _parse_url, _read_numbers
from fast_batcher._load.bodies import _find_operation, read_requests, read_schema
from fast_batcher._load.measurement import Case, LoadError, LoadMeasurement
from fast_batcher._load.report import Comparison, compare

# Short, and with a range.
SHORT = ["--clients", "2", "--rates", "none", "--seconds", "0.5", "--repetitions", "2"]


# --- what is sent ---------------------------------------------------------------------------------


class Inner(BaseModel):
    kind: Literal["a", "b"]
    share: float


class Whole(BaseModel):
    text: str
    inner: Inner
    model_config = ConfigDict(json_schema_extra={"examples": [{"text": "x", "inner": {}}, 2]})


class Stated(BaseModel):
    level: Annotated[int, Field(examples=[7, 8])]
    name: Annotated[str, Field(json_schema_extra={"default": "n"})]
    fixed: Literal[3]
    left_out: str = "has a default, so that it is not required"


class Unstated(BaseModel):
    level: Annotated[int, Field(examples=[7])]
    texts: list[str]
    inner: Inner
    choice: int | None
    left_out: int = 1


class Tree(BaseModel):
    children: list["Tree"]


app = FastAPI()


@app.post("/whole")
async def take_whole(body: Whole) -> None: ...


@app.post("/stated")
async def take_stated(body: Stated) -> None: ...


@app.post("/unstated")
async def take_unstated(body: Unstated) -> None: ...


@app.post("/tree")
async def take_tree(body: Tree) -> None: ...


@pytest.mark.parametrize(
    ("path", "bodies"),
    [
        ("/whole", [{"text": "x", "inner": {}}, 2]),
        ("/stated", [{"level": level, "name": "n", "fixed": 3} for level in (7, 8)]),
    ],
)
def test_bodies_that_a_schema_states_are_sent(path: str, bodies: list[Any]) -> None:
    found = read_schema(app.openapi(), path, None)
    assert (found.method, [json.loads(body) for body in found.bodies]) == ("POST", bodies)


@pytest.mark.parametrize(
    ("path", "skeleton"),
    [
        (
            "/unstated",
            {"level": 7, "texts": ["..."], "inner": {"kind": "a", "share": 0.0}, "choice": 0},
        ),
        ("/tree", {"children": [{"children": [{"children": "..."}]}]}),
    ],
)
def test_a_skeleton_is_shown_where_no_body_is_stated(path: str, skeleton: Any) -> None:
    with pytest.raises(LoadError, match=f"the schema of {path} has no example") as caught:
        read_schema(app.openapi(), path, None)
    _, _, shown = str(caught.value).partition("give --body FILE, like ")
    assert json.loads(shown) == skeleton


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/components/schemas/A"},
        {"$ref": "#/components/schemas/Missing"},
        {"type": "array", "items": True},
    ],
)
def test_unreadable_schema_is_told(schema: dict[str, Any]) -> None:
    own = {"$ref": "#/components/schemas/A"}
    body = {"content": {"application/json": {"schema": schema}}}
    document = {
        "paths": {"/a": {"post": {"requestBody": body}}},
        "components": {"schemas": {"A": own}},
    }
    with pytest.raises(LoadError, match="the schema of /a cannot be read"):
        read_schema(document, "/a", None)


PATHS: dict[str, Any] = {
    "/items/{id}": {"get": {"name": "any"}},
    "/items/first": {"get": {"name": "first"}, "post": {"name": "new"}},
}


@pytest.mark.parametrize(
    ("path", "method", "found"),
    [
        ("/items/7", None, ("get", "any")),
        ("/items/first", None, ("post", "new")),
        ("/items/first", "GET", ("get", "first")),
    ],
)
def test_the_operation_of_a_path_is_found(
    path: str, method: str | None, found: tuple[str, str]
) -> None:
    name, operation = _find_operation(PATHS, path, method)
    assert (name, operation["name"]) == found


def test_missing_operation_error_lists_known_operations() -> None:
    with pytest.raises(LoadError, match=r"has GET /items/\{id\}, POST /items/first.*no /other"):
        _find_operation(PATHS, "/other", None)


@pytest.mark.parametrize(
    ("name", "content", "bodies", "content_type"),
    [
        ("a.json", b'[{"n": 1}, 2]', [b'{"n": 1}', b"2"], "application/json"),
        ("a.json", b'{"n": 1}\n', [b'{"n": 1}\n'], "application/json"),
        ("a.jsonl", b"[1]\n\n[2]\n", [b"[1]", b"[2]"], "application/json"),
        ("a.jsonl", b"\xef\xbb\xbf[1]\r\n", [b"[1]\r"], "application/json"),
        # These are line ends for `str.splitlines`.
        (
            "a.jsonl",
            '"\u2028\x85\x0b"\n'.encode(),
            ['"\u2028\x85\x0b"'.encode()],
            "application/json",
        ),
        ("a.png", b"\x89PNG", [b"\x89PNG"], "image/png"),
        ("a.unknown", b"[1]", [b"[1]"], "application/octet-stream"),
    ],
)
def test_bodies_are_read_from_files(
    tmp_path: Path, name: str, content: bytes, bodies: list[bytes], content_type: str
) -> None:
    (tmp_path / name).write_bytes(content)
    found = read_requests([tmp_path / name], "POST", None)
    assert (found.bodies, found.content_type) == (bodies, content_type)


@pytest.mark.parametrize("content", ["[]", "{", None])
def test_a_file_without_a_body_is_refused(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "a.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(LoadError, match=r"a\.json: it (cannot be read|has no body)"):
        read_requests([path], "POST", None)


# --- the options ----------------------------------------------------------------------------------


def test_rates_are_numbers_and_shares() -> None:
    assert _parse_rates("100, 50%,200") == ([100, 200], [0.5])
    assert _parse_rates("none") == ([], [])


@pytest.mark.parametrize("text", ["", "0", "-1", "two", "1.5", "1,,2", "inf", "nan"])
def test_wrong_clients_are_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="--clients"):
        _read_numbers("--clients", text)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("a:80/b", "write it like http://"),
        ("http:///b", "write it like http://"),
        ("http://a:99999/", "Port out of range"),
        ("http://[::1", "Invalid IPv6 URL"),
    ],
)
def test_a_wrong_url_is_refused(url: str, message: str) -> None:
    with pytest.raises(typer.BadParameter, match=message):
        _parse_url(url)


def test_a_path_is_encoded_once() -> None:
    target, path = _parse_url("http://[::1]:80/a b/%20/ä?q=ä b&n=1")
    assert (target.host, target.port) == ("::1", 80)
    assert path == "/a%20b/%20/%C3%A4?q=%C3%A4%20b&n=1"


# --- the warnings ---------------------------------------------------------------------------------


def test_a_busy_client_and_few_requests_are_told() -> None:
    case = Case("path", "/path", 8)
    calm = LoadMeasurement(case, 0, {"client_busy": 0.5, "requests": 20})
    assert _find_warnings([calm]) == []
    busy = LoadMeasurement(case, 0, {"client_busy": 0.9, "requests": 19}, {"no answer": 2})
    lost, limit, few = _find_warnings([busy])
    assert "2 times no answer" in lost
    assert "busy for 90% of the time" in limit
    assert "fewer than 20 requests at 8 clients" in few


# --- the comparison -------------------------------------------------------------------------------


def measured(*rates: float, clients: int = 8, rate: float | None = None) -> list[LoadMeasurement]:
    case = Case("path", "/path", clients, rate)
    return [
        LoadMeasurement(case, number, {"requests_per_second": one, "p95_ms": 1000 / one})
        for number, one in enumerate(rates)
    ]


def test_ranges_that_overlap_show_no_difference() -> None:
    rate, latency = compare(measured(8, 10, 12), measured(11, 9, 13))
    assert (rate.is_better, latency.is_better) == (None, None)
    assert (rate.ratio.median, rate.ratio.low, rate.ratio.high) == (10 / 11, 8 / 13, 12 / 9)


@pytest.mark.parametrize(("now", "is_better"), [((20, 21), True), ((5, 6), False)])
def test_ranges_apart_are_better_or_worse(now: tuple[float, ...], is_better: bool) -> None:
    found: list[Comparison] = compare(measured(*now), measured(10, 11))
    assert [one.is_better for one in found] == [is_better, is_better]


def test_the_same_loads_are_compared_alone() -> None:
    now = [*measured(1, 2), *measured(3, 4, clients=512, rate=9.0), *measured(5, clients=1)]
    earlier = [*measured(1, 2), *measured(3, 4, clients=512, rate=9.0), *measured(5, clients=2)]
    assert [(one.load, one.figure) for one in compare(now, earlier)] == [
        ("8 clients", "requests_per_second"),
        ("8 clients", "p95_ms"),
        ("9/s", "p95_ms"),
    ]


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = Server("apps.measured:app", "--no-access-log")
    yield server.url()
    server.close()


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_command(
        [sys.executable, "-m", "fast_batcher", "bench", *arguments],
        env={"PATH": "", "PYTHONPATH": PYTHONPATH, "COLUMNS": "80"},
    )


@pytest.mark.slow
def test_an_endpoint_is_measured_with_stated_bodies(url: str, tmp_path: Path) -> None:
    picture = tmp_path / "picture.svg"
    done = bench(
        *(f"{url}/length", "--clients", "1,2", "--rates", "50%,20", "--seconds", "1"),
        *("--repetitions", "1", "--json", "-", "--picture", str(picture)),
    )
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found["method"] == "POST"
    assert found["sent"].startswith("2 bodies of the app's OpenAPI schema")
    cases = [one["case"] for one in found["measurements"]]
    assert [(one["clients"], one["share"]) for one in cases] == [
        *[(1, None), (2, None)],
        *[(512, None), (512, 0.5)],
    ]
    assert found["measurements"][0]["figures"]["requests_per_second"] > 0
    assert all(one["lost"] == {} for one in found["measurements"])
    assert "<svg" in picture.read_text()


@pytest.mark.slow
def test_parts_of_streamed_bodies_are_timed(url: str, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    done = bench(f"{url}/parts", *SHORT, "--json", str(path))
    assert (done.returncode, done.stderr) == (0, "")
    assert "first p50 ms" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    for one in json.loads(path.read_text())["measurements"]:
        figures = one["figures"]
        assert figures["first_p50_ms"] < figures["p50_ms"]
        assert figures["gap_p50_ms"] <= figures["gap_p99_ms"]
    again = bench(f"{url}/parts", "--compare", str(path))
    assert "first p50 ms" in again.stdout.partition("Compared with")[2]


@pytest.mark.slow
def test_bodies_of_a_stated_length_are_not_taken_for_streams(url: str) -> None:
    done = bench(f"{url}/large", *SHORT, "--json", "-")
    for one in json.loads(done.stdout)["measurements"]:
        assert one["figures"]["answers"] > 0
        assert "first_p50_ms" not in one["figures"]


@pytest.mark.slow
def test_two_runs_are_compared(url: str, tmp_path: Path) -> None:
    earlier = tmp_path / "earlier.json"
    done = bench(f"{url}/shout/hello%20you", *SHORT, "--json", str(earlier))
    assert (done.returncode, done.stderr) == (0, "")
    assert f"GET {url}/shout/hello%20you: no body" in done.stdout
    assert "2 clients" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    # The loads are the earlier ones.
    again = bench(f"{url}/length", "--compare", str(earlier))
    assert (again.returncode, again.stderr) == (0, "")
    head, _, comparison = again.stdout.partition(f"Compared with GET {url}/shout/hello%20you")
    assert "Median (range) of 2 x 0.5 s" in head
    assert "it sent something else: no body" in comparison
    assert comparison.count("2 clients") == 3


@pytest.mark.slow
def test_bodies_of_a_file_are_sent(url: str, tmp_path: Path) -> None:
    body = tmp_path / "body.jsonl"
    body.write_text('{"text": "one"}\n{"text": "three"}\n')
    done = bench(f"{url}/length", *SHORT, "--body", str(body))
    assert (done.returncode, done.stderr) == (0, "")
    assert "2 bodies from body.jsonl, 15 to 17 bytes, application/json" in done.stdout


@pytest.mark.slow
def test_headers_are_sent_with_each_request(url: str) -> None:
    done = bench(f"{url}/guarded", *SHORT)
    assert (done.returncode, "POST /guarded answers 401" in done.stderr) == (1, True)
    let_in = ["--header", "Authorization: Bearer secret", "--json", "-"]
    done = bench(f"{url}/guarded", *SHORT, *let_in)
    assert (done.returncode, done.stderr) == (0, "")
    assert [one["lost"] for one in json.loads(done.stdout)["measurements"]] == [{}, {}]
    done = bench(f"{url}/guarded", *SHORT, "--header", "secret")
    assert (done.returncode, "write it like" in done.stderr) == (2, True)


@pytest.mark.slow
def test_length_is_read_of_its_own_header(url: str) -> None:
    done = bench(f"{url}/labelled", *SHORT, "--json", "-")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)["measurements"]
    assert [(one["lost"], one["figures"]["answers"] > 1) for one in found] == [({}, True)] * 2


@pytest.mark.slow
def test_errors_under_load_are_told(url: str) -> None:
    done = bench(f"{url}/sometimes-busy", *SHORT)
    assert done.returncode == 0
    assert "times status 503; the first: 503 {" in done.stdout
    assert "the queue is full" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        ("/busy", [], 'POST /busy answers 503 {"detail":"the queue\\nis full"}'),
        ("/missing", [], "no /missing"),
        ("/missing", ["--method", "GET"], 'GET /missing answers 404 {"detail":"Not Found"}'),
        ("/greet", [], 'has no example: give --body FILE, like {"name": "..."}'),
        ("/length", ["--body", "wrong.json"], 'POST /length answers 422 {"detail":[{"type":"str'),
        ("/length", ["--compare", "wrong.json"], "not a file written by bench --json"),
    ],
)
def test_bench_error_is_reported_in_one_line(
    url: str, tmp_path: Path, path: str, options: list[str], message: str
) -> None:
    (tmp_path / "wrong.json").write_text('{"text": ""}')
    options = [str(tmp_path / one) if one == "wrong.json" else one for one in options]
    done = bench(f"{url}{path}", *options)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("wrong ")
    assert message in line


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limit", "message"),
    [
        ("-n 64", "512 connections need 544 open files, and this process may have 64: raise the"),
        # Too low as well, but the process may raise it.
        ("-Sn 64", None),
    ],
)
def test_too_few_descriptors_are_told(url: str, limit: str, message: str | None) -> None:
    command = f"{sys.executable} -m fast_batcher bench {url}/length {shlex.join(SHORT)}"
    rates = "--rates 20 --clients 40"
    done = run_command(
        ["/bin/sh", "-c", f"ulimit {limit}; {command} {rates}"],
        env={"PATH": "", "PYTHONPATH": PYTHONPATH, "COLUMNS": "80"},
    )
    assert done.returncode == (message is not None), done.stderr
    assert message is None or message in done.stderr


@pytest.mark.slow
def test_an_unreachable_server_is_told_in_a_line() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # it does not listen
        done = bench(f"http://127.0.0.1:{silent.getsockname()[1]}/length")
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert "no server answers at http://127.0.0.1" in line
    assert "Connect call failed" in line


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["ftp://127.0.0.1/length"],
        ["http://127.0.0.1/length", "--clients", "none", "--rates", "none"],
        ["http://127.0.0.1/length", "--clients", "none"],
        ["http://127.0.0.1/length", "--json", "missing/file.json"],
        ["http://127.0.0.1/length", "--picture", "picture.txt"],
    ],
)
def test_a_wrong_command_line_ends_with_two(arguments: list[str]) -> None:
    done = bench(*arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
