"""The parity gate: does a candidate say what the target alone would have said?

Speculation promises the target's own text, so every candidate is asked, over HTTP and by token ids, to continue what
the server without speculation has written (`reference.py`): from the prompts, first one alone and then all at once,
beside continuations of the texts from cut points within them. Where a candidate differs, its token must be a tie by
the reference's own scores, and it is asked again from behind that place, so that a first difference hides nothing.
What it made of its own way after a tie the reference has not seen: those texts are kept in the record, and the
baseline, relaunched for the confirmation, scores them (`score_others`; `tuner.verdicts` says what follows).

A candidate also fails when its text runs in circles and the reference's does not, and when its drafts are accepted
far too rarely (`acceptance.py`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.backends import Answer, Ask, Backend, Score
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.loops import loops
from tuner.acceptance import Rounds, Seen, collapse, total
from tuner.errors import TunerError
from tuner.failures import Remains, kind_of_errors
from tuner.journal import Journal
from tuner.load.client import Client, Endpoint
from tuner.load.workload import Prompt, Requests
from tuner.ready import ServerDied, unless_dead
from tuner.records import FailureKind, TrialSpec
from tuner.reference import TOP, OwnText, Parity, Peer, Reference, ReferenceText, ScoredText, regret, unit_of
from tuner.supervise import Supervised

TEXTS = 5
LENGTH = 56  # tokens of a text; a loop shows in 48
BATCH = 16  # requests at once, beside which the reference is compared with itself
CUT_EVERY = 45  # tokens from one cut point of a text to the next
CUT_LATER = 9  # tokens by which the first cut point of a text lies behind that of the text before
CUT_LENGTH = 6
RESUMED = 4  # times that a text which left the reference at a tie is taken up behind it
RESUMED_LENGTH = 28  # tokens; a longer rest is taken up in parts, all at once, which takes fewer rounds
MOST_LINES = 4  # of evidence of one sort
SELF_UNITS, SELF_NATS = 8, 0.05  # a reference that contradicts itself by more than both judges nobody


class Unanswered(TunerError):
    """A server gave no usable answer. `kind`: what that means, where it is known. `refused`: it cannot be asked so."""

    def __init__(self, message: str, kind: FailureKind | None, *, refused: bool = False) -> None:
        super().__init__(message)
        self.kind = kind
        self.refused = refused


@dataclass(frozen=True)
class Server:
    """A server that can be asked. `stall`: seconds without a byte that end a request."""

    endpoint: Endpoint
    backend: Backend
    model: str
    stall: float
    ignore_eos: bool = False

    async def ask(self, *asks: Ask) -> list[Answer]:
        """Send all at once and return the answers in their order.

        Raises:
            Unanswered: one of them has no usable answer; the others are given up.
        """
        tasks = [asyncio.ensure_future(self._one(ask)) for ask in asks]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _one(self, ask: Ask) -> Answer:
        ask = dataclasses.replace(ask, model=self.model, ignore_eos=self.ignore_eos)
        try:
            path, body = self.backend.ask(ask)
        except ConfigError as error:
            raise Unanswered(str(error), "config", refused=True) from error
        async with Client(self.endpoint) as client:
            reply = await client.request("POST", path, json.dumps(body).encode(), self.stall)
        if reply.error is not None:
            raise Unanswered(f"POST {path}: {reply.error}", kind_of_errors({reply.error.kind}))
        if reply.status != 200:
            words = " ".join(reply.body[:200].decode("utf-8", "replace").split())
            raise Unanswered(f"POST {path}: HTTP {reply.status}: {words}", None, refused=reply.status < 500)
        try:
            document = json.loads(reply.body)
            if not isinstance(document, dict):
                raise ValueError("not an object")
            return self.backend.answer(ask, document)
        except (ValueError, RecursionError) as error:
            raise Unanswered(f"POST {path}: not a JSON object: {error}", "garbage_output") from error
        except ConfigError as error:
            raise Unanswered(str(error), "garbage_output", refused=True) from error


# ------------------------------------------------------------------------------------------------- the reference


async def take_reference(server: Server, requests: Requests, dtype: str) -> Reference | Parity:
    """Have the server without speculation write the texts, and compare it with itself.

    Every text is made alone, made again beside others, and echoed, which computes all its positions at once: three
    shapes of the same sums. `dtype` is what the server computes in.

    Returns:
        Parity: a failed one, when the server contradicts itself beyond all rounding.

    Raises:
        Unanswered: the server cannot be asked for token ids and log-probabilities.
    """
    written = []
    for prompt in chosen(requests):
        written += await server.ask(_first(prompt))
    texts = tuple(_text(answer) for answer in written)
    again = [_continue(texts[i % len(texts)], 0, LENGTH, top=0) for i in range(max(BATCH, len(texts)))]
    beside = await server.ask(*again)
    echoed = await server.ask(*(_echo(text.prompt, text.tokens) for text in texts))
    own = [regret(top, token) for text in texts for top, token in zip(text.top, text.tokens, strict=True)]
    seen = own + _beside(texts, beside) + [cost for pair in zip(texts, echoed, strict=True) for cost in _echoed(*pair)]
    unit = unit_of([top for text in texts for top in text.top], dtype)
    worst = max(seen)
    if worst > max(SELF_UNITS * unit, SELF_NATS):
        why = f"without speculation the server contradicts itself by {worst:.3g} nats, alone and beside other requests"
        finite = worst if math.isfinite(worst) else None  # infinite: one text ends where the other goes on
        return Parity(verdict="failed", why=(why,), texts=len(texts), positions=len(seen), regret=finite)
    return Reference(dtype=dtype, length=LENGTH, unit=unit, self_regret=worst, compared=len(seen), texts=texts)


def chosen(requests: Requests) -> tuple[Prompt, ...]:
    """Return the prompts of the reference: the first of the study's order."""
    return tuple(requests.prompts[index] for index in dict.fromkeys(requests.order[:TEXTS]))


def _first(prompt: Prompt) -> Ask:
    if prompt.messages is not None:
        return Ask("", LENGTH, messages=prompt.messages, top=TOP)
    return Ask("", LENGTH, prompt=prompt.prompt or (), top=TOP)


def _continue(text: ReferenceText, start: int, tokens: int, top: int = 0) -> Ask:
    return Ask("", tokens, prompt=text.prompt + text.tokens[:start], top=top)


def _echo(prompt: Sequence[int], tokens: Sequence[int]) -> Ask:
    return Ask("", 1, prompt=(*prompt, *tokens), top=TOP, echo=True)


def _text(answer: Answer) -> ReferenceText:
    tops = tuple(score.top for score in answer.scores if score is not None)
    if not answer.tokens or len(tops) != len(answer.tokens) or not all(tops):
        raise Unanswered("the answer lacks tokens or their alternatives", "garbage_output", refused=True)
    return ReferenceText(prompt=answer.prompt, tokens=answer.tokens, top=tops)


def _beside(texts: Sequence[ReferenceText], answers: Sequence[Answer]) -> list[float]:
    """Return what the text made beside others costs by the text made alone, up to the first difference."""
    costs = []
    for index, answer in enumerate(answers):
        found = compare(texts[index % len(texts)], 0, LENGTH, LENGTH, answer.tokens)
        costs += [0.0] * (found.positions - 1) + [found.cost]
    return costs


def _echoed(text: ReferenceText, answer: Answer) -> list[float]:
    """Return, at every position, what the best token of one computation costs by the other."""
    costs = []
    for top, score in zip(text.top, answer.prompt_scores[len(text.prompt) :], strict=True):
        if score is None or not score.top:
            raise Unanswered("an echoed token has no score", "garbage_output", refused=True)
        costs.append(max(regret(top, score.top[0][0]), regret(score.top, top[0][0])))
    return costs


# ------------------------------------------------------------------------------------------------- one comparison


@dataclass(frozen=True)
class Compared:
    """A continuation of a reference text against what follows there.

    `positions`: tokens compared, the first different one included. `left`: where in the text it left the reference,
    None when it did not. `cost`: the regret of that token, infinite when one of the two ends where the other goes on.
    """

    positions: int
    left: int | None = None
    cost: float = 0.0
    token: int | None = None


def compare(text: ReferenceText, start: int, asked: int, length: int, said: Sequence[int]) -> Compared:
    """Compare `said`, asked for with `asked` tokens from `start` on, with the text that was asked for `length`."""
    expected = text.tokens[start : start + asked]
    for index, (token, wanted) in enumerate(zip(said, expected, strict=False)):
        if token != wanted:
            return Compared(index + 1, start + index, regret(text.top[start + index], token), token)
    complete = len(expected) == asked or len(text.tokens) < length  # else the reference itself was not asked for more
    if len(said) < len(expected) or (len(said) > len(expected) and complete):
        return Compared(min(len(said), len(expected)) + 1, start + min(len(said), len(expected)), float("inf"))
    return Compared(len(expected))


# ------------------------------------------------------------------------------------------------- the candidate


@dataclass(frozen=True)
class Piece:
    """A continuation that a candidate was asked for, and what it said."""

    text: int
    start: int
    asked: int
    said: tuple[int, ...]
    compared: Compared
    rounds: Rounds


async def judge(
    server: Server, reference: Reference, config: EngineConfig, dtype: str, peer: Peer | None = None
) -> tuple[Parity, FailureKind | None]:
    """Return what the gate saw of a candidate, and the failure that it is, if it is one.

    Args:
        dtype: what the candidate computes in.
        peer: the trial whose acceptance it must not fall far below.

    Raises:
        Unanswered: the candidate gave no usable answer.
    """
    bound = reference.bound(dtype)
    whole = [(index, 0, reference.length) for index in range(len(reference.texts))]
    pieces = await _pieces(server, reference, whole[:1])
    pieces += await _pieces(server, reference, [*whole, *_cuts(reference)])
    texts, made = pieces[1 : 1 + len(whole)], pieces
    for _ in range(RESUMED):
        wanted = [part for piece in made for part in _resumed(piece, reference, bound)]
        if not wanted:
            break
        made = await _pieces(server, reference, list(dict.fromkeys(wanted)))
        pieces += made
    circling = [piece for piece in (pieces[0], *texts) if _circles(piece, reference)]
    broken = any(piece.compared.cost > bound for piece in pieces)
    garbage = circling if broken else await _not_its_own(server, reference, circling, bound)
    seen = _seen(pieces[0], texts)
    parity, kind = _verdict(pieces, garbage, collapse(config, seen, peer), reference, bound)
    left = [piece for piece in (pieces[0], *texts) if piece.compared.left is not None]
    own = (OwnText(text=p.text, tokens=p.said, judged=p.compared.positions) for p in left)
    more = {
        "accept_length": 1 + seen.every.rate if seen.every.count else None,
        "verify_count": seen.every.count,
        "own": tuple({(each.text, each.tokens): each for each in own}.values()),
    }
    return parity.model_copy(update=more), kind


async def _pieces(server: Server, reference: Reference, wanted: Sequence[tuple[int, int, int]]) -> list[Piece]:
    """Ask for continuations (text, start, tokens), all at once."""
    answers = await server.ask(*(_continue(reference.texts[index], start, n) for index, start, n in wanted))
    return [
        Piece(
            index,
            start,
            n,
            answer.tokens,
            compare(reference.texts[index], start, n, reference.length, answer.tokens),
            Rounds.of(answer.stats.accept_length, answer.stats.verify_count),
        )
        for (index, start, n), answer in zip(wanted, answers, strict=True)
    ]


def _cuts(reference: Reference) -> list[tuple[int, int, int]]:
    """Return the cut points: other places in every text, so that prompts of many lengths begin."""
    return [
        (index, start, min(CUT_LENGTH, reference.length - start))
        for index, text in enumerate(reference.texts)
        for start in range(5 + CUT_LATER * index % CUT_EVERY, len(text.tokens) - 1, CUT_EVERY)
    ]


def _resumed(piece: Piece, reference: Reference, bound: float) -> list[tuple[int, int, int]]:
    """Return what to ask for behind the tie at which a piece left the reference."""
    left = piece.compared.left
    if left is None or piece.compared.cost > bound:
        return []
    asked, written = piece.start + piece.asked, len(reference.texts[piece.text].tokens)
    starts = range(left + 1, min(asked, written), RESUMED_LENGTH)
    return [(piece.text, start, min(RESUMED_LENGTH, asked - start)) for start in starts]


def _circles(piece: Piece, reference: Reference) -> bool:
    return loops(piece.said) and not loops(reference.texts[piece.text].tokens)


