"""The worker role: holds the tensors, judges with the same plan as the other engine, moves, corrects, learns.

Knows no vLLM class: a `PagedCache` per layer reads and writes rows. Keys in pages are rotated; they are unrotated once
on capture and rotated once on load, in float32.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from kvbaton.correctors.base import Correction, LayerKV, as_is, joined, parts
from kvbaton.engine.learner import Learner
from kvbaton.errors import KVBatonError, StoreError
from kvbaton.kv import KV, Geometry
from kvbaton.memory import Memory, ModelIdentity
from kvbaton.plan import make_plan, note_reuse
from kvbaton.prompt import Edge
from kvbaton.references import RunStore
from kvbaton.rope import Rope
from kvbaton.vllm import LOGGER
from kvbaton.vllm.paging import PageCodec, Rows, Writer
from kvbaton.vllm.planning import build_prompt
from kvbaton.vllm.wire import Capture, Judge, Lane, LaneReport, Load, Source, StepOrders, StepReport, Teach, Verdict

_LOG = logging.getLogger(LOGGER)
SAVE_EVERY_S = 30.0
"""A lane's learned state is saved when it has learned and the last time is so long ago; and at the end."""

_TOLERANCE = {torch.float32: 1e-3}
"""Relative difference allowed between one token's layer-0 keys at two positions; 5 % where the cache is 16 bit."""


