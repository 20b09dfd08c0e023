"""What a running server does with requests: counts, isolation, rejection, refusals. One engine, many needles."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm.config", reason="vLLM is not installed: run `make vllm-test`")

from engines import Engine, running, save_model
from scenario import tokens

EXACT = 2e-5
"""Log-probabilities of one computation in float32 under other chunk shapes."""

LONG = tokens(1, 200)
ROLE = {name: tokens(10 + i, 64) for i, name in enumerate("abcd")}
TASK = {name: tokens(20 + i, 17) for i, name in enumerate("abcd")}


def prompt(name: str, text: list[int] = LONG) -> list[int]:
    return ROLE[name] + text + TASK[name]


def asks(name: str, text: list[int] = LONG, group: str = "g", method: str = "full-shared", **fields) -> dict:
    return {"agent": name, "group": group, "method": method, "spans": [[64, 64 + len(text), "q"]], **fields}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return save_model(str(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def untouched(model) -> dict[str, list]:
    """What a server that never saw KVBaton answers: each prompt computed, then served from its prefix cache."""
    with running(model, None) as engine:
        return {name: [engine.ask(prompt(name)) for _ in range(2)] for name in "abcd"}


@pytest.fixture(scope="module")
def engine(model, untouched):
    with running(model, {"method": "full-shared"}, disable_log_stats=False) as made:
        yield made


@pytest.fixture(autouse=True)
def clean(request):
    """Every test starts without stored texts or cached blocks, and must give all blocks back."""
    if "engine" not in request.fixturenames:
        yield
        return
    made: Engine = request.getfixturevalue("engine")
    made.settle()
    made.scheduler.connector.reset_cache()
    assert made.scheduler.reset_prefix_cache()
    free = made.free_blocks
    yield
    made.settle()
    assert made.free_blocks == free, "blocks leaked"
    assert not made.role.hops
    assert set(made.worker.texts) == set(made.role.books.all_ids()), "a worker keeps what the books say"


def metric(engine: Engine, name: str) -> float:
    return sum(m.value for m in engine.llm.get_metrics() if m.name == name)


def test_only_private_and_last_tokens_are_computed(engine) -> None:
    """The 17-of-255 count, from vLLM's own numbers: 64 from its prefix cache, 200 from the connector, 17 computed."""
    engine.ask(prompt("a"), asks("a"))
    engine.ask(ROLE["b"] + tokens(99, 40), asks("b", tokens(99, 40)))
    before = metric(engine, "vllm:external_prefix_cache_hits")
    served = engine.ask(prompt("b"), asks("b"))
    assert metric(engine, "vllm:external_prefix_cache_hits") - before == 200
    assert served.cached_tokens == 64 + 200
    assert served.params["computed_tokens"] == 17
    assert served.params["segments"][0]["action"] == "reuse"


def test_behind_a_gap_only_private_tokens_are_computed(engine) -> None:
    engine.ask(prompt("a"), asks("a"))
    served = engine.ask(prompt("b"), asks("b"))
    assert served.params["computed_tokens"] == 64 + 17
    assert served.params["loaded_tokens"] == served.cached_tokens == 200


def test_reuse_in_the_same_context_is_exact(engine, untouched) -> None:
    """P6: the hit path equals the miss path. The same role prompt stands before the text, so its KV is exact."""
    engine.ask(ROLE["b"] + LONG + TASK["a"], asks("a"))
    engine.scheduler.reset_prefix_cache()
    served = engine.ask(prompt("b"), asks("b"))
    assert served.params["loaded_tokens"] == 200
    assert served.ids == untouched["b"][0].ids
    assert served.difference(untouched["b"][0]) < EXACT


def test_the_same_request_four_times(engine) -> None:
    """W2: the third identical request differed in another system."""
    engine.ask(prompt("a"), asks("a"))
    served = [engine.ask(prompt("b"), asks("b")) for _ in range(4)]
    assert all(again.difference(served[0]) < EXACT for again in served)
    assert all(again.ids == served[0].ids for again in served)


def test_exact_requests_never_see_approximate_kv(engine, untouched) -> None:
    """P7, the pollution needle: bit for bit what an untouched server answers, after 50 approximate requests."""
    first = {name: engine.ask(prompt(name)) for name in "ab"}
    engine.ask(prompt("a"), asks("a"))
    for i in range(50):
        served = engine.ask(prompt("bcd"[i % 3]), asks("bcd"[i % 3], group="g" if i % 2 else "h"))
        assert served.params["exact"] == (i == 0), "the first one of group h has nothing to reuse"
    for name in "ab":
        again = engine.ask(prompt(name))
        assert (first[name].logprobs, again.logprobs) == tuple(r.logprobs for r in untouched[name])
        assert again.cached_tokens == untouched[name][1].cached_tokens
    for name in "cd":
        never_exact_before = engine.ask(prompt(name))
        assert never_exact_before.cached_tokens <= 64
        assert never_exact_before.difference(untouched[name][0]) < EXACT


