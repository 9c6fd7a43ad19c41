"""What a client asked for, in tokens. No torch: the front, the scheduler and the step share it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sampling:
    """How one request draws: `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 do not limit."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature == 0.0

    @property
    def limited(self) -> bool:
        """Whether tokens are cut off."""
        return self.top_k > 0 or self.top_p < 1.0


GREEDY = Sampling()


@dataclass(frozen=True)
class Scored:
    """How likely the target finds one token, and its likeliest alternatives, best first: natural logarithms.

    Before temperature, top-k and top-p: the target's own distribution.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Request:
    """One prompt to continue."""

    id: int
    prompt: tuple[int, ...]
    max_tokens: int
    eos: tuple[int, ...] = ()
    sampling: Sampling = GREEDY
    logprobs: int | None = None  # score every token, with so many alternatives
    echo: bool = False  # score the prompt too; with `logprobs`