@dataclass(frozen=True)
class PagedCache:
    """One layer's pages: ``tensor`` ``[blocks, H, block_size, 2D]``, the backend's writer and its packing."""

    tensor: Tensor
    write_rows: Writer
    codec: PageCodec

    def read(self, rows: Rows) -> LayerKV:
        """Rotated keys and values ``[H, T, D]``."""
        return self.codec.read(self.tensor, rows)

    def write(self, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Write rotated keys and values ``[H, T, D]``."""
        self.write_rows(k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous(), self.tensor, slots)


class Refused(KVBatonError):
    """A load that must not happen; its rows are computed instead."""


@dataclass
class WorkerRole:
    """``geometry`` is this worker's share of the heads. ``state_dir``: learned state is kept there between starts."""

    geometry: Geometry
    rope: Rope
    identity: ModelIdentity
    memory_bytes: int | None = None
    state_dir: Path | None = None
    layers: Sequence[PagedCache] = ()
    broken: str | None = None
    texts: dict[int, KV] = field(default_factory=dict)
    memories: dict[Lane, Memory] = field(default_factory=dict)
    _lost: set[int] = field(default_factory=set)
    _changed: set[Lane] = field(default_factory=set)
    _saved: dict[Lane, float] = field(default_factory=dict)
    _learner: Learner = field(default_factory=Learner)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @torch.no_grad()
    def run(self, orders: StepOrders) -> tuple[StepReport, set[int]]:
        """Carry out one step's orders, in the order of `wire`; returns the report and the blocks that were refused."""
        self._lost = {capture.text for capture in orders.captures if not self._try_capture(capture)}
        for teach in orders.teaches:
            self._teach(teach)
        verdicts = {judge.request: self._judge(judge) for judge in orders.judges}
        refused: dict[tuple[str, int], str] = {}
        blocks: set[int] = set()
        for load in orders.loads:
            reason = self._try_load(load)
            if reason is not None:
                refused[load.request, load.segment] = reason
                blocks.update(load.blocks)
        for text in orders.drops:
            self.texts.pop(text, None)
        for lane in orders.closed:
            self._close_lane(lane)
        return StepReport(verdicts, refused, frozenset(self._lost), self._lane_reports()), blocks

    def drain(self) -> None:
        """Wait until everything taught so far is learned."""
        self._learner.drain()

    def close(self) -> None:
        """Finish learning and save what was learned."""
        self._learner.close()
        for lane in list(self.memories):
            self._close_lane(lane)

    def memory(self, lane: Lane) -> Memory:
        """What the lane has learned; read from the state folder the first time it is asked for."""
        if lane not in self.memories:
            self.memories[lane] = self._load_memory(lane)
        return self.memories[lane]

    def _load_memory(self, lane: Lane) -> Memory:
        corrector = lane.method.recipe().corrector
        if self.state_dir is not None and self._state_file(lane).exists():
            try:
                return Memory.load(self._state_file(lane), corrector, self.geometry, self.identity, self.memory_bytes)
            except StoreError as error:
                _LOG.warning("learned state not used: %s", error)
        return Memory(corrector, self.geometry, self.memory_bytes)

    def _close_lane(self, lane: Lane) -> None:
        """Let go of what a lane learned; saved, where there is a folder for it."""
        memory = self.memories.pop(lane, None)
        if memory is not None:
            self._save(lane, memory)

    def _save(self, lane: Lane, memory: Memory) -> None:
        """Write what a lane learned to the state folder, if there is one; a failure is logged, serving goes on."""
        if self.state_dir is None or not memory.edges():
            return
        try:
            memory.save(self._state_file(lane), self.identity)
        except StoreError as error:
            _LOG.error("learned state not saved: %s", error)

    def _state_file(self, lane: Lane) -> Path:
        assert self.state_dir is not None
        readable = "".join(c if c.isalnum() or c in "-_" else "_" for c in f"{lane.group}-{lane.method}")[:80]
        exact = hashlib.blake2b(repr(lane).encode(), digest_size=8).hexdigest()
        return self.state_dir / f"{readable}-{exact}-rank{os.environ.get('RANK', '0')}.safetensors"

    # --- capture and learn ---------------------------------------------------------------------------------------

    def _try_capture(self, capture: Capture) -> bool:
        try:
            kv = self._read(capture.slots, capture.start, capture.source, capture.exact)
        except (KVBatonError, RuntimeError) as error:
            _LOG.error("text %d was not captured: %s", capture.text, error)
            return False
        self.texts[capture.text] = replace(kv, token_ids=capture.token_ids)
        return True

    def _read(self, slots: Sequence[int], start: int, source: str, exact: bool) -> KV:
        """Rows at ``slots`` as unrotated KV; the first one stands at position ``start``."""
        at, positions = self._at(slots), self._positions(start, len(slots))
        rows = Rows.at(at, self.layers[0].codec.block_size)
        k, v = self.geometry.empty(len(slots), at.device), self.geometry.empty(len(slots), at.device)
        for layer, cache in enumerate(self.layers):
            rotated, v[layer] = cache.read(rows)
            k[layer] = self.rope.unrotate(rotated, *self.rope.angles(positions, layer))
        return KV(k, v, start, source, exact)

    def _teach(self, teach: Teach) -> None:
        source = self._source(teach.source, len(teach.slots))
        if source is None or self.broken:
            return
        target = self._read(teach.slots, teach.start, teach.edge.reader, exact=True)
        self._check_rotation(source, target)
        if self.broken is None:
            self._learner.submit(self._learn, teach.lane, self.memory(teach.lane), teach.edge, source, target)

    def _learn(self, lane: Lane, memory: Memory, edge: Edge, source: KV, target: KV) -> None:
        """The learner's job: what fails is logged, serving goes on."""
        try:
            memory.learn(edge, source, target)
        except (KVBatonError, RuntimeError) as error:
            _LOG.warning("nothing learned on %s: %s", edge, error)
        with self._lock:
            self._changed.add(lane)
        if time.monotonic() - self._saved.get(lane, -SAVE_EVERY_S) >= SAVE_EVERY_S:
            self._saved[lane] = time.monotonic()
            self._save(lane, memory)

    def _check_rotation(self, source: KV, target: KV) -> None:
        """Layer 0 knows no context: the same token has the same unrotated key everywhere, or we rotate wrongly."""
        scale = target.k[0].float().norm().clamp_min(1e-12)
        error = float((source.k[0].float() - target.k[0].float()).norm() / scale)
        if not error <= _TOLERANCE.get(self.geometry.dtype, 0.05):
            self.broken = f"layer-0 keys differ by {error:.1e} after unrotation: this model's RoPE is not reproduced"
            _LOG.error("KVBaton reuses nothing any more: %s", self.broken)

    # --- judge and load ------------------------------------------------------------------------------------------

    def _judge(self, judge: Judge) -> tuple[Verdict, ...]:
        """The plan's verdicts; where a part fails, the whole hop is computed and serving goes on."""
        try:
            return self._plan(judge)
        except (KVBatonError, RuntimeError) as error:
            _LOG.error("request %s runs exactly: %s", judge.request, error)
            return tuple(Verdict("recompute", "judging failed") for _ in judge.shared)

    def _plan(self, judge: Judge) -> tuple[Verdict, ...]:
        recipe, run = judge.lane.method.recipe(), RunStore()
        prompt = build_prompt(judge.reader, judge.token_ids, judge.shared)
        for part, (_, segment, _, _) in zip(judge.shared, prompt.shared(), strict=True):
            source = None if part.source is None or self.broken else self._source(part.source, len(segment))
            if source is not None:
                run.put(segment, source)
        plan = make_plan(prompt, recipe, run, self.memory(judge.lane), RunStore())
        note_reuse(plan)
        return tuple(Verdict(step.action.value, self.broken or step.reason, step.edge, step.predicted)
                     for step in plan.steps)

    def _source(self, source: Source, tokens: int) -> KV | None:
        """The source rows; None, and the text is reported as lost, if it is not here."""
        held = self.texts.get(source.text)
        if held is None:
            self._lost.add(source.text)
            return None
        return held.rows(source.offset, source.offset + tokens)

    def _try_load(self, load: Load) -> str | None:
        """Write the rows; a reason if they were refused (some layers may then be written, all are computed again)."""
        try:
            self._load(load)
        except Refused as refusal:
            return str(refusal)
        except (KVBatonError, RuntimeError) as error:
            _LOG.error("request %s: segment %d is computed: %s", load.request, load.segment, error)
            return "correction failed"
        return None

    def _load(self, load: Load) -> None:
        source = self._source(load.source, load.tokens)
        if source is None or len(source) != load.tokens:
            raise Refused("source gone")
        correction = self._correction(load, source)
        at = self._at(load.slots)
        rows = slice(load.first, load.first + len(load.slots))
        positions = self._positions(load.place.start + load.first, len(load.slots))
        for layer, cache in enumerate(self.layers):
            k, v = joined(parts(correction, source, layer))
            if load.edge is not None and not _finite(k[:, load.first], v[:, load.first]):
                raise Refused("correction not finite")
            cache.write(self.rope.rotate(k[:, rows], *self.rope.angles(positions, layer)), v[:, rows], at)

    def _correction(self, load: Load, source: KV) -> Correction:
        if load.edge is None:
            return as_is(source)
        corrector, state = load.lane.method.recipe().corrector, self.memory(load.lane).state(load.edge)
        if state is None or not corrector.can_correct(state, source):
            raise Refused("learned state gone")
        return corrector.correct(state, source, load.place)

    def _lane_reports(self) -> dict[Lane, LaneReport]:
        with self._lock:
            changed, self._changed = self._changed, set()
        reports = {}
        for lane in changed & self.memories.keys():
            memory = self.memories[lane]
            texts = [state.texts for edge in memory.edges() if (state := memory.state(edge)) is not None]
            reports[lane] = LaneReport(len(texts), sum(texts), memory.nbytes)
        return reports

    def _at(self, slots: Sequence[int]) -> Tensor:
        return torch.tensor(slots, dtype=torch.int64, device=self.layers[0].tensor.device)

    def _positions(self, start: int, tokens: int) -> Tensor:
        return torch.arange(start, start + tokens, device=self.layers[0].tensor.device)


def _finite(k: Tensor, v: Tensor) -> bool:
    """Whether one corrected row ``[H, D]`` is finite: a broken state breaks every row, so one is enough to look at."""
    return bool(torch.isfinite(k.float().sum() + v.float().sum()))
