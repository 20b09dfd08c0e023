"""Both roles, driven by a small paged server, against the other engine: same recipe, same state, same logits."""

from __future__ import annotations

from functools import cache

import pytest
import torch

pytest.importorskip("transformers", minversion="5.24", reason="older transformers, as vLLM wants it: run `make test`")

from hypothesis import given, settings
from hypothesis import strategies as st
from paged import PagedServer
from scenario import Scenario, team

from kvbaton.engine.sampling import Force
from kvbaton.engine.session import Session
from kvbaton.prompt import Prompt, Segment
from kvbaton.recipes import recipe
from tiny import VOCAB, engine, ids

METHODS = ("full-shared", "moved", "mapped", "mapped-leading", "chained-mapped", "shift", "affine", "hybrid",
           "kvcmas-open", "dense")
TOLERANCE = 2e-4
"""Logits are of size 10; chunk shapes and the unrotation of captured keys change the last digits."""


def small(method: str, seed: int = 1) -> Scenario:
    """The team's scenario with short texts of this model's vocabulary and fixed answers."""
    made = team(method, seed)
    for run in made.runs:
        for hop in run:
            hop.parts = [(None if part is None else [t % VOCAB for t in part[:40]], share) for part, share in hop.parts]
            hop.answer = list(ids(7, seed=len(hop.parts) + run[0].parts[1][0][0]))
    return made


@cache
def wanted(method: str, family: str, seed: int) -> list[list[tuple[torch.Tensor, list[str]]]]:
    """Logits and actions of the other engine, hop by hop."""
    out = []
    with Session(engine(family), recipe(method), prefix_cache=False) as session:
        for hops in small(method, seed).runs:
            store, answers, results = session.start_run(), {}, []
            for hop in hops:
                parts = tuple(Segment(tuple(part), share) for part, share in hop.filled(answers))
                result = session.hop(Prompt(hop.reader, parts), Force(tuple(hop.answer)), store, writes=hop.reader)
                answers[hop.reader] = hop.answer
                results.append((result.logits, [d.action for d in result.decisions]))
            out.append(results)
    return out


def play(server: PagedServer, scenario: Scenario) -> list[list]:
    out = []
    for hops in scenario.runs:
        answers, results = {}, []
        for hop in hops:
            prompt, spans = [], []
            for part, share in hop.filled(answers):
                if share is not None:
                    spans.append([len(prompt), len(prompt) + len(part), share])
                prompt += part
            asked = {"group": "g", "method": scenario.method, "agent": hop.reader, "spans": spans}
            results.append(server.serve(prompt, asked, [*hop.answer, 0]))
            answers[hop.reader] = hop.answer
        out.append(results)
    return out


def check(server: PagedServer, method: str, seed: int = 1) -> int:
    """Play and compare; returns the rows that were brought in."""
    free, moved = len(server.free), 0
    for run, (served, expected) in enumerate(zip(play(server, small(method, seed)), wanted(method, server.family, seed),
                                                 strict=True)):
        for hop, (got, (logits, actions)) in enumerate(zip(served, expected, strict=True)):
            where = f"run {run}, hop {hop}: {got.told['segments']}"
            assert [s["action"] for s in got.told["segments"]] == actions, where
            ours = torch.stack(got.logits[:-1])
            assert torch.allclose(ours, logits, atol=TOLERANCE, rtol=0), (where, float((ours - logits).abs().max()))
            assert len(set(got.computed)) + got.told["loaded_tokens"] + got.cached_tokens >= len(got.prompt_token_ids)
            moved += got.told["loaded_tokens"]
    assert len(server.free) == free, "blocks leaked"
    assert not server.role.hops
    assert set(server.worker.texts) == set(server.role.books.all_ids())
    assert server.worker.broken is None
    return moved


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("server", [{"budget": 16}, {"block_size": 16, "prefix_cache": False}], ids=str)
def test_equals_the_other_engine(method, server) -> None:
    moved = check(PagedServer(**server), method)
    assert (moved > 0) == (method != "dense")


