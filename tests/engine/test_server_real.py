"""The whole server with the real engine process and the smoke pair, and OpenAI's own client against it."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
import yaml

from engine.front.api import is_loopback
from tests.engine.serving import ROOT, Served, raw_request, started, talk
from tests.waiting import DEADLINE, alive, wait_until

SMOKE = ROOT / "tests" / "data" / "smoke_pair"
TARGET = str(SMOKE / "target")
PROMPTS: list[list[int]] = [each["token_ids"] for each in json.loads((SMOKE / "prompts.json").read_text())[:12]]
LOAD_DEADLINE = 5 * DEADLINE  # torch's import on a busy machine


@contextmanager
def serving(folder: Path, ready: bool = True, **config: Any) -> Iterator[Served]:
    """Run `python -m engine serve` with a config."""
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump({"model": {"target": TARGET, "dtype": "float32"}, **config}))
    with started([sys.executable, "-m", "engine", "serve", str(path), "--port", "0"]) as served:
        if ready:
            event = served.event("listening")
            served.url, served.port, served.engine_pid = event["url"], event["port"], event["engine_pid"]
            served.event("ready", LOAD_DEADLINE)
        yield served


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("none")) as served:
        yield served
        os.kill(served.process.pid, signal.SIGKILL)
        wait_until(lambda: not alive(served.engine_pid), "the engine process's end after the front's")


@pytest.fixture(scope="module")
def drafted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    draft = {"kind": "dflash", "model": str(SMOKE / "draft"), "block_size": 4}
    with serving(tmp_path_factory.mktemp("dflash"), draft=draft) as served:
        yield served
        os.kill(served.process.pid, signal.SIGINT)
        assert served.ended()["message"] == "SIGINT: all requests finished"


def body(prompt: list[int], **more: Any) -> dict[str, Any]:
    return {"model": TARGET, "prompt": prompt, "max_tokens": 32, "ignore_eos": True, "return_token_ids": True, **more}


async def answers(port: int, bodies: list[dict[str, Any]]) -> list[bytes]:
    """Send all at once."""
    requests = [raw_request(json.dumps(each), connection="close") for each in bodies]
    return await asyncio.gather(*(talk(port, each) for each in requests))


def ids(answer: bytes) -> list[int]:
    """Return the token ids of an answer, whole or streamed."""
    head, _, rest = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), answer
    if b"text/event-stream" not in head:
        found: list[int] = json.loads(rest)["choices"][0]["token_ids"]
        return found
    lines = [line.removeprefix(b"data: ") for line in rest.split(b"\n") if line.startswith(b"data: {")]
    return [token for line in lines for token in json.loads(line)["choices"][0]["token_ids"]]


def test_speculation_changes_nothing_but_the_time(plain: Served, drafted: Served) -> None:
    """Alone and all at once, streamed and whole: the same tokens (float32)."""
    expected = [ids(asyncio.run(answers(plain.port, [body(prompt)]))[0]) for prompt in PROMPTS[:4]]
    assert all(len(each) == 32 for each in expected)
    together = asyncio.run(answers(plain.port, [body(prompt) for prompt in PROMPTS]))
    assert [ids(each) for each in together[:4]] == expected
    streamed = [body(prompt, stream=i % 2 == 0) for i, prompt in enumerate(PROMPTS)]
    speculative = asyncio.run(answers(drafted.port, streamed))
    assert [ids(each) for each in speculative] == [ids(each) for each in together]


def ending(answer: bytes) -> tuple[str, list[int], str | None, int]:
    """Return what a client reads of an answer: text, token ids, finish reason, counted tokens."""
    head, _, rest = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), answer
    documents = events(rest) if b"text/event-stream" in head else [json.loads(rest)]
    choices = [choice for document in documents for choice in document["choices"]]
    finish = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    usage = [document["usage"] for document in documents if document.get("usage")]
    assert len(finish) == len(usage) == 1
    text = "".join(choice["text"] for choice in choices)
    return text, [t for choice in choices for t in choice["token_ids"]], finish[0], usage[0]["completion_tokens"]


def test_stops_inside_a_block_are_those_of_plain_decoding(plain: Served, drafted: Served) -> None:
    """Stop strings from everywhere in the text, max_tokens at every offset, eos heeded; streamed and whole."""
    text = ending(asyncio.run(answers(plain.port, [body(PROMPTS[0])]))[0])[0]
    stops = [text[start : start + length] for start in range(0, len(text) - 6, 7) for length in (1, 6)]
    wishes: list[dict[str, Any]] = [{"stop": stop} for stop in stops]
    wishes += [{"max_tokens": count} for count in range(1, 12)]
    wishes += [{"stop": stops[3:9], "max_tokens": count, "ignore_eos": False} for count in (3, 20, 4000)]
    found = []
    for served, stream in ((plain, False), (drafted, False), (drafted, True)):
        extra = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        bodies = [body(PROMPTS[0], **wish, **extra) for wish in wishes]
        found.append([ending(answer) for answer in asyncio.run(answers(served.port, bodies))])
    assert found[0] == found[1] == found[2]
    assert {finish for _, _, finish, _ in found[0]} == {"stop", "length"}
    assert all(stop not in each[0] for stop, each in zip(stops, found[0], strict=False))


def test_counters(drafted: Served) -> None:
    with drafted.client() as client:
        before = client.get("/server_info").json()
        document = client.post("/v1/completions", json=body(PROMPTS[0])).json()
        after = client.get("/server_info").json()
        metrics = client.get("/metrics").text
    spec = document["spec"]
    rounds = after["rounds"]["rounds"] - before["rounds"]["rounds"]
    assert spec["verify_count"] == rounds
    assert spec["accept_length"] == pytest.approx(31 / rounds)
    assert after["rounds"]["target_rows"] - before["rounds"]["target_rows"] == 4 * rounds
    assert (after["running"], after["waiting"]) == (0, 0)
    assert "engine:token_usage" in metrics
    assert after["config"]["draft"]["block_size"] == 4


def test_leaving_frees_the_slot(drafted: Served) -> None:
    with drafted.client() as client:
        with client.stream("POST", "/v1/completions", json=body(PROMPTS[0], max_tokens=4000, stream=True)) as answer:
            next(answer.iter_lines())
        wait_until(lambda: client.get("/server_info").json()["running"] == 0, "the slot to be free")


def test_memory(drafted: Served) -> None:
    total = sum(psutil.Process(pid).memory_info().rss for pid in (drafted.process.pid, drafted.engine_pid))
    assert total < 10**9


def test_openai_client(drafted: Served) -> None:
    """OpenAI's Python client, unchanged."""
    client = openai.OpenAI(base_url=f"{drafted.url}/v1", api_key="none", timeout=DEADLINE, max_retries=0)
    assert [model.id for model in client.models.list()] == [TARGET]
    completion = client.completions.create(model=TARGET, prompt="def add(", max_tokens=20)
    assert completion.usage is not None
    assert 1 <= completion.usage.completion_tokens <= 20
    text = completion.choices[0].text
    chunks = list(
        client.completions.create(
            model=TARGET, prompt="def add(", max_tokens=20, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == text
    assert chunks[-1].usage == completion.usage
    if text.strip():
        stop = text.strip()[0]
        cut = client.completions.create(model=TARGET, prompt="def add(", max_tokens=20, stop=stop)
        assert (cut.choices[0].text, cut.choices[0].finish_reason) == (text[: text.index(stop)], "stop")

    messages: Any = [{"role": "user", "content": "Write a function."}]
    chat = client.chat.completions.create(model=TARGET, messages=messages, max_completion_tokens=20)
    stream = client.chat.completions.create(model=TARGET, messages=messages, max_completion_tokens=20, stream=True)
    deltas = [chunk.choices[0].delta for chunk in stream]
    assert deltas[0].role == chat.choices[0].message.role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == chat.choices[0].message.content

    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.completions.create(model="other", prompt="a")
    scored = client.completions.create(model=TARGET, prompt="a", logprobs=2, temperature=0, max_tokens=4)
    logprobs = scored.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.top_logprobs is not None
    assert [max(each.values()) for each in logprobs.top_logprobs] == logprobs.token_logprobs
    turn = client.chat.completions.create(model=TARGET, messages=messages, logprobs=True, top_logprobs=2, max_tokens=4)
    assert turn.choices[0].logprobs is not None
    assert all(len(each.top_logprobs) == 2 for each in turn.choices[0].logprobs.content or [])
    drawn = [client.completions.create(model=TARGET, prompt="a", temperature=1.0, seed=seed) for seed in (1, 1, 2)]
    texts = [each.choices[0].text for each in drawn]
    assert texts[0] == texts[1] != texts[2]
    with pytest.raises(openai.BadRequestError, match="context"):
        client.completions.create(model=TARGET, prompt=[5] * 5000)


def test_the_draft_of_a_running_server_is_swapped(drafted: Served) -> None:
    expected = ids(asyncio.run(answers(drafted.port, [body(PROMPTS[0])]))[0])
    with drafted.client() as client:
        policy = [
            [1, 1, {"kind": "dflash", "model": str(SMOKE / "draft"), "block_size": 2}],
            [2, None, {"kind": "none"}],
        ]
        answer = client.post("/policy", json={"by_running": policy})
        assert answer.status_code == 200, answer.text
        assert client.get("/server_info").json()["config"]["draft"]["kind"] == "policy"
        assert ids(asyncio.run(answers(drafted.port, [body(PROMPTS[0])]))[0]) == expected
        assert client.get("/server_info").json()["policy_entry"] == 0
        assert client.post("/policy", json={"kind": "none"}).status_code == 200  # and back, its draft KV whole
        assert ids(asyncio.run(answers(drafted.port, [body(PROMPTS[0])]))[0]) == expected
        assert client.get("/server_info").json()["policy_entry"] is None
        for wrong in ({"window": 8}, {"model": "elsewhere"}, {"layers": 9}, {"simulate_accept": 2}):
            refused = client.post("/policy", json={"kind": "dflash", "block_size": 4, **wrong})
            assert refused.status_code in (400, 409), refused.text
        too_long = client.post("/policy", json={"kind": "dflash", "block_size": 64})
        assert (too_long.status_code, too_long.json()["error"]["type"]) == (409, "conflict")
        assert client.post("/policy", content=b"{}").status_code == 415
        chain = {"kind": "dflash", "model": str(SMOKE / "draft"), "block_size": 4}
        assert client.post("/policy", json=chain).status_code == 200
        assert client.get("/server_info").json()["config"]["draft"]["layers"] == 2, "a resolved draft is shown"


@pytest.mark.parametrize(("host", "own"), [("127.0.0.1", True), ("::1", True), ("10.0.0.1", False), ("", False)])
def test_whose_address_it_is(host: str, own: bool) -> None:
    assert is_loopback(host) is own


@pytest.mark.parametrize("stream", [False, True])
def test_echo_scores_the_prompt_like_transformers(drafted: Served, stream: bool) -> None:
    """Every token's log-probability is the target's, prompt and answer alike, with speculation on."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    for prompt in PROMPTS[:3]:
        asked = body(prompt, max_tokens=12, echo=True, logprobs=3, return_tokens_as_token_ids=True, stream=stream)
        answer = asyncio.run(answers(drafted.port, [asked]))[0].partition(b"\r\n\r\n")[2]
        found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        text = ""
        for document in events(answer) if stream else [json.loads(answer)]:
            for each in document["choices"]:
                text += each["text"]
                for name, values in (each["logprobs"] or {}).items():
                    found[name] += values
        tokens = [int(name.removeprefix("token_id:")) for name in found["tokens"]]
        assert tokens[: len(prompt)] == prompt
        assert len(tokens) == len(prompt) + 12
        with torch.inference_mode():
            expected = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
        assert found["token_logprobs"][0] is None
        own = expected[:-1].gather(1, torch.tensor(tokens[1:])[:, None]).flatten()
        assert torch.allclose(torch.tensor(found["token_logprobs"][1:]), own, atol=1e-4)
        for row, best in enumerate(found["top_logprobs"][1:]):
            assert set(best) == {f"token_id:{i}" for i in expected[row].topk(3).indices.tolist()}
        assert found["text_offset"] == sorted(found["text_offset"])
        assert found["text_offset"][-1] < len(text)


def events(answer: bytes) -> list[dict[str, Any]]:
    """Return the JSON events of a chunked event stream."""
    text = answer.decode()
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: {")]


def test_end(tmp_path: Path) -> None:
    """SIGTERM while requests run: they finish, both processes end, the status is 0."""
    with serving(tmp_path) as served:
        with (
            served.client() as client,
            client.stream("POST", "/v1/completions", json=body(PROMPTS[0], stream=True)) as answer,
        ):
            lines = answer.iter_lines()
            next(lines)
            os.kill(served.process.pid, signal.SIGTERM)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert served.ended()["code"] == 0


def truncated(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


@pytest.mark.parametrize(
    ("spoil", "code", "words"),
    [
        (lambda folder: shutil.rmtree(folder), 3, "no such folder"),
        (truncated, 3, "model.safetensors"),
    ],
)
def test_model_files_that_cannot_be_used(tmp_path: Path, spoil: Any, code: int, words: str) -> None:
    target = tmp_path / "target"
    shutil.copytree(SMOKE / "target", target)
    spoil(target)
    with serving(tmp_path, ready=False, model={"target": str(target)}) as served:
        assert served.process.wait(LOAD_DEADLINE) == code
        events = [event for event in served.events if event["event"] == "exit"]
    assert len(events) == 1
    assert words in events[0]["message"]
    assert "Traceback" not in "\n".join(served.lines)
