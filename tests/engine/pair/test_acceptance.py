"""Walking a known trajectory against loops that really draft and verify."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.pair.acceptance import (
    CHAIN,
    Trajectories,
    accept_length,
    draft_everywhere,
    trajectories,
    verify_rounds,
    walk,
)
from engine.pair.card import read_result
from engine.pair.evaluate import Plan, as_json, measure, report
from engine.pair.modules import Drafter, Target
from engine.pair.proof import checks
from engine.pair.trees import best_ranks, tree_accepts
from engine.pair.workload import Prompt


def draft_logits(target: Target, drafter: Drafter, ids: list[int], block: int, depth: int) -> torch.Tensor:
    """Logits [block-1, V] of one block after ``ids``, whose last token is the block's first."""
    context = len(ids) - 1
    _, features = target(torch.tensor([ids[:-1]]), drafter.config.target_layer_ids)
    assert features is not None
    tokens = torch.tensor([[ids[-1]] + [drafter.config.mask_token_id] * (block - 1)])
    outputs = drafter(
        target.embed(tokens), features, context + torch.arange(block)[None], torch.arange(context)[None],
        torch.ones(1, 1, block, context + block, dtype=torch.bool),
    )  # fmt: skip
    return target.logits(outputs[depth - 1])[0, 1:]


def verifying_loop(
    target: Target, drafter: Drafter, prompt: list[int], new: int, block: int, depth: int, nodes: int
) -> tuple[list[int], int]:
    """Generated tokens and verify rounds of plain speculative decoding: no cache, no known future."""

    def choice(ids: list[int]) -> int:
        hidden, _ = target(torch.tensor([ids]))
        return int(target.logits(hidden)[0, -1].argmax())

    ids, rounds = [*prompt, choice(prompt)], 0
    while len(ids) < len(prompt) + new:
        best = draft_logits(target, drafter, ids, block, depth).log_softmax(dim=-1).topk(max(nodes, 1))
        ranked, log_probs = best.indices.tolist(), best.values.tolist()
        tree = {(0,) * d for d in range(1, block)} if nodes == CHAIN else set(best_ranks(log_probs, nodes))
        path: tuple[int, ...] = ()
        rounds += 1
        while True:  # verify: the target's own choice decides where the walk goes
            token = choice(ids)
            ids.append(token)
            row = ranked[len(path)] if len(path) < len(ranked) else []
            step = (*path, row.index(token)) if token in row else None
            if step not in tree:
                break
            path = step
    return ids[len(prompt) : len(prompt) + new], rounds


@pytest.mark.parametrize(("block", "depth", "nodes"), [(4, 2, CHAIN), (16, 1, CHAIN), (8, 2, CHAIN), (16, 2, 16)])
def test_the_walk_is_a_verifying_loop(
    target: Target, drafter: Drafter, prompts: list[Prompt], block: int, depth: int, nodes: int
) -> None:
    new = 40
    few = prompts[:3]
    ids = torch.tensor([prompt.token_ids for prompt in few])
    known = trajectories(target, drafter.config.target_layer_ids, ids, new, 0.0, stops=())
    rounds: list[int] = []
    for drafts in draft_everywhere(target, drafter, known, block, (depth,), max(nodes, 1)):
        rounds += verify_rounds(drafts, known, (nodes,))[0]
    for row, prompt in enumerate(few):
        tokens, verified = verifying_loop(target, drafter, list(prompt.token_ids), new, block, depth, nodes)
        assert tokens == known.generated(row)
        assert verified == rounds[row]


def test_a_stop_token_ends_the_request(target: Target, prompts: list[Prompt]) -> None:
    ids = torch.tensor([prompt.token_ids for prompt in prompts[:4]])
    whole = trajectories(target, (0,), ids, 30, 0.0, stops=())
    stop = whole.generated(0)[7]
    cut = trajectories(target, (0,), ids, 30, 0.0, stops=(stop,))
    first = whole.generated(0).index(stop)
    assert cut.generated(0) == whole.generated(0)[: first + 1]


def test_walk_cuts_the_last_round() -> None:
    assert walk(lambda _: 0, 5) == 4
    assert walk(lambda _: 15, 5) == 1
    assert walk([2, 0, 0, 1, 0].__getitem__, 6) == 2
    assert walk(lambda _: 3, 1) == 0


def test_requests_weigh_by_their_verify_count() -> None:
    measured = accept_length([2, 8], [9, 9], [0, 1])
    assert measured.weighted == 16 / 10
    assert measured.per_request == (4 + 1) / 2
    with pytest.raises(ValueError, match="two generated tokens"):
        accept_length([0], [1], [0])


def brute_force_tree(log_probs: list[list[float]], nodes: int) -> set[tuple[int, ...]]:
    """The best ``nodes`` of all rank paths, by score, then by path."""
    ranks = range(len(log_probs[0]))
    paths = [p for d in range(1, len(log_probs) + 1) for p in itertools.product(ranks, repeat=d)]
    return set(sorted(paths, key=lambda p: (-sum(log_probs[d][r] for d, r in enumerate(p)), p))[:nodes])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(0, 30))
def test_best_ranks_are_the_best_set(seed: int, nodes: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, 5, generator=generator, dtype=torch.float64) * 2
    log_probs = logits.log_softmax(dim=-1).sort(dim=-1, descending=True).values.tolist()
    assert set(best_ranks(log_probs, nodes)) == brute_force_tree(log_probs, nodes)


def test_tree_accepts_along_the_truth() -> None:
    log_probs = [[-0.1, -2.5], [-0.2, -1.8], [-0.3, -1.5]]
    assert best_ranks(log_probs, 3) == [(0,), (0, 0), (0, 0, 0)]
    assert tree_accepts(log_probs, [0, 0, 1], 3) == 2
    assert tree_accepts(log_probs, [1, 0, 0], 3) == 0
    assert tree_accepts(log_probs, [0, None, 0], 3) == 1
    assert tree_accepts(log_probs, [None, 0, 0], 3) == 0
    assert tree_accepts(log_probs, [0, 0, 0], 0) == 0


def test_lengths_bound_the_generated_tokens() -> None:
    tokens = torch.arange(12).view(2, 6)
    known = Trajectories(tokens, torch.zeros(2, 6, 1), prompt=2, lengths=[4, 1])
    assert known.generated(0) == [2, 3, 4, 5]
    assert known.generated(1) == [8]


def test_evaluation_survives_its_json(target: Target, drafter: Drafter, prompts: list[Prompt], tmp_path: Path) -> None:
    """Measured cells, written and read back, print the same report; every bound is checked from them."""
    plan = Plan(blocks=(8, 16), depths=(1, 2), nodes=(CHAIN, 32), temperatures=(0.0, 0.8), new_tokens=32)
    result = measure(target, drafter, prompts[:6], plan)
    path = tmp_path / "evaluation.json"
    path.write_text(json.dumps(as_json(result)))
    assert report(read_result(path), {}) == report(result, {})
    verdicts = {check.name: check for check in checks(result, {}, weight_bytes=20_000_001)}
    assert not verdicts["weights, bytes"].holds
    chain = next(c for c in result["cells"] if (c.block, c.depth, c.nodes, c.temperature) == (16, 2, CHAIN, 0.0))
    assert verdicts["accept length, block 16, greedy"].measured == chain.accept.weighted
    assert chain.with_loops.requests >= chain.accept.requests
