"""TextCodec on the embedded model's own tokenizer."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from kvbaton.engine.models import PACKAGED
from kvbaton.engine.text import TextCodec
from kvbaton.teamfile import load_team
from kvbaton.templates import Template
from test_teamfile import EXAMPLES

MODEL = PACKAGED["smollm2"]
pytestmark = [pytest.mark.embedded, pytest.mark.skipif(not MODEL.installed, reason=f"needs `{MODEL.install}`")]


@cache
def tokenizer():
    path, = MODEL.parts()
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


@cache
def codec():
    return TextCodec(tokenizer())


def transformers_ids(user, system=None):
    chat = [{"role": "system", "content": system}] if system is not None else []
    return tuple(tokenizer().apply_chat_template([*chat, {"role": "user", "content": user}],
                                                 add_generation_prompt=True, return_dict=False))


@given(user=st.text(alphabet="abe lo.Y16\n☃é", max_size=40), system=st.none() | st.just("You solve maths problems."))
def test_a_prompt_without_placeholders_is_what_transformers_makes(user, system):
    built = codec().prompt("r", None if system is None else Template.parse(system), Template.parse(user), {})
    assert built.token_ids == transformers_ids(user, system)


@given(st.text(st.characters(exclude_categories=["C"], include_characters="\n\t"), max_size=40))
def test_any_text_survives_the_trip(text):
    """But control characters and unassigned ones: this vocabulary lacks some of their bytes and drops them."""
    assert codec().decode(codec().encode(text)) == text


@pytest.mark.parametrize("token", ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<repo_name>"])
def test_special_tokens_in_a_question_stay_text(token):
    ids = codec().encode(f"What does {token}{token} mean?")
    assert set(tokenizer().all_special_ids).isdisjoint(ids)
    assert codec().decode(ids) == f"What does {token}{token} mean?"
    assert codec().token_id(token) == tokenizer().convert_tokens_to_ids(token)


def test_shared_text_behind_a_line_break_has_the_tokens_it_has_in_the_whole():
    question = "Janet's ducks lay 16 eggs per day. How many are left?"
    template = Template.parse("Read this:\n{q}\n\nThen answer.")
    built = codec().prompt("r", None, template, {"q": codec().encode(question)})
    assert built.token_ids == transformers_ids(f"Read this:\n{question}\n\nThen answer.")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_fills_with_the_very_ids(path):
    spec = load_team(path)
    fills = {name: codec().encode(text) for name, text in spec.fill({}).items()}
    for agent in spec.members():
        texts = {field.share: fills.get(field.name, codec().encode(f"{field.name} said so.")) for field in agent.fields}
        built = codec().prompt(agent.name, *agent.templates, texts)
        assert [s.share for s in built.segments if s.share] == [field.share for field in agent.fields]
        text = codec().decode(built.token_ids)
        assert all(codec().decode(ids) in text for ids in texts.values())
        assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")
