"""The scheduler role: follows requests, plans claims, jumps and orders. Knows no vLLM class, only what a request shows.

    arrive -> (judge on the workers) -> claim at admission -> load, jump -> capture and teach -> finish
"""

from __future__ import annotations

import logging
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvbaton.errors import KVBatonError
from kvbaton.kv import Geometry
from kvbaton.prompt import Place, Span
from kvbaton.vllm import LOGGER, planning
from kvbaton.vllm.hop import Hop, find_content, find_marked, role_of
from kvbaton.vllm.leaving import Leavings
from kvbaton.vllm.options import PARAMS_KEY, RequestOptions, ServerOptions
from kvbaton.vllm.paging import blocks_of, slots_of
from kvbaton.vllm.salting import salt_request
from kvbaton.vllm.texts import TextBooks
from kvbaton.vllm.wire import Judge, Lane, LaneReport, Load, StepOrders, StepReport, Verdict

_LOG = logging.getLogger(LOGGER)
_ENDED_WELL = ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED", "FINISHED_REPETITION")

BlockTable = Callable[[str], Sequence[int]]
"""Block ids of a request, by its id."""


class SchedulerRole:
    """``geometry`` is the whole model's, over all workers. ``prefix_cache``: whether vLLM's prefix caching is on."""

    def __init__(self, options: ServerOptions, geometry: Geometry, block_size: int, prefix_cache: bool) -> None:
        self.options, self.geometry, self.block_size = options, geometry, block_size
        self._prefix_cache = prefix_cache
        self.books = TextBooks(options.store_bytes, geometry.nbytes, options.window)
        self.hops: dict[str, Hop] = {}
        self.counts: Counter[str] = Counter()
        self._reported: Counter[str] = Counter()
        self._predicted: list[float] = []
        self.lanes: OrderedDict[Lane, LaneReport] = OrderedDict()
        self._errors: dict[str, str] = {}
        self._judges: list[Judge] = []
        self._leavings = Leavings(self.books, block_size)
        self._closed: list[Lane] = []

    # --- one request, in the order of its life -------------------------------------------------------------------

    def arrive(self, request: Any) -> None:
        """A new request. Never raises on a client's mistake: the request then gets exact KV, and is told why."""
        try:
            options = RequestOptions.of(request.kv_transfer_params, self.options)
            if options is None:
                return
            reason = _only_exact(request)
            if reason is not None:
                self._error(request.request_id, reason, told=options.asked)
                return
            options.check_length(len(request.prompt_token_ids))
        except KVBatonError as error:
            self._error(request.request_id, str(error), told=True)
            return
        self._open(Lane(options.group, options.method))
        hop = self._begin(request, options)
        self.hops[request.request_id] = hop
        self.books.pin(hop.sources)
        self.counts["segments_found"] += len(hop.sources)
        if hop.sources and options.reuse:
            self._judges.append(Judge(request.request_id, hop.lane, hop.reader, hop.prompt.token_ids, hop.shared))
        else:
            reason = "first hop" if options.reuse else "reuse off"
            self._decide(hop, tuple(Verdict("recompute", reason) for _ in hop.shared))

    def claim(self, request: Any, computed: int) -> int | None:
        """Prompt tokens that can be brought in right behind the first ``computed``; None: ask again next step."""
        hop = self.hops.get(request.request_id)
        if hop is None:
            return 0
        if hop.verdicts is None:
            return None
        hop.claim_from = computed
        hop.cached_tokens, hop.loaded = min(computed, hop.tokens), {}
        return planning.reach(hop.pieces, computed) - computed

    def allocated(self, request: Any, tokens: int) -> None:
        """The request was admitted, with ``tokens`` of its claim."""
        hop = self.hops.get(request.request_id)
        if hop is not None:
            hop.load = Span(hop.claim_from, hop.claim_from + tokens) if tokens else None

    def chunk(self, request: Any, computed: int, tokens: int) -> int:
        """How many of the next ``tokens`` rows to compute before the request stands at reusable rows."""
        hop = self.hops.get(request.request_id)
        if hop is None or not hop.pieces:
            return tokens
        return planning.chunk_end(hop.pieces, computed, tokens) - computed

    def jump(self, request: Any) -> int:
        """Where a running request may jump to: its own position if nothing can be brought in there."""
        hop, at = self.hops.get(request.request_id), int(request.num_computed_tokens)
        if hop is None or at >= hop.tokens:
            return at
        to = planning.reach(hop.pieces, at)
        hop.load = Span(at, to) if to > at else None
        return to

    def finish(self, request: Any, block_ids: Sequence[int]) -> tuple[bool, dict[str, Any] | None]:
        """The request ended: whether its blocks must stay until the next step, and what to tell the client."""
        error = self._errors.pop(request.request_id, None)
        hop = self.hops.pop(request.request_id, None)
        if hop is None:
            return False, None if error is None else {PARAMS_KEY: {"error": error}}
        keep, outcome = False, request.status.name.removeprefix("FINISHED_").lower()
        self._judges = [judge for judge in self._judges if judge.request != request.request_id]
        if request.status.name in _ENDED_WELL and hop.verdicts is not None:
            keep = self._leavings.end(hop, block_ids)
        self.books.unpin(hop.sources)
        self._count_end(hop, outcome)
        if self.options.log_requests:
            _LOG.info("%s", hop.log_line(outcome))
        return keep, {PARAMS_KEY: hop.summary()} if hop.options.asked else None

    # --- one step ------------------------------------------------------------------------------------------------

    def orders(self, scheduled: Mapping[str, int], block_ids: BlockTable) -> StepOrders:
        """What the workers do in the coming step, which computes ``scheduled`` tokens of each request."""
        loads: list[Load] = []
        for request_id in scheduled:
            hop = self.hops.get(request_id)
            if hop is None:
                continue
            if hop.load is not None:
                loads += self._loads(hop, hop.load, block_ids(request_id))
            if not hop.captured and hop.request.num_computed_tokens >= hop.tokens:
                self._leavings.prompt(hop, block_ids(request_id))
        for hop in self.hops.values():
            hop.load = None
        left = self._leavings.take()
        self.counts["texts_stored"] += len(left.captures)
        orders = StepOrders(tuple(left.captures), tuple(left.teaches), tuple(self._judges), tuple(loads),
                            self.books.take_dropped(), tuple(self._closed), frozenset(left.kept))
        self._judges, self._closed = [], []
        return orders

    def report(self, report: StepReport) -> None:
        """Take in what the workers say after a step."""
        for text in report.lost:
            self.books.forget(text)
        for request_id, verdicts in report.verdicts.items():
            if request_id in self.hops:
                self._decide(self.hops[request_id], verdicts)
        for (request_id, segment), reason in report.refused.items():
            hop = self.hops.get(request_id)
            self.counts[f"rejected:{kind_of(reason)}"] += 1
            if hop is not None:
                hop.refused[segment] = reason
                hop.loaded.pop(segment, None)
                hop.pieces = [piece for piece in hop.pieces if piece.segment != segment]
        self.lanes.update({lane: learned for lane, learned in report.lanes.items() if lane in self.lanes})

    def take_counts(self) -> dict[str, int]:
        """What `counts` grew by since the last call."""
        grown, self._reported = dict(self.counts - self._reported), Counter(self.counts)
        return grown

    def take_predicted(self) -> list[float]:
        """Divergences predicted since the last call, nats a token."""
        predicted, self._predicted = self._predicted, []
        return predicted

    # --- inside --------------------------------------------------------------------------------------------------

    def _open(self, lane: Lane) -> None:
        """Make ``lane`` the youngest; close idle ones, the oldest first, until no more than `max_lanes` are open."""
        self.lanes.setdefault(lane, LaneReport(0, 0, 0))
        self.lanes.move_to_end(lane)
        busy = {hop.lane for hop in self.hops.values()} | {lane}
        for old in [old for old in self.lanes if old not in busy][:max(0, len(self.lanes) - self.options.max_lanes)]:
            del self.lanes[old]
            self.books.close(old)
            self._closed.append(old)

    def _begin(self, request: Any, options: RequestOptions) -> Hop:
        ids = tuple(request.prompt_token_ids)
        lane = Lane(options.group, options.method)
        reader = role_of(options, ids, self.options.role_tokens)
        new_text: list[Span] = []
        if options.marks is not None:
            shared = find_marked(self.books, lane, options, ids)
        else:
            shared, matches = find_content(self.books, lane, ids)
            new_text = planning.gaps(matches, len(ids), self.options.window)
        return Hop(request, options, lane, reader, planning.build_prompt(reader, ids, shared), tuple(shared),
                   tuple(new_text))

    def _decide(self, hop: Hop, verdicts: tuple[Verdict, ...]) -> None:
        hop.verdicts = verdicts
        recipe = hop.lane.method.recipe()
        try:
            hop.pieces = planning.pieces_of(recipe, self.geometry.layers, hop.tokens, hop.reused)
        except KVBatonError as error:
            _LOG.error("request %s runs exactly: %s", hop.request.request_id, error)
            hop.verdicts = tuple(Verdict("recompute", "method not possible in vLLM") for _ in verdicts)
        for verdict in hop.verdicts:
            self.counts["segments_reused" if verdict.reused else f"rejected:{kind_of(verdict.reason)}"] += 1
            if verdict.predicted is not None:
                self._predicted.append(verdict.predicted)
        if hop.pieces:
            hop.exact_until = min(span.start for _, span in hop.reused)
            if self._prefix_cache:
                salt_request(hop.request, hop.salt(), hop.pieces[0].span.start // self.block_size)

    def _loads(self, hop: Hop, span: Span, table: Sequence[int]) -> list[Load]:
        loads, corrected = [], hop.corrected_tokens
        for part in planning.cut(hop.pieces, span.start, span.end):
            segment, rows = hop.shared[part.segment], part.span
            assert segment.source is not None
            assert hop.verdicts is not None
            verdict = hop.verdicts[part.segment]
            loads.append(Load(
                hop.request.request_id, part.segment, hop.lane, segment.source, segment.end - segment.start,
                Place(segment.start, corrected), rows.start - segment.start,
                tuple(slots_of(table, *_ends(rows), self.block_size)),
                tuple(blocks_of(table, *_ends(rows), self.block_size)),
                verdict.edge if verdict.action == "correct" else None))
            hop.loaded[part.segment] = hop.loaded.get(part.segment, 0) + len(rows)
            self.counts["tokens_moved"] += len(rows)
        return loads

    def _count_end(self, hop: Hop, outcome: str) -> None:
        self.counts["requests"] += 1
        self.counts[f"ended:{outcome}"] += 1
        self.counts["tokens_prompt"] += hop.tokens

    def _error(self, request_id: str, message: str, told: bool) -> None:
        _LOG.warning("request %s runs exactly: %s", request_id, message)
        self.counts["requests_refused"] += 1
        if told:
            self._errors[request_id] = message


def kind_of(reason: str) -> str:
    """A reason without the numbers and names in it: what metrics may be labelled with, a bounded set."""
    return re.sub(r"[-+]?\d[\d.e+-]*", "#", reason.partition(":")[0])


def _ends(span: Span) -> tuple[int, int]:
    return span.start, span.end


def _only_exact(request: Any) -> str | None:
    """Why this request must not get or leave approximate KV."""
    if request.prompt_token_ids is None or request.prompt_embeds is not None:
        return "prompts given as embeddings have no token ids to match"
    if request.mm_features:
        return "multi-modal prompts: equal placeholder tokens may stand for different images"
    if request.lora_request is not None:
        return "LoRA requests: KV of one adapter must not reach another"
    if request.sampling_params is None:
        return "pooling requests"
    if request.skip_reading_prefix_cache:
        return "prompt log-probabilities need every prompt row computed"
    if request.resumable:
        return "streaming-input sessions change their prompt"
    return None
