"""Session: one recipe over one engine, with what it learned. `Session.hop` is a hop's whole life.

    1 encode alone (where the reference asks)   5 packed pass, first token          <- TTFT ends
    2 plan: gate and decide each segment        6 learn from exact pairs (thread)
    3 exact prefix from the prefix cache        7 decode
    4 splice: move, correct, choose rows        8 hand on what is held

`Session.hop_together` takes many hops through 1 to 6 one by one, decodes all as one batch, and ends them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from kvbaton.engine.audit import Audit, Auditor
from kvbaton.engine.cache import PrefixCache, SplicedCache
from kvbaton.engine.capture import Capture, Captures
from kvbaton.engine.decode import Answer, OnToken, begin_answer
from kvbaton.engine.hf import HFEngine
from kvbaton.engine.learner import Learner
from kvbaton.engine.result import Decision, Entries, HopResult
from kvbaton.engine.sampling import Force, Generate
from kvbaton.engine.splice import Splice
from kvbaton.engine.together import finish_together
from kvbaton.errors import PromptTooLong, UsageError
from kvbaton.kv import KV
from kvbaton.memory import Memory
from kvbaton.plan import Plan, Step, make_plan, note_reuse, own_text
from kvbaton.prompt import Prompt, Segment, Span, agent_of
from kvbaton.recipes import PrivateText, Recipe
from kvbaton.references import ALONE, Keep, RunStore


@dataclass(frozen=True)
class Call:
    """One agent call, as `Session.hop` takes it."""

    prompt: Prompt
    decode: Generate | Force
    run: RunStore
    writes: str | None = None


@dataclass(frozen=True)
class _Hop:
    """A hop whose first token is known. ``prefix``: tokens from the prefix cache; ``extra``: entries beyond the prompt;
    ``held``: what the reader now holds of each shared segment."""

    call: Call
    plan: Plan
    plan_s: float
    extra: int
    prefix: int
    splice: Splice
    held: dict[int, KV | None]
    audit: Audit | None
    answer: Answer


class Session:
    """Runs hops of one recipe. Not for use by several threads at once.

    ``memory``: what was learned before (None: nothing yet); ``budget_bytes``: limit on what is learned;
    ``prefix_cache``: exact reuse of an agent's own role prompt across runs, the same for every method.
    ``audit``: share of reuse hops that are also run dense, off the TTFT path, to measure and to teach; `engine.audit`.
    """

    def __init__(self, engine: HFEngine, recipe: Recipe, memory: Memory | None = None,
                 budget_bytes: int | None = None, prefix_cache: bool = True, audit: float = 0.0) -> None:
        self.engine, self.recipe = engine, recipe
        self.memory = memory if memory is not None else Memory(recipe.corrector, engine.geometry, budget_bytes)
        _same_corrector(self.memory, recipe)
        self._prefixes = PrefixCache() if prefix_cache else PrefixCache(budget_bytes=0)
        self._own: dict[str, RunStore] = {}
        self._learner = Learner(max(1, torch.get_num_threads() // 2))  # the rest goes on decoding
        self._auditor = Auditor(engine, self.memory, audit)
        self._busy = threading.Lock()

    def follow(self, recipe: Recipe) -> None:
        """Go on with another recipe that uses what was learned. Raises UsageError if it corrects otherwise."""
        _same_corrector(self.memory, recipe)
        self.recipe = recipe

    def start_run(self) -> RunStore:
        """An empty store for the shared KV of one run; `RunStore.clear` frees it."""
        return RunStore()

    def close(self) -> None:
        """Finish learning and stop the worker thread."""
        self._learner.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @torch.no_grad()
    def hop(self, prompt: Prompt, decode: Generate | Force, run: RunStore, writes: str | None = None,
            on_token: OnToken | None = None) -> HopResult:
        """One agent call. ``writes`` names the text it generates, for its readers.

        Raises PromptTooLong if prompt and answer do not fit the context. A hop that raises leaves ``run`` as it was.
        """
        with self._alone():
            self.check_length(prompt, decode)
            hop = self._begin(Call(prompt, decode, run, writes))
            self._learn(hop.plan, hop.held)
            hop.answer.finish(on_token)
            return self._end([hop])[0]

    @torch.no_grad()
    def hop_together(self, calls: Sequence[Call]) -> list[HopResult]:
        """Many agent calls, prefilled one by one and decoded together; none knows what another writes or teaches.

        Each gets what it would get alone (in float32 to rounding; in bfloat16 a batch rounds otherwise). Raises as
        `hop` does, and then every run is as it was. Token times are those of a batch; `learn_s` is shared out evenly.
        """
        with self._alone():
            for call in calls:
                self.check_length(call.prompt, call.decode)
            hops = [self._begin(call) for call in calls]
            for hop in hops:
                self._learn(hop.plan, hop.held)
            finish_together(self.engine, [hop.answer for hop in hops])
            return self._end(hops)

    def play(self, hops: Iterable[tuple[Prompt, Generate | Force, str | None]]) -> list[HopResult]:
        """One run of given hops, ``(prompt, decode, writes)`` each. The run's shared KV is freed however it ends."""
        run = self.start_run()
        try:
            return [self.hop(prompt, decode, run, writes=writes) for prompt, decode, writes in hops]
        finally:
            run.clear()

    def encode_alone(self, prompt: Prompt, run: RunStore) -> int:
        """Encode texts that nobody holds by themselves, where the reference starts from that; entries computed.

        The first thing that `hop` does; for those who want that and not the hop.
        """
        reference, entries = self.recipe.reference, 0
        if not reference.encodes_alone:
            return 0
        for _, segment, _, _ in prompt.shared():
            if reference.resolve(segment, run) is None:
                lead = prompt.token_ids[:reference.lead_tokens]
                reference.encoded(segment, self._encode(lead, segment), run)
                entries += (len(lead) + len(segment)) * self.engine.geometry.layers
        return entries

    def check_length(self, prompt: Prompt, decode: Generate | Force) -> None:
        """Raises PromptTooLong if prompt and answer do not fit the context."""
        answer = decode.max_tokens
        over = len(prompt) + answer - self.engine.context_tokens
        if over > 0:
            parts = ", ".join(f"{segment.share or 'own text'} {len(segment)}" for segment in prompt.segments)
            raise PromptTooLong(
                f"{prompt.reader!r}: prompt of {len(prompt)} tokens and answer of up to {answer} exceed the model's "
                f"context of {self.engine.context_tokens} by {over} tokens (segments: {parts}); shorten one of them")

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._busy.acquire(blocking=False):
            raise UsageError("a session runs one hop at a time: use one session a thread")
        try:
            yield
        finally:
            self._busy.release()

    def _begin(self, call: Call) -> _Hop:
        """Up to the first token."""
        prompt, run = call.prompt, call.run
        truth = self._truth(prompt) if self.recipe.corrector.needs_truth else None
        submit = time.perf_counter()
        own = self._own.setdefault(prompt.reader, RunStore())
        extra = self.encode_alone(prompt, run) + self._encode_own(prompt, own)
        plan = make_plan(prompt, self.recipe, run, self.memory, own, truth)
        plan_s = time.perf_counter() - submit
        end = len(prompt) + call.decode.max_tokens
        cache = self.engine.new_cache(end)
        prefix = self._load_prefix(prompt, cache)
        splice = Splice(self.engine, prompt, plan, self.recipe, cache, prefix)
        first = self.engine.logits(splice.prefill())[0]
        answer = begin_answer(self.engine, call.decode, first, submit, cache, self._capture(Span(len(prompt), end)))
        held = {step.index: splice.held(step.index) for step in plan.steps}
        audit = self._auditor.begin(prompt, plan, self.recipe, cache, first)
        self._save_prefix(prompt, cache)
        return _Hop(call, plan, plan_s, extra, prefix, splice, held, audit, answer)

    def _end(self, hops: Sequence[_Hop]) -> list[HopResult]:
        """Learning and audits end before anything is handed on: if one fails, every run is as it was."""
        learn_s = self._learner.drain() / max(len(hops), 1)
        actual = [None if hop.audit is None else self._close_audit(hop.audit, hop.answer) for hop in hops]
        results = []
        for hop, divergence in zip(hops, actual, strict=True):
            note_reuse(hop.plan)
            self._hand_on(hop)
            results.append(self._result(hop, learn_s, divergence))
        return results

    def _encode_own(self, prompt: Prompt, own: RunStore) -> int:
        """Encode the agent's own text without the shared text between, once a template; entries computed."""
        private = [(index, segment) for index, segment in enumerate(prompt.segments) if segment.share is None]
        if self.recipe.private is not PrivateText.ANCHORED or all(own.get(own_text(s, i)) for i, s in private):
            return 0
        alone = Prompt(prompt.reader, tuple(segment for _, segment in private))
        captures = [self._capture(span) for span in alone.spans]
        self.engine.forward(self.engine.new_cache(len(alone)), self.engine.tensor(alone.token_ids),
                            self.engine.rows(0, len(alone)), Captures(captures))
        own.clear()
        for (index, segment), capture in zip(private, captures, strict=True):
            own.put(own_text(segment, index), capture.kv(ALONE, exact=True))
        return len(alone) * self.engine.geometry.layers

    def _encode(self, lead: tuple[int, ...], segment: Segment) -> KV:
        tokens = len(lead) + len(segment)
        capture = self._capture(Span(len(lead), tokens))
        self.engine.forward(self.engine.new_cache(tokens), self.engine.tensor(lead + segment.token_ids),
                            self.engine.rows(0, tokens), Captures([capture]))
        return capture.kv(ALONE, exact=True)

    def _capture(self, span: Span) -> Capture:
        return Capture.empty(span, self.engine.geometry, self.engine.device, self.recipe.selector.entry)

    def _truth(self, prompt: Prompt) -> dict[int, KV]:
        """True KV of every shared segment, from a dense pass outside the clock."""
        captures = {index: self._capture(span) for index, _, span, _ in prompt.shared()}
        self.engine.forward(self.engine.new_cache(len(prompt)), self.engine.tensor(prompt.token_ids),
                            self.engine.rows(0, len(prompt)), Captures(list(captures.values())))
        return {index: capture.kv(prompt.role, exact=True) for index, capture in captures.items()}

    def _load_prefix(self, prompt: Prompt, cache: SplicedCache) -> int:
        """Copy the role prompt's exact KV into the cache; returns its tokens (never the prompt's last one)."""
        held = self._prefixes.get(prompt.token_ids[:prompt.prefix_tokens])
        if held is None:
            return 0
        tokens = min(prompt.prefix_tokens, len(prompt) - 1)
        cache.k[:, :, :tokens], cache.v[:, :, :tokens] = (t[:, :, :tokens] for t in held)
        return tokens

    def _save_prefix(self, prompt: Prompt, cache: SplicedCache) -> None:
        ids = prompt.token_ids[:prompt.prefix_tokens]
        if ids and self._prefixes.get(ids) is None:
            self._prefixes.put(ids, cache.k[:, :, :len(ids)], cache.v[:, :, :len(ids)])

    def _learn(self, plan: Plan, held: dict[int, KV | None]) -> None:
        """Queue every pair of a source and what this hop computed exactly."""
        if not self.recipe.corrector.learns:
            return
        for step in plan.steps:
            target = held[step.index]
            if self._teaches(step, target):
                assert step.edge is not None
                assert step.source is not None
                assert target is not None
                self._learner.submit(self.memory.learn, step.edge, step.source, target)

    def _close_audit(self, audit: Audit, answer: Answer) -> float:
        """Run the hop the other way, learn from it if that is the exact way; the measured divergence."""
        actual = audit.run(tuple(answer.ids))
        if not audit.plan.dense:
            self._learn(audit.plan, audit.held)
            self._learner.drain()
        self._auditor.record(audit.plan, actual)
        return actual

    def _teaches(self, step: Step, target: KV | None) -> bool:
        exact_source = step.source is not None and (step.source.exact or self.recipe.learn_approximate)
        return step.edge is not None and exact_source and target is not None and target.exact

    def _hand_on(self, hop: _Hop) -> None:
        """Give the reference what it keeps: what the reader now holds, and what it wrote."""
        prompt, run, answer, reference = hop.call.prompt, hop.call.run, hop.answer, self.recipe.reference
        for step in hop.plan.steps:
            kv = hop.held[step.index]
            if kv is not None and step.segment.share is not None:
                reference.read(step.segment, kv, run)
        if self.recipe.private is PrivateText.STALE and hop.plan.dense:
            own = self._own[prompt.reader] = RunStore()
            for index, segment, _ in prompt.own_behind():
                kv = hop.splice.held(index)
                if kv is not None:
                    own.put(own_text(segment, index), kv)
        if hop.call.writes is not None and answer.ids and Keep.WRITTEN in reference.keeps:
            kv = answer.written.kv(prompt.role, exact=hop.plan.dense, tokens=len(answer.ids))
            reference.wrote(Segment(tuple(answer.ids), hop.call.writes), kv, run)

    def _result(self, hop: _Hop, learn_s: float, divergence: float | None) -> HopResult:
        prompt, plan, splice, answer, run = hop.call.prompt, hop.plan, hop.splice, hop.answer, hop.call.run
        layers = self.engine.geometry.layers
        cached, total = hop.prefix * layers, len(prompt) * layers
        reused = total - cached - splice.recomputed - splice.corrected
        decisions = tuple(
            Decision(step.segment.share, agent_of(step.edge.source) if step.edge else None, len(step.span),
                     step.action.value, step.reason, step.predicted) for step in plan.steps)
        text = "" if self.engine.text is None else self.engine.text.decode(tuple(answer.ids))
        return HopResult(
            reader=prompt.reader, prompt_tokens=len(prompt), layers=layers,
            shared_tokens=sum(len(segment) for _, segment, _, _ in prompt.shared()),
            output_ids=tuple(answer.ids), stopped=answer.stopped, text=text, token_times_s=tuple(answer.times_s),
            plan_s=hop.plan_s, decisions=decisions,
            entries=Entries(reused=reused, corrected=splice.corrected, recomputed=splice.recomputed, cached=cached),
            extra_entries=hop.extra + splice.extra_entries, rows_per_layer=tuple(splice.rows_per_layer),
            moved_bytes=splice.moved_bytes, held_bytes=run.nbytes, boundary_bytes=run.boundary_bytes,
            learned_bytes=self.memory.nbytes, learn_s=learn_s,
            dense=plan.dense, logits=answer.logits, beside=answer.beside, divergence=divergence)


def _same_corrector(memory: Memory, recipe: Recipe) -> None:
    if memory.corrector != recipe.corrector:
        raise UsageError(f"the memory was learned by {memory.corrector}, recipe {recipe.name!r} "
                         f"corrects with {recipe.corrector}")
