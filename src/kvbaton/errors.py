"""Every error a user can meet, in one tree.

    KVBatonError
    ├── UsageError                 the caller's words are off; exit code 2
    │   ├── TeamError              agents, templates, graph, YAML
    │   ├── UnknownName            a method, part, model or field nobody registered (names the nearest)
    │   ├── PromptTooLong          says by how many tokens and where
    │   └── MissingExtra           a package is absent; says the command that gets it
    ├── Unsupported                a model, RoPE kind or need that no path here gets right
    ├── StoreError                 a saved memory is broken, hostile or of another model
    ├── BudgetExceeded             something cannot fit its byte budget
    ├── DataError                  a data set or a results file is broken
    └── InvariantError             our own bookkeeping is wrong: a bug, never the user's fault
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class KVBatonError(Exception):
    """Root of the tree: catch this to catch all that KVBaton raises on purpose."""


class UsageError(KVBatonError):
    """The caller asked for something that cannot be; the message says how to mend it."""


class TeamError(UsageError):
    """Agents, templates or their graph do not fit together."""


class UnknownName(UsageError):
    """A name that nobody registered."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        names = sorted(known)
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}? " if near else ""
        super().__init__(f"unknown {kind} {name!r}: {hint}known: {', '.join(names) or 'none'}")
        self.kind, self.name, self.nearest = kind, name, near[0] if near else None


class PromptTooLong(UsageError):
    """A prompt and its answer do not fit the model's context."""


class MissingExtra(UsageError):
    """An optional package is not installed."""

    def __init__(self, what: str, command: str) -> None:
        super().__init__(f"{what} is not installed: run `{command}`")


class Unsupported(KVBatonError):
    """A model family, RoPE kind or method need that no path here computes right."""


class StoreError(KVBatonError):
    """A saved memory cannot be used: truncated, hostile, or made by another model."""


class BudgetExceeded(KVBatonError):
    """Something cannot fit into its byte budget, whatever is evicted."""


class DataError(KVBatonError):
    """A data set or results file is broken; names the file and line."""


class InvariantError(KVBatonError):
    """KVBaton's own books do not balance. Please report it."""
