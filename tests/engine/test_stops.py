"""Where a text ends, inside a block or not: exactly where plain decoding ends it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cache

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from engine.loop import Loop
from engine.request import GREEDY, Request, Sampling
from engine.text import Text, load_text
from tests.engine.test_speculate import SMOKE, loop_of, smoke_prompts

TOKENS = 24
DRAFT = {"model": str(SMOKE / "draft")}
CHAIN = {"kind": "dflash", "block_size": 8, **DRAFT}
TREE = {"kind": "ddtree", "block_size": 8, "nodes": 20, **DRAFT}
DRAFTS = {
    "none": {"kind": "none"},
    "dflash": CHAIN,
    "ddtree": TREE,
    "policy": {"kind": "policy", "by_running": [[1, 2, TREE], [3, 5, {"kind": "none"}], [6, None, CHAIN]]},
}
SPECULATIVE = [name for name in DRAFTS if name != "none"]
SLOW = settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate])


@dataclass(frozen=True)
class Wish:
    """One request, and the stop strings that its client sends."""

    prompt: tuple[int, ...]
    max_tokens: int = TOKENS
    eos: tuple[int, ...] = ()
    stops: tuple[str, ...] = ()
    sampling: Sampling = GREEDY


@dataclass(frozen=True)
class Ending:
    """What the client gets: the pieces as they are streamed, joined, the counted tokens, and why it ends."""

    text: str
    tokens: tuple[int, ...]
    finish: str | None


@cache
def loop(name: str) -> Loop:
    return loop_of(SMOKE / "target", DRAFTS[name])


@cache
def text() -> Text:
    return load_text(SMOKE / "target")


def served(name: str, wishes: list[Wish]) -> list[Ending]:
    """Serve all at once as the front does: decode piece by piece, cancel at a stop string."""
    engine = loop(name)
    decoders = [text().decoder(wish.stops) for wish in wishes]
    pieces: list[list[str]] = [[] for _ in wishes]
    tokens: list[tuple[int, ...]] = [()] * len(wishes)
    finish: list[str | None] = [None] * len(wishes)
    for number, wish in enumerate(wishes):
        assert engine.submit(Request(number, wish.prompt, wish.max_tokens, wish.eos, wish.sampling)) is None
    while not engine.idle:
        for progress in engine.advance():
            number = progress.id
            assert finish[number] is None, "a token after the end"
            piece = decoders[number].feed(progress.tokens, progress.finish)
            pieces[number].append(piece.text)
            tokens[number] += piece.tokens
            finish[number] = piece.finish
            if piece.finish is not None:
                engine.cancel(number)
    return [Ending("".join(parts), *rest) for parts, *rest in zip(pieces, tokens, finish, strict=True)]


@cache
def plain(prompt: tuple[int, ...]) -> Ending:
    return served("none", [Wish(prompt)])[0]


@pytest.mark.parametrize("name", SPECULATIVE)
def test_max_tokens_and_eos_at_every_offset_of_a_block(name: str) -> None:
    prompt = smoke_prompts(1)[0]
    tokens = plain(prompt).tokens
    lengths = [Wish(prompt, max_tokens=count) for count in range(1, TOKENS + 1)]
    ends = [Wish(prompt, eos=(tokens[place],)) for place in range(TOKENS)]
    both = [Wish(prompt, max_tokens=count, eos=(tokens[count - 1], 511)) for count in range(1, TOKENS + 1)]
    wishes = lengths + ends + both
    for wish, ending in zip(wishes, served(name, wishes), strict=True):
        cut = tokens[: wish.max_tokens]
        first = next((place for place, token in enumerate(cut) if token in wish.eos), None)
        assert ending.tokens == (cut if first is None else cut[: first + 1])
        assert ending.finish == ("length" if first is None else "stop")


@st.composite
def stop_strings(draw: st.DrawFn) -> tuple[int, tuple[str, ...]]:
    """A prompt, and strings of its plain text: any characters of it, so also across tokens, and near misses."""
    number = draw(st.integers(0, 5))
    whole = plain(smoke_prompts(6)[number]).text
    stops = []
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(whole) - 1))
        stop = whole[start : start + draw(st.integers(1, 12))]
        stops.append(stop + draw(st.sampled_from(["", "", "", "\u2020", stop])))
    return number, tuple(stops)


@SLOW
@given(st.lists(stop_strings(), min_size=8, max_size=16), st.integers(1, TOKENS))
def test_stop_strings_cut_where_plain_decoding_does(found: list[tuple[int, tuple[str, ...]]], length: int) -> None:
    wishes = [Wish(smoke_prompts(6)[number], TOKENS, stops=stops) for number, stops in found]
    wishes += [Wish(wish.prompt, length, (plain(wish.prompt).tokens[length // 2],), wish.stops) for wish in wishes[:4]]
    expected = served("none", wishes)
    for name in SPECULATIVE:
        assert served(name, wishes) == expected, name
    for (number, stops), ending in zip(found, expected, strict=False):
        tokens = plain(smoke_prompts(6)[number]).tokens
        shown = [text().decode(tokens[:count]) for count in range(TOKENS + 1)]
        # The first token that completes a stop string ends the text, before the string that starts first.
        count = next((c for c, prefix in enumerate(shown) if any(stop in prefix for stop in stops)), None)
        if count is None:
            assert (ending.text, ending.finish) == (shown[-1], "length")
        else:
            start = min(shown[count].find(stop) for stop in stops if stop in shown[count])
            assert ending == Ending(shown[count][:start], tokens[:count], "stop")


@SLOW
@given(st.integers(0, 2**32), st.lists(st.integers(1, TOKENS), min_size=6, max_size=6), st.data())
def test_sampled_texts_end_where_plain_decoding_ends_them(seed: int, lengths: list[int], data: st.DataObject) -> None:
    prompts = smoke_prompts(6)
    hows = [Sampling(0.8, seed=seed), Sampling(1.0, 8, 0.95, seed + 1)] * 3
    wishes = [Wish(*each) for each in zip(prompts, lengths, [()] * 6, [()] * 6, hows, strict=True)]
    texts = served("none", wishes)
    stops = [each.text[at : at + 3] for each in texts if (at := data.draw(st.integers(0, 20))) < len(each.text)]
    wishes = [Wish(w.prompt, w.max_tokens, w.eos, tuple(stops), w.sampling) for w in wishes]
    expected = served("none", wishes)
    for name in SPECULATIVE:
        assert served(name, wishes) == expected, name


@pytest.mark.parametrize("name", SPECULATIVE)
def test_the_end_of_the_context_at_every_offset_of_a_block(name: str) -> None:
    """Blocks that reach past the context's end cost nothing and change nothing."""
    longest = 64
    prompt = smoke_prompts(12)[11][:60]
    model = {"target": str(SMOKE / "target"), "dtype": "float32", "max_len": longest}
    texts = []
    for draft in (DRAFTS["none"], DRAFTS[name]):
        engine = loop_of(SMOKE / "target", draft, model=model)
        made: dict[int, list[int]] = {}
        ends: dict[int, str | None] = {}
        for cut in itertools.chain(range(1, len(prompt)), [len(prompt)]):
            made[cut] = []
            assert engine.submit(Request(cut, prompt[:cut], longest - cut)) is None
        while not engine.idle:
            for progress in engine.advance():
                made[progress.id] += progress.tokens
                ends[progress.id] = progress.finish
        assert all(len(tokens) == longest - cut for cut, tokens in made.items())
        assert set(ends.values()) == {"length"}
        texts.append(made)
    assert texts[0] == texts[1]