def test_a_needle_would_be_found(engine, untouched) -> None:
    """The needle above can fail: without the salt an exact request is served approximate blocks."""
    import kvbaton.vllm.scheduling as scheduling

    salt, scheduling.salt_request = scheduling.salt_request, lambda *args: None
    try:
        engine.ask(prompt("a"), asks("a"))
        engine.ask(prompt("c"), asks("c"))
        polluted = engine.ask(prompt("c"))
    finally:
        scheduling.salt_request = salt
    assert polluted.cached_tokens > 64
    assert polluted.difference(untouched["c"][0]) > 1e-3


def test_groups_do_not_see_each_other(engine) -> None:
    engine.ask(prompt("a"), asks("a", group="tenant 1"))
    other = engine.ask(prompt("b"), asks("b", group="tenant 2"))
    assert other.params["exact"]
    assert other.params["found_segments"] == 0
    assert not engine.ask(prompt("b"), asks("b", group="tenant 1")).params["exact"]


def test_learned_state_stays_in_its_group(engine) -> None:
    for group in ("one", "two"):
        for text in (tokens(40, 60), tokens(41, 60)):
            engine.ask(prompt("a", text), asks("a", text, group=group, method="mapped"))
            engine.settle()
            served = engine.ask(prompt("b", text), asks("b", text, group=group, method="mapped"))
            engine.settle()
            learned = text == tokens(41, 60)
            assert served.params["exact"] != learned, "the first text of an edge teaches, the second is corrected"


def test_late_rejection_equals_the_full_computation(engine, untouched, monkeypatch) -> None:
    """P1: a load that fails is never taken as loaded. Twice the text, refused once before and once behind."""
    engine.ask(prompt("a"), asks("a"))
    monkeypatch.setattr(engine.worker, "_try_load", lambda load: "injected")
    served = engine.ask(prompt("b"), asks("b"))
    assert served.params["loaded_tokens"] == 0
    assert served.params["segments"][0]["reason"] == "injected"
    assert served.ids == untouched["b"][0].ids
    assert served.difference(untouched["b"][0]) < EXACT
    assert engine.role.counts["rejected:injected"] >= 1


def test_one_refused_segment_does_not_take_the_others_along(engine, monkeypatch) -> None:
    first, second = tokens(50, 100), tokens(51, 110)
    ids = ROLE["c"] + first + tokens(52, 9) + second + TASK["c"]
    spans = [[64, 164, "x"], [173, 283, "y"]]
    for text, share in ((first, "x"), (second, "y")):
        engine.ask(ROLE["a"] + text + TASK["a"], {"agent": "a", "group": "g", "spans": [[64, 64 + len(text), share]]})
    load = engine.worker._try_load
    monkeypatch.setattr(engine.worker, "_try_load", lambda order: "no" if order.segment == 0 else load(order))
    served = engine.ask(ids, {"agent": "c", "group": "g", "spans": spans})
    assert [s["reason"] for s in served.params["segments"]] == ["no", "always"]
    assert served.params["loaded_tokens"] == 110


def test_a_text_that_the_worker_lost_is_computed(engine, untouched) -> None:
    engine.ask(prompt("a"), asks("a"))
    engine.settle()
    del engine.worker.texts[next(text for text, kv in engine.worker.texts.items() if len(kv) == 200)]
    served = engine.ask(prompt("b"), asks("b"))
    assert served.params["exact"]
    assert served.difference(untouched["b"][0]) < EXACT
    assert engine.ask(prompt("c"), asks("c")).params["loaded_tokens"] == 200, "it was captured again"


def test_an_all_shared_prompt_computes_its_last_token(engine) -> None:
    """S2: a prompt that is known as a whole still gives a first token."""
    engine.ask(LONG + TASK["a"], {"agent": "a", "group": "g", "spans": [[0, 200, "q"]]})
    served = engine.ask(LONG, {"agent": "b", "group": "g", "spans": [[0, 200, "q"]]})
    assert served.params["computed_tokens"] >= 1
    assert len(served.ids) == 6


def test_a_prompt_without_shared_text_runs(engine, untouched) -> None:
    """S3: requests with nothing to share must not fail."""
    served = engine.ask(prompt("a"), {"agent": "a", "group": "g", "spans": []})
    assert served.params["exact"]
    assert served.difference(untouched["a"][0]) < EXACT


