"""What servers and requests may ask for; everything else is refused with the way out."""

from __future__ import annotations

import pytest

from kvbaton.errors import UnknownName, Unsupported, UsageError
from kvbaton.prompt import Span
from kvbaton.vllm.options import Mark, Method, RequestOptions, ServerOptions

SERVER = ServerOptions.parse({"method": "full-shared"})


def ask(**raw) -> RequestOptions | None:
    return RequestOptions.of({"kvbaton": raw}, SERVER)


def test_a_request_that_does_not_ask_gets_nothing() -> None:
    assert RequestOptions.of(None, SERVER) is None
    assert RequestOptions.of({}, SERVER) is None
    assert RequestOptions.of({"do_remote_decode": True}, SERVER) is None


def test_an_operator_may_ask_for_everybody() -> None:
    server = ServerOptions.parse({"method": "full-shared", "apply": "all", "group": "house"})
    options = RequestOptions.of(None, server)
    assert options is not None
    assert (options.group, options.asked) == ("house", False)
    assert RequestOptions.of({"kvbaton": {"method": "dense"}}, server).method == Method("dense")


def test_everything_a_request_can_say() -> None:
    options = ask(group="g", method="full-shared", agent="critic", output="review", set=["lead_rows=4"],
                  spans=[[3, 9, "question"], [12, 20, "solver@-1"]], reuse=False, save=False)
    assert options == RequestOptions(
        "g", Method("full-shared", ("lead_rows=4",)), "critic", "review",
        (Mark(Span(3, 9), "question"), Mark(Span(12, 20), "solver@-1")), False, False)
    assert options.method.recipe().lead_rows == 4


def test_the_servers_settings_hold_for_its_own_method_only() -> None:
    server = ServerOptions.parse({"method": "full-shared", "set": ["lead_rows=2"]})
    same = RequestOptions.of({"kvbaton": {"set": ["lead_rows=3"]}}, server)
    other = RequestOptions.of({"kvbaton": {"method": "dense"}}, server)
    assert same.method.settings == ("lead_rows=2", "lead_rows=3")
    assert same.method.recipe().lead_rows == 3
    assert other.method.settings == ()


@pytest.mark.parametrize("raw", [
    {"agent": ""}, {"agent": 7}, {"group": "x" * 201}, {"reuse": 1}, {"set": "lead_rows=4"}, {"set": ["lead_rows=-1"]},
    {"spans": [[5, 3, "q"]]}, {"spans": [[0, 3, ""]]}, {"spans": [[0, 3]]}, {"spans": "0-3"},
    {"spans": [[True, 3, "q"]]},
    {"spans": [[0, 5, "q"], [4, 8, "r"]]}, {"spans": [[-1, 5, "q"]]}, {"method": "nonesuch"}, {"metod": "dense"},
    {"budget": "much", "method": "full-shared"},
])
def test_bad_values_are_refused(raw) -> None:
    with pytest.raises(UsageError):
        ask(**raw)


def test_a_span_behind_the_prompt_is_refused() -> None:
    with pytest.raises(UsageError, match="ends at 9, the prompt has 8"):
        ask(spans=[[3, 9, "q"]]).check_length(8)


def test_a_misspelt_field_names_the_nearest() -> None:
    with pytest.raises(UnknownName, match="did you mean 'agent'"):
        ask(agnet="critic")
    with pytest.raises(UnknownName, match="did you mean 'store_bytes'"):
        ServerOptions.parse({"store_byte": 1})


@pytest.mark.parametrize(("method", "why"), [
    ("cacheblend", "layer to layer"), ("random", "scattered"), ("epic", "alone"), ("droidspeak", "layers")])
def test_methods_that_vllm_cannot_run_are_refused_by_name(method, why) -> None:
    with pytest.raises(Unsupported, match=why):
        ServerOptions.parse({"method": method})


@pytest.mark.parametrize("asked", [{"target_divergence": 0.05}, {"set": ["gate.target=0.05"]}])
def test_a_target_needs_measurements_that_no_server_makes(asked) -> None:
    """An edge without a measured divergence stays dense: on a server that would be every edge, for ever."""
    with pytest.raises(Unsupported, match="no request twice"):
        ask(method="hybrid", **asked)
    with pytest.raises(Unsupported, match="no request twice"):
        ServerOptions.parse({"method": "hybrid", "set": ["gate.target=0.05"]})


@pytest.mark.parametrize("raw", [{"apply": "some"}, {"window": 2}, {"store_bytes": -1}, {"set": "x"}])
def test_bad_server_options_are_refused(raw) -> None:
    with pytest.raises(UsageError):
        ServerOptions.parse({"method": "full-shared", **raw})
