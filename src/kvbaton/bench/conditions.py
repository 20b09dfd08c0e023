"""What a number was measured under: it travels with every result."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

LIBRARIES = ("kvbaton", "torch", "transformers", "numpy")


def _git(*args: str) -> str | None:
    """Output of git in this package's own checkout; None outside one."""
    try:
        done = subprocess.run(["git", *args], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=20,
                              check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def commit() -> tuple[str, bool]:
    """Commit of the source, and whether tracked files under ``src`` differ; ``("unknown", False)`` outside git."""
    root = _git("rev-parse", "--show-toplevel")
    head = _git("rev-parse", "HEAD")
    if root is None or head is None:
        return "unknown", False
    return head[:12], bool(_git("status", "--porcelain", "--untracked-files=no", "--", f"{root}/src"))


def processor() -> str:
    """Name of the processor and the cores this process may use."""
    name = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{name}, {cores} cores"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "source"


def command_line(argv: Sequence[str] | None = None) -> str:
    """The command as typed, machine paths cut to their last part."""
    words = list(sys.argv if argv is None else argv)
    return shlex.join([Path(words[0]).name, *(Path(w).name if os.path.isabs(w) else w for w in words[1:])])


def conditions(device: str = "cpu") -> dict[str, Any]:
    """Command, source, device, versions, threads and load, as plain JSON values. ``device``: where the model runs."""
    import torch

    head, dirty = commit()
    where = torch.cuda.get_device_name() if device.startswith("cuda") else processor()
    return {
        "command": command_line(), "commit": head, "dirty": dirty, "device": where, "threads": torch.get_num_threads(),
        "python": platform.python_version(), "libraries": {p: _version(p) for p in LIBRARIES},
        "load": round(os.getloadavg()[0], 2), "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }
