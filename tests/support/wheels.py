"""Packages of the library, and environments that have its wheel."""

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

from paths import ROOT
from waits import LIMIT

# Of the files in a package: any moment will do.
EPOCH = "1767225600"


def build(target: str, folder: Path, source: Path = ROOT) -> Path:
    """Build the `wheel` or the `sdist` of a checkout."""
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder)],
        cwd=source,
        env={**os.environ, "SOURCE_DATE_EPOCH": EPOCH},
        check=True,
        capture_output=True,
        timeout=LIMIT,
    )
    (built,) = folder.glob({"wheel": "*.whl", "sdist": "*.tar.gz"}[target])
    return built


def install(wheel: Path, folder: Path, *, others: bool = True) -> str:
    """Return the Python of a new environment that has a wheel.

    It has what this one has beside our package, unless `others` is False; the checkout is not on
    its path.
    """
    venv.create(folder, symlinks=True)
    place = {"base": str(folder), "platbase": str(folder)}
    packages = Path(sysconfig.get_path("purelib", "venv", place))
    with zipfile.ZipFile(wheel) as file:
        file.extractall(packages)
    if others:
        # Python reads no .pth files in a directory that is added so: one of them leads to the
        # checkout.
        (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return str(folder / "bin" / "python")
