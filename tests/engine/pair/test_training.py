"""The pieces of training that go wrong silently: masks, labels, repeats, prompts, schedules."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.pair.corpus import Document
from engine.pair.data import chat_frame, chat_prompts, encode_stream, held_out_prompts
from engine.pair.modules import Drafter, Target
from engine.pair.optim import Clock, orthogonalise, trapezoid
from engine.pair.recipe import SMOKE
from engine.pair.tokenizer import END_OF_TEXT_ID, load_tokenizer, train_tokenizer
from engine.pair.train import main
from engine.pair.train_drafter import Layout, draft_mask, draft_pass
from engine.pair.train_target import LOOP_PERIOD, LOOP_RUN, repetition
from engine.pair.workload import Prompt, load_workload, parse_prompt, save_workload
from tests.engine.pair.conftest import SMOKE as FOLDER
from tests.engine.pair.test_corpus import source_text


def test_draft_mask_by_hand() -> None:
    layout = Layout.of(((2, 1), (3, 1)), torch.device("cpu"))
    mask = draft_mask(torch.tensor([[1, 3]]), layout, 4)[0, 0].int().tolist()
    first, second = [1, 0, 0, 0, 1, 1, 0, 0, 0], [1, 1, 1, 0, 0, 0, 1, 1, 1]
    assert mask == [first, first, second, second, second]
    assert layout.drafted.tolist() == [1, 3, 4]
    assert layout.start.tolist() == [0, 0, 2, 2, 2]


def test_draft_pass_agrees_with_single_blocks(target: Target, drafter: Drafter, prompts: list[Prompt]) -> None:
    """Guesses, slots and liveness of the training pass are those of one block drafted alone."""
    rows = torch.tensor([prompts[0].token_ids])
    features = target.features(rows, drafter.config.target_layer_ids)
    recipe = replace(SMOKE, blocks=((4, 1), (16, 1)))
    layout = Layout.of(recipe.blocks, rows.device)
    anchors = torch.tensor([[40, 90]])
    drafted = draft_pass(drafter, target, rows, features, anchors, layout, recipe)
    slot = 0
    for anchor, block in ((40, 4), (90, 16)):
        tokens = torch.tensor([[int(rows[0, anchor]), *[drafter.config.mask_token_id] * (block - 1)]])
        mask = torch.ones(1, 1, block, anchor + block, dtype=torch.bool)
        positions = anchor + torch.arange(block)[None]
        alone = drafter(target.embed(tokens), features[:, :anchor], positions, torch.arange(anchor)[None], mask)
        guess = target.logits(alone[-1])[0, 1:].argmax(dim=-1)
        assert drafted.guess[0, slot : slot + block - 1].tolist() == guess.tolist()
        live = True
        for place in range(1, block):
            exists = anchor + place < rows.shape[1]
            assert bool(drafted.live[0, slot + place - 1]) == (live and exists)
            if exists:
                assert drafted.slots[0, slot + place - 1] == anchor + place
                live = live and guess[place - 1] == rows[0, anchor + place]
        slot += block - 1
    assert drafted.loss.isfinite()


def brute_repetition(tokens: list[int], prompt: int) -> list[bool]:
    marked, looped = [False] * len(tokens), False
    for period in range(1, LOOP_PERIOD + 1):
        run = 0
        for i in range(len(tokens)):
            same = i >= max(prompt, period) and tokens[i] == tokens[i - period]
            run = run + 1 if same else 0
            marked[i] |= run >= period + 8
            looped |= run >= max(LOOP_RUN, 2 * period)
    return [mark and looped for mark in marked]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 2), max_size=30), st.lists(st.integers(0, 2), min_size=1, max_size=12), st.integers(1, 40)
)
def test_repetition_is_brute_force(head: list[int], block: list[int], times: int) -> None:
    tokens = ([*head, *block * times] + [9] * 8)[:160]
    if len(tokens) <= LOOP_PERIOD:
        tokens += list(range(10, 10 + LOOP_PERIOD))
    assert repetition(torch.tensor([tokens]), 5)[0].tolist() == brute_repetition(tokens, 5)


def test_orthogonalise_flattens_singular_values() -> None:
    torch.manual_seed(0)
    for shape in ((2, 48, 24), (2, 24, 48)):
        values = torch.linalg.svdvals(orthogonalise(torch.randn(*shape)))
        assert 0.5 < values.min() <= values.max() < 1.5


def test_schedule_and_clock() -> None:
    assert trapezoid(0.0, 0, 100, 0.4) == pytest.approx(0.01)
    assert trapezoid(0.3, 500, 100, 0.4) == 1.0
    assert trapezoid(0.7, 500, 100, 0.4) == pytest.approx(0.5)
    assert trapezoid(1.0, 500, 100, 0.4, floor=0.1) == pytest.approx(0.1)
    with pytest.raises(ValueError, match="no time left"):
        Clock(0)


def test_streams_and_chat_frames() -> None:
    tokenizer = load_tokenizer(FOLDER / "target")
    documents = [Document("p", f"{i}.py", source_text(i, 10)) for i in range(30)]
    plain = encode_stream(tokenizer, documents, seed=0, chat=False)
    assert plain.dtype == np.uint16
    assert (plain == END_OF_TEXT_ID).sum() == 30
    assert (encode_stream(tokenizer, documents, seed=0, chat=False) == plain).all()
    frame = chat_frame(tokenizer, system=True)
    rendered = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
    assert frame.before == tokenizer.encode(rendered).ids
    rows = chat_prompts(torch.full((2, 300), 77), frame, 200)
    assert rows.shape == (2, 200)
    assert rows[0, -len(frame.between) :].tolist() == frame.between
    with pytest.raises(ValueError, match="no room"):
        chat_prompts(torch.full((2, 300), 77), frame, 5)


def test_held_out_prompts_are_real_windows() -> None:
    documents = [Document(p, f"{i}.py", source_text(i, 200)) for i, p in enumerate("aabb")]
    tokenizer = train_tokenizer((d.text for d in documents), 400)
    found = held_out_prompts(tokenizer, documents, 6, seed=0)
    assert [prompt.package for prompt in found] == ["a"] * 3 + ["b"] * 3
    for prompt in found:
        assert tuple(tokenizer.encode(prompt.text).ids) == prompt.token_ids
        assert any(prompt.text in d.text for d in documents if d.package == prompt.package)
    with pytest.raises(ValueError, match="only 0 of"):
        held_out_prompts(tokenizer, [Document("c", "c.py", "x = 1\n")], 1, seed=0)


def test_workload_files(tmp_path: object) -> None:
    from pathlib import Path

    folder = Path(str(tmp_path))
    prompts = [Prompt(0, "p", "é", (1, 2)), Prompt(1, "q", "\n", (3,))]
    for name in ("a.json", "a.jsonl"):
        save_workload(prompts, folder / name)
        assert load_workload(folder / name) == prompts
    with pytest.raises(ValueError, match="token_ids"):
        parse_prompt({"id": 0, "package": "p", "text": "t", "token_ids": ["a"]})
    with pytest.raises(ValueError, match="id \\(int\\)"):
        parse_prompt({"package": "p", "text": "t", "token_ids": [1]})


def test_the_command_refuses_bad_times(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--smoke", "--minutes", "9", "--out", "nowhere"])
    assert "at most 8" in capsys.readouterr().err
