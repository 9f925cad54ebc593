"""Run the command `fast-batcher` as `python -m fast_batcher`."""

import sys


def run_command() -> None:
    """Run the command; it needs the packages of `fast_batcher[cli]`."""
    try:
        from fast_batcher._cli.main import app
    except ModuleNotFoundError as missing:
        if missing.name not in ("typer", "rich", "httptools"):
            raise
        sys.exit(f"fast-batcher needs the package {missing.name}: pip install 'fast_batcher[cli]'")
    app(prog_name="fast-batcher")


if __name__ == "__main__":
    run_command()
