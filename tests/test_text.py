"""TextCodec against transformers' own chat templates and tokenisation, on every kind of tokenizer that matters."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbaton.engine.text import TextCodec
from kvbaton.errors import TeamError, Unsupported, UsageError
from kvbaton.templates import Template
from toy_tokenizers import CHATML, GEMMA, KINDS, MISTRAL, TRIMMED, byte_level, sentencepiece, wrap

EVERY_KIND = pytest.mark.parametrize("kind", KINDS)
CODECS = {kind: TextCodec(make()) for kind, make in KINDS.items()}

plain_texts = st.text(alphabet="abehlo Y16.,:?!\n\t☃é", max_size=30)


def prompt(codec, user, system=None, **fills):
    ids = {share: codec.encode(text) for share, text in fills.items()}
    return codec.prompt("reader", None if system is None else Template.parse(system), Template.parse(user), ids)


def shape(built, codec):
    return [(s.share, codec.decode(s.token_ids)) for s in built.segments]


@EVERY_KIND
@given(system=st.none() | plain_texts, user=plain_texts)
def test_a_prompt_without_placeholders_is_what_transformers_makes(kind, system, user):
    chat = [{"role": "user", "content": user}]
    if system is not None:
        if kind in ("mistral", "unigram", "gemma", "drops-system"):
            folded = system.strip() if kind == "drops-system" else system  # nobody sees that white space is dropped
            chat[0]["content"] = f"{system}\n\n{user}" if folded else user
        else:
            chat.insert(0, {"role": "system", "content": system})
    want = KINDS[kind]().apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    built = CODECS[kind].prompt("r", None if system is None else Template.parse(system), Template.parse(user), {})
    assert list(built.token_ids) == want
    assert len(built.segments) == 1


@EVERY_KIND
@given(text=st.text(alphabet="abehlo Y16.<|>im_endstrINST[/]\n☃é", max_size=40))
def test_user_text_survives_the_trip(kind, text):
    codec = CODECS[kind]
    if kind == "unigram":  # this one has no byte fallback: characters it never saw are lost
        text = text.replace("☃", "").replace("é", "")
    assert codec.decode(codec.encode(text)) == text


@EVERY_KIND
@given(parts=st.lists(st.sampled_from(["{a}", "{b}", "{a@-1}", "own text", "\n", " ", "16"]), min_size=1, max_size=7),
       fills=st.fixed_dictionaries({share: st.sampled_from(["", "x", "Hello world", "é 16"]) for share in
                                    ("a", "b", "a@-1")}))
def test_any_order_of_pieces_keeps_every_piece(kind, parts, fills):
    """First, last, side by side, repeated, empty: shared text stands where the template puts it, as the very ids."""
    codec = CODECS[kind]
    ids = {share: codec.encode(text) for share, text in fills.items()}
    built = codec.prompt("r", None, Template.parse("".join(parts)), ids)
    shared = [s for s in built.segments if s.share]
    assert [s.share for s in shared] == [p.strip("{}") for p in parts if p[0] == "{" and fills[p.strip("{}")]]
    assert all(s.token_ids is ids[s.share] for s in shared)
    assert not any(a.share is b.share is None for a, b in zip(built.segments, built.segments[1:], strict=False))
    spans = built.spans
    assert [s.start for s in spans] == [0, *(s.end for s in spans[:-1])]
    assert spans[-1].end == len(built) == len(built.token_ids)
    assert all(built.token_ids[span.start:span.end] == s.token_ids
               for span, s in zip(spans, built.segments, strict=True))


@EVERY_KIND
def test_the_decoded_prompt_holds_every_text_and_one_bos(kind):
    codec, tokenizer = CODECS[kind], KINDS[kind]()
    built = prompt(codec, "Question: {q}\n\nSolution:\n{s}", "You are a judge.", q="How many eggs?", s="16 - 3 = 13")
    text = codec.decode(built.token_ids)
    for wanted in ("You are a judge.", "Question: How many eggs?\n\nSolution:\n16 - 3 = 13"):
        assert wanted in text
    if tokenizer.bos_token_id is not None and "bos_token" in tokenizer.chat_template:
        assert [i for i, t in enumerate(built.token_ids) if t == tokenizer.bos_token_id] == [0]


@EVERY_KIND
def test_the_shared_path_and_the_dense_path_see_the_same_ids(kind):
    """The dense path reads `Prompt.token_ids`, the shared path its segments: one object, so no seam can differ."""
    codec = CODECS[kind]
    ids = codec.encode("Hello world, 16 eggs")
    first = codec.prompt("a", None, Template.parse("{q}"), {"q": ids})
    second = codec.prompt("b", Template.parse("You review."), Template.parse("Read: {q}!"), {"q": ids})
    for built in (first, second):
        (_, segment, span, _), = built.shared()
        assert segment.token_ids is ids
        assert built.token_ids[span.start:span.end] == ids
        assert built.token_ids == tuple(t for s in built.segments for t in s.token_ids)


@pytest.mark.parametrize("text", ["<|im_end|>", "a<|im_start|>system\nb", "<<|im_end|>", "<|im_end|><|im_end|>",
                                  "<think>", "<|endoftext|>"])
def test_special_tokens_in_user_text_stay_text(text):
    codec = TextCodec(byte_level(CHATML + "{# <think> #}"))
    special = {i for i, _ in byte_level().added_tokens_decoder.items()}
    assert special.isdisjoint(codec.encode(text))
    assert codec.decode(codec.encode(text)) == text
    literal = codec.prompt("r", Template.parse(text), Template.parse(text + "{q}" + text), {"q": codec.encode(text)})
    empty = codec.prompt("r", Template.parse("x"), Template.parse("x{q}x"), {"q": codec.encode("x")})
    assert [t for t in literal.token_ids if t in special] == [t for t in empty.token_ids if t in special]


@pytest.mark.parametrize("kind", ["mistral", "gemma", "phi3", "llama2"])
def test_special_tokens_of_sentencepiece_tokenizers_stay_text(kind):
    codec, tokenizer = CODECS[kind], KINDS[kind]()
    for token in tokenizer.added_tokens_decoder.values():
        text = f"a {token.content}\n{token.content}b"
        assert set(tokenizer.all_special_ids).isdisjoint(set(codec.encode(text)) - {tokenizer.unk_token_id})
        assert codec.decode(codec.encode(text)) == text


def test_an_added_word_that_the_chat_template_never_writes_is_an_ordinary_word():
    codec = TextCodec(byte_level())
    assert codec.encode("<think>") == (byte_level().convert_tokens_to_ids("<think>"),)


def test_a_template_that_trims_messages_trims_ours():
    codec = TextCodec(byte_level(TRIMMED))
    assert shape(prompt(codec, "\n {q}, why? \n", q=" keep me "), codec) == [
        (None, "<|im_start|>user\n"), ("q", " keep me "), (None, ", why?<|im_end|>\n<|im_start|>assistant\n")]


def test_shared_text_first_last_adjacent_and_twice():
    codec = TextCodec(byte_level("{{ messages[0]['content'] }}"))
    assert shape(prompt(codec, "{a}{b} and {a}", a="one", b="two"), codec) == [
        ("a", "one"), ("b", "two"), (None, " and "), ("a", "one")]
    assert [slot for *_, slot in prompt(codec, "{a}{b} and {a}", a="one", b="two").shared()] == [0, 0, 1]


def test_an_empty_text_is_left_out_and_its_neighbours_join():
    codec = TextCodec(byte_level())
    built = prompt(codec, "Before:\n{a@-1}\nNow:\n{q}", **{"a@-1": "", "q": "go"})
    assert shape(built, codec) == [(None, "<|im_start|>user\nBefore:\n\nNow:\n"), ("q", "go"),
                                   (None, "<|im_end|>\n<|im_start|>assistant\n")]


def test_a_one_token_segment_is_a_segment():
    codec = TextCodec(byte_level())
    built = prompt(codec, "{a}{a}", a="1")
    assert [len(s) for s in built.segments if s.share] == [1, 1]


def test_nothing_but_empty_text_is_refused():
    with pytest.raises(UsageError, match="empty"):
        prompt(TextCodec(byte_level("{{ messages[0]['content'] }}")), "{a}", a="")


def test_a_share_without_a_text_is_refused():
    with pytest.raises(TeamError, match=r"'r' has no text for \{q@-1\}"):
        TextCodec(byte_level()).prompt("r", None, Template.parse("{q@-1}"), {"q": (1,)})


def test_a_tokenizer_without_chat_template_is_refused_when_it_is_needed():
    codec = TextCodec(byte_level(None))
    assert codec.decode(codec.encode("Hello")) == "Hello"
    with pytest.raises(Unsupported, match="no chat template"):
        prompt(codec, "Hello")


@pytest.mark.parametrize("template", [GEMMA, MISTRAL])
def test_a_refused_system_message_goes_to_the_head_of_the_user_message(template):
    codec = TextCodec(sentencepiece(template, "never"))
    built = prompt(codec, "{q}", "You {q} judge.", q="16")
    assert "You 16 judge.\n\n16" in codec.decode(built.token_ids)
    assert [slot for *_, slot in built.shared()] == [0, 1]


def test_an_empty_system_message_that_is_refused_leaves_no_gap():
    codec = TextCodec(byte_level(GEMMA.replace("{{ bos_token }}", "")))
    assert prompt(codec, "Hello", "") == prompt(codec, "Hello")


@pytest.mark.parametrize(("template", "words"), [
    ("{{ raise_exception('no users here') }}", "no users here"),
    ("{{ messages[0]['content'] | upper }}", "drops or changes"),
    ("{{ messages[0]['role'] }}", "drops or changes"),
])
def test_a_chat_template_that_loses_the_text_is_refused(template, words):
    with pytest.raises(Unsupported, match=words):
        prompt(TextCodec(byte_level(template)), "Hello", "You are")


def test_several_chat_templates_and_no_default():
    tokenizer = byte_level()
    several = TextCodec(wrap(tokenizer.backend_tokenizer, {"tool_use": CHATML, "rag": CHATML}))
    with pytest.raises(Unsupported, match="no default"):
        prompt(several, "Hello")


def test_a_chat_template_that_repeats_a_message_repeats_its_segments():
    codec = TextCodec(byte_level("{{ messages[0]['content'] }}|{{ messages[0]['content'] }}"))
    assert shape(prompt(codec, "{a}", a="x"), codec) == [("a", "x"), (None, "|"), ("a", "x")]


def test_a_chat_template_is_rendered_once_per_pair_of_templates(monkeypatch):
    tokenizer = byte_level()
    calls = []
    render = type(tokenizer).apply_chat_template
    monkeypatch.setattr(type(tokenizer), "apply_chat_template",
                        lambda *args, **options: calls.append(1) or render(*args, **options))
    codec = TextCodec(tokenizer)
    for i in range(3):
        prompt(codec, "Q {q}", "You are", q=str(i))
    assert len(calls) == 1
    prompt(codec, "Q {q}", q="1")
    assert len(calls) == 2


@pytest.mark.parametrize("kind", ["chatml", "llama2", "gemma"])
def test_streamed_text_is_the_decoded_text(kind):
    codec = CODECS[kind]
    text = "Hello é☃ 16 eggs \n<|im_end|> ☃☃"
    stream = codec.stream()
    fed = [stream.feed(token) for token in codec.encode(text)]
    assert "".join(fed) + stream.end() == text
    assert not any("\ufffd" in piece for piece in fed)


def test_a_character_cut_short_is_shown_at_the_end():
    codec = TextCodec(byte_level())
    stream = codec.stream()
    assert [stream.feed(token) for token in codec.encode("☃")[:-1]] == ["", ""]
    assert stream.end() == "\ufffd"


@pytest.mark.parametrize("kind", ["chatml", "llama2"])
def test_token_id_is_one_exact_token(kind):
    codec, tokenizer = CODECS[kind], KINDS[kind]()
    assert codec.token_id(tokenizer.eos_token) == tokenizer.eos_token_id
    assert codec.decode([codec.token_id("\n")]) == "\n"
    assert codec.token_id("Hello again and again") is None
