"""What a request asks for: bodies to jobs, and everything that is refused on the way. Pure."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import from_json

from engine.config import BUNDLED, Draft, EngineConfig, explain_paths
from engine.front.exchange import Refused
from engine.front.job import Job
from engine.protocol import ChatBody, CompletionBody, Generation
from engine.request import GREEDY, Sampling
from engine.text import Text

COMPLETION_MAX_TOKENS = 16  # OpenAI's default
MAX_STOP_CHARACTERS = 1024
MESSAGE_WIDTH = 300

# Fields of other servers that would change the output, with the values that do not.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (),
    "allowed_token_ids": ([],),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "early_stopping": (False,),
    "ebnf": (),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "grammar": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "json_schema": (),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "lora_path": (),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "no_stop_trim": (False,),
    "presence_penalty": (0,),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "regex": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "stop_regex": ([],),
    "stop_token_ids": ([],),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}

Body = TypeVar("Body", bound=Generation)


def parse(raw: bytes, kind: type[Body]) -> Body:
    """Return the body of a request.

    Raises:
        Refused: 400, not JSON or not such a body.
    """
    try:
        document = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise Refused(400, f"the body is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise Refused(400, "the body must be a JSON object")
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        path, message = explain_paths(error, kind)[0]
        name = path.split(".")[0]
        if name == "prompt":
            message = "one text, or one list of token ids (not empty, each in [0, 2^31)), is meant here"
        if name == "n":
            message = "only n = 1 is supported"
        raise Refused(400, f"{path or 'body'}: {message}"[:MESSAGE_WIDTH], param=name or None) from None


def parse_draft(raw: bytes) -> Draft:
    """Return the draft config of POST /policy: a draft, or just `by_running`.

    Raises:
        Refused: 400, not JSON or no such config.
    """
    try:
        document = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise Refused(400, f"the body is not JSON: {error}") from None
    if isinstance(document, dict) and "by_running" in document:
        document.setdefault("kind", "policy")
    try:
        return EngineConfig.model_validate({"model": {"target": BUNDLED}, "draft": document}).draft
    except ValidationError as error:
        path, message = explain_paths(error)[0]
        raise Refused(400, f"{path}: {message}"[:MESSAGE_WIDTH], param="draft") from None


def check_supported(body: Generation) -> None:
    """Refuse what would change the output and is not built.

    Raises:
        Refused: 400, naming the field.
    """
    if isinstance(body, ChatBody) and body.top_logprobs and not body.logprobs:
        raise Refused(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    for name, value in (body.model_extra or {}).items():
        if name in NEUTRAL and value is not None and not any(value == neutral for neutral in NEUTRAL[name]):
            raise Refused(400, f"{name} is not supported: leave it out", param=name)
    if any(len(stop) > MAX_STOP_CHARACTERS for stop in body.stops):
        raise Refused(400, f"a stop string may have {MAX_STOP_CHARACTERS} characters at most", param="stop")


def too_long(prompt: str, context: int) -> Refused:
    """Return the refusal of a prompt that leaves no room for a token."""
    return Refused(
        400,
        f"the prompt has {prompt}, the context of {context} tokens takes {context - 1} and one new token at most",
        "context_length_exceeded",
        "prompt",
    )


def sampling_of(body: Generation, default: Sampling) -> Sampling:
    """Return how a request draws; what it leaves out is the target's default, a missing seed is drawn."""
    temperature = default.temperature if body.temperature is None else body.temperature
    if temperature == 0:
        return GREEDY
    return Sampling(
        temperature,
        default.top_k if body.top_k is None else max(0, body.top_k),
        default.top_p if body.top_p is None else body.top_p,
        secrets.randbits(63) if body.seed is None else body.seed,
    )


def _logprobs(body: CompletionBody | ChatBody) -> int | None:
    """Return how many alternatives to score, None when no scores are asked for."""
    if isinstance(body, CompletionBody):
        return body.logprobs
    return (body.top_logprobs or 0) if body.logprobs else None


def job(body: CompletionBody | ChatBody, prompt: Sequence[int], context: int, text: Text) -> Job:
    """Return what to submit.

    Args:
        prompt: token ids.
        context: longest prompt plus output, in tokens; the output is clipped to it (finish reason "length").
        text: the target's vocabulary, its ends of text and its defaults.

    Raises:
        Refused: 400, an empty or too long prompt, or a token id outside the vocabulary.
    """
    if not prompt:
        raise Refused(400, "the prompt has no tokens", param="prompt")
    if len(prompt) > context - 1:
        raise too_long(f"{len(prompt)} tokens", context)
    highest = max(prompt)
    if highest >= text.vocab_size:
        raise Refused(400, f"token id {highest} is outside the vocabulary of {text.vocab_size}", param="prompt")
    asked: int | None
    if isinstance(body, ChatBody):
        asked = body.max_completion_tokens or body.max_tokens
    else:
        asked = body.max_tokens or COMPLETION_MAX_TOKENS
    room = context - len(prompt)
    options = body.stream_options
    return Job(
        prompt=tuple(prompt),
        max_tokens=room if asked is None else min(asked, room),
        eos=() if body.ignore_eos else text.eos,
        stops=body.stops,
        stream=body.stream,
        include_usage=options is not None and options.include_usage,
        continuous_usage=options is not None and options.continuous_usage_stats,
        token_ids=body.return_token_ids,
        sampling=sampling_of(body, text.sampling),
        logprobs=_logprobs(body),
        echo=isinstance(body, CompletionBody) and body.echo,
        names_by_id=body.return_tokens_as_token_ids,
    )
