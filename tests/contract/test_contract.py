"""What the tuner relies on, asked of every backend over HTTP."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.backends import Ask
from engine.backends.base import counter
from engine.config import DFlashDraft
from tests.contract.conftest import Served
from tests.waiting import wait_until
from tuner.load.client import Client
from tuner.load.streams import Completion, read_completion
from tuner.records import config_dict
from tuner.resolved import silent_changes

EXPECTED = json.loads((Path(__file__).parents[1] / "data" / "golden" / "contract.json").read_text(encoding="utf-8"))
EXPECTED_TEXT = 'a, b, c):\n    """'  # what float32 says after `def f(`
NEAR_TIE = 0.25  # nats: bfloat16, computed at once instead of token by token
DEADLINE = 60.0
Prompts = list[tuple[int, ...]]


def stream(served: Served, prompt: tuple[int, ...], **fields: Any) -> tuple[Completion, list[dict[str, Any]]]:
    """Stream a completion through the tuner's own client; return it, and every event."""
    body = {
        "model": served.config.model.target,
        "prompt": list(prompt),
        "max_tokens": 24,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        **fields,
    }

    async def ask() -> Any:
        async with Client(served.endpoint) as client:
            return await client.request("POST", "/v1/completions", json.dumps(body).encode(), 60.0)

    reply = asyncio.run(ask())
    completion = read_completion(reply)
    assert isinstance(completion, Completion), completion
    lines = [line for line in reply.body.decode().splitlines() if line.startswith("data: {")]
    return completion, [json.loads(line.removeprefix("data: ")) for line in lines]


def test_probes_and_models(served: Served) -> None:
    assert served.get(served.backend.probes.health).status_code == 200
    assert served.get(served.backend.probes.ready).status_code == 200
    listed = served.get(served.backend.probes.models).json()["data"]
    assert [entry["id"] for entry in listed] == [served.config.model.target]


def test_greedy_text_is_the_same_everywhere(served: Served, prompts: Prompts) -> None:
    texts = [served.complete(prompt, max_tokens=32, ignore_eos=True)["choices"][0]["text"] for prompt in prompts]
    same = [text == entry["text"] for text, entry in zip(texts, EXPECTED, strict=True)]
    assert sum(same) >= (len(same) if served.exact else 2), texts


def test_a_prompt_as_text_is_tokenised_alike(served: Served) -> None:
    body = served.complete("def f(", max_tokens=8)
    assert body["usage"]["prompt_tokens"] == 3
    assert body["choices"][0]["text"][: None if served.exact else 2] == EXPECTED_TEXT[: None if served.exact else 2]


def test_usage_counts_tokens(served: Served, prompts: Prompts) -> None:
    body = served.complete(prompts[0], max_tokens=16, ignore_eos=True)
    usage = body["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (
        len(prompts[0]),
        16,
        len(prompts[0]) + 16,
    )
    assert body["choices"][0]["finish_reason"] == "length"


def test_a_stream_counts_its_tokens_as_they_come(served: Served, prompts: Prompts) -> None:
    completion, events = stream(served, prompts[1], ignore_eos=True)
    whole = served.complete(prompts[1], max_tokens=24, ignore_eos=True)["choices"][0]["text"]
    assert completion.text == whole
    assert (completion.output_tokens, completion.prompt_tokens) == (24, len(prompts[1]))
    assert completion.exact
    assert sum(arrival.tokens for arrival in completion.arrivals) == 24
    assert completion.finish == "length"
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 24
    assert all(event["usage"]["completion_tokens"] >= 1 for event in events)


def test_a_stream_without_usage_has_none(served: Served, prompts: Prompts) -> None:
    body = {"model": served.config.model.target, "prompt": list(prompts[0]), "max_tokens": 4, "stream": True}
    reply = served.post("/v1/completions", body)
    events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
    assert events
    assert not any(event.get("usage") for event in events)
    assert reply.text.rstrip().endswith("data: [DONE]")


def test_a_stop_string_ends_the_text_before_it(served: Served, prompts: Prompts) -> None:
    whole = served.complete(prompts[2], max_tokens=32, ignore_eos=True)["choices"][0]["text"]
    stop = whole[10:13]
    choice = served.complete(prompts[2], max_tokens=32, ignore_eos=True, stop=[stop])["choices"][0]
    assert choice["text"] == whole[: whole.index(stop)]
    assert choice["finish_reason"] == "stop"
    completion, _ = stream(served, prompts[2], max_tokens=32, ignore_eos=True, stop=[stop])
    assert (completion.text, completion.finish) == (choice["text"], "stop")


def test_a_client_that_leaves_frees_its_place(served: Served, prompts: Prompts) -> None:
    body = {
        "model": served.config.model.target,
        "prompt": list(prompts[0]),
        "max_tokens": 3500,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }

    def running() -> float:
        return counter(served.get(served.backend.probes.metrics).text, served.backend.metrics.running) or 0.0

    with httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=60) as reply:
        lines = reply.iter_lines()
        assert next(line for line in lines if line.startswith("data: {"))
        wait_until(lambda: running() >= 1, "the request runs", DEADLINE)
    wait_until(lambda: running() == 0, "the request is gone", DEADLINE)
    assert served.complete(prompts[0], max_tokens=4)["choices"][0]["text"]


