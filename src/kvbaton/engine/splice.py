"""Splice: carries a plan through the packed pass.

    per layer, on entry   moved or corrected KV of every reused segment is written at its slots;
                          rows that a selector drops leave, rows that it wants enter from kept hidden states
              on exit     fresh rows of watched segments are captured; the selector sees fresh against reused
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from kvbaton.correctors.base import Correction, EdgeState, LayerKV, Turning, as_is, joined, parts
from kvbaton.engine.attention import QueryRows
from kvbaton.engine.cache import SplicedCache
from kvbaton.engine.capture import Capture
from kvbaton.engine.hf import HFEngine, PackedPass, Watch
from kvbaton.errors import InvariantError
from kvbaton.kv import KV
from kvbaton.plan import Action, Plan, Step
from kvbaton.prompt import Place, Prompt
from kvbaton.recipes import Mask, PrivateText, Recipe
from kvbaton.references import Keep
from kvbaton.selectors.base import Compared, LayerView, Need, NoRows, ReusedRows, Selection


@dataclass
class _Reused:
    """One reused segment on its way into the cache. ``layer_kv``: this layer's rows, unrotated, corrected, in parts."""

    step: Step
    source: KV
    correction: Correction
    positions: Tensor
    held: Capture | None
    layer_kv: list[LayerKV] = field(default_factory=list)


