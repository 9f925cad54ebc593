"""Errors of a worker that cannot import the model's module; reports about its GPU.

Everything else about loading is shown with real workers, in `test_batcher_processes.py`.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from models.base import Echo

from fast_batcher._transport import pickling
from fast_batcher._worker.model import find_gpu, import_model


class Misspells(Echo):
    def closes(self) -> None: ...


def test_import_error_inside_a_module_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name that is wrong is not the user's string."""
    (tmp_path / "needs_another.py").write_text("import no_such_dependency\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        import_model(pickling.dumps(("needs_another:Model", (), {})))


def test_misspelt_hook_of_string_model_warns() -> None:
    with pytest.warns(RuntimeWarning, match=r"Misspells\.closes looks like close"):
        import_model(pickling.dumps((f"{__name__}:Misspells", (), {})))


def test_gpu_is_named_with_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cuda:
        """As `torch.cuda`."""

        def __init__(self, fault: Exception | None = None) -> None:
            self.fault = fault

        def is_initialized(self) -> bool:
            return True

        def current_device(self) -> int:
            return 1

        def device_count(self) -> int:
            return 2

        def memory_reserved(self, device: int) -> int:
            if self.fault is not None:
                raise self.fault
            return (4096, 1024)[device]

    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert find_gpu() == ("", 0)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=Cuda()))
    assert find_gpu() == ("cuda:1", 5120)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=Cuda(RuntimeError("no driver"))))
    assert find_gpu() == ("", 0)
