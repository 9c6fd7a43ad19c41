"""Text and tokens: incremental text equals whole text, stop strings cut exactly, templates and defaults."""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from engine.chat import ChatError, ChatTemplate
from engine.errors import ModelError
from engine.request import Sampling
from engine.text import (
    ByteDetokenizer,
    Decoder,
    Detokenizer,
    StopMatcher,
    Text,
    TokenBytes,
    WindowDetokenizer,
    load_text,
)
from tests.engine.serving import EOS, text_folder, tiny_tokenizer

BYTE_LEVEL = tiny_tokenizer()
SIZE = BYTE_LEVEL.get_vocab_size()
VALID_TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\ufffd"), max_size=40)


def byte_fallback_tokenizer() -> Tokenizer:
    """Return a Llama-2-like tokenizer: spaces as ▁, unknown characters as bytes, a leading space stripped."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdehlotwé漢"]
    names += ["he", "ll", "hell", "▁t", "▁the"]
    pairs = [("h", "e"), ("l", "l"), ("he", "ll"), ("▁", "t"), ("▁t", "he")]
    vocabulary = {name: index for index, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


FALLBACK = byte_fallback_tokenizer()


def window() -> WindowDetokenizer:
    return WindowDetokenizer(FALLBACK.decode, TokenBytes(FALLBACK).silent)


def fed(detokenizer: Detokenizer, tokens: Sequence[int], cuts: Sequence[int]) -> list[str]:
    """Feed `tokens` in rounds of the sizes in `cuts`, cycled; return the pieces."""
    pieces, start, turn = [], 0, 0
    while start < len(tokens):
        size = cuts[turn % len(cuts)]
        pieces.append(detokenizer.feed(tokens[start : start + size]))
        start, turn = start + size, turn + 1
    return [*pieces, detokenizer.flush()]


CUTS = st.lists(st.integers(1, 5), min_size=1, max_size=6)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, SIZE + 5), max_size=40), CUTS)
def test_byte_level_stream_equals_decoding_the_whole(tokens: list[int], cuts: list[int]) -> None:
    """Whatever the tokens: special ones, padded rows, bytes that are not UTF-8."""
    pieces = fed(ByteDetokenizer(TokenBytes(BYTE_LEVEL)), tokens, cuts)
    assert "".join(pieces) == BYTE_LEVEL.decode(tokens, skip_special_tokens=True)


@settings(max_examples=200, deadline=None)
@given(VALID_TEXT, CUTS)
def test_no_half_characters_byte_level(text: str, cuts: list[int]) -> None:
    pieces = fed(ByteDetokenizer(TokenBytes(BYTE_LEVEL)), BYTE_LEVEL.encode(text).ids, cuts)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


@settings(max_examples=200, deadline=None)
@given(VALID_TEXT, CUTS)
def test_no_half_characters_byte_fallback(text: str, cuts: list[int]) -> None:
    tokens = FALLBACK.encode(text).ids
    pieces = fed(window(), tokens, cuts)
    assert "".join(pieces) == FALLBACK.decode(tokens)
    assert not any("\ufffd" in piece for piece in pieces)


PRINTABLE = [FALLBACK.get_vocab()[name] for name in ("▁", "a", "he", "hell", "▁the", "é", "漢", "<s>")]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(PRINTABLE), max_size=30), CUTS)
def test_window_stream_equals_decoding_the_whole(tokens: list[int], cuts: list[int]) -> None:
    """Leading spaces are stripped once, special tokens in between change nothing."""
    assert "".join(fed(window(), tokens, cuts)) == FALLBACK.decode(tokens)


def test_window_stays_small_on_bytes_that_are_no_text() -> None:
    bad = FALLBACK.get_vocab()["<0xFF>"]
    lengths: list[int] = []

    def decode(tokens: list[int]) -> str:
        lengths.append(len(tokens))
        text: str = FALLBACK.decode(tokens)
        return text

    detokenizer = WindowDetokenizer(decode, TokenBytes(FALLBACK).silent)
    text = "".join([detokenizer.feed([bad]) for _ in range(200)]) + detokenizer.flush()
    assert text == "\ufffd" * 200
    assert max(lengths) <= 8


def naive_cut(text: str, stops: Sequence[str]) -> int | None:
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    return min(found, default=None)


ALPHABET = st.text("ab", min_size=0, max_size=6)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4)


@settings(max_examples=500, deadline=None)
@given(st.lists(ALPHABET, max_size=12), STOPS)
def test_stop_strings_match_a_search_of_the_whole_text(pieces: list[str], stops: list[str]) -> None:
    """The text so far is searched after every piece; what was shown never reaches into a stop string."""
    matcher = StopMatcher(stops)
    whole = shown = ""
    for piece in pieces:
        whole += piece
        text, stopped = matcher.feed(piece)
        shown += text
        cut = naive_cut(whole, stops)
        assert stopped == (cut is not None)
        if cut is not None:
            assert shown == whole[:cut]
            return
        assert whole.startswith(shown)
        held = whole[len(shown) :]
        assert any(stop.startswith(held) for stop in stops), "held back without need"
    assert shown + matcher.flush() == whole


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from([BYTE_LEVEL.get_vocab()[name] for name in ("a", "b", "Ã", "©", "hello")]), max_size=20),
    st.lists(st.sampled_from(["a", "ab", "ba", "aab", "é", "éa", "oa", "hello", "\ufffd", "\ufffda"]), min_size=1),
    CUTS,
    st.sampled_from(["length", "stop"]),
)
def test_decoder_counts_tokens_up_to_the_stop(
    tokens: list[int], stops: list[str], cuts: list[int], finish: str
) -> None:
    """Against the definition: decode everything after every token, and stop at the first stop string."""
    answer = [*tokens, EOS] if finish == "stop" else tokens
    expected = reference(answer, stops, finish)
    decoder = Decoder(ByteDetokenizer(TokenBytes(BYTE_LEVEL)), stops)
    texts, counted, start, turn, ended = "", 0, 0, 0, None
    while ended is None and start < len(answer):
        size = cuts[turn % len(cuts)]
        end = start + size
        piece = decoder.feed(tuple(answer[start:end]), finish if end >= len(answer) else None)
        assert expected[0].startswith(texts + piece.text), "shown, then taken back"
        texts, counted, ended = texts + piece.text, counted + len(piece.tokens), piece.finish
        start, turn = end, turn + 1
    if answer:
        assert (texts, counted, ended) == expected


def reference(answer: list[int], stops: list[str], finish: str) -> tuple[str, int, str]:
    """(text, tokens, finish reason), by searching all settled text after every token, and everything at the end."""
    shown = answer[:-1] if finish == "stop" else answer
    table = TokenBytes(BYTE_LEVEL)
    for count in range(1, len(shown) + 1):
        data = b"".join(table[token] for token in shown[:count])
        settled = codecs.getincrementaldecoder("utf-8")("replace").decode(data)  # without an unfinished character
        cut = naive_cut(settled, stops)
        if cut is not None:
            return settled[:cut], count, "stop"
    text = BYTE_LEVEL.decode(shown)
    cut = naive_cut(text, stops)
    return (text, len(answer), finish) if cut is None else (text[:cut], len(answer), "stop")


def test_long_stop_strings_cost_linear_time() -> None:
    """A self-similar stop string against a self-similar text: no quadratic rescans."""
    stop = "a" * 1000 + "b"
    matcher = StopMatcher([stop])
    shown = "".join(matcher.feed("a")[0] for _ in range(20000))
    assert shown == "a" * 19000


def test_defaults_of_a_folder(tmp_path: Path) -> None:
    text = load_text(text_folder(tmp_path / "a"))
    assert text.eos == (EOS,)
    assert (text.sampling.greedy, text.vocab_size) == (True, 300)
    assert text.encode("hello the") == tiny_tokenizer().encode("hello the").ids
    assert text.decode([*text.encode("hello the"), EOS]) == "hello the"
    folder = text_folder(tmp_path / "b", do_sample=True)
    (folder / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.6, "top_k": 20}')
    (folder / "config.json").write_text('{"text_config": {"eos_token_id": [7, 9], "vocab_size": 12}}')
    nested = load_text(folder)
    assert (nested.eos, nested.sampling, nested.vocab_size) == ((7, 9), Sampling(0.6, 20), 12)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", None, "missing"),
        ("tokenizer.json", "{", "not a tokenizer"),
        ("config.json", "[]", "expected a JSON object"),
        ("generation_config.json", "nonsense", "not readable as JSON"),
        ("tokenizer_config.json", '{"chat_template": "{% for %}"}', "chat template, line 1"),
    ],
)
def test_unusable_files_are_named(tmp_path: Path, name: str, content: str | None, message: str) -> None:
    folder = text_folder(tmp_path / "m")
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_text(content)
    with pytest.raises(ModelError, match=message) as caught:
        load_text(folder)
    assert "\n" not in str(caught.value)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such folder"):
        load_text(tmp_path / "absent")


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=300), st.integers(1, 40))
def test_what_is_refused_by_length_really_is_too_long(text: str, tokens: int) -> None:
    loaded = _loaded()
    text = text * 5
    if loaded.cannot_fit(text, tokens):
        assert len(loaded.encode(text.encode("utf-8", "replace").decode())) > tokens


_CACHE: list[Text] = []


def _loaded() -> Text:
    if not _CACHE:
        import tempfile

        with tempfile.TemporaryDirectory() as folder:
            _CACHE.append(load_text(text_folder(Path(folder))))
    return _CACHE[0]


def test_no_bound_by_length_where_a_token_may_stand_for_anything(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = text_folder(tmp_path / "m")
    tokenizer.save(str(folder / "tokenizer.json"))
    text = load_text(folder)
    assert len(text.encode("x" * 10000)) == 1
    assert not text.cannot_fit("x" * 10000, 1)


# Chat templates


def render(source: str, turns: list[dict[str, object]], **options: object) -> str:
    return ChatTemplate(source, "<s>", "</s>").render(turns, options)


def test_template_features_that_models_use() -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'skip' %}{% continue %}{% endif %}"
        "{% generation %}{{ m.content | trim }}{% endgeneration %}{% endfor %}"
        "{{ {'é': [1]} | tojson }}{% if enable_thinking is defined and not enable_thinking %}!{% endif %}"
    )
    messages: list[dict[str, object]] = [{"role": "user", "content": " hi <b> "}, {"role": "skip", "content": "x"}]
    assert render(source, messages, enable_thinking=False) == '<s>hi <b>{"é": [1]}!'


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[5].content.x }}",
        "{{ 1 + messages }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ range(10 ** 9) | list }}",
    ],
)
def test_template_errors_and_the_sandbox(source: str) -> None:
    with pytest.raises(ChatError, match="refuses these messages"):
        render(source, [{"role": "user", "content": "x"}])


def test_reserved_names() -> None:
    with pytest.raises(ChatError, match="may not set messages"):
        render("x", [], messages=[])


def test_template_sources(tmp_path: Path) -> None:
    folder = text_folder(tmp_path / "m", chat=False)
    assert load_text(folder).chat is None
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    chat = load_text(folder).chat
    assert chat is not None
    assert chat.render([], {}) == "yes"
    (folder / "chat_template.jinja").write_text("file")
    chat = load_text(folder).chat
    assert chat is not None
    assert chat.render([], {}) == "file"
