"""Sampled decoding against the definition: joint cells of consecutive tokens, chi-square, Holm.

Two experiments. `verify_alone` draws two consecutive tokens of a small Markov model through one drafted round of
verification (and a second where the first yields one token), for all seeds at once. `through_the_engine` decodes
three tokens of a real prompt by requests that differ in nothing but the seed. Both compare with probabilities that
numpy computes from logits by the definition of temperature, top-k and top-p; the engine's come from Transformers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from scipy import stats

from engine import sampling, tree, verify
from engine.loop import Loop
from engine.request import Request, Sampling

CPU = torch.device("cpu")
LEAST = 5.0  # expected draws of a cell; rarer ones are one cell together
CHUNK = 50_000
VOCAB, ROWS, START = 8, 4, 10
METHODS = ("likeliest", "drawn", "tree")
Path = tuple[int, ...]


def definition(logits: np.ndarray, how: Sampling) -> np.ndarray:
    """Return the probabilities [vocab] that `how` draws from, by the definition."""
    scores = logits.astype(np.float64)
    order = np.argsort(-scores, kind="stable")
    if how.greedy:
        point: np.ndarray = (np.arange(len(scores)) == order[0]).astype(np.float64)
        return point
    weights = np.exp((scores - scores.max()) / how.temperature)[order]
    weights[how.top_k or len(weights) :] = 0
    before = np.cumsum(weights) - weights
    weights[1:][before[1:] >= how.top_p * weights.sum()] = 0
    probabilities: np.ndarray = np.zeros_like(weights)
    probabilities[order] = weights / weights.sum()
    return probabilities


def p_value(draws: Counter[Path], cells: dict[Path, float]) -> float:
    """Return the chi-square test's p of `draws` against `cells`; what no cell names is one cell together.

    A draw where the cells leave no mass at all refutes them.
    """
    total = draws.total()
    kept = {path: mass for path, mass in cells.items() if mass * total >= LEAST}
    observed = [draws[path] for path in kept]
    expected = [mass * total for mass in kept.values()]
    rest = total - sum(expected)
    others = total - sum(observed)
    if rest >= LEAST:
        observed.append(others)
        expected.append(rest)
    elif rest < 1e-9 * total:
        if others:
            return 0.0
    elif others > LEAST + 10 * math.sqrt(LEAST):
        return 0.0
    if len(expected) < 2:
        return 1.0
    expected = [each * sum(observed) / sum(expected) for each in expected]
    return float(stats.chisquare(observed, expected).pvalue)


def holm(p_values: Sequence[float], alpha: float = 0.001) -> list[int]:
    """Return which hypotheses Holm's procedure rejects, familywise at `alpha`."""
    rejected: list[int] = []
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        if p_values[index] > alpha / (len(p_values) - rank):
            break
        rejected.append(index)
    return rejected


# --------------------------------------------------------------------------------------------------- verify alone


@dataclass(frozen=True)
class Toy:
    """A target whose next token depends on the last one, and a drafter that knows only the place in the block."""

    target: torch.Tensor  # [vocab, vocab] logits after each token
    draft: torch.Tensor  # [rows − 1, vocab] logits

    @classmethod
    def of(cls, seed: int) -> Toy:
        """Return random tables; the drafter is near the target's average."""
        generator = torch.Generator().manual_seed(seed)
        target = torch.randn(VOCAB, VOCAB, generator=generator) * 1.5
        return cls(target, target.mean(dim=0) + torch.randn(ROWS - 1, VOCAB, generator=generator))


def verify_alone(setting: Sampling, method: str, draws: int, seed: int = 0) -> tuple[float, float]:
    """Draw two consecutive tokens `draws` times through verification alone.

    Args:
        method: how drafts are made and judged: "likeliest" (a chain of the likeliest), "drawn" (a chain drawn from
            the drafter, speculative sampling), or "tree".

    Returns:
        p against the definition, and the mean accept length (or the test would test nothing).
    """
    toy = Toy.of(seed)
    counts: Counter[Path] = Counter()
    rounds = tokens = 0
    for first in range(0, draws, CHUNK):
        seeds = range(first, min(first + CHUNK, draws))
        hows = [replace(setting, seed=each) for each in seeds]
        made = _round(toy, hows, method, torch.zeros(len(hows), dtype=torch.int64), START)
        rounds, tokens = rounds + len(made), tokens + sum(map(len, made))
        short = [index for index, each in enumerate(made) if len(each) == 1]
        roots = torch.tensor([made[index][0] for index in short], dtype=torch.int64)
        for index, more in zip(short, _round(toy, [hows[i] for i in short], method, roots, START + 1), strict=True):
            made[index] += more
        counts.update(each[:2] for each in made)
    rows = [definition(row, setting) for row in toy.target.numpy()]
    cells: dict[Path, float] = {(a, b): float(rows[0][a] * rows[a][b]) for a in range(VOCAB) for b in range(VOCAB)}
    if any(cells[path] == 0 for path in counts):
        return 0.0, tokens / rounds
    return p_value(counts, cells), tokens / rounds


