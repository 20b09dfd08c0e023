"""Peak memory of a stretch of work: of the process, and of torch on a CUDA device."""

from __future__ import annotations

import contextlib
import resource
from pathlib import Path

import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class PeakMemory:
    """``with PeakMemory(device) as peak``; read ``peak`` after the block.

    ``process_bytes``: highest resident set inside the block on Linux, since the process began elsewhere.
    ``torch_bytes``: highest allocation on ``device``; None on the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.process_bytes = 0
        self.torch_bytes: int | None = None

    def __enter__(self) -> PeakMemory:
        with contextlib.suppress(OSError):
            _CLEAR.write_text("5", encoding="ascii")
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        return self

    def __exit__(self, *exc: object) -> None:
        self.process_bytes = _resident_peak()
        if self._device.type == "cuda":
            self.torch_bytes = torch.cuda.max_memory_allocated(self._device)


def _resident_peak() -> int:
    try:
        for line in _STATUS.read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
