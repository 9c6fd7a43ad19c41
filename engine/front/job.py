"""One generation as the front hands it to the engine and to the answer's writer."""

from __future__ import annotations

from dataclasses import dataclass

from engine.request import Sampling


@dataclass(frozen=True)
class Job:
    """One generation, ready to submit."""

    prompt: tuple[int, ...]
    max_tokens: int
    eos: tuple[int, ...]
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool
    continuous_usage: bool
    token_ids: bool
    sampling: Sampling
    logprobs: int | None  # alternatives to each token; None for no scores
    echo: bool
    names_by_id: bool  # tokens are named token_id:N in logprobs
