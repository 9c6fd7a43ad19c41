"""Scores of tokens in OpenAI's two shapes. Pure.

A token's name is its text, or `token_id:N` when the request asks for `return_tokens_as_token_ids` (as vLLM has it):
different tokens can have the same text, and a program that compares servers needs the ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

Score = Sequence[Any]  # [logprob, [[id, logprob], …]], as `wire.Tokens` carries it
Name = Callable[[int], str]


def by_id(token: int) -> str:
    """Return a token's name by its id."""
    return f"token_id:{token}"


@dataclass
class CompletionScores:
    """/v1/completions: four lists in step. Offsets count characters from the start of the answer's text."""

    name: Name
    text_of: Name
    _offset: int = field(default=0)

    def of(self, tokens: Sequence[int], scores: Sequence[Score | None]) -> dict[str, Any]:
        """Return the object for the next tokens; a token without a score (the first of a prompt) has null."""
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(self.text_of(token))
        return {
            "tokens": [self.name(token) for token in tokens],
            "token_logprobs": [None if score is None else score[0] for score in scores],
            "top_logprobs": [
                None if score is None else {self.name(token): value for token, value in score[1]} for score in scores
            ],
            "text_offset": offsets,
        }


@dataclass
class ChatScores:
    """/v1/chat/completions: one object a token."""

    name: Name
    text_of: Name

    def of(self, tokens: Sequence[int], scores: Sequence[Score | None]) -> dict[str, Any]:
        """Return the object for the next tokens."""
        return {
            "content": [
                {**self._entry(token, score[0]), "top_logprobs": [self._entry(*pair) for pair in score[1]]}
                for token, score in zip(tokens, scores, strict=True)
                if score is not None
            ]
        }

    def _entry(self, token: int, value: float) -> dict[str, Any]:
        return {"token": self.name(token), "logprob": value, "bytes": list(self.text_of(token).encode())}


Scores = CompletionScores | ChatScores