@pytest.mark.parametrize("family", ["llama-mqa", "llama-mha", "llama3-rope", "llama-yarn", "qwen2", "qwen3"])
def test_families(family) -> None:
    """R1, R2, G1: scaled RoPE and every head layout."""
    assert check(PagedServer(family), "mapped") > 0


@settings(max_examples=5)
@given(st.sampled_from(METHODS), st.sampled_from([4, 8, 16]), st.integers(5, 60), st.booleans(), st.integers(1, 3))
def test_equals_whatever_the_settings(method, block_size, budget, prefix_cache, seed) -> None:
    check(PagedServer(block_size=block_size, budget=budget, prefix_cache=prefix_cache, seed=seed), method, seed)


def asks(agent: str, start: int, tokens: int, **more) -> dict:
    return {"agent": agent, "method": "full-shared", "spans": [[start, start + tokens, "q"]], **more}


TEXT, ONE, TWO, END = ids(50, 1), ids(16, 2), ids(19, 3), ids(6, 4)


def test_the_stock_scheduler_claims_a_prefix_only() -> None:
    server = PagedServer(gap_jump=False)
    server.serve(ONE + TEXT + END, asks("a", 16, 50))
    cold = server.serve(TWO + TEXT + END, asks("b", 19, 50))
    assert cold.told["loaded_tokens"] == 0
    server.serve(ONE + ids(9, 9))
    warm = server.serve(ONE + TEXT + END[::-1], asks("c", 16, 50))
    assert (warm.cached_tokens, warm.told["loaded_tokens"]) == (16, 50)
    assert warm.computed == list(range(66, 72))


def test_a_refused_load_is_computed() -> None:
    """P1, with a segment before it and one behind it."""
    server, plain = PagedServer(), PagedServer()
    server.serve(ONE + TEXT + END, asks("a", 16, 50))
    server.reject = {("r2", 0)}
    prompt = TWO + TEXT + END + TEXT[:30] + END
    spans = [[19, 69, "q"], [75, 105, "other"]]
    got = server.serve(prompt, {"agent": "b", "method": "full-shared", "spans": spans})
    assert torch.allclose(got.logits[0], plain.serve(prompt).logits[0], atol=TOLERANCE)
    assert got.told["segments"][0]["reason"] == "injected"
    assert server.role.counts["rejected:injected"] == 1


def test_exact_requests_never_hit_approximate_blocks() -> None:
    """P7, and that the needle can be found: blocks in front of the first reused row are shared."""
    server = PagedServer()
    server.serve(ONE + TEXT + END, asks("a", 16, 50, method="moved"))
    approximate = server.serve(TWO + TEXT + END, asks("b", 19, 50, method="moved"))
    again = server.serve(TWO + TEXT + END, asks("b", 19, 50, method="moved"))
    exact = server.serve(TWO + TEXT + END)
    assert again.cached_tokens == 72
    assert exact.cached_tokens == 16
    assert float((approximate.logits[0] - exact.logits[0]).abs().max()) > 100 * TOLERANCE
    assert torch.allclose(exact.logits[0], PagedServer().serve(TWO + TEXT + END).logits[0], atol=TOLERANCE)
    assert torch.allclose(again.logits[0], approximate.logits[0], atol=TOLERANCE)


def test_a_batch_equals_single_requests() -> None:
    server, alone = PagedServer(budget=16), PagedServer(budget=16)
    orders = [(TWO + TEXT + END, asks("b", 19, 50), (1, 2)), (ids(25, 7) + TEXT, asks("c", 25, 50), (3,)),
              (TWO + TEXT + END, None, (1, 2)), (ids(30, 8), None, (5, 6))]
    for one in (server, alone):
        one.serve(ONE + TEXT + END, asks("a", 16, 50))
    together = server.serve_all(orders)
    for got, order in zip(together, orders, strict=True):
        want = alone.serve(*order)
        assert torch.allclose(torch.stack(got.logits), torch.stack(want.logits), atol=TOLERANCE)