def test_text_found_by_content_alone(engine) -> None:
    """S4, S5: the client marks nothing; the question and a generated answer are found, at other positions."""
    question = tokens(60, 70)
    writer = engine.ask(ROLE["a"] + question + TASK["a"], {"group": "g"}, answer=30)
    engine.settle()
    ids = ROLE["b"] + question + tokens(61, 5) + writer.ids[:29] + TASK["b"]
    served = engine.ask(ids, {"group": "g"})
    found = [(s["start"], s["tokens"]) for s in served.params["segments"]]
    assert found == [(64, 70), (64 + 75, 29)]
    assert served.params["loaded_tokens"] == 99


def test_a_repeated_segment_uses_one_text_twice(engine) -> None:
    text = tokens(70, 80)
    engine.ask(prompt("a", text), asks("a", text))
    ids = ROLE["b"] + text + tokens(71, 6) + text + TASK["b"]
    served = engine.ask(ids, {"agent": "b", "group": "g", "spans": [[64, 144, "q"], [150, 230, "q"]]})
    assert served.params["loaded_tokens"] == 160


@pytest.mark.parametrize(("kvbaton", "message"), [
    ({"metod": "x"}, "did you mean 'method'"), ({"method": "cacheblend"}, "cannot run inside vLLM"),
    ({"spans": [[0, 9999, "q"]]}, "the prompt has 281 tokens"), ("yes", "is an object")])
def test_a_wrong_request_is_served_exactly_and_told_why(engine, untouched, kvbaton, message) -> None:
    served = engine.ask(prompt("a"), kvbaton)
    assert message in served.params["error"]
    assert served.difference(untouched["a"][0]) < EXACT
    assert engine.ask(prompt("a")).params == {}, "a request that asks nothing is told nothing"


def test_prompt_log_probabilities_run_exactly(engine) -> None:
    engine.ask(prompt("a"), asks("a"))
    served = engine.ask(prompt("b"), asks("b"), prompt_logprobs=1)
    assert "every prompt row" in served.params["error"]


def test_save_and_reuse_can_be_switched_off(engine) -> None:
    engine.ask(prompt("a"), asks("a", save=False))
    assert engine.ask(prompt("b"), asks("b", save=False)).params["found_segments"] == 0
    engine.ask(prompt("a"), asks("a"))
    refused = engine.ask(prompt("b"), asks("b", reuse=False))
    assert refused.params["segments"][0]["reason"] == "reuse off"
    assert refused.params["exact"]


def test_a_mixed_batch_equals_single_requests(engine) -> None:
    """Six requests at once, exact and approximate, one of them twice: each as when it runs alone."""
    engine.ask(prompt("a"), asks("a"))
    orders = [("b", asks("b")), ("c", asks("c")), ("d", None), ("b", None), ("c", asks("c")), ("d", asks("d"))]
    single = []
    for name, kvbaton in orders:
        engine.settle()
        engine.scheduler.reset_prefix_cache()
        single.append(engine.ask(prompt(name), kvbaton))
    engine.settle()
    engine.scheduler.reset_prefix_cache()
    batch = engine.serve([prompt(name) for name, _ in orders],
                         [engine.params(6, kvbaton) for _, kvbaton in orders])
    for alone, together in zip(single, batch, strict=True):
        assert together.difference(alone) < EXACT
        assert together.ids == alone.ids
        assert together.params.get("exact") == alone.params.get("exact")


def test_an_aborted_request_leaves_nothing_behind(engine) -> None:
    """In the middle of a gapped prefill, while waiting for its verdict, and while its blocks are held for a capture."""
    engine.ask(prompt("a"), asks("a"))
    llm = engine.llm.llm_engine
    for steps in range(7):
        llm.add_request(f"doomed-{steps}", {"prompt_token_ids": prompt("b")}, engine.params(4, asks("b", group="g")))
        for _ in range(steps):
            llm.step()
        llm.abort_request([f"doomed-{steps}"])
    engine.settle()
    assert not engine.scheduler.requests
    assert engine.ask(prompt("b"), asks("b")).params["loaded_tokens"] == 200


def test_metrics_and_summary_agree(engine) -> None:
    before = dict(engine.role.counts)
    engine.ask(prompt("a"), asks("a"))
    engine.ask(prompt("b"), asks("b"))
    grown = {name: value - before.get(name, 0) for name, value in engine.role.counts.items()}
    assert grown["requests"] == 2
    assert (grown["segments_found"], grown["segments_reused"], grown["tokens_moved"]) == (1, 1, 200)
    assert metric(engine, "vllm:kvbaton_tokens_moved") == engine.role.counts["tokens_moved"]
