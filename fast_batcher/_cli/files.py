"""Checks of the files that a command writes, before minutes of measuring."""

from importlib.util import find_spec
from pathlib import Path

import typer

# Kinds of pictures, by the end of the file's name.
PICTURES = (".png", ".svg", ".pdf")


def check_folder(path: Path | None) -> Path | None:
    """Reject a file in a folder that does not exist."""
    if path is not None and not path.parent.is_dir():
        raise typer.BadParameter(f"{path}: there is no folder {path.parent}")
    return path


def check_picture(path: Path | None) -> Path | None:
    """Reject a picture of an unknown kind, in a missing folder, or without matplotlib."""
    if path is not None and find_spec("matplotlib") is None:
        raise typer.BadParameter("needs matplotlib: pip install matplotlib")
    if path is not None and path.suffix not in PICTURES:
        raise typer.BadParameter(f"{path}: let it end with {', '.join(PICTURES)}")
    return check_folder(path)


def write_file(path: Path, text: str) -> None:
    """Write a result; one line and exit code 1 if that fails, after minutes of measuring."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        typer.echo(f"wrong {path}: it cannot be written: {error}", err=True)
        raise typer.Exit(1) from None
