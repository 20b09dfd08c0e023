"""Results on disk: JSONL, append-only, one line a (question, method, repeat); a kill loses at most the line in hand.

    {"kind": "header",  "identity": {...}, "conditions": {...}}      what was measured, and under what
    {"kind": "record",  "question": "17", "method": "affine", "repeat": 0, ...}
    {"kind": "resumed", "conditions": {...}}                         the same command, started again

A line counts once its newline is on disk. A torn last line is cut off and measured again; a corrupt line is named by
its number and skipped, the rest is kept.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from kvbaton.errors import DataError, UsageError

Record = dict[str, Any]
Key = tuple[str, str, int]


def key(record: Mapping[str, Any]) -> Key:
    """What a record is about: question, method, repeat."""
    return str(record["question"]), str(record["method"]), int(record["repeat"])


@dataclass(frozen=True)
class RunFile:
    """A results file as read. ``corrupt``: line numbers and what is wrong; ``torn``: bytes of a cut-off tail."""

    path: Path
    identity: Mapping[str, Any]
    conditions: tuple[Mapping[str, Any], ...]
    records: tuple[Record, ...]
    corrupt: tuple[tuple[int, str], ...] = ()
    torn: int = 0

    @property
    def methods(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(r["method"] for r in self.records))


@dataclass
class _Reader:
    """Sorts lines into header, records and corrupt ones."""

    header: Mapping[str, Any] | None = None
    conditions: list[Mapping[str, Any]] = field(default_factory=list)
    records: dict[Key, Record] = field(default_factory=dict)
    corrupt: list[tuple[int, str]] = field(default_factory=list)

    def take(self, number: int, line: bytes) -> None:
        try:
            value = json.loads(line)
            kind = value["kind"]
            if kind == "header":
                self.header, made = value["identity"], value["conditions"]
                self.conditions.append(made)
            elif kind == "resumed":
                self.conditions.append(value["conditions"])
            elif kind == "record":
                self.records[key(value)] = value
            else:
                raise ValueError(f"unknown kind {kind!r}")
        except (ValueError, KeyError, TypeError) as problem:
            self.corrupt.append((number, f"{type(problem).__name__}: {problem}"))


def read(path: Path) -> RunFile:
    """Everything readable in a results file. Raises DataError if it is absent or has no header."""
    try:
        raw = path.read_bytes()
    except OSError as problem:
        raise DataError(f"cannot read results {path}: {problem.strerror}") from problem
    whole, newline, tail = raw.rpartition(b"\n")
    reader = _Reader()
    for number, line in enumerate(whole.split(b"\n") if newline else [], 1):
        reader.take(number, line)
    if reader.header is None:
        hint = "; ".join(f"line {n}: {why}" for n, why in reader.corrupt[:3])
        raise DataError(f"{path} is not a results file: no header line{f' ({hint})' if hint else ''}")
    return RunFile(path, reader.header, tuple(reader.conditions), tuple(reader.records.values()),
                   tuple(reader.corrupt), len(tail))


class Journal:
    """One results file open for appending. One process at a time; close it, or use it in a ``with``."""

    def __init__(self, path: Path, descriptor: int, done: dict[Key, Record],
                 corrupt: tuple[tuple[int, str], ...]) -> None:
        self.path, self.done, self.corrupt = path, done, corrupt
        self._descriptor = descriptor

    @classmethod
    def open(cls, path: Path, identity: Mapping[str, Any], conditions: Mapping[str, Any]) -> Journal:
        """Create the file, or go on with it. Raises UsageError if another process writes it or it measures another.

        ``identity`` must equal the file's: task, data, model, dtype, seeds; ``conditions`` may differ and are noted.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            _lock(descriptor, path)
            if os.fstat(descriptor).st_size == 0 or _only_torn(path):
                os.ftruncate(descriptor, 0)
                journal = cls(path, descriptor, {}, ())
                journal._write({"kind": "header", "identity": dict(identity), "conditions": dict(conditions)})
                return journal
            found = read(path)
            _same_identity(path, found.identity, identity)
            os.ftruncate(descriptor, os.fstat(descriptor).st_size - found.torn)
            journal = cls(path, descriptor, {key(r): r for r in found.records}, found.corrupt)
            journal._write({"kind": "resumed", "conditions": dict(conditions)})
            return journal
        except BaseException:
            os.close(descriptor)
            raise

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record; on disk when this returns. Raises DataError, nothing half-written, if the disk is full."""
        line = {"kind": "record", **record}
        self._write(line)
        self.done[key(line)] = line

    def _write(self, value: Mapping[str, Any]) -> None:
        line = (json.dumps(value, ensure_ascii=False, allow_nan=False) + "\n").encode()
        size = os.fstat(self._descriptor).st_size
        try:
            written = os.write(self._descriptor, line)
            if written != len(line):
                raise OSError(28, "No space left on device")
            os.fsync(self._descriptor)
        except OSError as problem:
            os.ftruncate(self._descriptor, size)
            raise DataError(f"cannot write to {self.path}: {problem.strerror}. Nothing half-written is left; free some "
                            "space and start the same command again") from problem

    def close(self) -> None:
        os.close(self._descriptor)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()


def _lock(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise UsageError(f"another process is writing {path}: wait for it or choose another --out") from None


def _only_torn(path: Path) -> bool:
    """Killed while the header was being written: nothing was measured yet."""
    return b"\n" not in path.read_bytes()


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    for name in sorted({*old, *new}):
        if old.get(name) != new.get(name):
            yield f"{name} was {old.get(name)!r}, now {new.get(name)!r}"


def _same_identity(path: Path, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    plain = json.loads(json.dumps(dict(new)))
    if changed := list(_differences(old, plain)):
        raise UsageError(f"{path} measures something else ({'; '.join(changed[:3])}): choose another --out")
