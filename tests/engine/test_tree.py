"""Trees against brute force, and both builders against each other."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine import tree
from engine.cost import Curve, best_size

Problem = tuple[torch.Tensor, torch.Tensor, int, int | None]


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Log-probabilities [R, D, V] sorted, token ids, nodes, width; coarse values so that ties are common.

    Each request has a tree of its own; nodes may exceed the paths there are, and width the vocabulary.
    """
    requests, depth, vocab = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    width = draw(st.none() | st.integers(1, 5))
    nodes = draw(st.integers(1, 24))
    values = draw(st.sampled_from([st.integers(-6, 0).map(lambda n: n / 2), st.floats(-6, 0), st.just(-1.0)]))
    raw = draw(st.lists(values, min_size=requests * depth * vocab, max_size=requests * depth * vocab))
    scores = torch.tensor(raw, dtype=torch.float64).view(requests, depth, vocab)
    log_probs, order = scores.sort(dim=-1, descending=True, stable=True)
    return log_probs, order + 10, nodes, width


def brute_force(log_probs: list[list[float]], nodes: int, width: int | None) -> list[tuple[int, ...]]:
    """The best paths of all, each as the ranks along it, in the order that `engine.tree` states."""
    ranks = range(min(len(log_probs[0]), width or len(log_probs[0])))
    paths = [path for level in range(len(log_probs)) for path in itertools.product(ranks, repeat=level + 1)]
    weight = {path: sum(log_probs[d][rank] for d, rank in enumerate(path)) for path in paths}
    return sorted(paths, key=lambda path: (-weight[path], len(path), path))[:nodes]


@settings(max_examples=400, deadline=None)
@given(problems())
@example((torch.zeros(2, 3, 3, dtype=torch.float64), torch.arange(3).expand(2, 3, 3), 12, 2))
def test_both_builders_equal_brute_force(problem: Problem) -> None:
    log_probs, tokens, nodes, width = problem
    by_levels = tree.by_levels(log_probs, tokens, nodes, width)
    by_heap = tree.by_heap(log_probs, tokens, nodes, width)
    for name in ("tokens", "parents", "depths", "log_weights"):
        assert torch.equal(getattr(by_levels, name), getattr(by_heap, name)), name
    for r in range(len(log_probs)):
        best = brute_force(log_probs[r].tolist(), nodes, width)
        rows = {(): 0} | {ranks: i + 1 for i, ranks in enumerate(best)}
        assert by_heap.parents[r, 1:].tolist() == [rows[ranks[:-1]] for ranks in best]
        assert by_heap.tokens[r, 1:].tolist() == [tokens[r, len(ranks) - 1, ranks[-1]].item() for ranks in best]
        assert by_heap.depths[r, 1:].tolist() == [len(ranks) for ranks in best]
        if width is not None:
            assert max(by_heap.parents[r, 1:].bincount().tolist()) <= width


@settings(max_examples=200, deadline=None)
@given(problems(), st.integers(1, 3))
def test_few_candidates_give_the_same_tree_or_none(problem: Problem, few: int) -> None:
    log_probs, tokens, nodes, width = problem
    full = tree.by_heap(log_probs, tokens, nodes, width)
    try:
        partial = few < log_probs.shape[2]
        narrow = tree.by_heap(log_probs[..., :few], tokens[..., :few], nodes, width, partial=partial)
    except tree.TooFew:
        assert partial
        assert few < nodes
        return
    for name in ("tokens", "parents", "depths", "log_weights"):
        assert torch.equal(getattr(full, name), getattr(narrow, name)), name


@settings(max_examples=100, deadline=None)
@given(problems(), st.lists(st.floats(1e-4, 1e-2), min_size=25, max_size=25))
def test_a_budget_gives_both_builders_the_same_tree(problem: Problem, steps: list[float]) -> None:
    log_probs, tokens, nodes, width = problem
    log_probs = log_probs - log_probs.exp().sum(dim=-1, keepdim=True).log().clamp(min=0)  # probabilities
    curve = Curve.of(list(itertools.accumulate([0.01, *steps])))
    budget = partial(best_size, requests=len(log_probs), curve=curve)
    heap = tree.by_heap(log_probs, tokens, nodes, width, budget)
    full = tree.by_levels(log_probs, tokens, nodes, width)
    size = budget(iter(full.log_weights[:, 1:].exp().sum(dim=0).tolist()))
    for name in ("tokens", "parents", "depths", "log_weights"):
        assert torch.equal(getattr(full.cut(size), name), getattr(heap, name)), name


