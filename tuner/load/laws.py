"""When requests are sent, by `kind`. Closed: so many are always in flight. Open: whether or not answers come.

A level of c is c users. Closed, each has one request in flight. Open, each sends `rate` requests a second, so the
level is offered c · rate; how many are in flight is then up to the server.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, FiniteFloat

from engine.config import Strict

Rate = Annotated[FiniteFloat, Field(gt=0, le=1e6, description="Requests a second of each user of a level.")]


class Closed(Strict):
    """A fixed number in flight: each user sends when the last answer is over. Measures capacity."""

    kind: Literal["closed"] = "closed"


class Constant(Strict):
    """Evenly spaced."""

    kind: Literal["constant"] = "constant"
    rate: Rate

    def gaps(self, users: int, rng: random.Random) -> Iterator[float]:
        """Yield seconds from one request to the next, for ever."""
        return itertools.repeat(1 / (self.rate * users))


class Poisson(Strict):
    """Independent users: exponential gaps."""

    kind: Literal["poisson"] = "poisson"
    rate: Rate

    def gaps(self, users: int, rng: random.Random) -> Iterator[float]:
        """Yield seconds from one request to the next, for ever."""
        while True:
            yield rng.expovariate(self.rate * users)


class Gamma(Strict):
    """Bursts: gamma-distributed gaps. A shape below 1 clusters requests, 1 is Poisson, above 1 evens them out."""

    kind: Literal["gamma"] = "gamma"
    rate: Rate
    shape: Annotated[FiniteFloat, Field(gt=0, le=1e6, description="Gaps' squared mean over their variance.")] = 0.25

    def gaps(self, users: int, rng: random.Random) -> Iterator[float]:
        """Yield seconds from one request to the next, for ever."""
        while True:
            yield rng.gammavariate(self.shape, 1 / (self.shape * self.rate * users))


Open = Constant | Poisson | Gamma
ARRIVAL_KINDS = (Closed, Constant, Poisson, Gamma)


def from_word(value: Any) -> Any:
    """Turn the bare word `closed` into the mapping it stands for."""
    return {"kind": value} if isinstance(value, str) else value


_Kinds = Annotated[Closed | Constant | Poisson | Gamma, Field(discriminator="kind")]
Arrivals = Annotated[_Kinds, BeforeValidator(from_word, json_schema_input_type=Literal["closed"] | _Kinds)]


def times(law: Open, users: int, seed: int) -> Iterator[float]:
    """Yield seconds from the start to each request, ascending: the same for every candidate of a study."""
    return itertools.accumulate(law.gaps(users, random.Random(seed)))