def test_acceptance_is_reported(served: Served, prompts: Prompts) -> None:
    before = served.backend.round_counts(served.get(served.backend.probes.metrics).text)
    completion, _ = stream(served, prompts[4], max_tokens=48, ignore_eos=True)
    stats = served.backend.request_stats(completion.last)
    after = served.backend.round_counts(served.get(served.backend.probes.metrics).text)
    if not isinstance(served.config.draft, DFlashDraft):
        assert stats.accept_length is None or stats.accept_length == 1
        assert after is None or before is None or after.accept_length(before) is None
        return
    lengths = [stats.accept_length] if before is None or after is None else [after.accept_length(before)]
    assert all(length is not None and 1 <= length <= served.config.draft.block_size for length in lengths)


def test_metrics_have_the_names_that_are_read(served: Served, prompts: Prompts) -> None:
    served.complete(prompts[0])
    text = served.get(served.backend.probes.metrics).text
    names = dataclasses.asdict(served.backend.metrics)
    if not isinstance(served.config.draft, DFlashDraft):
        names |= {"accept_length": None, "accepted_by_position": None}
    for name in filter(None, names.values()):
        assert f"# TYPE {name.removesuffix('_total')}" in text or counter(text, name) is not None, name
    assert counter(text, served.backend.metrics.generated_tokens)


def test_what_runs_is_what_was_asked(served: Served) -> None:
    resolved = served.backend.resolved(served.info)
    assert silent_changes(config_dict(served.config), resolved) == []
    assert resolved["draft"]["kind"] == served.config.draft.kind
    assert resolved["memory"]["max_running"] == served.config.memory.max_running
    assert resolved["graphs"]["kind"] == "eager"
    # The check itself can fail: another cap would be named.
    other = config_dict(served.config)
    other["memory"]["max_running"] = 7
    assert silent_changes(other, resolved) == ["memory.max_running: asked 7, runs 8"]


def test_completions_by_token_ids(served: Served, prompts: Prompts) -> None:
    for prompt, expected in zip(prompts[:3], EXPECTED, strict=False):
        asked = Ask(model=served.config.model.target, max_tokens=32, prompt=prompt, top=5, ignore_eos=True)
        path, body = served.backend.ask(asked)
        reply = served.post(path, body)
        if not served.scores:
            assert (reply.status_code, "return_logprob" in reply.text) == (400, True), reply.text
            continue
        assert reply.status_code == 200, reply.text
        answer = served.backend.answer(asked, reply.json())
        assert answer.prompt == prompt
        assert not served.exact or list(answer.tokens) == expected["token_ids"]
        assert len(answer.scores) == 32
        for token, score in zip(answer.tokens, answer.scores, strict=True):
            assert score is not None
            likeliest = score.top[0][0] == token or (not served.exact and score.top[0][1] == score.logprob)
            assert likeliest  # greedy
            assert len(score.top) == 5
            assert score.logprob == pytest.approx(score.top[0][1], abs=1e-3)


def test_echoed_tokens_are_scored_as_they_were_generated(served: Served, prompts: Prompts) -> None:
    prompt, tokens = prompts[0], tuple(EXPECTED[0]["token_ids"])
    if not served.scores:
        return
    if not served.exact:
        asked = Ask(model=served.config.model.target, max_tokens=32, prompt=prompt, ignore_eos=True)
        path, body = served.backend.ask(asked)
        tokens = served.backend.answer(asked, served.post(path, body).json()).tokens
    asked = Ask(model=served.config.model.target, max_tokens=1, prompt=prompt + tokens, top=5, echo=True)
    path, body = served.backend.ask(asked)
    answer = served.backend.answer(asked, served.post(path, body).json())
    assert answer.prompt == prompt + tokens
    assert answer.prompt_scores[0] is None
    for token, score in zip(tokens, answer.prompt_scores[len(prompt) :], strict=True):
        assert score is not None
        assert score.top[0][0] == token or (not served.exact and score.top[0][1] - score.logprob < NEAR_TIE)


def test_a_chat_goes_through_the_models_template(served: Served) -> None:
    messages = [{"role": "user", "content": "Write add."}]
    body = {"model": served.config.model.target, "messages": messages, "max_tokens": 12, "temperature": 0}
    reply = served.post("/v1/chat/completions", body)
    assert reply.status_code == 200, reply.text
    whole = reply.json()["choices"][0]["message"]["content"]
    template = "<|im_start|>user\nWrite add.<|im_end|>\n<|im_start|>assistant\n"
    assert whole == served.complete(template, max_tokens=12)["choices"][0]["text"]
    options = {"stream": True, "stream_options": {"include_usage": True}}
    streamed = served.post("/v1/chat/completions", body | options)
    events = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
    deltas = [choice["delta"].get("content") or "" for event in events for choice in event["choices"]]
    assert "".join(deltas) == whole
    assert events[-1]["usage"]["completion_tokens"] == reply.json()["usage"]["completion_tokens"]
