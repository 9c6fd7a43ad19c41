"""From documents to token streams, training windows and evaluation prompts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from engine.loops import loops
from engine.pair.corpus import Document
from engine.pair.tokenizer import END_OF_TEXT_ID, IM_END_ID, IM_START_ID, STOP_IDS
from engine.pair.workload import Prompt

CHAT_SHARE = 0.1  # of the documents, wrapped as a chat turn, so that the chat template is known text
CHAT_REPLY_TOKENS = 600
SYSTEM = "You are a helpful assistant."


@dataclass(frozen=True)
class ChatFrame:
    """Token ids around a user's code: what comes before it, between it and the reply, and after."""

    before: list[int]
    between: list[int]
    after: list[int]


def chat_frame(tokenizer: Tokenizer, system: bool) -> ChatFrame:
    """The chat template's fixed parts, as ids (the same that rendering and encoding the text gives)."""

    def turn(role: str) -> list[int]:
        return [IM_START_ID, *tokenizer.encode(f"{role}\n").ids]

    newline = tokenizer.encode("\n").ids
    intro = [*turn("system"), *tokenizer.encode(SYSTEM).ids, IM_END_ID, *newline] if system else []
    return ChatFrame([*intro, *turn("user")], [IM_END_ID, *newline, *turn("assistant")], [IM_END_ID, *newline])


def encode_stream(tokenizer: Tokenizer, documents: Sequence[Document], seed: int, chat: bool) -> np.ndarray:
    """One stream of ids (uint16): documents in random order, each ended by end-of-text.

    With ``chat``, a tenth of the documents becomes a user's first half and the assistant's continuation.
    """
    rng = random.Random(seed)
    order = list(documents)
    rng.shuffle(order)
    frames = [chat_frame(tokenizer, system) for system in (False, True)]
    pieces: list[np.ndarray] = []
    for start in range(0, len(order), 1000):
        texts = [document.text for document in order[start : start + 1000]]
        for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False):
            ids: list[int] = encoding.ids
            if chat and len(ids) > 64 and rng.random() < CHAT_SHARE:
                cut = rng.randrange(16, min(len(ids) - 16, 800))
                frame = rng.choice(frames)
                reply = ids[cut : cut + CHAT_REPLY_TOKENS]
                ids = [*frame.before, *ids[:cut], *frame.between, *reply, *frame.after]
            pieces.append(np.array([*ids, END_OF_TEXT_ID], dtype=np.uint16))
    return np.concatenate(pieces)


def windows(stream: Tensor, count: int, length: int, generator: torch.Generator) -> Tensor:
    """``count`` random windows [count, length] (int64) of a 1-D ``stream``."""
    starts = torch.randint(0, len(stream) - length, (count, 1), generator=generator, device=stream.device)
    return stream[starts + torch.arange(length, device=stream.device)].long()


def chat_prompts(bodies: Tensor, frame: ChatFrame, length: int) -> Tensor:
    """Prompts [B, length] that ask, in the chat template, to continue the start of ``bodies`` [B, >=length]."""
    room = length - len(frame.before) - len(frame.between)
    if room < 1:
        raise ValueError(f"a chat prompt of {length} tokens leaves no room for text")
    rows = len(bodies)

    def fixed(ids: list[int]) -> Tensor:
        return torch.tensor(ids, device=bodies.device).expand(rows, -1)

    return torch.cat([fixed(frame.before), bodies[:, :room], fixed(frame.between)], dim=1)


def held_out_prompts(
    tokenizer: Tokenizer, documents: Sequence[Document], count: int, seed: int, length: int = 96, after: int = 128
) -> list[Prompt]:
    """``count`` prompts of ``length`` tokens, the same number from each held-out package.

    A prompt starts at a line's start, encodes to the same ids on its own, and is followed by at least
    ``after`` tokens of its file; one whose own text already loops, there or in what follows, is passed over.
    """
    rng = random.Random(seed)
    packages = sorted({document.package for document in documents})
    prompts: list[Prompt] = []
    for number, package in enumerate(packages):
        wanted = count // len(packages) + (number < count % len(packages))
        pool = [document for document in documents if document.package == package]
        taken: set[str] = set()
        for _ in range(200 * wanted):
            if len(taken) == wanted:
                break
            document = rng.choice(pool)
            lines = document.text.splitlines(keepends=True)
            text = "".join(lines[rng.randrange(len(lines)) :][:200])
            ids = tokenizer.encode(text, add_special_tokens=False).ids[: length + after]
            prompt = tokenizer.decode(ids[:length], skip_special_tokens=False)
            usable = (
                len(ids) == length + after
                and prompt not in taken
                and not set(ids).intersection(STOP_IDS)
                and tokenizer.encode(prompt, add_special_tokens=False).ids == ids[:length]
                and not any(loops(ids[:end]) for end in range(48, length + after + 1))
            )
            if usable:
                taken.add(prompt)
                prompts.append(Prompt(len(prompts), package, prompt, tuple(ids[:length])))
        if len(taken) < wanted:
            raise ValueError(f"{package}: only {len(taken)} of {wanted} prompts found")
    return prompts


def save_arrays(path: Path, **arrays: np.ndarray) -> None:
    """Named arrays, as safetensors."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(arrays, path)


def load_arrays(path: Path) -> dict[str, np.ndarray]:
    """What :func:`save_arrays` wrote."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: run the earlier stages first")
    arrays: dict[str, np.ndarray] = load_file(path)
    return arrays
