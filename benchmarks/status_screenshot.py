"""Takes the picture of the status page in README.md: a server under load, in Debian's Chromium.

    python -m benchmarks.status_screenshot [--seconds 330] [--output docs/images/status_page.png]

Other arguments show the page in other ways: a dark theme, a phone, a worker that is killed.
"""

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from fast_batcher import DynBatcher, InferenceModel
from fast_batcher.fastapi import combine_lifespans, install_exception_handlers, status_router

ROOT = Path(__file__).parents[1]


class Timed(InferenceModel[int, int]):
    """Takes some time per batch and per input, as a model on a GPU does; fails for 13."""

    def __init__(self, fixed: float, each: float) -> None:
        self._fixed, self._each = fixed, each

    def infer(self, inputs: list[int]) -> list[int]:
        """Sleep, and echo."""
        time.sleep((self._fixed + self._each * len(inputs)) * random.uniform(0.9, 1.3))
        return [value if value != 13 else ValueError(value) for value in inputs]  # type: ignore[misc]


embed: DynBatcher[int, int] = DynBatcher(
    Timed, 32, model_args=(0.006, 0.0004), num_workers=2, name="embed"
)
rerank: DynBatcher[int, int] = DynBatcher(
    Timed, 16, model_args=(0.02, 0.002), name="rerank", max_queue_size=64
)
batchers = (embed, rerank)
app = FastAPI(lifespan=combine_lifespans(*(one.lifespan for one in batchers)))
install_exception_handlers(app)
app.include_router(status_router(*batchers))


@app.post("/load/{seconds}")
async def load(seconds: float, overload: bool = False) -> None:
    """Call both batchers for some time; the load swells and ebbs."""
    ends = asyncio.get_running_loop().time() + seconds
    async with asyncio.TaskGroup() as group:
        group.create_task(_call(group, embed, 700.0, ends))
        group.create_task(_call(group, rerank, 900.0 if overload else 110.0, ends))


async def _call(
    group: asyncio.TaskGroup, batcher: DynBatcher[int, int], rate: float, ends: float
) -> None:
    loop = asyncio.get_running_loop()
    while (now := loop.time()) < ends:
        swell = 1.0 + 0.35 * random.random() if int(now / 40) % 3 else 0.6
        for _ in range(round(rate * swell / 50)):
            group.create_task(_forget(batcher))
        await asyncio.sleep(1 / 50)


async def _forget(batcher: DynBatcher[int, int]) -> None:
    try:
        await batcher.process_batched(1)
    except Exception:  # noqa: BLE001  the page shows it
        return


@app.post("/{name}/{value}")
async def infer(name: str, value: int) -> int:
    """Answer one request."""
    return await {one.name: one for one in batchers}[name].process_batched(value)


def take_picture(url: str, options: argparse.Namespace) -> None:
    """Load the server, and take the picture before the load ends."""
    from playwright.sync_api import sync_playwright

    command = ["curl", "-sX", "POST"]
    loads = f"{url}/load/{options.seconds + 20}?overload={options.broken}"
    curl = subprocess.Popen([*command, loads])
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        page: Any = chromium.new_page(
            viewport={"width": options.width, "height": options.height},
            color_scheme=options.theme,
        )
        page.on("console", lambda message: print(message.text))
        page.goto(f"{url}/batchers")
        page.wait_for_timeout(1000 * options.seconds)
        if options.broken:
            for path in ("embed/13", "embed/13", "rerank/13", "rerank/1"):
                subprocess.run([*command, f"{url}/{path}"], check=False, capture_output=True)
            workers = page.request.get(f"{url}/batchers.json").json()["batchers"][0]["workers"]
            os.kill(workers[1]["pid"], signal.SIGKILL)
        page.wait_for_timeout(1500)
        page.screenshot(path=options.output, full_page=options.full)
        chromium.close()
    curl.kill()
    curl.wait()


def main() -> None:
    """Start the server, and take the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=330.0)
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "images" / "status_page.png")
    parser.add_argument("--theme", choices=("light", "dark"), default="light")
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--height", type=int, default=836)
    parser.add_argument("--full", action="store_true", help="the whole page")
    parser.add_argument("--broken", action="store_true", help="overload, and kill a worker")
    options = parser.parse_args()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "uvicorn",
            f"{__spec__.name}:app",
            "--port",
            str(port),
            "--no-access-log",
        ],
        cwd=ROOT,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            try:
                json.load(urllib.request.urlopen(f"{url}/batchers.json"))
                break
            except OSError:
                time.sleep(0.2)
        take_picture(url, options)
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
