from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner.load.client import Reply, RequestError
from tuner.load.streams import Completion, events, read_completion

SSE = {"content-type": "text/event-stream; charset=utf-8"}


def reply(*pieces: tuple[float, bytes], status: int = 200, headers: dict[str, str] = SSE) -> Reply:
    return Reply(0.0, 9.0, status, headers, pieces)


def event(document: Any) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"


def chunk(text: str = "", finish: str | None = None, usage: int | None = None, **more: Any) -> bytes:
    document: dict[str, Any] = {"choices": [{"text": text, "finish_reason": finish, **more}]}
    if usage is not None:
        document["usage"] = {"completion_tokens": usage, "prompt_tokens": 7}
    return event(document)


DONE = b"data: [DONE]\n\n"


def read(answer: Reply) -> Completion:
    found = read_completion(answer)
    assert isinstance(found, Completion), found
    return found


def refused(answer: Reply) -> RequestError:
    found = read_completion(answer, 100)
    assert isinstance(found, RequestError)
    return found


def test_tokens_come_from_continuous_usage() -> None:
    found = read(
        reply((1.0, chunk("ab", usage=3)), (2.0, chunk("c", usage=4)), (3.0, chunk("", "stop", usage=5) + DONE))
    )
    assert [(a.time, a.tokens) for a in found.arrivals] == [(1.0, 3), (2.0, 1), (3.0, 1)]
    assert (found.output_tokens, found.prompt_tokens, found.exact) == (5, 7, True)
    assert (found.text, found.finish) == ("abc", "stop")


def test_tokens_come_from_token_ids() -> None:
    last = event({"choices": [], "usage": {"completion_tokens": 3}, "spec": {"verify_count": 2}})
    found = read(
        reply((1.0, chunk("ab", token_ids=[5, 6])), (2.0, chunk("c", "length", token_ids=[7])), (2.5, last + DONE))
    )
    assert [(a.time, a.tokens) for a in found.arrivals] == [(1.0, 2), (2.0, 1)]
    assert found.token_ids == (5, 6, 7)
    assert found.last["spec"] == {"verify_count": 2}
    assert found.exact


def test_a_total_alone_is_spread_evenly_and_said_to_be() -> None:
    last = event({"choices": [], "usage": {"completion_tokens": 6}})
    found = read(reply((1.0, chunk("a")), (2.0, chunk("b")), (3.0, chunk("c", "length")), (3.1, last + DONE)))
    assert [a.tokens for a in found.arrivals] == [2, 2, 2]
    assert not found.exact


def test_an_event_without_text_or_tokens_is_no_arrival() -> None:
    role = event({"choices": [{"delta": {"role": "assistant", "content": ""}}], "usage": {"completion_tokens": 0}})
    text = event(
        {"choices": [{"delta": {"content": "hi"}, "finish_reason": "stop"}], "usage": {"completion_tokens": 2}}
    )
    found = read(reply((1.0, role), (2.0, text + DONE)))
    assert [(a.time, a.tokens) for a in found.arrivals] == [(2.0, 2)]
    assert found.text == "hi"


def test_two_events_in_one_piece_came_together() -> None:
    found = read(reply((1.0, chunk("a", usage=1) + chunk("b", usage=2)), (2.0, chunk("c", "stop", usage=3) + DONE)))
    assert [(a.time, a.tokens) for a in found.arrivals] == [(1.0, 1), (1.0, 1), (2.0, 1)]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(max_size=6), min_size=1, max_size=6), st.integers(1, 7), st.booleans())
def test_any_split_reads_the_same(texts: list[str], size: int, crlf: bool) -> None:
    raw = (
        b"".join(chunk(text, usage=n + 1) for n, text in enumerate(texts)) + chunk("", "stop", usage=len(texts)) + DONE
    )
    raw = b": a comment\n" + (raw.replace(b"\n", b"\r\n") if crlf else raw)
    pieces = [(float(i), raw[i : i + size]) for i in range(0, len(raw), size)]
    found = read(reply(*pieces))
    assert found.text == "".join(texts)
    assert sum(a.tokens for a in found.arrivals) == len(texts) == found.output_tokens
    assert [a.time for a in found.arrivals] == sorted(a.time for a in found.arrivals)


def test_lines_of_an_event_are_joined() -> None:
    assert list(events(reply((1.0, b"event: x\ndata: a\ndata:b\n\ndata: c\n\n")))) == [(1.0, "a\nb"), (1.0, "c")]


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (reply((1.0, b'{"error": "no"}'), status=500), "status"),
        (reply((1.0, b"later"), status=429), "throttled"),
        (reply((1.0, b""), status=302, headers={"location": "/x"}), "redirect"),
        (reply((1.0, b"<html>"), headers={"content-type": "text/html"}), "not_a_stream"),
        (reply((1.0, chunk("a", usage=1))), "incomplete"),
        (reply((1.0, chunk("a", usage=1) + DONE)), "incomplete"),
        (reply((1.0, chunk("a", "stop") + DONE)), "no_usage"),
        (reply((1.0, chunk("a", "stop", usage=0) + DONE)), "wrong_usage"),
        (reply((1.0, chunk("a", "stop", usage=-3) + DONE)), "wrong_usage"),
        (reply((1.0, chunk("a", usage=4)), (2.0, chunk("b", "stop", usage=3) + DONE)), "wrong_usage"),
        (reply((1.0, chunk("a", "stop", usage=101) + DONE)), "wrong_usage"),
        (reply((1.0, chunk("a", "stop", usage=1, token_ids=[4, 5]) + DONE)), "wrong_usage"),
        (reply((1.0, chunk("", "stop", usage=0) + DONE)), "incomplete"),
        (reply((1.0, b"data: {broken\n\n" + DONE)), "malformed"),
        (reply((1.0, b"data: 17\n\n" + DONE)), "malformed"),
        (reply((1.0, event({"error": {"message": "oom"}}) + DONE)), "status"),
        (Reply(0.0, 1.0, 200, SSE, (), RequestError("reset", "gone")), "reset"),
    ],
)
def test_what_cannot_be_counted_is_an_error(answer: Reply, kind: str) -> None:
    assert refused(answer).kind == kind


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["choices", "usage", "text", "delta", "completion_tokens", "finish_reason", "token_ids", "x"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(st.lists(JSON, max_size=4))
def test_no_document_breaks_the_reader(documents: list[Any]) -> None:
    found = read_completion(reply((1.0, b"".join(map(event, documents)) + DONE)))
    if isinstance(found, Completion):
        assert found.output_tokens > 0
        assert all(arrival.tokens > 0 for arrival in found.arrivals)
        assert sum(arrival.tokens for arrival in found.arrivals) == pytest.approx(found.output_tokens)
