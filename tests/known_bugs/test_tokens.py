"""T1 to T6: token boundaries."""

from __future__ import annotations

import pytest
import torch

from hops import ANSWER, dense, same
from kvbaton.engine.hf import HFEngine
from kvbaton.engine.sampling import Generate
from kvbaton.engine.session import Session
from kvbaton.engine.text import TextCodec
from kvbaton.prompt import Segment
from kvbaton.recipes import recipe
from kvbaton.team import Agent, Team
from kvbaton.templates import Template
from tiny import build, engine, ids, prompt
from toy_tokenizers import CHATML, LLAMA2, byte_level, sentencepiece

THINKS = CHATML.replace("assistant\n", "assistant\n<think>")


def team_of(template: str = CHATML) -> Team:
    tokenizer = byte_level(template)
    tiny = HFEngine(build("llama", vocab_size=len(tokenizer)), tokenizer)
    agents = [Agent("solver", "{question}", max_new_tokens=9),
              Agent("critic", "{question}\nA colleague wrote:\n{solver}\nIs it right?", max_new_tokens=3)]
    return Team(agents, engine=tiny, method="full-shared")


@pytest.mark.parametrize("tokenizer", [byte_level(), sentencepiece(LLAMA2, "prepend", ("[INST]", "[/INST]"))])
def test_t1_shared_ids_do_not_depend_on_neighbours_and_hold_no_bos(tokenizer: object) -> None:
    codec = TextCodec(tokenizer)
    text = " # #\n16 eggs per day"
    shared = codec.encode(text)
    assert tokenizer.bos_token_id is None or tokenizer.bos_token_id not in shared
    assert codec.decode(shared) == text
    for words in ("{question}", "Read:{question}", "a  {question}b", "{question}{question}"):
        read = codec.prompt("critic", None, Template.parse(words), {"question": shared})
        found = [s.token_ids for s in read.segments if s.share == "question"]
        assert found == [shared] * words.count("{question}")


def test_t2_generated_text_is_found_by_the_ids_that_were_sampled() -> None:
    with team_of() as team:
        solver, critic = team.run(question="How many are left?").turns
    relayed = next(s.token_ids for s in critic.prompt.segments if s.share == "solver")
    assert relayed == solver.hop.output_ids
    again = team.text.encode(team.text.decode(relayed))
    assert again != relayed, "a random model's tokens do not survive re-tokenisation, or this test shows nothing"
    assert {d.share: d.action for d in critic.hop.decisions} == {"question": "reuse", "solver": "reuse"}


def test_t3_the_same_text_in_other_ids_is_recomputed_not_cut() -> None:
    codec = TextCodec(byte_level())
    whole = codec.encode("maths problems.\n\n")
    parts = tuple(i for c in "maths problems.\n\n" for i in codec.encode(c))
    assert codec.decode(whole) == codec.decode(parts)
    assert whole != parts
    tiny = HFEngine(build("llama", vocab_size=400 + 8))
    source = prompt("solver", (None, ids(5, 2)), ("question", whole), (None, ids(4, 3)))
    reader = prompt("critic", (None, ids(9, 4)), ("question", parts), (None, ids(6, 5)))
    with Session(tiny, recipe("full-shared")) as session:
        store = session.start_run()
        session.hop(source, ANSWER, store)
        hop = session.hop(reader, ANSWER, store)
    assert hop.dense
    assert same(hop, dense(tiny, reader))


def test_t4_a_think_tag_of_the_generation_prompt_is_nobody_elses_text() -> None:
    """Templates that open a think block to generate, and drop it in the history, break the hit of every turn."""
    with team_of(THINKS) as team:
        solver, critic = team.run(question="How many are left?").turns
    think = team.text.token_id("<think>")
    assert solver.prompt.token_ids[-1] == think
    assert think not in next(s for s in critic.prompt.segments if s.share == "solver").token_ids[:1]
    assert next(d for d in critic.hop.decisions if d.share == "solver").action == "reuse"


def test_t5_no_merge_crosses_the_seam_of_a_shared_text() -> None:
    codec = TextCodec(byte_level())
    shared = codec.encode("the answer is 4")
    joined = codec.encode("the answer is 42")
    assert joined[:len(shared)] != shared or len(joined) > len(shared)
    grown = codec.prompt("critic", None, Template.parse("{answer}2 and more"), {"answer": shared})
    short = codec.prompt("judge", None, Template.parse("{answer}"), {"answer": shared})
    assert next(s for s in grown.segments if s.share) == next(s for s in short.segments if s.share)
    assert "the answer is 42 and more" in codec.decode(grown.token_ids)


@pytest.mark.parametrize("limit", [1, 2, 7])
def test_t6_the_last_sampled_token_has_kv_for_its_readers(limit: int) -> None:
    start = prompt("solver", (None, ids(11, 2)))
    with Session(engine(), recipe("full-shared")) as session:
        store = session.start_run()
        wrote = session.hop(start, Generate(limit), store, writes="solver")
        held = store.get(Segment(wrote.output_ids, "solver"))
        assert held is not None
        assert len(held) == len(wrote.output_ids) == limit
        read = prompt("critic", (None, start.token_ids), ("solver", wrote.output_ids), (None, ids(2, 5)))
        hop = session.hop(read, ANSWER, store)
    assert hop.entries.reused == limit * hop.layers
    assert same(hop, dense(engine(), read))
    assert torch.isfinite(held.k).all()
