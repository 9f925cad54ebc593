"""The reference pages are complete: every error with its status, every command with its page."""

import inspect
import re

from paths import ROOT

from fast_batcher import errors
from fast_batcher._cli.main import app
from fast_batcher.errors import BatcherError, DeadlineExceededError
from fast_batcher.fastapi.errors import find_answer

DOCS = ROOT / "docs"


def test_the_page_of_errors_has_every_status() -> None:
    page = (DOCS / "errors.md").read_text()
    rows = re.findall(r"^\| `(\w+)`( with `retry_after`)? \|[^|]*\| (\d+) \|", page, re.MULTILINE)
    kinds = {
        kind
        for name, kind in vars(errors).items()
        if inspect.isclass(kind) and issubclass(kind, BatcherError) and name[0] != "_"
    }
    answers = {(kind.__name__, "", str(find_answer(kind(), 503).status)) for kind in kinds}
    rejected = find_answer(DeadlineExceededError(retry_after=1.0), 503).status
    answers.add(("DeadlineExceededError", " with `retry_after`", str(rejected)))
    assert len(rows) == len(set(rows))
    assert set(rows) == answers


def test_the_page_of_errors_names_other_base_classes() -> None:
    page = (DOCS / "errors.md").read_text()
    for name, others in re.findall(r"^\| `(\w+)`[^|]* \|([^|]*)\|", page, re.MULTILINE):
        bases = [base for base in getattr(errors, name).__bases__ if not is_ours(base)]
        if name != "InferenceError":  # it is also a class that only the model knows
            assert others.strip().strip("`") == "".join(base.__name__ for base in bases), name


def is_ours(kind: type) -> bool:
    return issubclass(kind, BatcherError) or kind is Exception


def test_every_command_has_a_page() -> None:
    functions = [command.callback for command in app.registered_commands]
    names = [function.__name__ for function in functions if function is not None]
    assert {"doctor", "tune"} <= set(names)
    index = (DOCS / "reference" / "index.md").read_text()
    for name in names:
        title = (DOCS / f"{name}.md").read_text().partition("\n")[0]
        assert f"`fast-batcher {name}`" in title
        assert f"(../{name}.md)" in index
