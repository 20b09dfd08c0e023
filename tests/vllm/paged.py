"""A small paged server around the other engine's forward pass: blocks, prefix cache by block hash, chunked prefill,
claims and jumps, load errors. It drives both roles as vLLM does, so that they are tested where vLLM is not installed.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kvbaton.engine.hf import Watch
from kvbaton.vllm.options import ServerOptions
from kvbaton.vllm.paging import PageCodec, Rows, slots_of
from kvbaton.vllm.scheduling import SchedulerRole
from kvbaton.vllm.working import PagedCache, WorkerRole
from tiny import engine as tiny_engine


class PagedRequest:
    """What a request shows to the scheduler role. ``answer``: the tokens it will sample."""

    def __init__(self, server: PagedServer, name: str, prompt: Sequence[int], kvbaton: Any,
                 answer: Sequence[int]) -> None:
        self.request_id, self.prompt_token_ids, self.answer = name, list(prompt), list(answer)
        self.kv_transfer_params = None if kvbaton is None else {"kvbaton": kvbaton}
        self.prompt_embeds = self.lora_request = None
        self.mm_features: list[Any] = []
        self.sampling_params = object()
        self.skip_reading_prefix_cache = self.resumable = False
        self.all_token_ids = list(prompt)
        self.num_computed_tokens = 0
        self.status = SimpleNamespace(name="WAITING")
        self.block_hashes: list[bytes] = []
        self._block_hasher = server.hash_blocks if server.prefix_cache else None
        self.update_block_hashes()
        self.table: list[int] = []
        self.logits: list[Tensor] = []
        self.cached_tokens = 0
        self.computed: list[int] = []
        self.told: dict[str, Any] = {}

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    def update_block_hashes(self) -> None:
        if self._block_hasher is not None:
            self.block_hashes.extend(self._block_hasher(self))


@dataclass
class PagedServer:
    """``budget``: rows a step and request; ``reject``: loads that the worker refuses, by (request, segment)."""

    family: str = "llama"
    block_size: int = 8
    blocks: int = 400
    budget: int = 1000
    gap_jump: bool = True
    prefix_cache: bool = True
    options: dict[str, Any] = field(default_factory=dict)
    reject: set[tuple[str, int]] = field(default_factory=set)
    seed: int = 0

    def __post_init__(self) -> None:
        self.engine = tiny_engine(self.family)
        geometry = self.engine.geometry
        self.role = SchedulerRole(ServerOptions.parse({"log_requests": False, **self.options}), geometry,
                                  self.block_size, self.prefix_cache)
        order = torch.randperm(2 * self.block_size * geometry.head_dim,
                               generator=torch.Generator().manual_seed(self.seed))
        self._k_at, self._v_at = order.view(2, self.block_size, geometry.head_dim)
        shape = (self.blocks, geometry.kv_heads, self.block_size, 2 * geometry.head_dim)
        pages = [torch.full(shape, float("nan")) for _ in range(geometry.layers)]
        codec = PageCodec.learn(self._write, pages[0])
        self.worker = WorkerRole(geometry, self.engine.rope, self.engine.identity,
                                 layers=[PagedCache(page, self._write, codec) for page in pages])
        load = self.worker._try_load
        self.worker._try_load = lambda order: ("injected" if (order.request, order.segment) in self.reject
                                               else load(order))
        self.free = list(range(self.blocks))
        random.Random(self.seed).shuffle(self.free)
        self.references = [0] * self.blocks
        self.by_hash: dict[bytes, int] = {}
        self.hash_of: dict[int, bytes] = {}
        self.held: dict[str, list[int]] = {}
        self._count = 0

    def serve(self, prompt: Sequence[int], kvbaton: Any = None, answer: Sequence[int] = (1,)) -> PagedRequest:
        return self.serve_all([(prompt, kvbaton, answer)])[0]

    def serve_all(self, asked: Sequence[tuple[Sequence[int], Any, Sequence[int]]]) -> list[PagedRequest]:
        """Serve requests that arrive together, to their end, and settle."""
        requests = []
        for prompt, kvbaton, answer in asked:
            self._count += 1
            requests.append(PagedRequest(self, f"r{self._count}", prompt, kvbaton, answer))
            self.role.arrive(requests[-1])
        for _ in range(2000):
            alive = [r for r in requests if not r.status.name.startswith("FINISHED")]
            self.step(alive)
            if not alive and not self.held:
                break
        else:
            raise AssertionError("the server does not come to an end")
        self.worker.drain()
        return requests

    def step(self, alive: Sequence[PagedRequest]) -> None:
        """One step: schedule, carry out orders, compute, take the worker's report, free what may be freed."""
        planned = {}
        for request in alive:
            tokens = self._schedule(request)
            if tokens:
                planned[request.request_id] = (request, tokens)
        tables = {name: request.table for name, (request, _) in planned.items()}
        orders = self.role.orders({name: tokens for name, (_, tokens) in planned.items()}, tables.__getitem__)
        report, failed = self.worker.run(orders)
        for request, tokens in planned.values():
            self._compute(request, tokens)
        for request, tokens in planned.values():
            self._update(request, tokens, failed)
        self.role.report(report)
        for name in orders.finished:
            self._release(self.held.pop(name))

    def preempt(self, request: PagedRequest) -> None:
        self._release(request.table)
        request.table, request.num_computed_tokens, request.status = [], 0, SimpleNamespace(name="PREEMPTED")

    def hash_blocks(self, request: Any) -> list[bytes]:
        out, at = [], len(request.block_hashes) * self.block_size
        parent = request.block_hashes[-1] if request.block_hashes else b""
        while at + self.block_size <= request.num_tokens:
            ids = request.all_token_ids[at:at + self.block_size]
            parent = hashlib.sha256(parent + repr(ids).encode()).digest()
            out.append(parent)
            at += self.block_size
        return out

    def _schedule(self, request: PagedRequest) -> int:
        """Rows to compute in this step; 0: not this time."""
        if request.status.name in ("WAITING", "PREEMPTED"):
            local = self._local_hit(request)
            claim = self.role.claim(request, len(local) * self.block_size)
            if claim is None:
                return 0
            for block in local:
                self._take(block)
            request.table = list(local)
            request.cached_tokens = len(local) * self.block_size
            at = request.cached_tokens + claim
        else:
            at = self.role.jump(request) if self.gap_jump else request.num_computed_tokens
            claim = 0
        tokens = min(self.budget, request.num_tokens - at)
        if self.gap_jump:
            tokens = self.role.chunk(request, at, tokens)
        if not self._allocate(request, at + tokens):
            raise AssertionError("the test gives too few blocks")
        if request.status.name in ("WAITING", "PREEMPTED"):
            self.role.allocated(request, claim)
            request.status = SimpleNamespace(name="RUNNING")
        request.num_computed_tokens = at
        self._publish(request, at + tokens)
        return tokens

    def _compute(self, request: PagedRequest, tokens: int) -> None:
        at, end = request.num_computed_tokens, request.num_computed_tokens + tokens
        cache = self.engine.new_cache(end)
        slots = torch.tensor(slots_of(request.table, 0, end, self.block_size))
        held = Rows.at(slots[:at], self.block_size)
        for layer, pages in enumerate(self.worker.layers):
            cache.k[layer][:, :at], cache.v[layer][:, :at] = pages.read(held)
        ids = self.engine.tensor(tuple(request.all_token_ids[at:end]))
        _, hidden = self.engine.forward(cache, ids, self.engine.rows(at, end), Watch())
        for layer, pages in enumerate(self.worker.layers):
            pages.write(cache.k[layer][:, at:end], cache.v[layer][:, at:end], slots[at:])
        request.last = self.engine.logits(hidden[-1:])[0]

    def _update(self, request: PagedRequest, tokens: int, failed: set[int]) -> None:
        first = next((i for i, block in enumerate(request.table) if block in failed), None)
        if first is not None:
            request.num_computed_tokens = first * self.block_size
            return
        request.computed += range(request.num_computed_tokens, request.num_computed_tokens + tokens)
        request.num_computed_tokens += tokens
        if request.num_computed_tokens < request.num_tokens:
            return
        request.logits.append(request.last)
        request.all_token_ids.append(request.answer[len(request.logits) - 1])
        request.update_block_hashes()
        if len(request.logits) == len(request.answer):
            request.status = SimpleNamespace(name="FINISHED_LENGTH_CAPPED")
            keep, told = self.role.finish(request, request.table)
            request.told = (told or {}).get("kvbaton", {})
            if keep:
                self.held[request.request_id] = request.table
            else:
                self._release(request.table)

    def _local_hit(self, request: PagedRequest) -> list[int]:
        hit = []
        for number, code in enumerate(request.block_hashes):
            if code not in self.by_hash or (number + 1) * self.block_size >= request.num_tokens:
                break
            hit.append(self.by_hash[code])
        return hit

    def _publish(self, request: PagedRequest, tokens: int) -> None:
        for number in range(min(tokens // self.block_size, len(request.block_hashes))):
            code, block = request.block_hashes[number], request.table[number]
            if code not in self.by_hash and block not in self.hash_of:
                self.by_hash[code], self.hash_of[block] = block, code

    def _allocate(self, request: PagedRequest, tokens: int) -> bool:
        while len(request.table) * self.block_size < tokens:
            if not self.free:
                return False
            block = self.free[0]
            self.by_hash.pop(self.hash_of.pop(block, b""), None)
            self._take(block)
            request.table.append(block)
        return True

    def _take(self, block: int) -> None:
        if block in self.free:
            self.free.remove(block)
        self.references[block] += 1

    def _release(self, table: Sequence[int]) -> None:
        for block in table:
            self.references[block] -= 1
            if not self.references[block]:
                self.free.append(block)

    def _write(self, key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
        """A backend that keeps a page as one random permutation of its elements."""
        pages = cache.flatten(2)
        block, offset = slots // self.block_size, slots % self.block_size
        for head in range(key.shape[1]):
            pages[block[:, None], head, self._k_at[offset]] = key[:, head]
            pages[block[:, None], head, self._v_at[offset]] = value[:, head]
