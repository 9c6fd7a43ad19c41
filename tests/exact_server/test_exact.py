"""Both programs keep the same schedule, and log it."""

from __future__ import annotations

import json
import urllib.request

import pytest

from tests.exact_server.run import Schedule, Served, compiler, exact

SCHEDULE = Schedule(lo=1, hi=16, interval_us=3000, jitter_us=2000, first_us=4000, seed=3)
VARIANTS = [
    "python",
    pytest.param("c", marks=pytest.mark.skipif(compiler() is None, reason="no C compiler, or no epoll")),
]


def served(variant: str, chat: bool) -> tuple[bytes, Served]:
    path = "/v1/chat/completions" if chat else "/v1/completions"
    body = {"max_tokens": 60, "seed": 7, "stream_options": {"continuous_usage_stats": True}}
    with exact(SCHEDULE, variant) as server:
        request = urllib.request.Request(f"http://127.0.0.1:{server.port}{path}", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=30) as answer:
            text = answer.read()
        [entry] = server.log()
        assert server.log() == []
    return text, entry


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("chat", [False, True])
def test_a_request_is_served_on_schedule_and_logged(variant: str, chat: bool) -> None:
    text, entry = served(variant, chat)
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith(b"data: {")]
    assert text.endswith(b"data: [DONE]\n\n")
    totals = [event["usage"]["completion_tokens"] for event in events]
    assert totals[-1] == totals[-2] == entry.tokens == 60
    assert [tokens for _, tokens in entry.writes] == [b - a for a, b in zip([0, *totals], totals[:-1], strict=False)]
    assert entry.number == 7
    for index, (time, _) in enumerate(entry.writes):
        assert time - entry.received >= 0.004 + 0.003 * index - 1e-6  # never early


@pytest.mark.skipif(compiler() is None, reason="no C compiler, or no epoll")
def test_both_programs_say_the_same() -> None:
    (one, first), (two, second) = served("c", False), served("python", False)
    assert one == two
    assert [tokens for _, tokens in first.writes] == [tokens for _, tokens in second.writes]