async def _not_its_own(server: Server, reference: Reference, circling: Sequence[Piece], bound: float) -> list[Piece]:
    """Return those circling texts that the candidate does not even agree with itself.

    A small model may run in circles on the other side of a tie; then scoring the text gives the same tokens. A server
    that scores nothing (SGLang with DFLASH) leaves its own texts to the relaunched reference.
    """
    texts = [OwnText(text=piece.text, tokens=piece.said, judged=0) for piece in circling]
    try:
        scored = await score_texts(server, reference, texts)
    except Unanswered as error:
        if not error.refused:
            raise
        return []
    return [piece for piece, (cost, _) in zip(circling, scored, strict=True) if cost > bound]


def _seen(alone: Piece, texts: Sequence[Piece]) -> Seen:
    same = alone.said == texts[0].said
    return Seen(
        alone=alone.rounds,
        every=alone.rounds + total(piece.rounds for piece in texts),
        twice=(alone.rounds, texts[0].rounds) if same else None,
    )


def _verdict(
    pieces: Sequence[Piece], garbage: Sequence[Piece], collapsed: str, reference: Reference, bound: float
) -> tuple[Parity, FailureKind | None]:
    left = [piece for piece in pieces if piece.compared.left is not None]
    beyond = [piece for piece in left if piece.compared.cost > bound]
    positions = sum(piece.compared.positions for piece in pieces)
    lines = [_words(piece, reference, bound) for piece in beyond[:MOST_LINES]]
    if beyond:
        lines.insert(0, f"{len(beyond)} of {len(pieces)} texts leave the reference beyond a tie")
    lines += [f"text {p.text} runs in circles and the reference's does not" for p in garbage[:MOST_LINES]]
    kind: FailureKind | None = None
    if garbage:
        kind = "garbage_output"
    elif beyond:
        kind = "lost_parity"
    elif collapsed:
        kind = "acceptance_collapse"
        lines.append(collapsed)
    finite = [piece.compared.cost for piece in left if piece.compared.cost < float("inf")]
    parity = Parity(
        verdict="failed" if kind is not None else "passed",
        why=tuple(lines),
        texts=len(pieces),
        positions=positions,
        ties=len(left) - len(beyond),
        beyond=len(beyond),
        regret=max(finite, default=0.0),
        bound=bound,
    )
    return parity, kind


def _words(piece: Piece, reference: Reference, bound: float) -> str:
    """Return what is wrong with a piece, for people."""
    text, found = reference.texts[piece.text], piece.compared
    where = f"text {piece.text} from token {piece.start}"
    if found.left is None or found.token is None:
        return f"{where}: {len(piece.said)} tokens came, the reference has {len(text.tokens) - piece.start}"
    top = text.top[found.left]
    least = "" if found.token in dict(top) else "at least "
    return (
        f"{where}: token {found.left} is {found.token}, which costs {least}{found.cost:.3g} nats "
        f"against {top[0][0]}; a tie costs up to {bound:.3g}"
    )


# ------------------------------------------------------------------------------------------------- the confirmation


async def score_others(server: Server, reference: Reference, texts: Sequence[OwnText]) -> list[ScoredText]:
    """Have the baseline, relaunched, score the texts that other trials made of their own.

    Raises:
        Unanswered: it gives no usable answer; a text that it refuses has no regret.
    """
    found = []
    for start in range(0, len(texts), BATCH):
        found += await _score_some(server, reference, texts[start : start + BATCH])
    return found


async def _score_some(server: Server, reference: Reference, texts: Sequence[OwnText]) -> list[ScoredText]:
    """Score texts all at once; where one is refused, each alone, so that it spoils none of the others."""
    try:
        scored = await score_texts(server, reference, texts)
    except Unanswered as error:
        if not error.refused:
            raise
        if len(texts) == 1:
            return [ScoredText.model_validate(texts[0].model_dump())]
        return [each for text in texts for each in await _score_some(server, reference, [text])]
    found = []
    for text, (cost, at) in zip(texts, scored, strict=True):
        looping = loops(text.tokens) and not loops(reference.texts[text.text].tokens)
        found.append(ScoredText(**text.model_dump(), regret=cost, at=at, looping=looping))
    return found


