from __future__ import annotations

import itertools
import json
import statistics
from pathlib import Path

import pytest

from tuner.load.sources import JsonlPrompts, RandomPrompts, ShareGptPrompts
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
    workload = Workload(prompts=JsonlPrompts(path=name), output_tokens=8, ignore_eos=True)
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


# --- the other kinds ---


def sharegpt(folder: Path, document: object) -> str:
    path = folder / "talks.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    return str(path)


TALKS = [
    {
        "conversations": [
            {"from": "system", "value": "Be brief."},
            {"from": "human", "value": "Why?"},
            {"from": "gpt", "value": "x"},
        ]
    },
    {"conversations": [{"from": "gpt", "value": "I begin"}, {"from": "human", "value": "no"}]},
    {"conversation": [{"role": "user", "content": "Hi"}], "category": "chat"},
]


def test_sharegpt_asks_what_comes_before_the_first_answer(tmp_path: Path) -> None:
    path = sharegpt(tmp_path, TALKS)
    chat = load_prompts(ShareGptPrompts(path=path))
    assert [prompt.messages for prompt in chat] == [
        ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}),
        ({"role": "user", "content": "Hi"},),
    ]
    assert [prompt.slice for prompt in chat] == ["", "chat"]
    assert [prompt.prompt for prompt in load_prompts(ShareGptPrompts(path=path, chat=False))] == [
        "Be brief.\n\nWhy?",
        "Hi",
    ]


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({}, "not a list"),
        ([3], "conversation 0"),
        ([{"conversations": [{"from": "human"}]}], "conversation 0"),
        ([], "no conversation"),
    ],
)
def test_a_bad_sharegpt_file_is_refused(tmp_path: Path, document: object, words: str) -> None:
    with pytest.raises(WorkloadError, match=words):
        load_prompts(ShareGptPrompts(path=sharegpt(tmp_path, document)))


def test_random_prompts_have_their_lengths_and_a_warning() -> None:
    source = RandomPrompts(input_tokens=(5, 9), vocabulary=50, count=40)
    found = load_prompts(source, 1)
    assert {len(prompt.prompt or ()) for prompt in found} == {5, 6, 7, 8, 9}
    assert all(
        isinstance(prompt.prompt, tuple) and 0 <= min(prompt.prompt) <= max(prompt.prompt) < 50 for prompt in found
    )
    assert found == load_prompts(source, 1) != load_prompts(source, 2)
    assert "misjudge" in Workload(prompts=source).warnings[0]
    assert Workload().warnings == ()


@pytest.mark.parametrize("share", [0.25, 0.5, 0.9])
@pytest.mark.parametrize("kind", ["text", "ids", "chat"])
def test_a_share_of_every_prompt_is_common(tmp_path: Path, share: float, kind: str) -> None:
    def line(i: int) -> dict[str, object]:
        text = f"question {i:3d} " * 10
        return {
            "text": {"prompt": text},
            "ids": {"token_ids": [i] * 60},
            "chat": {"messages": [{"role": "user", "content": text}]},
        }[kind]

    workload = Workload.model_validate({"prompts": write(tmp_path, *map(line, range(12))), "shared_prefix": share})
    made = make_requests(workload, "m", 0).prompts
    asked = [prompt.prompt if kind == "ids" else prompt.text for prompt in made]
    assert all(text is not None for text in asked)
    columns = zip(*(text or () for text in asked), strict=False)
    common = sum(1 for _ in itertools.takewhile(lambda column: len(set(column)) == 1, columns))
    assert common / statistics.median(len(text or ()) for text in asked) == pytest.approx(share, abs=0.1)


def test_categories_choose(tmp_path: Path) -> None:
    path = write(tmp_path, {"prompt": "a", "category": "code"}, {"prompt": "b", "category": "prose"}, {"prompt": "c"})
    chosen = make_requests(Workload.model_validate({"prompts": path, "categories": ["code"]}), "m", 0)
    assert [prompt.prompt for prompt in chosen.prompts] == ["a"]
    with pytest.raises(WorkloadError, match=r"no prompt has category verse; there are .*code, prose"):
        make_requests(Workload.model_validate({"prompts": path, "categories": ["verse"]}), "m", 0)


@pytest.mark.parametrize(
    ("word", "kind"),
    [("bundled", "bundled"), ("random", "random"), ("a.json", "sharegpt"), ("a.jsonl", "jsonl"), ("a", "jsonl")],
)
def test_a_word_stands_for_a_kind(word: str, kind: str) -> None:
    assert Workload.model_validate({"prompts": word}).prompts.kind == kind
