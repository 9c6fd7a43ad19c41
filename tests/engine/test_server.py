"""The HTTP contract, against a real server whose engine process echoes the prompt."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engine.serving import EOS, Served, fake, text_folder, tiny_tokenizer
from tests.waiting import wait_until

TOKENIZER = tiny_tokenizer()
MAX_LEN = 512
ROWS = 3


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = text_folder(tmp_path_factory.mktemp("model"))
    with fake(folder, "--rows", str(ROWS), "--max-len", str(MAX_LEN), "--refuse-over", "400") as server:
        yield server


@pytest.fixture
def client(served: Served) -> Iterator[httpx.Client]:
    with served.client() as client:
        yield client


def ask(client: httpx.Client, **body: Any) -> httpx.Response:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    return client.post(path, json={"model": "tiny", **body})


def stream(client: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    """Return the events of a streamed answer, which must end with [DONE]."""
    answer = ask(client, stream=True, **body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, done, rest = answer.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def choice(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()["choices"][0]
    return found


def refused(answer: httpx.Response, status: int, words: str, param: str | None = None) -> None:
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (status, status), answer.text
    assert words in error["message"]
    assert "\n" not in error["message"]
    if param is not None:
        assert error["param"] == param


def test_small_routes(client: httpx.Client) -> None:
    assert client.get("/health").json() == {"status": "alive"}
    assert client.head("/health").status_code == 200
    assert client.get("/ready").json() == {"status": "ready"}
    card = client.get("/v1/models").json()["data"][0]
    assert (card["id"], card["max_model_len"]) == ("tiny", MAX_LEN)
    assert client.get("/v1/models/tiny").json() == card
    refused(client.get("/v1/models/other"), 404, "'other' does not exist")
    refused(client.get("/nowhere"), 404, "no such path")
    refused(client.post("/health"), 405, "/health takes GET")
    refused(client.get("/v1/completions"), 405, "takes POST")
    refused(client.post("/policy", json={"kind": "dflash", "block": 3}), 400, "no such field")


def test_server_info(client: httpx.Client) -> None:
    info = client.get("/server_info").json()
    assert (info["schema"], info["model"], info["ready"], info["synthetic"]) == (1, "tiny", True, False)
    assert info["config"]["model"]["max_len"] == MAX_LEN
    assert info["memory"]["kv_tokens"] == 1000
    assert info["acceptance"]["by_position"] == [0.75, 0.5]
    assert info["seconds_to_ready"] > 0


def test_completion(client: httpx.Client) -> None:
    ids = TOKENIZER.encode("hello the").ids
    answer = ask(client, prompt="hello the", max_tokens=2 * len(ids))
    document = answer.json()
    assert document["object"] == "text_completion"
    assert choice(answer) == {"index": 0, "text": "hello the" * 2, "logprobs": None, "finish_reason": "length"}
    count = 2 * len(ids)
    assert document["usage"] == {
        "prompt_tokens": len(ids),
        "completion_tokens": count,
        "total_tokens": len(ids) + count,
    }
    verifies = -(-(count - 1) // ROWS)
    assert document["spec"] == {"accept_length": (count - 1) / verifies, "verify_count": verifies}


def test_prompts_as_token_ids_and_lists_of_one(client: httpx.Client) -> None:
    ids = TOKENIZER.encode("wörd now 漢字 é").ids
    for prompt in (ids, [ids], "wörd now 漢字 é", ["wörd now 漢字 é"]):
        assert choice(ask(client, prompt=prompt, max_tokens=len(ids)))["text"] == "wörd now 漢字 é"


def test_default_lengths(client: httpx.Client) -> None:
    assert ask(client, prompt="hello").json()["usage"]["completion_tokens"] == 16
    chat = ask(client, messages=[{"role": "user", "content": "hello"}]).json()
    assert chat["usage"]["total_tokens"] == MAX_LEN
    assert chat["choices"][0]["finish_reason"] == "length"
    clipped = ask(client, prompt="hello", max_tokens=2**31 - 1).json()
    assert (clipped["usage"]["total_tokens"], clipped["choices"][0]["finish_reason"]) == (MAX_LEN, "length")


def test_no_verify_round_yet(client: httpx.Client) -> None:
    spec = ask(client, prompt="hello", max_tokens=1).json()["spec"]
    assert spec == {"accept_length": None, "verify_count": 0}


def test_chat(client: httpx.Client) -> None:
    parts = [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]
    prompt = "<user>he\nllo\n<assistant>"
    answer = ask(client, messages=[{"role": "user", "content": parts}], max_completion_tokens=len(prompt))
    assert answer.json()["object"] == "chat.completion"
    message = choice(answer)["message"]
    assert message["role"] == "assistant"
    assert message["content"].startswith(prompt)


def test_stream_is_one_chunk_a_round(client: httpx.Client) -> None:
    """Whatever the rounds are cut into, the text is the same; joined chunks mean several rounds came at once."""
    whole = choice(ask(client, prompt="wörd now 漢字", max_tokens=40))["text"]
    events = stream(client, prompt="wörd now 漢字", max_tokens=40, return_token_ids=True)
    assert "".join(event["choices"][0]["text"] for event in events) == whole
    *before, last = [event["choices"][0]["finish_reason"] for event in events]
    assert last == "length"
    assert set(before) <= {None}  # no other chunk, when all rounds came at once
    ids = [token for event in events for token in event["choices"][0]["token_ids"]]
    prompt = TOKENIZER.encode("wörd now 漢字").ids
    assert ids == [prompt[i % len(prompt)] for i in range(40)]
    assert len(events) <= 1 + 13
    assert events[0]["choices"][0]["prompt_token_ids"] == prompt
    assert all("prompt_token_ids" not in event["choices"][0] for event in events[1:])
    assert all("usage" not in event for event in events)
    assert events[-1]["spec"]["verify_count"] == 13
    assert all("spec" not in event for event in events[:-1])


def test_chunks_without_text_are_withheld(client: httpx.Client) -> None:
    """漢 is three tokens: the first round has no character yet."""
    prompt = TOKENIZER.encode("字").ids
    assert len(prompt) == 3
    assert stream(client, prompt=prompt, max_tokens=3)[0]["choices"][0]["text"] == "字"


def test_stream_usage(client: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = stream(client, prompt="hello the", max_tokens=7, stream_options=options)
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 7)
    assert last["spec"] == {"accept_length": 3.0, "verify_count": 2}
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 7
    assert "spec" not in chunks[-1]


def test_chat_stream(client: httpx.Client) -> None:
    events = stream(client, messages=[{"role": "user", "content": "x"}], max_tokens=20, return_token_ids=True)
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0]["role"] == "assistant"
    assert all("role" not in delta for delta in deltas[1:])
    assert "prompt_token_ids" in events[0]
    assert all(event["object"] == "chat.completion.chunk" for event in events)
    assert "".join(delta["content"] for delta in deltas).startswith("<user>x")


def test_token_ids_of_a_whole_answer(client: httpx.Client) -> None:
    completion = ask(client, prompt=[5, 6], max_tokens=3, return_token_ids=True).json()
    assert completion["choices"][0]["token_ids"] == [5, 6, 5]
    assert completion["choices"][0]["prompt_token_ids"] == [5, 6]
    chat = ask(client, messages=[{"role": "user", "content": "x"}], max_tokens=3, return_token_ids=True).json()
    assert len(chat["choices"][0]["token_ids"]) == 3
    assert chat["prompt_token_ids"] == TOKENIZER.encode("<user>x\n<assistant>").ids


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("prompt", "stop", "text"),
    [
        ("abcdef", "cd", "ab"),
        ("abcdef", ["x", "ef", "cde"], "ab"),
        ("abcdef", "fab", "abcde"),
        ("漢字 and 漢", "字", "漢"),
        ("abcdef", "a", ""),
    ],
)
def test_stop_strings(client: httpx.Client, prompt: str, stop: Any, text: str, streamed: bool) -> None:
    body = {"prompt": prompt, "stop": stop, "max_tokens": 60}
    if streamed:
        events = stream(client, **body, stream_options={"include_usage": True})
        shown = "".join(event["choices"][0]["text"] for event in events if event["choices"])
        reason, usage = events[-2]["choices"][0]["finish_reason"], events[-1]["usage"]
    else:
        document = ask(client, **body).json()
        shown, reason = document["choices"][0]["text"], document["choices"][0]["finish_reason"]
        usage = document["usage"]
    assert (shown, reason) == (text, "stop")
    ids = TOKENIZER.encode(prompt).ids
    stops = [stop] if isinstance(stop, str) else stop
    needed = next(n for n in range(1, 61) if any(s in _echo(ids, n) for s in stops))
    assert usage["completion_tokens"] == needed


def _echo(ids: list[int], count: int) -> str:
    text: str = TOKENIZER.decode([ids[i % len(ids)] for i in range(count)])
    return text


def test_a_stop_string_frees_the_slot(client: httpx.Client) -> None:
    before = client.get("/server_info").json()["rounds"]["graph_rounds"]  # the fake counts cancels there
    assert choice(ask(client, prompt="abcdef", stop="c", max_tokens=500))["finish_reason"] == "stop"
    wait_until(lambda: client.get("/server_info").json()["running"] == 0, "slot to be free")
    assert client.get("/server_info").json()["rounds"]["graph_rounds"] >= before


def test_unfinished_stop_is_shown_at_the_end(client: httpx.Client) -> None:
    assert choice(ask(client, prompt="abc", stop="cabx", max_tokens=5))["text"] == "abcab"


def test_eos(client: httpx.Client) -> None:
    prompt = [*TOKENIZER.encode("ab").ids, EOS, 9]
    answer = ask(client, prompt=prompt, max_tokens=10, return_token_ids=True).json()
    assert answer["choices"][0]["text"] == "ab"
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["token_ids"] == prompt[:3]
    assert answer["usage"]["completion_tokens"] == 3
    ignored = ask(client, prompt=prompt, max_tokens=8, ignore_eos=True).json()
    assert ignored["choices"][0]["finish_reason"] == "length"
    assert ignored["usage"]["completion_tokens"] == 8
    assert ignored["choices"][0]["text"] == TOKENIZER.decode(prompt * 2)


@pytest.mark.parametrize(
    ("body", "status", "words", "param"),
    [
        ({"prompt": "a", "model": "other"}, 404, "'other' does not exist", "model"),
        ({"prompt": "a", "temperature": "hot"}, 400, "temperature: a number is meant", "temperature"),
        ({"prompt": "a", "n": 2}, 400, "n = 1", "n"),
        ({"prompt": "a", "best_of": 3}, 400, "best_of is not supported", "best_of"),
        ({"prompt": "a", "suffix": "b"}, 400, "suffix", "suffix"),
        ({"prompt": "a", "presence_penalty": 0.1}, 400, "presence_penalty", "presence_penalty"),
        ({"prompt": "a", "logit_bias": {"5": 100}}, 400, "logit_bias", "logit_bias"),
        ({"prompt": "a", "stop": "x" * 1025}, 400, "1024", "stop"),
        ({"prompt": "a", "stop": ["x"] * 17}, 400, "stop", "stop"),
        ({"prompt": "a", "max_tokens": 0}, 400, "max_tokens", "max_tokens"),
        ({"prompt": "a", "max_tokens": True}, 400, "max_tokens", "max_tokens"),
        ({"prompt": "a", "stream": "yes"}, 400, "stream", "stream"),
        ({"prompt": ""}, 400, "no tokens", "prompt"),
        ({"prompt": []}, 400, "one text, or one list of token ids", "prompt"),
        ({"prompt": ["a", "b"]}, 400, "one text, or one list of token ids", "prompt"),
        ({"prompt": [1, -2]}, 400, "one text, or one list of token ids", "prompt"),
        ({"prompt": [1, 300]}, 400, "token id 300 is outside the vocabulary of 300", "prompt"),
        ({"prompt": [5] * 512}, 400, "512 tokens, the context of 512 tokens takes 511", "prompt"),
        ({"prompt": [5] * 401}, 400, "can never fit", None),  # the engine process says so
        ({"prompt": "x" * 100_000}, 400, "100000 characters", "prompt"),
        ({}, 400, "prompt", "prompt"),
        ({"messages": []}, 400, "messages", "messages"),
        ({"messages": [{"role": "user", "content": "a"}], "tools": [{}]}, 400, "tools", "tools"),
        ({"prompt": "a", "response_format": {"type": "json_object"}}, 400, "response_format", None),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages", "messages"),
        ({"messages": [{"role": "user"}], "chat_template_kwargs": 3}, 400, "must be an object", None),
        ({"messages": [{"role": "user"}], "chat_template_kwargs": {"messages": 3}}, 400, "may not set messages", None),
    ],
)  # fmt: skip
def test_refusals(client: httpx.Client, body: dict[str, Any], status: int, words: str, param: str | None) -> None:
    refused(ask(client, **body), status, words, param)


def test_neutral_fields_are_accepted(client: httpx.Client) -> None:
    neutral = {
        "n": 1, "best_of": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "top_p": 0.3,
        "top_k": 5, "seed": 7, "logit_bias": {}, "suffix": None, "user": "me", "temperature": 0, "logprobs": None,
        "stop": None, "stream_options": None, "unheard_of": {"x": 1}, "response_format": {"type": "text"},
    }  # fmt: skip
    assert choice(ask(client, prompt="hello", max_tokens=1, **neutral))["text"] == "hello"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "not JSON"),
        (b"[]", "must be a JSON object"),
        (b'{"model": "tiny", "prompt": "a", "temperature": NaN}', "not JSON"),
        (b'{"model": "tiny", "prompt": "\\ud800"}', "not JSON"),
        (b'{"model": "tiny", "prompt": "\xff"}', "not JSON"),
        (b'{"prompt":' + b"[" * 100_000, "not JSON"),
        (b'{"model": "tiny", "prompt": "a", "seed": ' + b"9" * 100_000 + b"}", "not JSON"),
        (b'{"model": "tiny", "prompt": [' + b"true," * 100_000 + b"1]}", "one text"),
    ],
)
def test_bodies_that_are_no_json(client: httpx.Client, data: bytes, words: str) -> None:
    headers = {"content-type": "application/json"}
    refused(client.post("/v1/completions", content=data, headers=headers), 400, words)


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded"])
def test_other_content_types(client: httpx.Client, kind: str | None) -> None:
    body = b'{"model": "tiny", "prompt": "a"}'
    headers = {} if kind is None else {"content-type": kind}
    refused(client.post("/v1/completions", content=body, headers=headers), 415, "application/json")


def test_chunked_bodies_and_charset(client: httpx.Client) -> None:
    parts = iter([b'{"model": "tiny", "prom', b'pt": "hello", "max_tokens": 1}'])
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    assert choice(client.post("/v1/completions", content=parts, headers=headers))["text"] == "hello"


def test_long_prompts_are_tokenised_aside(tmp_path: Path) -> None:
    text = "hello the " * 1000
    with fake(text_folder(tmp_path / "m"), "--max-len", "20000") as served, served.client() as client:
        answer = ask(client, prompt=text, max_tokens=2)
        assert answer.json()["usage"]["prompt_tokens"] == len(TOKENIZER.encode(text).ids)


def test_metrics(client: httpx.Client) -> None:
    def read() -> dict[str, float]:
        lines = [line for line in client.get("/metrics").text.splitlines() if not line.startswith("#")]
        return {
            line.rsplit(" ", 1)[0].replace('model_name="tiny"', "m"): float(line.rsplit(" ", 1)[1]) for line in lines
        }

    before = read()
    ask(client, prompt=[5] * 7, max_tokens=10)
    after = read()

    def grew(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    assert grew("engine:prompt_tokens_total{m}") == 7
    assert grew("engine:generation_tokens_total{m}") == 10
    assert grew("engine:time_to_first_token_seconds_count{m}") == 1
    assert grew("engine:inter_token_latency_seconds_count{m}") == 9
    assert grew("engine:e2e_request_latency_seconds_count{m}") == 1
    assert grew('engine:num_requests_total{finish_reason="length",m}') == 1
    assert (
        after['engine:inter_token_latency_seconds_bucket{le="+Inf",m}']
        == after["engine:inter_token_latency_seconds_count{m}"]
    )
    assert after['engine:spec_accept_rate_by_position{m,position="2"}'] == 0.5
    for name in (
        "num_running_reqs",
        "num_queue_reqs",
        "gen_throughput",
        "spec_accept_length",
        "spec_accept_rate",
        "token_usage",
    ):
        assert f"engine:{name}{{m}}" in after
    assert "engine:spec_verify_calls_total{m}" in after


def test_errors_of_the_engine(tmp_path: Path) -> None:
    """Before the first token an error has a status, after it the stream ends with an error and no [DONE]."""
    with fake(text_folder(tmp_path / "m"), "--break-after", "4") as served, served.client() as client:
        refused(ask(client, prompt="hello", max_tokens=9), 500, "the cache is full")
        lines = ask(client, prompt="hello", max_tokens=9, stream=True).text.strip().split("\n\n")
        assert json.loads(lines[-1].removeprefix("data: "))["error"]["message"] == "the cache is full"
        assert choice(ask(client, prompt="hello", max_tokens=3))["text"] == "hello" * 3


def test_a_target_without_a_chat_template(tmp_path: Path) -> None:
    with fake(text_folder(tmp_path / "m", chat=False)) as served, served.client() as client:
        assert choice(ask(client, prompt="hello", max_tokens=1))["text"] == "hello"
        refused(ask(client, messages=[{"role": "user", "content": "a"}]), 400, "no chat template")
