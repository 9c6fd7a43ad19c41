from __future__ import annotations

import json
from pathlib import Path

import pytest

from tuner.load.sources import JsonlPrompts
from tuner.load.workload import WorkloadError, load_prompts, make_requests
from tuner.records import Workload


def write(folder: Path, *lines: object) -> str:
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return str(path)


def test_reads_texts_token_ids_and_messages(tmp_path: Path) -> None:
    name = write(
        tmp_path,
        {"prompt": "hello", "category": "greeting"},
        "",
        {"id": 3, "package": "numpy", "text": "import", "token_ids": [5, 6]},
        {"messages": [{"role": "user", "content": "hi"}]},
    )
    first, second, third = load_prompts(JsonlPrompts(path=name))
    assert (first.prompt, first.slice, first.path) == ("hello", "greeting", "/v1/completions")
    assert (second.prompt, second.slice) == ((5, 6), "")
    assert (third.messages, third.path) == (({"role": "user", "content": "hi"},), "/v1/chat/completions")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("not json", ":2: "),
        ({"prompt": 5}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({}, "needs `prompt`"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "x"}], "prompt": "y"}, "not both"),
        ({"text": "a", "token_ids": [-1]}, "token_ids"),
        ("[1, 2]", ":2: "),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: object, words: str) -> None:
    name = write(tmp_path, {"prompt": "fine"}, line)
    with pytest.raises(WorkloadError) as caught:
        load_prompts(JsonlPrompts(path=name))
    assert str(caught.value).startswith(f"{name}:2: ")
    assert words in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xff\xfe"])
def test_a_file_without_prompts_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(content)
    with pytest.raises(WorkloadError):
        load_prompts(JsonlPrompts(path=str(path)))


def test_a_missing_file_is_refused() -> None:
    with pytest.raises(WorkloadError, match="there is no file"):
        load_prompts(JsonlPrompts(path="/nowhere/prompts.jsonl"))


def test_requests_are_the_same_for_every_candidate(tmp_path: Path) -> None:
    name = write(tmp_path, *[{"prompt": f"p{i}"} for i in range(10)])
    workload = Workload(prompts=name, output_tokens=8, ignore_eos=True)
    one, two = make_requests(workload, "m", 3), make_requests(workload, "m", 3)
    assert [one.make(i) for i in range(25)] == [two.make(i) for i in range(25)]
    assert one.order != make_requests(workload, "m", 4).order
    assert sorted(one.order) == list(range(10))
    bodies = [json.loads(one.make(i).body) for i in range(20)]
    assert {body["prompt"] for body in bodies[:10]} == {f"p{i}" for i in range(10)}
    assert [body["prompt"] for body in bodies[:10]] == [body["prompt"] for body in bodies[10:]]
    assert bodies[5] == {
        "model": "m",
        "prompt": bodies[5]["prompt"],
        "max_tokens": 8,
        "temperature": 0,
        "seed": 8,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "ignore_eos": True,
    }
    assert json.loads(one.make(0, output_tokens=2).body)["max_tokens"] == 2