def test_a_preempted_request_loads_again() -> None:
    """After its blocks went to others, in the middle of a gapped prefill and during decode."""
    from paged import PagedRequest

    for steps in range(1, 7):
        server = PagedServer(prefix_cache=False)
        server.serve(ONE + TEXT + END, asks("a", 16, 50))
        want = server.serve(TWO + TEXT + END, asks("b", 19, 50), (1, 2, 3, 4))
        request = PagedRequest(server, "victim", TWO + TEXT + END, asks("b", 19, 50), (1, 2, 3, 4))
        server.role.arrive(request)
        for _ in range(steps):
            server.step([request] if not request.status.name.startswith("FINISHED") else [])
        if request.status.name == "RUNNING":
            server.preempt(request)
            server.serve(ids(200, steps))
        while not request.status.name.startswith("FINISHED"):
            server.step([request])
        assert torch.allclose(torch.stack(request.logits[-4:]), torch.stack(want.logits), atol=TOLERANCE)


def test_a_wrong_rotation_is_noticed_and_nothing_is_reused_any_more() -> None:
    """R2, R5: a rotation off by a factor must not pass in silence."""
    server = PagedServer()
    right = server.worker.rope
    bands = tuple(type(band)(band.inv_freq * 1.05, band.scaling) for band in right.bands)
    server.worker.rope = type(right)(bands, right.layer_bands, right.head_dim)
    server.serve(ONE + TEXT + END, asks("a", 16, 50, method="mapped"))
    server.serve(TWO + TEXT + END, asks("b", 19, 50, method="mapped"))
    assert "RoPE" in server.worker.broken
    refused = server.serve(ids(12, 8) + TEXT + END, asks("c", 12, 50, method="mapped"))
    assert refused.told["exact"]


def test_a_text_is_dropped_on_both_sides_when_the_store_is_full() -> None:
    server = PagedServer()
    server = PagedServer(options={"store_bytes": server.engine.geometry.nbytes(120)})
    for number in range(5):
        server.serve(ONE + ids(50, 50 + number) + END, asks("a", 16, 50))
        assert server.role.books.nbytes <= server.role.options.store_bytes
        assert set(server.worker.texts) == set(server.role.books.all_ids())
    assert server.role.books.evicted > 0


def test_found_by_content_without_any_mark() -> None:
    """S4, S5: text of another request's prompt and of its answer, in a new place, by requests that mark nothing."""
    server = PagedServer(options={"apply": "all", "method": "full-shared", "window": 8, "role_tokens": 8})
    answer = ids(12, 70)
    first = server.serve(ONE + TEXT + END, None, answer)
    assert first.told == {}, "a client that asks nothing is told nothing"
    got = server.serve(TWO + TEXT + ids(3, 71) + answer[:11] + END, None)
    assert set(got.computed) == {*range(19), 69, 70, 71, *range(83, 89)}
    assert server.role.counts["segments_reused"] == 2
    opted_out = server.serve(TWO + TEXT + END, {"method": "dense"})
    assert opted_out.told["exact"]


def test_what_one_group_stored_another_does_not_find() -> None:
    server = PagedServer()
    server.serve(ONE + TEXT + END, asks("a", 16, 50, group="x"))
    assert server.serve(TWO + TEXT + END, asks("b", 19, 50, group="y")).told["exact"]
    assert not server.serve(TWO + TEXT + END, asks("b", 19, 50, group="x")).told["exact"]


def test_learned_state_is_saved_and_read_again(tmp_path) -> None:
    """The second start corrects at once what the first one learned; another recipe's file is not used."""
    servers = []
    for _ in range(2):
        server = PagedServer()
        server.worker.state_dir = tmp_path
        server.serve(ONE + TEXT + END, asks("a", 16, 50, method="mapped"))
        servers.append(server.serve(TWO + TEXT + END, asks("b", 19, 50, method="mapped")))
        assert list(tmp_path.glob("*.safetensors")), "saved while it runs, not only at the end"
        server.worker.close()
    assert [s.told["segments"][0]["action"] for s in servers] == ["recompute", "correct"]
    from kvbaton.store import check_file

    (file,) = tmp_path.glob("*.safetensors")
    assert check_file(file).edges


