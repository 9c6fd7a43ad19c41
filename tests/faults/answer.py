"""Mistakes in what the client gets: ends of texts, and the numbers beside them."""

from __future__ import annotations

from typing import Any

from tests.faults.fault import DRAFTED, EVERY, Need, Patches, Shows, fault


@fault("an eos token inside a round is ignored unless it is the last", DRAFTED, Shows.ANSWER, (Need.EOS,))
def eos_in_block_missed(patch: Patches) -> None:
    @patch("engine.scheduler:cut")
    def cut(original: Any, tokens: tuple[int, ...], room: int, eos: tuple[int, ...]) -> Any:
        inside = tokens[:room]
        return (inside, "stop") if inside[-1] in eos else original(tokens, room, ())


@fault("max_tokens is exceeded by what the last round accepted", DRAFTED, Shows.ANSWER, (Need.LENGTH,))
def max_tokens_overshot(patch: Patches) -> None:
    @patch("engine.scheduler:cut")
    def cut(original: Any, tokens: tuple[int, ...], room: int, eos: tuple[int, ...]) -> Any:
        kept, finish = original(tokens, len(tokens) + 1, eos)
        return kept, finish or ("length" if len(kept) >= room else None)


@fault("a stop string is seen only where one token holds it whole", EVERY, Shows.ANSWER, (Need.STOP,), front=True)
def stop_across_tokens_missed(patch: Patches) -> None:
    @patch("engine.text:StopMatcher.feed")
    def feed(original: Any, matcher: Any, text: str) -> tuple[str, bool]:
        matcher._states = [0] * len(matcher._stops)
        shown, stopped = original(matcher, text)
        return (shown if stopped else shown + matcher.flush()), stopped


@fault(
    "the text goes on through the stop string to the end of its token", EVERY, Shows.ANSWER, (Need.STOP,), front=True
)
def text_after_stop(patch: Patches) -> None:
    @patch("engine.text:StopMatcher.feed")
    def feed(original: Any, matcher: Any, text: str) -> tuple[str, bool]:
        whole = matcher._held + text
        shown, stopped = original(matcher, text)
        return (whole if stopped else shown), stopped


@fault("a drafted token's logprobs are the draft's", DRAFTED, Shows.ANSWER, (Need.LOGPROBS,))
def logprobs_of_draft(patch: Patches) -> None:
    latest: list[Any] = []

    @patch("engine.drafters.dflash:DFlashDrafter.block")
    def block(original: Any, drafter: Any, *rest: Any) -> Any:
        tokens, hidden, work = original(drafter, *rest)
        latest[:] = [drafter.model.logits(hidden.flatten(0, 1)).view(*hidden.shape[:2], -1)]
        return tokens, hidden, work

    @patch("engine.scoring:of_round")
    def of_round(original: Any, decodes: Any, verdict: Any, logits: Any) -> Any:
        if not latest:
            return original(decodes, verdict, logits)  # nothing was drafted
        draft = latest.pop()
        logits = logits.clone()
        for request, rows in enumerate(verdict.rows):
            for depth, row in enumerate(rows[: draft.shape[1]]):
                logits[request, row] = draft[request, depth]
        return original(decodes, verdict, logits)
