from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbaton.errors import TeamError
from kvbaton.templates import Field, Template

names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_-]{0,6}", fullmatch=True)
fields = st.builds(Field, names, st.booleans())
literals = st.text(alphabet="ab {}\n<|@>é", max_size=8)
pieces = st.lists(st.one_of(fields, literals), max_size=8)


def written(parts):
    return "".join(str(p) if isinstance(p, Field) else p.replace("{", "{{").replace("}", "}}") for p in parts)


@given(pieces)
def test_a_template_renders_to_the_text_it_was_read_from(parts):
    text = written(parts)
    assert str(Template.parse(text)) == text


@given(pieces)
def test_parsing_finds_the_placeholders_and_keeps_the_literals(parts):
    read = Template.parse(written(parts))
    assert list(read.fields) == [p for p in parts if isinstance(p, Field)]
    assert "".join(p for p in read.parts if isinstance(p, str)) == "".join(p for p in parts if isinstance(p, str))
    assert "" not in read.parts
    kinds = [isinstance(p, str) for p in read.parts]
    assert not any(a and b for a, b in pairwise(kinds))


@given(st.text(alphabet="ab{}@-1 \n", max_size=12))
def test_any_text_round_trips_or_is_refused_with_its_place(text):
    try:
        read = Template.parse(text)
    except TeamError:
        with pytest.raises(TeamError, match=r"^line \d+, column \d+: "):
            Template.parse(text)
    else:
        assert str(read) == text


def test_shares_and_rounds():
    read = Template.parse("{question}{solver@-1}")
    assert [f.share for f in read.fields] == ["question", "solver@-1"]
    assert read.parts == (Field("question"), Field("solver", previous=True))


def test_braces_around_a_placeholder():
    assert Template.parse("{{{a}}}").parts == ("{", Field("a"), "}")
    assert Template.parse("{{a}}").parts == ("{a}",)


@pytest.mark.parametrize(("text", "words"), [
    ("a\nb {", ["line 2, column 3", "lone '{'"]),
    ("a } b", ["line 1, column 3", "'}}'"]),
    ("{}", ["line 1, column 1", "no placeholder"]),
    ("{ a }", ["no placeholder"]),
    ('say {"a": 1}', ["line 1, column 5", "double the braces"]),
    ("{a@-2}", ["'@-2'", "{a@-1}"]),
    ("{a@}", ["'@'", "{a@-1}"]),
    ("{1a}", ["no placeholder"]),
    ("{@-1}", ["no placeholder"]),
])
def test_bad_syntax_is_refused_with_its_place(text, words):
    with pytest.raises(TeamError) as caught:
        Template.parse(text)
    assert all(word in str(caught.value) for word in words)


def test_where_counts_lines_and_columns_in_the_source_text():
    read = Template.parse("{{\n}}x{a}\n {b}")
    assert [read.where(f) for f in read.fields] == ["line 2, column 4", "line 3, column 2"]


def test_templates_join():
    assert (Template.parse("a {b}") + Template.parse("c{{")).parts == ("a ", Field("b"), "c{")