def test_learning_leaves_the_threads_to_the_server(monkeypatch) -> None:
    """vLLM binds its threads to cores and refuses, with a warning, to have their number set."""
    asked = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    server = PagedServer()
    play(server, small("affine"))
    server.worker.drain()
    assert server.worker.memories
    assert not asked


def test_a_claim_that_is_asked_again_says_the_same() -> None:
    """S6: a look-up that is repeated because no block was free must not count anything twice."""
    from paged import PagedRequest

    server = PagedServer(gap_jump=False)
    server.serve(ONE + TEXT + END, asks("a", 16, 50))
    request = PagedRequest(server, "waiting", ONE + TEXT + END[::-1], asks("b", 16, 50), (1,))
    server.role.arrive(request)
    assert server.role.claim(request, 16) is None, "not judged yet"
    report, _ = server.worker.run(server.role.orders({}, {}.__getitem__))
    server.role.report(report)
    assert [server.role.claim(request, 16) for _ in range(5)] == [50] * 5
    assert server.role.claim(request, 24) == 42, "a longer local hit leaves less to bring in"
    assert server.role.orders({}, {}.__getitem__).loads == (), "nothing is loaded before it is admitted"
    assert server.role.counts["tokens_moved"] == 0


@pytest.mark.parametrize(("field", "value", "why"), [
    ("lora_request", object(), "LoRA"), ("mm_features", [object()], "images"),
    ("prompt_embeds", object(), "embeddings"), ("sampling_params", None, "pooling"),
    ("skip_reading_prefix_cache", True, "log-probabilities"), ("resumable", True, "streaming")])
def test_requests_that_must_run_exactly(field, value, why) -> None:
    """P2, P3: KV of an adapter or an image must not reach a request with equal tokens."""
    from paged import PagedRequest

    server = PagedServer()
    server.serve(ONE + TEXT + END, asks("a", 16, 50))
    request = PagedRequest(server, "special", TWO + TEXT + END, asks("b", 19, 50), (1,))
    setattr(request, field, value)
    server.role.arrive(request)
    assert server.role.claim(request, 0) == 0
    assert not server.role.hops
    _, told = server.role.finish(request, [])
    assert why in told["kvbaton"]["error"]


def test_a_hash_collision_reuses_nothing(monkeypatch) -> None:
    """P5: equal hashes of unequal text, end to end."""
    import numpy as np

    from kvbaton.vllm.matching import TextIndex

    monkeypatch.setattr(TextIndex, "_hashes", lambda self, tokens: np.zeros(
        max(0, len(tokens) - self.window + 1), dtype=np.uint64))
    server = PagedServer(options={"apply": "all", "method": "full-shared", "window": 8})
    server.serve(ONE + TEXT + END)
    server.serve(TWO + ids(50, 999) + END)
    assert server.role.counts["segments_found"] == 0


def test_groups_beyond_the_limit_are_let_go() -> None:
    """A client that invents groups must not make the server grow."""
    server = PagedServer(options={"max_lanes": 3})
    for number in range(8):
        server.serve(ONE + TEXT + END, asks("a", 16, 50, method="mapped", group=f"g{number}"))
        server.serve(TWO + TEXT + END, asks("b", 19, 50, method="mapped", group=f"g{number}"))
        assert len(server.role.lanes) <= 3
        assert set(server.worker.texts) == set(server.role.books.all_ids())
    server.serve(ids(9, 9))
    assert len(server.worker.memories) <= 3
    last = server.serve(ids(20, 5) + TEXT + END, asks("b", 20, 50, method="mapped", group="g7"))
    assert last.told["segments"][0]["action"] == "correct"
    first = server.serve(ids(20, 5) + TEXT + END, asks("b", 20, 50, method="mapped", group="g0"))
    assert first.told["found_segments"] == 0


