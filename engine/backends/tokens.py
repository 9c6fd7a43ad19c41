"""Completions by token ids, in the form that OpenAI's API has with vLLM's additions: how the native engine is asked.

`return_token_ids` gives the ids of prompt and text, `return_tokens_as_token_ids` names the tokens of `logprobs` by
their ids, `token_id:523`: different tokens can have the same text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from engine.backends.base import Answer, Ask, RequestStats, Score
from engine.errors import ConfigError

PREFIX = "token_id:"


def ask_by_ids(ask: Ask) -> tuple[str, dict[str, Any]]:
    """Return (path, body) of a greedy request that is not streamed."""
    body: dict[str, Any] = {
        "model": ask.model,
        "max_tokens": ask.max_tokens,
        "temperature": 0,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    if ask.ignore_eos:
        body["ignore_eos"] = True
    if ask.messages is not None:
        if ask.echo:
            raise ValueError("messages are not echoed; give their token ids")
        scores = {"logprobs": True, "top_logprobs": ask.top} if ask.top else {}
        return "/v1/chat/completions", body | {"messages": list(ask.messages)} | scores
    prompt = ask.prompt if isinstance(ask.prompt, str) else list(ask.prompt)
    scores = {"logprobs": ask.top} if ask.top else {}
    return "/v1/completions", body | {"prompt": prompt} | scores | ({"echo": True} if ask.echo else {})


def answer_by_ids(ask: Ask, body: Mapping[str, Any], stats: RequestStats) -> Answer:
    """Read the answer to `ask_by_ids`.

    Raises:
        ConfigError: the answer lacks token ids, or the scores that were asked for.
    """
    try:
        choice = body["choices"][0]
        prompt = _ids(choice["prompt_token_ids"] if "prompt_token_ids" in choice else body["prompt_token_ids"])
        tokens = _ids(choice["token_ids"])
        scores = _scores(choice["logprobs"]) if ask.top else ()
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"the server's answer holds no token ids or scores ({error!r}); use a newer server"
        ) from error
    split = len(prompt) if ask.echo else 0
    if ask.top and len(scores) != split + len(tokens):
        raise ConfigError(f"the server scored {len(scores)} of {split + len(tokens)} tokens; use a newer server")
    return Answer(prompt, tokens, scores[split:], scores[:split], stats)


def _ids(value: Sequence[object]) -> tuple[int, ...]:
    if not all(isinstance(token, int) for token in value):
        raise ValueError("a token id is no number")
    return tuple(token for token in value if isinstance(token, int))


def _scores(logprobs: Mapping[str, Any]) -> tuple[Score | None, ...]:
    """Read OpenAI's two shapes: of completions, and of chat completions."""
    if "content" in logprobs:
        return tuple(
            Score(finite(entry["logprob"]), _top((each["token"], each["logprob"]) for each in entry["top_logprobs"]))
            for entry in logprobs["content"]
        )
    return tuple(
        None if value is None else Score(finite(value), _top(top.items()))
        for value, top in zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
    )


def _top(pairs: Any) -> tuple[tuple[int, float], ...]:
    named = [(int(str(name).removeprefix(PREFIX)), finite(value)) for name, value in pairs]
    return tuple(sorted(named, key=lambda pair: -pair[1]))


def finite(value: float) -> float:
    """Return a log-probability.

    Raises:
        ValueError: it is not finite.
    """
    if not math.isfinite(value):
        raise ValueError("a log-probability is not finite")
    return float(value)
