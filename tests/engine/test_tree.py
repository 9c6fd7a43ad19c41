"""Trees against brute force, and both builders against each other."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import tree


@st.composite
def problems(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, int, int | None]:
    """Log-probabilities [R, D, V] sorted, token ids, nodes, width; coarse values so that ties are common."""
    requests, depth, vocab = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    width = draw(st.none() | st.integers(1, 4))
    choices = min(vocab, width or vocab)
    capacity = sum(choices**level for level in range(1, depth + 1))
    nodes = draw(st.integers(1, min(capacity, 20)))
    values = st.integers(-6, 0).map(lambda n: n / 2)
    raw = draw(st.lists(values, min_size=requests * depth * vocab, max_size=requests * depth * vocab))
    scores = torch.tensor(raw, dtype=torch.float64).view(requests, depth, vocab)
    log_probs, order = scores.sort(dim=-1, descending=True, stable=True)
    return log_probs, order + 10, nodes, width


@settings(max_examples=300, deadline=None)
@given(problems())
def test_both_builders_equal_brute_force(problem: tuple[torch.Tensor, torch.Tensor, int, int | None]) -> None:
    log_probs, tokens, nodes, width = problem
    built = tree.build(log_probs, tokens, nodes, width)
    requests, depth, vocab = log_probs.shape
    for r in range(requests):
        heap = tree.best_first(log_probs[r].tolist(), tokens[r].tolist(), nodes, width)
        for name in ("tokens", "parents", "depths", "log_weights"):
            assert torch.equal(getattr(built, name)[r], getattr(heap, name)[0]), name
        paths = [
            (-sum(log_probs[r, d, rank].item() for d, rank in enumerate(ranks)), len(ranks), ranks)
            for level in range(1, depth + 1)
            for ranks in itertools.product(range(min(vocab, width or vocab)), repeat=level)
        ]
        best = [ranks for _, _, ranks in sorted(paths)[:nodes]]
        rows = {(): 0} | {ranks: i + 1 for i, ranks in enumerate(best)}
        assert built.parents[r, 1:].tolist() == [rows[ranks[:-1]] for ranks in best]
        assert built.tokens[r, 1:].tolist() == [tokens[r, len(ranks) - 1, ranks[-1]].item() for ranks in best]


@settings(max_examples=100, deadline=None)
@given(problems())
def test_visibility_is_self_and_ancestors(problem: tuple[torch.Tensor, torch.Tensor, int, int | None]) -> None:
    log_probs, tokens, nodes, width = problem
    built = tree.build(log_probs, tokens, nodes, width)
    seen = tree.visibility(built.parents, log_probs.shape[1])
    for r, row in itertools.product(range(len(seen)), range(nodes + 1)):
        expected, here = {row, 0}, row
        while here:
            here = built.parents[r, here].item()
            expected.add(here)
        assert set(seen[r, row].nonzero().flatten().tolist()) == expected


@settings(max_examples=100, deadline=None)
@given(problems(), st.randoms(use_true_random=False))
def test_walk_follows_the_targets_tokens(
    problem: tuple[torch.Tensor, torch.Tensor, int, int | None], random: object
) -> None:
    log_probs, tokens, nodes, width = problem
    built = tree.build(log_probs, tokens, nodes, width)
    choices = torch.tensor([[random.choice([10, 11, 12]) for _ in range(nodes + 1)] for _ in range(len(tokens))])  # type: ignore[attr-defined]
    path, length = tree.walk(built.tokens, built.parents, choices, log_probs.shape[1])
    for r in range(len(tokens)):
        here, expected = 0, [0]
        while True:
            wanted = choices[r, here].item()
            children = [n for n in range(1, nodes + 1) if built.parents[r, n] == here and built.tokens[r, n] == wanted]
            if not children:
                break
            here = children[0]
            expected.append(here)
        assert length[r] == len(expected) - 1
        assert path[r, : len(expected)].tolist() == expected
        assert path[r, len(expected) :].tolist() == [here] * (log_probs.shape[1] + 1 - len(expected))


def test_a_chain_is_a_tree_of_width_one() -> None:
    log_probs = torch.log(torch.tensor([[[0.5, 0.3], [0.9, 0.05], [0.2, 0.1]]], dtype=torch.float64))
    tokens = torch.tensor([[[1, 2], [3, 4], [5, 6]]])
    built = tree.build(log_probs, tokens, 3, width=1)
    assert built.tokens.tolist() == [[0, 1, 3, 5]]
    assert built.parents.tolist() == [[0, 0, 1, 2]]
