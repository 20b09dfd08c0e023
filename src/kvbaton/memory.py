"""Memory: what was learned, by edge, inside a byte budget.

One `EdgeState` an edge. The edge used longest ago is dropped first. Learning may run in another thread: `state` never
waits for it, because a state replaces its tensors and never writes to those that a reader may hold.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import OrderedDict, deque
from typing import Self

from kvbaton import store
from kvbaton.correctors.base import Corrector, EdgeState
from kvbaton.errors import BudgetExceeded, InvariantError, StoreError, UsageError
from kvbaton.kv import KV, Geometry
from kvbaton.prompt import Edge
from kvbaton.store import EdgeRecord, Manifest, ModelIdentity, check_file, describe

__all__ = ["Memory", "ModelIdentity", "check_file", "describe"]

_LOG = logging.getLogger(__name__)
_EVICTIONS_KEPT = 1000


class Memory:
    """Learned states of one corrector on one model. ``budget_bytes`` None: no limit."""

    def __init__(self, corrector: Corrector, geometry: Geometry, budget_bytes: int | None = None) -> None:
        if budget_bytes is not None and budget_bytes < 0:
            raise UsageError(f"budget_bytes must be 0 or more, got {budget_bytes}")
        self.corrector, self.geometry, self.budget_bytes = corrector, geometry, budget_bytes
        self.evicted: deque[Edge] = deque(maxlen=_EVICTIONS_KEPT)
        """The latest evictions, oldest first."""
        self._states: OrderedDict[Edge, EdgeState] = OrderedDict()
        self._books = threading.Lock()
        self._learning = threading.RLock()

    def state(self, edge: Edge) -> EdgeState | None:
        """What was learned on that edge; asking counts as use."""
        with self._books:
            if edge in self._states:
                self._states.move_to_end(edge)
            return self._states.get(edge)

    def learn(self, edge: Edge, source: KV, target: KV) -> None:
        """Learn from one exact pair, then drop the edges used longest ago until the budget holds.

        Raises BudgetExceeded, and forgets the edge, if its state alone is over the budget.
        """
        if source.k.shape != target.k.shape:
            raise InvariantError(f"cannot learn {edge}: source {tuple(source.k.shape)}, target {tuple(target.k.shape)}")
        with self._learning:
            state = self._states.get(edge) or self.corrector.new_state(self.geometry)
            self.corrector.learn(state, source, target)
            self.keep(edge, state)

    def edges(self) -> tuple[Edge, ...]:
        """Edges with a state, the one used longest ago first."""
        with self._books:
            return tuple(self._states)

    def forget(self, edge: Edge) -> None:
        """Drop what was learned on that edge, if anything."""
        with self._books:
            self._states.pop(edge, None)

    @property
    def nbytes(self) -> int:
        with self._books:
            return sum(state.nbytes for state in self._states.values())

    def merge(self, other: Memory) -> None:
        """Take in what another memory of the same corrector and geometry learned; ``other`` is left as it is."""
        if (self.corrector, self.geometry) != (other.corrector, other.geometry):
            raise UsageError("cannot merge memories of different correctors or models")
        with self._learning:
            for edge in other.edges():
                theirs = other._states[edge]
                state = self._states.get(edge) or self.corrector.new_state(self.geometry)
                state.merge(theirs)
                self.keep(edge, state)

    def check(self) -> None:
        """Raise InvariantError if the books do not balance or a state is broken."""
        with self._learning:
            for state in self._states.values():
                state.check()
            if self.budget_bytes is not None and self.nbytes > self.budget_bytes:
                raise InvariantError(f"memory holds {self.nbytes} bytes, its budget is {self.budget_bytes}")

    def save(self, path: str | os.PathLike[str], identity: ModelIdentity) -> None:
        """Write everything to one file, whole or not at all. Raises StoreError."""
        name, settings = store.settings_of(self.corrector)
        with self._learning:
            held = [(edge, state, dict(state.to_tensors())) for edge, state in self._states.items()]
            records = tuple(EdgeRecord(edge, state.texts, state.nbytes, tuple(sorted(tensors)))
                            for edge, state, tensors in held)
            tensors = {f"{i}.{key}": tensor for i, (_, _, named) in enumerate(held) for key, tensor in named.items()}
            manifest = Manifest(identity, self.geometry, name, settings, store.library_versions(), records)
            store.write(path, manifest, tensors)

    @classmethod
    def load(cls, path: str | os.PathLike[str], corrector: Corrector, geometry: Geometry, identity: ModelIdentity,
             budget_bytes: int | None = None) -> Self:
        """Read a saved memory. Raises StoreError: the file is broken, or of another model, RoPE, shape or corrector."""
        store.require_match(path, store.describe(path), identity, geometry, corrector)
        manifest, edges = store.read(path)
        memory = cls(corrector, geometry, budget_bytes)
        for record, tensors in zip(manifest.edges, edges, strict=True):
            state = corrector.new_state(geometry)
            try:
                state.from_tensors(tensors)
                state.check()
            except (StoreError, InvariantError) as error:
                raise StoreError(f"{path}: edge {record.edge}: {error}") from error
            if (state.texts, state.nbytes) != (record.texts, record.nbytes):
                raise StoreError(f"{path}: edge {record.edge}: the manifest says {record.texts} texts and "
                                 f"{record.nbytes} bytes, the tensors {state.texts} and {state.nbytes}")
            memory.keep(record.edge, state)
        return memory

    def keep(self, edge: Edge, state: EdgeState) -> None:
        """Hold what was learned elsewhere. Raises BudgetExceeded where it is larger than the whole budget."""
        with self._books:
            self._states[edge] = state
            self._states.move_to_end(edge)
            if self.budget_bytes is None:
                return
            if state.nbytes > self.budget_bytes:
                del self._states[edge]
                raise BudgetExceeded(f"{edge} needs {state.nbytes} bytes, the budget is {self.budget_bytes}: "
                                     "raise budget_bytes, lower the pool or the rank")
            total = sum(held.nbytes for held in self._states.values())
            while total > self.budget_bytes:
                oldest, dropped = self._states.popitem(last=False)
                total -= dropped.nbytes
                self.evicted.append(oldest)
                _LOG.info("evicted %s: %d bytes, %d texts", oldest, dropped.nbytes, dropped.texts)