async def score_texts(server: Server, reference: Reference, texts: Sequence[OwnText]) -> list[tuple[float, int]]:
    """Have a server score the tokens that the reference has not seen: of every text those from `judged` on.

    Returns:
        The worst regret of each text, in nats, and the token that has it.

    Raises:
        Unanswered: it cannot echo with log-probabilities.
    """
    answers = await server.ask(*(_echo(reference.texts[text.text].prompt, text.tokens) for text in texts))
    return [_worst(reference, text, answer) for text, answer in zip(texts, answers, strict=True)]


def _worst(reference: Reference, text: OwnText, answer: Answer) -> tuple[float, int]:
    scores = answer.prompt_scores[len(reference.texts[text.text].prompt) :]
    costs = {i: _cost(score) for i, score in enumerate(scores) if i >= text.judged}
    at = max(costs, key=lambda i: costs[i], default=0)
    return costs.get(at, 0.0), at


def _cost(score: Score | None) -> float:
    if score is None or not score.top:
        raise Unanswered("an echoed token has no score", "garbage_output", refused=True)
    return max(0.0, score.top[0][1] - score.logprob)


# ------------------------------------------------------------------------------------------------- in a trial


async def parity_of(
    spec: TrialSpec,
    process: Supervised,
    endpoint: Endpoint,
    backend: Backend,
    requests: Requests,
    resolved: Mapping[str, object] | None,
    journal: Journal,
) -> tuple[Parity, Remains | None]:
    """Pass a ready server through the gate: the baseline writes the reference, every other trial is judged by it.

    Returns:
        What the gate saw, and what is left of the trial if it ends here.
    """
    if why := off(spec):
        return Parity(verdict="off", why=(why,)), None
    journal.begin("parity")
    server = Server(endpoint, backend, spec.served_name, spec.limits.request_s, spec.workload.ignore_eos)
    dtype = dtype_of(spec.config, resolved)
    work = _reference(server, requests, dtype, journal) if spec.reference is None else _judged(spec, server, dtype)
    try:
        async with asyncio.timeout(spec.limits.level_s):
            parity, kind = await unless_dead(process, work)
    except ServerDied:
        return _broken("the server ended while its text was judged", None, process)
    except TimeoutError:
        return _broken(f"its text was not judged within {spec.limits.level_s:.0f} s", "no_progress", process)
    except Unanswered as error:
        if error.refused and spec.reference is None:
            return Parity(verdict="off", why=(f"no reference: {error}",)), None
        return _broken(f"asked for token ids: {error}", error.kind, process)
    return parity, None if kind is None else Remains("parity", "; ".join(parity.why), kind)


def off(spec: TrialSpec) -> str:
    """Return why a trial is not judged, or nothing."""
    if spec.config.synthetic:
        return "synthetic: with dummy weights or forced acceptance the text means nothing"
    if spec.reference is None and spec.role != "baseline":
        return "no reference: the baseline left none"
    return ""


async def _reference(
    server: Server, requests: Requests, dtype: str, journal: Journal
) -> tuple[Parity, FailureKind | None]:
    found = await take_reference(server, requests, dtype)
    if isinstance(found, Parity):
        return found, "lost_parity"
    journal.refer(found)
    return Parity(
        verdict="reference",
        texts=len(found.texts),
        positions=found.compared,
        regret=found.self_regret,
        bound=found.bound(dtype),
    ), None


async def _judged(spec: TrialSpec, server: Server, dtype: str) -> tuple[Parity, FailureKind | None]:
    if spec.reference is None:
        raise ValueError("a candidate is judged by a reference")
    parity, kind = await judge(server, spec.reference, spec.config, dtype, spec.peer)
    if kind is None and spec.score:
        scored = await score_others(server, spec.reference, spec.score)
        parity = parity.model_copy(update={"scored": tuple(scored)})
    return parity, kind


def _broken(reason: str, kind: FailureKind | None, process: Supervised) -> tuple[Parity, Remains]:
    """Return the end of a trial whose server broke meanwhile; what its log tells goes before `kind`."""
    exit_ = process.poll()
    return Parity(verdict="failed", why=(reason,)), Remains("parity", reason, None if exit_ else kind, exit_)


def dtype_of(config: EngineConfig, resolved: Mapping[str, object] | None) -> str:
    """Return what a server computes in: as it says, else as asked; bfloat16 where neither tells."""
    model = (resolved or {}).get("model")
    said = model.get("dtype") if isinstance(model, Mapping) else None
    found = said if isinstance(said, str) else config.model.dtype
    return "bfloat16" if found == "auto" else found