class Splice(Watch):
    """One hop's plan at work. Used for one prefill; afterwards `held` says what the reader holds."""

    def __init__(self, engine: HFEngine, prompt: Prompt, plan: Plan, recipe: Recipe, cache: SplicedCache,
                 prefix_tokens: int) -> None:
        self._engine, self._prompt, self._plan, self._recipe, self._cache = engine, prompt, plan, recipe, cache
        self._entry = recipe.selector.entry
        self._reused = [self._prepare(step) for step in plan.reused]
        self._captures = {index: Capture.empty(prompt.spans[index], engine.geometry, engine.device, self._entry)
                          for index in self._to_capture()}
        self.reused_rows, self._row_of = self._reusable(prefix_tokens)
        computed = (self._row_of < 0).nonzero()[:, 0]
        self._computed = computed[computed >= prefix_tokens]
        self._selection: Selection | None = None
        self._selected = self._active = self.reused_rows.none()
        self.rows_per_layer: list[int] = []
        self.recomputed = self.corrected = self.moved_bytes = self.extra_entries = 0

    def start_rows(self) -> QueryRows:
        """Choose the rows of layer 0. Runs the selector's query pass first, if it needs one."""
        selector, reused = self._recipe.selector, self.reused_rows
        if len(reused):
            if Need.QUERY_PASS in selector.needs:
                reused = replace(reused, attention=self._query_pass())
            if Need.CORRECTION_SIZE in selector.needs:
                reused = replace(reused, correction=self._correction_size())
            self._selection = selector.begin(reused)
            self._selected = self._active = self._selection.start()
        return self._rows()

    def enter(self, layer: int, rows: QueryRows, hidden: Tensor) -> tuple[QueryRows, Tensor]:
        for reused in self._reused:
            self._write(layer, reused)
        rows, hidden = self._reconcile(layer, rows, hidden)
        for capture in self._captures.values():
            capture.take_hidden(layer, rows, hidden)
        self._account(layer, rows)
        return rows, hidden

    def leave(self, layer: int, view: PackedPass) -> None:
        for capture in self._captures.values():
            capture.take(layer, view)
        for reused in self._reused:
            if reused.held is not None:
                reused.held.take(layer, view)
        if self._selection is not None:
            self._selected = self._selection.after(layer, self._view(view))

    def held(self, index: int) -> KV | None:
        """What the reader now holds of segment ``index``: None where the recipe keeps nothing of it."""
        role = self._prompt.role
        if index in self._captures:
            return self._captures[index].kv(role, exact=self._prompt.spans[index].end <= self._plan.exact_until)
        reused = next((r for r in self._reused if r.step.index == index), None)
        if reused is None or Keep.REUSED_READS not in self._recipe.reference.keeps:
            return None
        if reused.held is None:
            return replace(reused.source, source=role, start=reused.step.span.start, exact=False)
        return replace(reused.held.kv(role, exact=False), boundary=reused.source.boundary)

    def _prepare(self, step: Step) -> _Reused:
        if step.source is None:
            raise InvariantError(f"segment {step.index} is planned for reuse without a source")
        correction = as_is(step.source)
        if step.action is Action.CORRECT:
            if step.state is None:
                raise InvariantError(f"segment {step.index} is planned for correction without a state")
            correction = self._correct(step.state, step.source, Place(step.span.start, self._plan.corrected_tokens))
        geometry, device = self._engine.geometry, self._engine.device
        recipe = self._recipe
        changes = (step.action is Action.CORRECT or recipe.lead_rows > 0 or not isinstance(recipe.selector, NoRows)
                   or step.span.end == len(self._prompt))
        keeps = Keep.REUSED_READS in self._recipe.reference.keeps and step.edge is not None
        held = Capture.empty(step.span, geometry, device, None) if changes and keeps else None
        positions = torch.arange(step.span.start, step.span.end, device=device)
        return _Reused(step, step.source, correction, positions, held)

    def _correct(self, state: EdgeState, source: KV, place: Place) -> Correction:
        corrector = self._recipe.corrector
        if not isinstance(corrector, Turning):
            return corrector.correct(state, source, place)
        return corrector.correct_turned(state, source, place, self._engine.rope.turn)

    def _to_capture(self) -> list[int]:
        """Segments whose fresh KV somebody will want: the next reader, the learner, or the agent itself later."""
        recipe, wanted = self._recipe, []
        for step in self._plan.steps:
            teaches = recipe.corrector.learns and step.source is not None
            if step.action is Action.RECOMPUTE and (Keep.EXACT_READS in recipe.reference.keeps or teaches):
                wanted.append(step.index)
        if recipe.private is PrivateText.STALE and self._plan.dense:
            wanted += [index for index, _, _ in self._prompt.own_behind()]
        return wanted

    def _reusable(self, prefix_tokens: int) -> tuple[ReusedRows, Tensor]:
        """The reused rows a selector may choose from, and each position's index among them (-1: always computed)."""
        device, total = self._engine.device, len(self._prompt)
        segment_of = torch.full((total,), -1, dtype=torch.int64, device=device)
        for number, reused in enumerate(self._reused):
            span = reused.step.span
            lead = self._recipe.lead_rows if reused.step.segment.share is not None else 0
            segment_of[min(span.start + lead, span.end):span.end] = number
        segment_of[total - 1] = -1  # the last prompt token is always computed: it gives the first token
        positions = (segment_of >= 0).nonzero()[:, 0]
        starts = torch.tensor([r.step.span.start for r in self._reused] or [0], device=device)
        segments = segment_of[positions]
        row_of = torch.full((total,), -1, dtype=torch.int64, device=device)
        row_of[positions] = torch.arange(len(positions), device=device)
        offsets = positions - starts[segments] if len(positions) else positions
        return ReusedRows(positions, offsets, segments, self._engine.geometry.layers), row_of

    def _rows(self) -> QueryRows:
        """Computed rows and selected reused rows, in position order."""
        chosen = torch.cat((self._computed, self.reused_rows.positions[self._selected])).sort().values
        return QueryRows(chosen, bottom_right=self._recipe.mask is Mask.BOTTOM_RIGHT)

    def _write(self, layer: int, reused: _Reused) -> None:
        reused.layer_kv = parts(reused.correction, reused.source, layer)
        cos, sin = self._engine.rope.angles(reused.positions, layer)
        first = 0
        for k, v in reused.layer_kv:
            rows = slice(first, first := first + k.shape[1])
            at = slice(reused.step.span.start + rows.start, reused.step.span.start + rows.stop)
            self._engine.rope.rotate_into(self._cache.k[layer][:, at], k, cos[rows], sin[rows])
            self._cache.v[layer][:, at] = v
            self.moved_bytes += k.nbytes + v.nbytes
            if reused.held is not None:
                reused.held.k[layer][:, rows], reused.held.v[layer][:, rows] = k, v

    def _reconcile(self, layer: int, rows: QueryRows, hidden: Tensor) -> tuple[QueryRows, Tensor]:
        """Make the active rows those that the selector asked for."""
        if self._selected is self._active or torch.equal(self._selected, self._active):
            return rows, hidden
        self._active, wanted = self._selected, self._rows()
        missing = wanted.positions[~torch.isin(wanted.positions, rows.positions)]
        if missing.numel():
            hidden = torch.cat((hidden, self._hidden_of(layer, missing)))
            positions, order = torch.cat((rows.positions, missing)).sort()
            rows, hidden = QueryRows(positions), hidden[order]
        kept = torch.isin(rows.positions, wanted.positions)
        return wanted, hidden[kept]

    def _hidden_of(self, layer: int, positions: Tensor) -> Tensor:
        """Kept hidden states of reused rows that enter at ``layer``."""
        if layer != self._entry:
            raise InvariantError(f"rows may enter at layer {self._entry} only, the selector asked for layer {layer}")
        index = self._row_of[positions]
        parts = []
        for number, reused in enumerate(self._reused):
            mine = index[self.reused_rows.segments[index] == number]
            boundary = reused.source.hidden_at(layer)
            if boundary is None:
                raise InvariantError(f"segment {reused.step.index}: its source kept no hidden states at layer {layer}")
            parts.append(boundary[self.reused_rows.offsets[mine]])
        return torch.cat(parts)

    def _view(self, view: PackedPass) -> LayerView:
        """What the selection sees of the active reused rows."""
        row = self._row_of[view.rows.positions]
        active = (row >= 0).nonzero()[:, 0]

        def compare() -> Compared:
            assert view.fresh is not None
            fresh_k, fresh_v = (t[:, active] for t in view.fresh)
            return Compared(fresh_k, fresh_v, *self._gather(row[active]))

        return LayerView(row[active], compare,
                         attention=lambda queries: view.attention(queries)[self.reused_rows.positions])

    def _gather(self, rows: Tensor) -> LayerKV:
        keys, values = [], []
        for number, reused in enumerate(self._reused):
            offsets = self.reused_rows.offsets[rows[self.reused_rows.segments[rows] == number]]
            k, v = joined(reused.layer_kv)
            keys.append(k[:, offsets])
            values.append(v[:, offsets])
        return torch.cat(keys, 1), torch.cat(values, 1)

    def _account(self, layer: int, rows: QueryRows) -> None:
        """Count this layer's prompt rows by what was done with them."""
        row = self._row_of[rows.positions]
        fresh = row[row >= 0]
        self.rows_per_layer.append(int(fresh.numel()))
        self.recomputed += int(rows.positions.numel())
        if layer > 0:
            self.corrected += int(self._changed.sum() - self._changed[fresh].sum())

    @cached_property
    def _changed(self) -> Tensor:
        """Which of the reused rows a corrector changes: ``[n]`` bool. Known from the first layer written."""
        rows = [r.layer_kv[0][0].shape[1] if r.step.action is Action.CORRECT else 0 for r in self._reused]
        return self.reused_rows.offsets < torch.tensor(rows, device=self._engine.device)[self.reused_rows.segments]

    def _query_pass(self) -> Tensor:
        """Attention ``[n]`` of the rows that are computed anyway on the reused rows, averaged over layers."""
        watch = _QueryPass(self)
        rows = QueryRows(self._computed)
        self._engine.forward(self._cache, self._token_ids(rows), rows, watch)
        self.extra_entries += int(rows.positions.numel()) * self._engine.geometry.layers
        return watch.mass[self.reused_rows.positions] / self._engine.geometry.layers

    def _correction_size(self) -> Tensor:
        """Squared size of every reused row's value correction, summed over layers: ``[n]`` float32."""
        sizes = []
        for number, reused in enumerate(self._reused):
            size = torch.zeros(len(reused.source), device=self._engine.device)
            for layer in range(self._engine.geometry.layers):
                _, v = reused.correction(layer)
                near = slice(0, v.shape[1])
                size[near] += (v - reused.source.v[layer][:, near]).float().square().sum((0, 2))
            sizes.append(size[self.reused_rows.offsets[self.reused_rows.segments == number]])
        return torch.cat(sizes)

    def _token_ids(self, rows: QueryRows) -> Tensor:
        return self._engine.tensor(self._prompt.token_ids)[rows.positions]

    def prefill(self) -> Tensor:
        """Run the pass; returns the last prompt row's hidden state ``[1, hidden]``."""
        rows = self.start_rows()
        _, hidden = self._engine.forward(self._cache, self._token_ids(rows), rows, self)
        return hidden[-1:]


class _QueryPass(Watch):
    """A pass of the computed rows alone that sums their attention over layers."""

    def __init__(self, splice: Splice) -> None:
        self._splice = splice
        self.mass: Tensor = torch.zeros(0)

    def enter(self, layer: int, rows: QueryRows, hidden: Tensor) -> tuple[QueryRows, Tensor]:
        for reused in self._splice._reused:
            self._splice._write(layer, reused)
        return rows, hidden

    def leave(self, layer: int, view: PackedPass) -> None:
        mass = view.attention(view.rows.positions.numel())
        self.mass = mass if layer == 0 else self.mass + mass