def _round(toy: Toy, hows: list[Sampling], method: str, roots: torch.Tensor, start: int) -> list[Path]:
    """Return the tokens that one round yields each request; `start`: position of the roots."""
    if not hows:
        return []
    requests = len(hows)
    batch = sampling.Batch.of(hows, CPU)
    positions = torch.arange(start, start + ROWS).expand(requests, -1)
    if method == "tree":
        best = toy.draft.log_softmax(-1).double().sort(-1, descending=True)
        one = tree.build(best.values[None], best.indices[None], 12)
        nodes = tree.Tree(
            *(part.expand(requests, -1) for part in (one.tokens, one.parents, one.depths, one.log_weights))
        )
        proposal = nodes.tokens.clone()
        proposal[:, 0] = roots
        choices = sampling.choose(toy.target[proposal], start + nodes.depths + 1, batch)
        return list(verify.branches(nodes, proposal, choices, ROWS - 1).tokens)
    draft = toy.draft.expand(requests, -1, -1)
    if method == "likeliest":
        proposal = torch.cat([roots[:, None], draft.argmax(dim=-1)], dim=1)
        choices = sampling.choose(toy.target[proposal], positions + 1, batch)
        return list(verify.chain(proposal, choices).tokens)
    q = sampling.distribution(draft, batch)
    drafted = sampling.invert(q, sampling.uniform(batch.seed[:, None], positions[:, 1:], sampling.DRAFT))
    proposal = torch.cat([roots[:, None], drafted], dim=1)
    accept = sampling.uniform(batch.seed[:, None], positions[:, 1:], sampling.ACCEPT)
    draw = sampling.uniform(batch.seed[:, None], positions + 1, sampling.TARGET)
    target = sampling.distribution(toy.target[proposal], batch)
    return list(verify.rejection(proposal, q, target, accept, draw).tokens)


# ------------------------------------------------------------------------------------------------ through the engine


class Reference:
    """The target by Transformers in float32: next-token logits after one prompt and a path of tokens."""

    def __init__(self, folder: Any, prompt: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._prompt = prompt
        self._known: dict[Path, np.ndarray] = {}

    def read(self, paths: Sequence[Path]) -> None:
        """Compute the logits after paths of one length, where they are not known."""
        wanted = [path for path in paths if path not in self._known]
        for first in range(0, len(wanted), 256):
            part = wanted[first : first + 256]
            with torch.inference_mode():
                logits = self._model(torch.tensor([[*self._prompt, *path] for path in part])).logits[:, -1]
            self._known |= dict(zip(part, logits.numpy(), strict=True))

    def probabilities(self, path: Path, how: Sampling) -> np.ndarray:
        """Return what is drawn from after a path that was read."""
        return definition(self._known[path], how)

    def cells(self, how: Sampling, length: int, least: float) -> dict[Path, float]:
        """Return the probability of every path of so many tokens that has at least `least`."""
        level: dict[Path, float] = {(): 1.0}
        for _ in range(length):
            self.read(list(level))
            level = {
                (*path, int(token)): mass * float(after[token])
                for path, mass in level.items()
                for after in [self.probabilities(path, how)]
                for token in np.flatnonzero(after * mass >= least)
            }
        return level

    def outside(self, draws: Counter[Path], how: Sampling) -> int:
        """Return how many draws hold a token that top-k or top-p leaves out, but for rounding at its edge."""
        wider = replace(how, top_p=min(1.0, how.top_p + 1e-5))
        found = 0
        for length in range(len(next(iter(draws)))):
            prefixes = sorted({path[:length] for path in draws})
            self.read(prefixes)
            allowed = {path: self.probabilities(path, wider) > 0 for path in prefixes}
            found += sum(count for path, count in draws.items() if not allowed[path[:length]][path[length]])
        return found


def through_the_engine(loop: Loop, prompt: Path, how: Sampling, draws: int, tokens: int = 3) -> Counter[Path]:
    """Decode so many tokens once for each of `draws` seeds, as many requests at once as the engine runs."""
    counts: Counter[Path] = Counter()
    made: dict[int, Path] = {}
    for number in range(draws):
        made[number] = ()
        if loop.submit(Request(number, prompt, tokens, (), replace(how, seed=number))) is not None:
            raise ValueError("the engine is too small for the experiment")
    while not loop.idle:
        for progress in loop.advance():
            made[progress.id] += progress.tokens
    counts.update(made.values())
    return counts
