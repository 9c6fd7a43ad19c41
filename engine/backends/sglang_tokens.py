"""Completions by token ids as SGLang has them: `/generate`, whose scores name tokens by id.

Its OpenAI endpoints name scored tokens by their text, which is not unique; chat completions carry the same scores by
id in `meta_info`, and are used where a chat template has to be applied.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from engine.backends.base import Answer, Ask, RequestStats, Score
from engine.backends.tokens import finite
from engine.errors import ConfigError

GENERATE = "/generate"
CHAT = "/v1/chat/completions"


def ask_generate(ask: Ask) -> tuple[str, dict[str, Any]]:
    """Return (path, body) of a greedy request that is not streamed."""
    if ask.messages is not None:
        return CHAT, _chat(ask)
    prompt = {"text": ask.prompt} if isinstance(ask.prompt, str) else {"input_ids": list(ask.prompt)}
    body: dict[str, Any] = {
        **prompt,
        "return_prompt_token_ids": True,
        "sampling_params": {"temperature": 0, "max_new_tokens": ask.max_tokens, "ignore_eos": ask.ignore_eos},
    }
    if ask.top:
        body |= {"return_logprob": True, "top_logprobs_num": ask.top}
    if ask.top and ask.echo:
        body["logprob_start_len"] = 0
    return GENERATE, body


def _chat(ask: Ask) -> dict[str, Any]:
    if ask.echo:
        raise ValueError("messages are not echoed; give their token ids")
    body: dict[str, Any] = {
        "model": ask.model,
        "messages": list(ask.messages or ()),
        "max_tokens": ask.max_tokens,
        "temperature": 0,
        "return_token_ids": True,
        "return_meta_info": True,
        "ignore_eos": ask.ignore_eos,
    }
    return body | ({"logprobs": True, "top_logprobs": ask.top} if ask.top else {})


def answer_generate(ask: Ask, body: Mapping[str, Any], stats: RequestStats) -> Answer:
    """Read the answer to `ask_generate`.

    Raises:
        ConfigError: the answer lacks token ids, or the scores that were asked for.
    """
    try:
        holder = body if ask.messages is None else body["choices"][0]
        tokens = _ids(holder["output_ids" if ask.messages is None else "token_ids"])
        given = holder.get("prompt_token_ids")
        prompt = tuple(ask.prompt) if given is None and not isinstance(ask.prompt, str) else _ids(given)
        meta = holder["meta_info"] if ask.top else {}
        scores = _scores(meta["output_token_logprobs"], meta["output_top_logprobs"]) if ask.top else ()
        echoed = _scores(meta["input_token_logprobs"], meta["input_top_logprobs"]) if ask.top and ask.echo else ()
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"SGLang's answer holds no token ids or scores ({error!r}); use another version") from error
    wanted = (len(tokens), len(prompt) if ask.echo else 0) if ask.top else (0, 0)
    if (len(scores), len(echoed)) != wanted:
        raise ConfigError(
            f"SGLang scored {len(scores)} tokens and {len(echoed)} of the prompt, not {wanted[0]} and {wanted[1]}; "
            "use another version"
        )
    return Answer(prompt, tokens, scores, echoed, stats)


def _ids(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(isinstance(token, int) for token in value):
        raise ValueError("no list of token ids")
    return tuple(value)


def _scores(chosen: Sequence[Any], top: Sequence[Any]) -> tuple[Score | None, ...]:
    """Read [[log-probability, id, text], …] and, a position, the same of the likeliest tokens."""
    return tuple(
        None if pair[0] is None else Score(finite(pair[0]), _top(others or ()))
        for pair, others in zip(chosen, top, strict=True)
    )


def _top(pairs: Iterable[Sequence[Any]]) -> tuple[tuple[int, float], ...]:
    named = [(int(pair[1]), finite(pair[0])) for pair in pairs]
    return tuple(sorted(named, key=lambda pair: -pair[1]))
