"""Where prompts come from, by `kind`: the types that a space file and a command line are read into."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from engine.config import BUNDLED, Size, Strict, Word


class BundledPrompts(Strict):
    """200 pieces of source code that the bundled pair was not trained on."""

    kind: Literal["bundled"] = "bundled"

    def __str__(self) -> str:
        return BUNDLED


class JsonlPrompts(Strict):
    """A JSONL file: one object a line with `prompt` (or `text`, `token_ids`) or `messages`, and maybe `category`."""

    kind: Literal["jsonl"] = "jsonl"
    path: Word = Field(description="The file, relative to where the tuner runs.")

    def __str__(self) -> str:
        return self.path


class ShareGptPrompts(Strict):
    """A ShareGPT-style JSON file: a list of conversations; what comes before the model's first answer is asked."""

    kind: Literal["sharegpt"] = "sharegpt"
    path: Word = Field(description="The file, relative to where the tuner runs.")
    chat: bool = Field(True, description="Send chat messages; false sends the text to /v1/completions.")

    def __str__(self) -> str:
        return self.path


class RandomPrompts(Strict):
    """Random token ids of given lengths. They misjudge speculation: no drafter predicts noise."""

    kind: Literal["random"] = "random"
    input_tokens: tuple[Size, Size] = Field((256, 256), description="Shortest and longest prompt, in tokens.")
    vocabulary: Annotated[Size, Field(le=2**24)] = Field(1000, description="Ids are drawn below this number.")
    count: Annotated[Size, Field(le=100_000)] = Field(200, description="Different prompts.")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.input_tokens[0] > self.input_tokens[1]:
            raise ValueError("input_tokens are the shortest and the longest, in this order")
        return self

    def __str__(self) -> str:
        return f"random, {self.input_tokens[0]} to {self.input_tokens[1]} tokens"


PROMPT_KINDS = (BundledPrompts, JsonlPrompts, ShareGptPrompts, RandomPrompts)


def from_word(value: Any) -> Any:
    """Turn `bundled`, or a path, into the mapping it stands for: `.json` is ShareGPT-style, else JSONL."""
    if not isinstance(value, str):
        return value
    if value in (BUNDLED, "random"):
        return {"kind": value}
    return {"kind": "sharegpt" if value.lower().endswith(".json") else "jsonl", "path": value}


Kinds = Annotated[BundledPrompts | JsonlPrompts | ShareGptPrompts | RandomPrompts, Field(discriminator="kind")]
Prompts = Annotated[Kinds, BeforeValidator(from_word, json_schema_input_type=str | Kinds)]
