"""The parity gate, over real HTTP, against a server whose every token is known."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from engine.backends import Native
from engine.config import EngineConfig
from engine.loops import loops
from tests.tuner.speaker import Misspeak, Speaker, best
from tuner import parity
from tuner.load.client import Endpoint
from tuner.load.workload import Prompt, Requests
from tuner.parity import LENGTH, Server, Unanswered, judge, score_others, take_reference
from tuner.records import FailureKind, Workload
from tuner.reference import OwnText, Parity, Reference, ScoredText

PROMPTS = [tuple(range(3 + i, 23 + 3 * i)) for i in range(12)]
CHAIN = EngineConfig.model_validate({"model": {"target": "bundled"}, "draft": {"kind": "dflash"}})


def requests() -> Requests:
    return Requests(tuple(Prompt(p, None) for p in PROMPTS), tuple(range(12)), "speaker", Workload(), 0)


def referred(speaker: Speaker | None = None, dtype: str = "bfloat16") -> Reference:
    async def take() -> Reference | Parity:
        async with (speaker or Speaker()).served() as server:
            return await take_reference(server, requests(), dtype)

    found = asyncio.run(take())
    assert isinstance(found, Reference), found
    return found


REFERENCE = referred()


def judged(speaker: Speaker, **more: Any) -> tuple[Parity, FailureKind | None]:
    async def run() -> tuple[Parity, FailureKind | None]:
        async with speaker.served() as server:
            return await judge(server, more.pop("reference", REFERENCE), CHAIN, more.pop("dtype", "bfloat16"), **more)

    return asyncio.run(run())


def test_the_reference_is_what_the_server_says() -> None:
    assert len(REFERENCE.texts) == parity.TEXTS
    assert [text.prompt for text in REFERENCE.texts] == PROMPTS[: parity.TEXTS]
    for text in REFERENCE.texts:
        context = list(text.prompt)
        for token, top in zip(text.tokens, text.top, strict=True):
            assert token == top[0][0] == best(context)
            assert len(top) == 20
            context.append(token)
        assert len(text.tokens) == LENGTH
    assert (REFERENCE.unit, REFERENCE.self_regret) == (0.125, 0.0)
    assert REFERENCE.bound("bfloat16") == pytest.approx(0.25, abs=0.002)
    assert Reference.model_validate_json(REFERENCE.model_dump_json()) == REFERENCE


def test_a_server_that_says_the_same_passes() -> None:
    speaker = Speaker()
    found, kind = judged(speaker)
    assert (kind, found.verdict, found.why) == (None, "passed", ())
    assert (found.ties, found.beyond, found.regret, found.bound) == (0, 0, 0.0, REFERENCE.bound("bfloat16"))
    assert found.positions > (parity.TEXTS + 1) * parity.LENGTH
    assert found.accept_length == pytest.approx(3.0, abs=0.1)
    assert found.own == ()
    cut = {tuple(body["prompt"]) for body in speaker.asked} - set(PROMPTS)
    assert len(cut) >= parity.TEXTS  # a cut point of every text, at many places
    assert not any("logprobs" in body for body in speaker.asked)


def from_place(rank: int, place: int = 20) -> Misspeak:
    return lambda prompt, index, flying: rank if index == place else 0


def test_ties_pass_and_are_seen_through() -> None:
    speaker = Speaker(from_place(2))
    found, kind = judged(speaker)
    assert kind is None
    assert (found.regret, found.beyond) == (pytest.approx(0.25), 0)
    assert found.ties >= parity.TEXTS
    assert {own.text for own in found.own} == set(range(parity.TEXTS))
    assert all(own.judged == 21 and len(own.tokens) == LENGTH for own in found.own)
    behind = [REFERENCE.texts[i].prompt + REFERENCE.texts[i].tokens[:21] for i in range(parity.TEXTS)]
    assert set(behind) <= {tuple(body["prompt"]) for body in speaker.asked}


FAULTS: dict[str, tuple[Speaker, FailureKind, str]] = {
    "a worse token": (Speaker(from_place(3)), "lost_parity", "costs 0.375 nats"),
    "a token from nowhere": (Speaker(from_place(20)), "lost_parity", "at least 2.38 nats"),
    "only long prompts": (
        Speaker(lambda p, i, _: 4 * (i == 2 and len(p) > 60 and p[:30] not in PROMPTS)),
        "lost_parity",
        "",
    ),
    "only beside others": (Speaker(lambda p, i, flying: 5 * (i == 9 and flying > 4)), "lost_parity", "beyond a tie"),
    "only alone": (Speaker(lambda p, i, flying: 5 * (i == 9 and flying == 1)), "lost_parity", "beyond a tie"),
    "only behind a tie": (
        Speaker(lambda p, i, _: 2 if i == 10 and p in PROMPTS else 6 * (len(p) + i > 50 and i == 20)),
        "lost_parity",
        "",
    ),
    "a token too few": (Speaker(end=-1), "lost_parity", f"{LENGTH - 1} tokens came, the reference has {LENGTH}"),
    "a token too many": (Speaker(end=1), "lost_parity", f"{LENGTH + 1} tokens came, the reference has {LENGTH}"),
    "runs in circles": (Speaker(circle=32), "garbage_output", "runs in circles"),
    "next to no draft accepted": (
        Speaker(accept=lambda flying: 1.0),
        "acceptance_collapse",
        "0 drafted tokens were accepted",
    ),
    "no draft accepted beside others": (
        Speaker(accept=lambda flying: 1.3 if flying > 2 else 3.5),
        "acceptance_collapse",
        "beside other requests",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_told_with_its_evidence(name: str) -> None:
    speaker, expected, words = FAULTS[name]
    found, kind = judged(speaker)
    assert (kind, found.verdict) == (expected, "failed")
    assert any(words in line for line in found.why), found.why
    if expected != "acceptance_collapse":
        assert found.beyond > 0


def test_circles_that_the_model_itself_runs_are_no_garbage() -> None:
    """Behind a tie the text is the candidate's own; it is garbage only if the candidate's own scores deny it."""
    tie = next(i for i in range(LENGTH) if not loops(REFERENCE.texts[0].tokens[: i + 1]))
    own = [5] * LENGTH

    def circling(prompt: tuple[int, ...], index: int, flying: int) -> int:
        return 1 if index == tie else 0

    piece = parity.Piece(0, 0, LENGTH, tuple(own), parity.Compared(1, 0, 0.125, 5), parity.Rounds())

    async def run(speaker: Speaker) -> list[parity.Piece]:
        async with speaker.served() as server:
            return await parity._not_its_own(server, REFERENCE, [piece], 0.25)

    assert asyncio.run(run(Speaker(circling))) == [piece]  # the language never repeats a token so often
    assert asyncio.run(run(Speaker(circling, scores=False))) == []  # no scores: left to the relaunched reference


def test_a_coarser_type_is_judged_by_its_own_rounding() -> None:
    fine = referred(dtype="float32")
    assert fine.bound("float32") < 0.01 < 0.25 < fine.bound("bfloat16")
    assert judged(Speaker(from_place(1)), reference=fine, dtype="float32")[1] == "lost_parity"
    assert judged(Speaker(from_place(1)), reference=fine)[1] is None


def test_own_texts_are_scored_by_the_relaunched_reference() -> None:
    found, _ = judged(Speaker(from_place(2)))
    spoilt = found.own[0].model_copy(update={"tokens": (*found.own[0].tokens[:50], 3, *found.own[0].tokens[51:])})

    async def run() -> list[ScoredText]:
        async with Speaker().served() as server:
            return await score_others(server, REFERENCE, [*found.own, spoilt])

    *good, bad = asyncio.run(run())
    assert all(score.regret == 0 and score.judged == 21 and not score.looping for score in good)
    assert (bad.text, bad.at) == (spoilt.text, 50)
    assert bad.regret is not None
    assert bad.regret > REFERENCE.bound("bfloat16")


def test_a_reference_that_contradicts_itself_judges_nobody() -> None:
    async def take() -> Reference | Parity:
        async with Speaker(lambda p, i, flying: 12 * (i == 7 and flying > 3)).served() as server:
            return await take_reference(server, requests(), "bfloat16")

    found = asyncio.run(take())
    assert isinstance(found, Parity)
    assert found.verdict == "failed"
    assert found.regret == pytest.approx(1.5)
    assert "contradicts itself by 1.5 nats" in found.why[0]


class Brief(Speaker):
    """Says less beside others than alone."""

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        self.end = -3 if self.flying > 3 else 0
        return super().answer(body)


def test_a_reference_that_ends_earlier_beside_others_judges_nobody() -> None:
    async def take() -> Reference | Parity:
        async with Brief().served() as server:
            return await take_reference(server, requests(), "bfloat16")

    found = asyncio.run(take())
    assert isinstance(found, Parity)
    assert (found.verdict, found.regret) == ("failed", None)
    assert "contradicts itself by inf nats" in found.why[0]


def test_a_reference_that_differs_from_itself_a_little_is_more_lenient() -> None:
    reference = referred(Speaker(lambda p, i, flying: 3 * (i == 7 and flying > 3)))
    assert reference.self_regret == pytest.approx(0.375)
    assert reference.bound("bfloat16") == pytest.approx(0.75, abs=0.002)


@pytest.mark.parametrize(
    ("speaker", "kind", "refused"),
    [
        (Speaker(status=400), None, True),
        (Speaker(status=500), None, False),
        (Speaker(scores=False), "garbage_output", True),
    ],
)
def test_no_answer_is_no_reference(speaker: Speaker, kind: FailureKind | None, refused: bool) -> None:
    with pytest.raises(Unanswered) as caught:
        referred(speaker)
    assert (caught.value.kind, caught.value.refused) == (kind, refused)


def test_nobody_there() -> None:
    server = Server(Endpoint("127.0.0.1", 1), Native(), "speaker", 1.0)
    with pytest.raises(Unanswered, match="connect"):
        asyncio.run(judge(server, REFERENCE, CHAIN, "bfloat16"))


def test_a_server_that_never_answers_makes_no_progress() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()  # until the client gives up
        writer.close()

    async def run() -> None:
        listener = await asyncio.start_server(silent, "127.0.0.1", 0)
        async with listener:
            endpoint = Endpoint("127.0.0.1", listener.sockets[0].getsockname()[1])
            await judge(Server(endpoint, Native(), "speaker", 0.2), REFERENCE, CHAIN, "bfloat16")

    with pytest.raises(Unanswered) as caught:
        asyncio.run(run())
    assert (caught.value.kind, caught.value.refused) == ("no_progress", False)


def test_a_text_that_looks_back_keeps_what_was_judged() -> None:
    text = OwnText(text=1, tokens=(1, 2, 3), judged=2)
    assert OwnText.model_validate_json(text.model_dump_json()) == text