@settings(max_examples=100, deadline=None)
@given(problems())
def test_visibility_is_self_and_ancestors(problem: Problem) -> None:
    log_probs, tokens, nodes, width = problem
    built = tree.build(log_probs, tokens, nodes, width)
    seen = tree.visibility(built.parents, log_probs.shape[1])
    assert torch.equal(seen, tree.visibility_all(built.parents, log_probs.shape[1]))
    for r, row in itertools.product(range(len(seen)), range(seen.shape[1])):
        expected, here = {row, 0}, row
        while here:
            here = built.parents[r, here].item()
            expected.add(here)
        assert set(seen[r, row].nonzero().flatten().tolist()) == expected


@settings(max_examples=100, deadline=None)
@given(problems(), st.randoms(use_true_random=False))
def test_walk_follows_the_targets_tokens(problem: Problem, random: Any) -> None:
    log_probs, tokens, nodes, width = problem
    built = tree.build(log_probs, tokens, nodes, width)
    rows = built.tokens.shape[1]
    choices = torch.tensor([[random.choice([10, 11, 12]) for _ in range(rows)] for _ in range(len(tokens))])
    kept = tree.walk(built.tokens, built.parents, choices, log_probs.shape[1])
    path, length = tree.walk_all(built.tokens, built.parents, choices, log_probs.shape[1])
    for r in range(len(tokens)):
        here, expected = 0, [0]
        while True:
            wanted = choices[r, here].item()
            children = [n for n in range(1, rows) if built.parents[r, n] == here and built.tokens[r, n] == wanted]
            if not children:
                break
            here = children[0]
            expected.append(here)
        assert kept[r] == tuple(expected)
        assert length[r] == len(expected) - 1
        assert path[r, : len(expected)].tolist() == expected
        assert path[r, len(expected) :].tolist() == [here] * (log_probs.shape[1] + 1 - len(expected))


def test_a_chain_is_a_tree_of_width_one() -> None:
    log_probs = torch.log(torch.tensor([[[0.5, 0.3], [0.9, 0.05], [0.2, 0.1]]], dtype=torch.float64))
    tokens = torch.tensor([[[1, 2], [3, 4], [5, 6]]])
    built = tree.build(log_probs, tokens, 3, width=1)
    assert built.tokens.tolist() == [[0, 1, 3, 5]]
    assert built.parents.tolist() == [[0, 0, 1, 2]]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_graph_holds_the_builder_the_mask_and_the_walk() -> None:
    """Captured once, replayed on other distributions: the heap's trees, without the host between."""
    requests, depth, vocab, nodes = 3, 7, 50, 31
    generator = torch.Generator().manual_seed(0)

    def problem() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        best = torch.randn(requests, depth, vocab, generator=generator).log_softmax(-1).double().sort(-1, True)
        choices = torch.randint(0, vocab, (requests, nodes + 1), generator=generator)
        return best.values, best.indices, choices

    log_probs, tokens, choices = (part.cuda() for part in problem())

    def work() -> tuple[tree.Tree, torch.Tensor, torch.Tensor, torch.Tensor]:
        built = tree.by_levels(log_probs, tokens, nodes)
        walked = tree.walk_all(built.tokens, built.parents, choices, depth)
        return built, tree.visibility_all(built.parents, depth), *walked

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        built, seen, path, length = work()
    for _ in range(20):
        fresh = problem()
        for buffer, value in zip((log_probs, tokens, choices), fresh, strict=True):
            buffer.copy_(value)
        graph.replay()
        expected = tree.by_heap(fresh[0], fresh[1], nodes)
        for name in ("tokens", "parents", "depths"):
            assert torch.equal(getattr(built, name).cpu(), getattr(expected, name)), name
        assert torch.equal(seen.cpu(), tree.visibility(expected.parents, depth))
        kept = tree.walk(expected.tokens, expected.parents, fresh[2], depth)
        assert [tuple(p[: n + 1]) for p, n in zip(path.tolist(), length.tolist(), strict=True)] == list(kept)
