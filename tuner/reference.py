"""What the target alone says: the texts by which candidates are judged, and what the gate records. Pure.

At the start of a study the server without speculation stores, for a few prompts of the workload, its greedy token
ids with the twenty likeliest tokens at every position. A token costs *regret*: how far its log-probability lies below
the best one's, in nats, which is the difference of their logits. Correct servers differ where two logits lie within
rounding of each other, so a regret up to the bound is a tie.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, NonNegativeInt

TOP = 20  # alternatives kept at every position, the most that servers give

# Bits of a mantissa behind the binary point: a number in [2^e, 2^(e+1)) has the unit 2^(e - bits) in its last place.
MANTISSA = {"bfloat16": 7, "float16": 10, "float32": 23, "float64": 52}
USUAL_BINADE = 4  # best logits are between 16 and 32, where nothing tells better
COARSEST, FINEST = 1.0, 2.0**-12  # units that show in log-probabilities, which are float32
LEAST_SHOWN = 8  # alternatives; fewer have a common divisor by chance
ROUNDING = 1e-3  # nats: log-probabilities are rounded, and sums of float32 differ by more than their last place

Top = tuple[tuple[int, FiniteFloat], ...]
"""(token id, log-probability), best first."""


class Record(BaseModel):
    """Base of what is read back from files: unknown keys are ignored, so later versions stay readable."""

    model_config = ConfigDict(
        extra="ignore", frozen=True, protected_namespaces=(), populate_by_name=True, serialize_by_alias=True
    )


class ReferenceText(Record):
    """One prompt and its greedy text, as token ids; `top` has one entry a token."""

    prompt: tuple[NonNegativeInt, ...] = Field(min_length=1)
    tokens: tuple[NonNegativeInt, ...] = Field(min_length=1)
    top: tuple[Top, ...]


class Reference(Record):
    """`reference.json`."""

    schema_: Literal[1] = Field(1, alias="schema")
    dtype: str = Field(description="What the server computes in.")
    length: NonNegativeInt = Field(description="Tokens asked for; a text with fewer ended by itself.")
    unit: FiniteFloat = Field(gt=0, description="Unit in the last place of `dtype` at the best logits, in nats.")
    self_regret: FiniteFloat = Field(ge=0, description="Its worst regret against itself: alone, in a batch, echoed.")
    compared: NonNegativeInt = Field(description="Positions at which it was compared with itself.")
    texts: tuple[ReferenceText, ...] = Field(min_length=1)

    def bound(self, dtype: str) -> float:
        """Return the regret up to which a token of a server that computes in `dtype` is a tie."""
        coarser = 2.0 ** max(0, MANTISSA.get(self.dtype, 7) - MANTISSA.get(dtype, 7))
        return max(2 * self.self_regret, 2 * self.unit * coarser) + ROUNDING


class OwnText(Record):
    """A text of the candidate that left the reference at a tie: what follows is for a relaunched reference to score."""

    text: NonNegativeInt = Field(description="Index of the reference's text.")
    tokens: tuple[NonNegativeInt, ...] = Field(description="All that was generated after its prompt.")
    judged: NonNegativeInt = Field(description="How many of them, from the first, the reference has scored.")


class ScoredText(OwnText):
    """A text of another trial by the scores of the relaunched reference."""

    regret: FiniteFloat | None = Field(None, description="The worst, in nats; null: the reference takes no such text.")
    at: NonNegativeInt = Field(0, description="The token that has it.")
    looping: bool = Field(False, description="It runs in circles, and the reference's text does not.")


class Peer(Record):
    """Another trial of the study, with the same drafter and a smaller draft."""

    trial: NonNegativeInt
    accept_length: FiniteFloat = Field(description="Over the gate's texts, which are the same for all.")


class Parity(Record):
    """What the gate saw of one trial. Regret and bound in nats."""

    verdict: Literal["reference", "passed", "failed", "off"] = Field(
        description="`reference` is the baseline's: it wrote the texts; `off` is not judged."
    )
    why: tuple[str, ...] = Field((), description="What is wrong, or why nothing was judged.")
    texts: NonNegativeInt = Field(0, description="Generations judged.")
    positions: NonNegativeInt = Field(0, description="Tokens judged against the reference.")
    ties: NonNegativeInt = Field(0, description="Tokens that differ from the reference within the bound.")
    beyond: NonNegativeInt = Field(0, description="Tokens beyond the bound.")
    regret: FiniteFloat | None = Field(None, description="The worst; a token outside the twenty has at least theirs.")
    bound: FiniteFloat | None = Field(None, description="Regret up to which a token is a tie.")
    accept_length: FiniteFloat | None = Field(None, description="Tokens a verify round gave, over the gate's texts.")
    verify_count: NonNegativeInt = Field(0, description="Verify rounds behind `accept_length`.")
    own: tuple[OwnText, ...] = Field((), description="Texts that left the reference at a tie, for the confirmation.")
    scored: tuple[ScoredText, ...] = Field((), description="Such texts of other trials, by the relaunched baseline.")


def regret(top: Top, token: int) -> float:
    """Return how far a token lies below the best of `top`; outside of it, at least as far as the last."""
    values = dict(top)
    best = max(values.values())
    return best - values[token] if token in values else best - min(values.values())


def unit_of(tops: Sequence[Top], dtype: str) -> float:
    """Return the unit in the last place of `dtype` at the best logits, as far as log-probabilities tell.

    They do not show how large a logit is. Best logits of language models lie mostly between 16 and 32, and a
    reference has some there, so no smaller unit is taken; rounding is as coarse as the largest numbers of a sum.
    Larger logits of a 16-bit type show: all differences of log-probabilities are multiples of their unit. Of that
    the median over all positions is taken.
    """
    bits = MANTISSA.get(dtype, 7)
    usual = 2.0 ** (USUAL_BINADE - bits)
    if bits > MANTISSA["float16"]:
        return usual
    return max(usual, statistics.median(_grid([top[0][1] - value for _, value in top]) for top in tops))


def _grid(differences: Sequence[float]) -> float:
    """Return the largest power of two that divides all, 0 when there is none above rounding."""
    unit = COARSEST
    while unit >= FINEST and len(differences) >= LEAST_SHOWN:
        if all(math.isclose(each / unit, round(each / unit), abs_tol=0.02) for each in differences):
            return unit
        unit /= 2
    return 0.0
