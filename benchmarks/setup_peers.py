"""Installs the peers that the benchmarks compare with, each into its own virtual environment.

Separate environments, because the peers' requirements contradict each other. Run it again at
any time: what is there already is kept. A peer that can't be installed is named and left out; the
benchmarks then report it as not installed.
"""

import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path

ENVIRONMENTS = Path(__file__).resolve().parent.parent / ".venv-peers"


def pin(name: str) -> str:
    """Require our own version of a package, or any version if we do not have it."""
    try:
        return f"{name}=={metadata.version(name)}"
    except metadata.PackageNotFoundError:
        return name


# What an app of ours runs on, in our versions, so that it makes no difference.
HTTP = [pin(name) for name in ("fastapi", "uvicorn", "httptools")]
PEERS = {
    # pydantic and numpy: imported by it or by its users' models.
    "fast_dynamic_batcher": ["fast_dynamic_batcher==1.1.0", "pydantic", "numpy", *HTTP],
    # Imports torch only if it is there; without it, it starts faster and serves the same.
    "batched": ["batched==0.1.5", "numpy", *HTTP],
    "async_batcher": ["async-batcher==0.2.2", "numpy"],
    # httptools: without it, its uvicorn reads requests in Python.
    "bentoml": ["bentoml==1.4.39", "numpy", "httptools"],
    "ray_serve": ["ray[serve]==2.60.0", "numpy"],
    "litserve": ["litserve==0.2.19", *HTTP],
    "mosec": ["mosec==0.9.8", "numpy", "pillow"],
}


def python_of(peer: str) -> Path:
    """The interpreter of a peer's environment, whether or not it exists."""
    return ENVIRONMENTS / peer / "bin" / "python"


def install(peer: str) -> None:
    """Make or complete one environment.

    Raises:
        subprocess.CalledProcessError: pip failed; its messages are on stderr.
    """
    # The same event loop as ours, so that the loop makes no difference.
    requirements = [*PEERS[peer], pin("uvloop")]
    wanted = "\n".join([f"python {sys.version}", *requirements])
    done = ENVIRONMENTS / peer / "installed.txt"
    if done.exists() and done.read_text() == wanted:
        print(f"{peer}: there already", file=sys.stderr)
        return
    print(f"{peer}: installing {' '.join(requirements)}", file=sys.stderr)
    venv.create(ENVIRONMENTS / peer, with_pip=True, clear=True)
    pip = [str(python_of(peer)), "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, *requirements], check=True)
    done.write_text(wanted)


def main() -> int:
    """Install all peers; return how many failed."""
    failed = 0
    for peer in PEERS:
        try:
            install(peer)
        except subprocess.CalledProcessError as error:
            print(f"{peer}: NOT INSTALLED, pip ended with {error.returncode}", file=sys.stderr)
            failed += 1
    return failed


if __name__ == "__main__":
    sys.exit(main())
