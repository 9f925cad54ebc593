"""How busy the GPU is, as its driver reports. Runs in the measuring process, in its own thread."""

import os
import threading
from types import TracebackType
from typing import Any, Self

# Stands in the results where there is no GPU.
NOT_MEASURED = "not yet measured on a GPU"
# The driver's figure covers its last 1/6 s to 1 s. Source: nvmlUtilization_t in the NVML reference.
INTERVAL = 0.1


class GpuWatch:
    """Measures the share of the time in a `with` block during which the GPU computed anything.

    It watches the first GPU that CUDA_VISIBLE_DEVICES allows. `name` and `busy_share` are None
    without a GPU or without nvidia-ml-py.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.busy_share: float | None = None
        self._nvml: Any = None
        self._thread: threading.Thread | None = None
        self._is_over = threading.Event()

    def __enter__(self) -> Self:
        self._nvml = _load_nvml()
        if self._nvml is not None:
            device = _find_device(self._nvml)
            self.name = self._nvml.nvmlDeviceGetName(device)
            self._thread = threading.Thread(target=self._sample, args=(device,), name="gpu-watch")
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._thread is not None:
            self._is_over.set()
            self._thread.join()
            self._nvml.nvmlShutdown()

    def _sample(self, device: Any) -> None:
        samples = []
        while not self._is_over.wait(INTERVAL):
            samples.append(self._nvml.nvmlDeviceGetUtilizationRates(device).gpu / 100)
        if samples:
            self.busy_share = sum(samples) / len(samples)


def _load_nvml() -> Any:
    """Initialise the driver's library; None where there is no driver or no GPU."""
    try:
        import pynvml  # type: ignore[import-untyped]
    except ModuleNotFoundError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    if pynvml.nvmlDeviceGetCount() == 0 or _first_device() in ("", "-1"):
        pynvml.nvmlShutdown()
        return None
    return pynvml


def _find_device(nvml: Any) -> Any:
    """Find CUDA's first device: the driver's own count ignores CUDA_VISIBLE_DEVICES."""
    first = _first_device()
    if first.isdigit():
        return nvml.nvmlDeviceGetHandleByIndex(int(first))
    return nvml.nvmlDeviceGetHandleByUUID(first)


def _first_device() -> str:
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
