"""A team over HTTP against a stub that answers as vLLM does: what is sent, what is made of the answer."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from kvbaton.agents import Agent
from kvbaton.errors import UsageError
from kvbaton.team import Team
from kvbaton.vllm.client import openai_client
from toy_tokenizers import byte_level

pytest.importorskip("openai", reason="the OpenAI SDK is not installed: pip install 'kvbaton[serve]'")

TRIO = [Agent("solver", "{question}", system="You solve."),
        Agent("critic", "{question}\n\nA colleague wrote:\n{solver}", system="You find mistakes.")]


class Stub(ThreadingHTTPServer):
    """Answers three tokens and an end; every marked span but the first hop's was reused, 4 rows of each computed."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[dict] = []
        self.known: set[tuple[int, ...]] = set()
        self.error: str | None = None
        self.metrics = {"time_to_first_token_ms": 20.0, "queue_time_ms": 5.0, "mean_itl_ms": 2.0}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    def said(self, asked: dict) -> dict:
        if self.error:
            return {"error": self.error}
        wish, segments = asked["kv_transfer_params"]["kvbaton"], []
        for start, end, share in wish["spans"]:
            ids = tuple(asked["prompt"][start:end])
            found = ids in self.known
            self.known.add(ids)
            segments.append({"share": share, "start": start, "tokens": end - start, "loaded": (end - start - 4) * found,
                             "action": "correct" if found else "recompute", "predicted": None,
                             "reason": "correction holds" if found else "first hop",
                             "source": "solver~1f" if found else None})
        return {"segments": segments, "cached_tokens": 3, "exact": not any(s["loaded"] for s in segments)}


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(asked)
        body = json.dumps({
            "id": "x", "object": "text_completion", "created": 0, "model": asked["model"],
            "choices": [{"index": 0, "text": "", "finish_reason": "stop", "logprobs": None,
                         "token_ids": [30, 31, 32, 2], "stop_reason": None}],
            "usage": {"prompt_tokens": 1, "completion_tokens": 4, "total_tokens": 5}, "metrics": self.server.metrics,
            "kv_transfer_params": {"kvbaton": self.server.said(asked)}}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args) -> None:
        pass


@pytest.fixture
def stub():
    server = Stub()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def folder(tmp_path) -> str:
    byte_level().save_pretrained(tmp_path)
    return str(tmp_path)


def test_a_team_runs_on_a_server(stub, folder) -> None:
    with Team(TRIO, engine=openai_client(stub.url, "tiny", tokenizer=folder, group="mine"), method="full-shared",
              max_new_tokens=9) as team:
        run = team.run(question="How many eggs are left today?")
    first, second = stub.asked
    wish = second["kv_transfer_params"]["kvbaton"]
    assert (wish["group"], wish["method"], wish["output"]) == ("mine", "full-shared", "critic")
    assert [share for *_, share in wish["spans"]] == ["question", "solver"]
    start, end, _ = wish["spans"][1]
    assert second["prompt"][start:end] == [30, 31, 32], "the very ids that were sampled, without the end token"
    assert (second["max_tokens"], second["temperature"], second["return_token_ids"]) == (9, 0.0, True)
    assert first["kv_transfer_params"]["kvbaton"]["spans"][0][2] == "question"

    hop = run["critic"].hop
    question = next(s for s in run["critic"].prompt.segments if s.share == "question")
    assert hop.entries.corrected == len(question) - 4
    assert hop.entries.cached == 3
    assert hop.decisions[0].source == "solver"
    assert [round(t, 6) for t in hop.token_times_s] == [0.025, 0.027, 0.029, 0.031]
    assert 0 < run["critic"].reuse < 1
    assert run["solver"].hop.dense
    assert "critic" in run.report()
    json.dumps(run.to_dict())


def test_a_server_that_refuses_the_parameters_is_not_taken_for_reuse(stub, folder) -> None:
    stub.error = "unknown method 'full-shared'"
    team = Team(TRIO, engine=openai_client(stub.url, "tiny", tokenizer=folder), method="full-shared")
    with pytest.raises(UsageError, match="unknown method"):
        team.run(question="How many?")


def test_a_server_without_times_is_refused(stub, folder) -> None:
    stub.metrics = None
    team = Team(TRIO, engine=openai_client(stub.url, "tiny", tokenizer=folder), method="full-shared")
    with pytest.raises(UsageError, match="enable-per-request-metrics"):
        team.run(question="How many?")


def test_no_server_says_how_to_start_one(folder) -> None:
    team = Team(TRIO, engine=openai_client("http://127.0.0.1:9/v1", "tiny", tokenizer=folder), method="full-shared")
    with pytest.raises(UsageError, match="kvbaton serve tiny"):
        team.run(question="How many?")


def test_a_changed_recipe_cannot_be_sent(stub, folder) -> None:
    from kvbaton.errors import Unsupported
    from kvbaton.overrides import override
    from kvbaton.recipes import recipe

    with pytest.raises(Unsupported, match="by name"):
        Team(TRIO, engine=openai_client(stub.url, "tiny", tokenizer=folder),
             method=override(recipe("full-shared"), "lead_rows=4"))