def test_a_request_may_end_before_it_is_judged() -> None:
    from types import SimpleNamespace

    from paged import PagedRequest

    server = PagedServer()
    server.serve(ONE + TEXT + END, asks("a", 16, 50))
    request = PagedRequest(server, "gone", TWO + TEXT + END, asks("b", 19, 50), (1,))
    server.role.arrive(request)
    request.status = SimpleNamespace(name="FINISHED_ABORTED")
    keep, told = server.role.finish(request, [])
    assert not keep
    assert told["kvbaton"]["segments"][0]["reason"] == "not judged"
    assert server.role.orders({}, {}.__getitem__).judges == ()
    assert not server.serve(TWO + TEXT + END, asks("b", 19, 50)).told["exact"]


def test_a_part_that_fails_costs_reuse_and_nothing_else(monkeypatch) -> None:
    """A gate or a corrector that raises must not end the server."""
    from kvbaton.correctors.affine import Affine
    from kvbaton.errors import InvariantError

    def broken(*args):
        raise InvariantError("broken on purpose")

    server, plain = PagedServer(), PagedServer()
    server.serve(ONE + TEXT + END, asks("a", 16, 50, method="mapped"))
    server.serve(TWO + TEXT + END, asks("b", 19, 50, method="mapped"))
    want = plain.serve(TWO + TEXT + END[::-1]).logits[0]
    monkeypatch.setattr(Affine, "correct", broken)
    late = server.serve(TWO + TEXT + END[::-1], asks("b", 19, 50, method="mapped"))
    assert late.told["segments"][0]["reason"] == "correction failed"
    assert torch.allclose(late.logits[0], want, atol=TOLERANCE)
    monkeypatch.setattr(Affine, "can_correct", broken)
    early = server.serve(TWO + TEXT + END[::-1], asks("b", 19, 50, method="mapped"))
    assert early.told["segments"][0]["reason"] == "judging failed"
    assert torch.allclose(early.logits[0], want, atol=TOLERANCE)


def test_groups_with_like_names_keep_their_files_apart(tmp_path) -> None:
    from kvbaton.vllm.options import Method
    from kvbaton.vllm.wire import Lane

    worker = PagedServer().worker
    worker.state_dir = tmp_path
    names = ["a b", "a_b", "a/b", "a-b", "x" * 150 + "1", "x" * 150 + "2"]
    files = {worker._state_file(Lane(name, Method("mapped"))) for name in names}
    assert len(files) == len(names)
    assert all(file.parent == tmp_path for file in files)


def test_reasons_in_metrics_are_a_bounded_set() -> None:
    from kvbaton.vllm.scheduling import kind_of

    assert kind_of("entropy 1.25 > 0.40 bits") == "entropy # > # bits"
    assert kind_of("hop dense: some share nothing learned") == "hop dense"
    assert kind_of("first hop") == "first hop"


def test_a_request_that_saves_nothing_teaches_nothing() -> None:
    server = PagedServer()
    server.serve(ONE + TEXT + END, asks("a", 16, 50, method="mapped"))
    for _ in range(2):
        got = server.serve(TWO + TEXT + END, asks("b", 19, 50, method="mapped", save=False))
        assert got.told["segments"][0]["reason"] == "nothing learned"


def test_a_correction_that_is_not_finite_is_refused(monkeypatch) -> None:
    from kvbaton.correctors.affine import Affine

    server, plain = PagedServer(), PagedServer()
    server.serve(ONE + TEXT + END, asks("a", 16, 50, method="mapped"))
    server.serve(TWO + TEXT + END, asks("b", 19, 50, method="mapped"))
    correct = Affine.correct
    monkeypatch.setattr(Affine, "correct", lambda *args: lambda layer: tuple(
        part * (float("nan") if layer == 2 else 1.0) for part in correct(*args)(layer)))
    got = server.serve(TWO + TEXT + END[::-1], asks("b", 19, 50, method="mapped"))
    assert got.told["segments"][0]["reason"] == "correction not finite"
    assert torch.allclose(got.logits[0], plain.serve(TWO + TEXT + END[::-1]).logits[0], atol=TOLERANCE)
