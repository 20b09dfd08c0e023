"""Runs model-written code in a child process: limited time, memory and files, no network, an empty folder of its own.

    parent ── nonce + source ──▶ child: limits set ─▶ network and processes barred ─▶ source runs ─▶ nonce written back

The nonce comes back only if the whole source ran to its end, so neither `sys.exit(0)` nor a crash looks like a pass.
This keeps a small model's mistakes from doing harm. It is not a jail for hostile code.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from enum import Enum
from functools import cache

_CHILD = r"""
import os, resource, sys
nonce, _, source = sys.stdin.read().partition("\n")
seconds, memory, size = (int(a) for a in sys.argv[1:4])
resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
for what, limit in ((resource.RLIMIT_AS, memory), (resource.RLIMIT_FSIZE, size), (resource.RLIMIT_NOFILE, 32),
                    (resource.RLIMIT_CORE, 0)):
    resource.setrlimit(what, (limit, limit))
answer = os.dup(1)
null = os.open(os.devnull, os.O_RDWR)
for fd in (0, 1, 2):
    os.dup2(null, fd)
home = os.getcwd() + os.sep
BARRED = ("socket.", "subprocess.", "os.fork", "os.exec", "os.posix_spawn", "os.spawn", "os.system", "os.kill",
          "ctypes.", "pty.", "ftplib.", "smtplib.", "urllib.", "http.")
WRITES = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.chmod", "os.chown",
          "os.truncate", "shutil.")
def guard(event, args):
    if event.startswith(BARRED):
        raise PermissionError(event)
    if event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR) or event.startswith(WRITES):
        if not os.path.abspath(os.fsdecode(args[0])).startswith(home):
            raise PermissionError(event)
code = compile(source, "answer.py", "exec")
sys.addaudithook(guard)
exec(code, {"__name__": "__answer__"})
os.write(answer, nonce.encode())
os._exit(0)
"""


class Outcome(Enum):
    PASSED = "passed"
    FAILED = "failed"
    """Raised, did not compile, or ended early."""
    TIMEOUT = "timeout"
    KILLED = "killed"
    """Ended by a limit: memory, processor time or file size."""


@dataclass(frozen=True)
class Limits:
    """What the child may use. ``seconds`` of processor time; of the wall clock three times that, for busy machines."""

    seconds: int = 10
    memory_bytes: int = 1 << 30
    file_bytes: int = 1 << 20


@cache
def network_cut() -> tuple[str, ...]:
    """Command prefix that starts a process without a network; empty where the system does not permit it."""
    tool = shutil.which("unshare")
    for flags in ([tool, "-n"], [tool, "-rn"]) if tool else ():
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            if subprocess.run([*flags, "true"], capture_output=True, timeout=10).returncode == 0:
                return tuple(flags)
    return ()


def run(source: str, limits: Limits | None = None) -> Outcome:
    """Run ``source`` to its end in a child. Never raises for what the source does."""
    limits = limits or Limits()
    nonce = secrets.token_hex(16)
    numbers = [str(n) for n in (limits.seconds, limits.memory_bytes, limits.file_bytes)]
    with tempfile.TemporaryDirectory(prefix="kvbaton-answer-") as folder:
        child = subprocess.Popen([*network_cut(), sys.executable, "-I", "-c", _CHILD, *numbers], cwd=folder,
                                 env={"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}, stdin=subprocess.PIPE,
                                 stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)
        text = f"{nonce}\n{source}".encode("utf-8", "surrogatepass")
        try:
            said, _ = child.communicate(text, timeout=3 * limits.seconds + 2)
        except subprocess.TimeoutExpired:
            return Outcome.TIMEOUT
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    if said == nonce.encode():
        return Outcome.PASSED
    if child.returncode in (-signal.SIGXCPU, 128 + signal.SIGXCPU):
        return Outcome.TIMEOUT
    return Outcome.KILLED if child.returncode < 0 or child.returncode > 128 else Outcome.FAILED
