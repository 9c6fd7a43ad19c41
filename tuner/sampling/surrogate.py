"""The default sampler: a Gaussian process of each objective over every point that can run.

Optuna's GP knows only parameters that every trial has, and optimises over a box; a search space of launches is
conditional, finite and full of holes. So here the points are listed once, the processes are fitted to the same
told values (crashes and broken limits as constraints), and the point with the largest expected gain in hypervolume
times the chance to run is taken from the list. No point is launched twice in a search: launches that
only buy precision come at its end (`tuner.confirm`), where they go to the points that can still win.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from tuner.pareto import non_dominated
from tuner.records import canonical
from tuner.sampling.acquisition import expected_improvement, hypervolume
from tuner.sampling.base import Costs, Proposal, Repeats, View, key_of, seed_of, unlike
from tuner.sampling.design import first_points, sobol_points
from tuner.sampling.encode import Array, numeric
from tuner.sampling.forecast import accepted, forecast
from tuner.sampling.gp import ALIKE, Prior, Rows, distances, fit, members, rows_of
from tuner.sampling.guesses import calibrate
from tuner.space import Assignment, FloatRange

CRASH_PRIOR = Prior(length=(-0.2, 0.6), signal=(0.0, 0.7), noise=(-4.0, 0.7))
BOLD, CAREFUL, TIMID = 2.0, 16.0, 64.0  # power of the chance to run: few launches crashed, many did, too many did
Indices = NDArray[np.intp]
Words = dict[str, str]  # path: canonical value
KIND = "draft.kind"
GIVEN_UP = 3  # failures of a word that never ran
BLUNT = 0.5  # a label between −1 and +1 is a doubt of its own, however sure the model is of it
HEALTHY = -0.6  # far from data, a point is taken to run: −1 runs, +1 crashes
MUCH, LITTLE = 2.5, 0.02  # what a dared launch must promise: so many times the careful one, and this share of volume
LAST = 16.0  # standard deviations per unit of log chance to run, where only the recommendation is left to settle


@dataclass(frozen=True)
class Promise:
    """What is expected of points: costs, with what is not known of them, and the chances to run and to hold the limits.

    `sds`: standard deviations of what a launch may find that no other has. `good`: costs of the launches that hold the
    limits; `margin`: gains over them that do not count; `reference`: the costs from which hypervolume is counted.
    """

    means: Array  # (points, objectives)
    sds: Array
    good: Array  # (launches, objectives)
    margin: Array  # (objectives,)
    reference: Array
    runs: Array  # (points,)
    holds: Array

    def gain(self, doubt: float = 1.0, axis: int | None = None, margin: float = 1.0) -> Array:
        """Return each point's gain if it runs and holds the limits, as a share of the hypervolume so far: of the whole
        front, or of one axis alone. The model's doubt of itself counts `doubt` times, the margin `margin` times."""
        of = slice(None) if axis is None else slice(axis, axis + 1)
        good, reference = self.good[:, of], self.reference[of]
        asked = good - margin * self.margin[of]
        found = expected_improvement(asked, reference, self.means[:, of], doubt * self.sds[:, of])
        return np.asarray(found / max(1e-12, hypervolume(good, reference)))

    def expected(self, gain: Array) -> Array:
        """Return gains times the chance to run and to hold the limits."""
        return gain * self.runs * self.holds

    def score(self, gain: Array, caution: float) -> Array:
        """Return what a point is chosen by, a logarithm; `caution` is the power of the chance to run."""
        gains, runs, holds = (np.log(np.maximum(each, 1e-300)) for each in (gain, self.runs, self.holds))
        return np.asarray(gains + caution * runs + BOLD * holds)


@dataclass(frozen=True)
class Surrogate:
    """The knobs of the default sampler.

    `startup`: launches before anything is modelled, `guided` where a prior gives a first guess and a launch holds the
    limits. `tolerated`: share of crashes that is a fair price for what they teach; `enough`: so many times the root of
    the launches, and at least `few`, have taught what crashes can, for later ones tell less. `least` and `noisy`: gains
    that do not count, in log units and in standard deviations of a measurement; without them a search ends up comparing
    points that differ by noise. `fairness`: every so many launches look where little is known: at a value that never
    ran (`untested`), or else with the model's doubt times `doubt` and without the prior, as scales that few launches
    tell are taken for certain, and a prior makes the rest look certain. `ends`: every so many push one end of the front
    alone, each in its turn. `daring`: every so many, what promises much more than the careful choice is launched in
    spite of the crashes before it: a model that blames the wrong knob for early ones avoids for ever what would correct
    it. Such a launch does not do without the prior. `settled`: a share of the hypervolume; where less is expected of
    the whole front, also with that doubt and by gains that else do not count, a launch goes to what may be recommended.
    """

    startup: int = 8
    guided: int = 4
    tolerated: float = 0.045
    enough: float = 0.5
    few: int = 3
    least: float = 0.01
    noisy: float = 0.6
    fairness: int = 2
    doubt: float = 2.5
    ends: int = 4
    daring: int = 5
    settled: float = 0.004
    repeats: ClassVar[Repeats] = "never"
    forgets_failures: ClassVar[bool] = False
    kind: ClassVar[str] = "surrogate"

    def starting_after(self, launches: int) -> Surrogate:
        """Return this sampler with another number of launches before it models anything."""
        return replace(self, startup=launches)

    def propose(self, view: View) -> Proposal | None:
        """Return the most promising point, None when every one was tried."""
        measured = sum(observation.values is not None for observation in view.observations)
        if measured < 2 or len(view.observations) < self.spread(view):
            seed = seed_of(view.pool.space.file.study.seed)
            *begin, everything_large = first_points(view.pool.space)  # the surest crash of a space goes last
            found = unlike(view, [*begin, *sobol_points(view.pool.space, seed), everything_large])
            if found is not None:
                return Proposal(found)
        allowed = self.allowed(view)
        if not len(allowed):
            return None
        explores = self.explores(view)
        doubtful = untested(view) if explores else None
        if doubtful is not None:
            allowed = _far_from_failures(view, allowed, doubtful)
        promise = self.promise(view, allowed, guided=not explores)
        gain = self.gain(view, promise, explores)
        score = _settling(view, allowed, promise.runs) if gain is None else self.score(view, promise, gain)
        rng = np.random.default_rng(view.seed)
        best = np.flatnonzero(score >= score.max() - 1e-9)
        return Proposal(view.pool.assignments[int(allowed[rng.choice(best)])])

    def score(self, view: View, promise: Promise, gain: Array) -> Array:
        """Return what points that promise gains are chosen by."""
        crashes = sum(observation.values is None for observation in view.observations)
        careful = promise.score(gain, self.caution(crashes, len(view.observations)))
        bold, share = promise.score(gain, BOLD), promise.expected(gain)
        worth = share[bold.argmax()] > max(MUCH * share[careful.argmax()], LITTLE)
        return bold if worth and self.dares(view) else careful

    def spread(self, view: View) -> int:
        """Return how many launches are spread over the space before anything is modelled."""
        holds = any(o.values is not None and all(each <= 0 for each in o.broken) for o in view.observations)
        return self.guided if holds and view.pool.guesses is not None else self.startup

    def explores(self, view: View) -> bool:
        """Tell whether a launch doubts what is known."""
        return view.number % self.fairness == 0 and not (self.dares(view) and view.pool.guesses is not None)

    def dares(self, view: View) -> bool:
        """Tell whether a launch may be chosen in spite of the crashes before it."""
        return view.number > 2 * self.daring and view.number % self.daring == self.daring - 1

    def gain(self, view: View, promise: Promise, explores: bool) -> Array | None:
        """Return the gains that a launch is chosen by: of the end of the front whose turn it is, or else of all of it,
        or else as doubtful as can be, or else those that noise may hide; None where nothing is expected any more.

        Recommendations are the last objective's end: where its turn promises nothing, who is best there is to be
        settled, as long as there are launches for it.
        """
        turn, pushed = divmod(view.number, self.ends)
        axis = turn % len(view.objectives) if pushed == self.ends - 1 else None
        doubt = self.doubt if explores else 1.0
        for doubted, of, margin in ((doubt, axis, 1.0), (doubt, None, 1.0), (self.doubt, None, 1.0), (1.0, None, 0.0)):
            gain = promise.gain(doubted, of, margin)
            if promise.expected(gain).max() >= self.settled * doubted:
                return gain
            if of == len(view.objectives) - 1:
                break
        return None

    def allowed(self, view: View) -> Indices:
        """Return the positions of the points that may be proposed."""
        barred = view.taken | view.seen
        return np.array([i for i, key in enumerate(view.pool.keys) if key not in barred], dtype=np.intp)

    def promise(self, view: View, allowed: Indices, *, guided: bool = True) -> Promise:
        """Return what is expected of the points at these positions, with or without the prior's guesses."""
        costs = _costs(view)
        x, encoder = view.pool.rows[allowed], view.pool.encoder
        prior = Trusted.of(view, costs, [view.pool.keys[position] for position in allowed], guided=guided)
        found = forecast(encoder, prior.rest(costs), x)
        means, told = found.means + prior.ahead, found.told + prior.behind
        sds = np.minimum(found.sds, found.apart)  # what differs in knobs that do not matter cannot surprise
        feasible = (costs.broken <= 0).all(axis=1)
        good = told[feasible] if feasible.any() else told
        margin = np.maximum(self.least, self.noisy * np.hypot(found.noise, costs.usual_scatter))
        runs = self.chance_to_run(costs, encoder.groups, x)
        holds = _chance_to_hold(costs, encoder.groups, x)
        return Promise(means, sds, good, margin, reference_of(good), runs, holds)

    def caution(self, crashes: int, launches: int) -> float:
        """Return to which power the chance to run counts."""
        if crashes <= self.tolerated * launches:
            return BOLD
        return CAREFUL if crashes <= max(self.few, self.enough * launches**0.5) else TIMID

    @staticmethod
    def chance_to_run(costs: Costs, groups: tuple[int, ...], x: Rows) -> Array:
        """Return each point's probability not to crash."""
        if not costs.crashed.any():
            return np.ones(len(x))
        model = fit(costs.x, 2 * costs.crashed - 1, groups, prior=CRASH_PRIOR, center=HEALTHY)
        mean, sd = model.predict(x)
        return np.asarray(ndtr(-mean / np.hypot(sd, BLUNT)))


def _costs(view: View) -> Costs:
    """Return the costs of what was launched, and of what runs now as it is believed to come out."""
    costs = Costs.of(view)
    return believe(view, costs) if view.pending else costs


def _settling(view: View, allowed: Indices, runs: Array) -> Array:
    """Return what points at these positions are chosen by when no gain is expected, given their chances to run: that
    each may be the one to recommend."""
    costs = _costs(view)
    prior = Trusted.of(view, costs, [view.pool.keys[position] for position in allowed])
    found = forecast(view.pool.encoder, prior.rest(costs).last, view.pool.rows[allowed], ALIKE)
    doubts = found.sds[:, -1]
    usual = max(1e-6, float(np.median(doubts)))
    hopes = doubts - found.means[:, -1] - prior.ahead[:, -1]
    return np.asarray(hopes + LAST * usual * np.log(np.maximum(runs, 1e-300)))


def untested(view: View) -> Words | None:
    """Return a choice that never ran together with the leader's kind of draft; None when all did, or failed often.

    Two early crashes can share a value that was not their cause, and a model that blames it never looks again. So a
    value is given up only after three failures, each as unlike the earlier ones as can be. Words are tried if nobody
    did; of numbers, those that failed.
    """
    measured = [o for o in view.observations if o.values is not None]
    if not measured:
        return None
    sign = 1.0 if view.objectives[-1].goal == "min" else -1.0
    leader = min(measured, key=lambda o: sign * o.values[-1] if o.values else 0.0)
    kind = {KIND: canonical(leader.assignment[KIND])} if KIND in leader.assignment else {}
    pool = view.pool.assignments, view.pool.keys
    for domain in view.pool.space.domains:
        if isinstance(domain, FloatRange):
            continue
        least = 1 if numeric(domain) else 0  # a number that nobody tried lies between or beside others
        for choice in domain.values:
            words = kind | {domain.path: canonical(choice)}
            ran = [o.values is not None for o in view.observations if _has(o.assignment, words)]
            if any(ran) or not least <= len(ran) < GIVEN_UP:
                continue
            if any(_has(a, words) for a, key in zip(*pool, strict=True) if key not in view.taken):
                return words
    return None


def _far_from_failures(view: View, allowed: Indices, words: Words) -> Indices:
    """Return the positions with these words that are least like their failures; all of them when there are none."""
    held = np.array([i for i in allowed if _has(view.pool.assignments[i], words)], dtype=np.intp)
    if not len(held):
        return allowed
    failed = [o.assignment for o in view.observations if o.values is None and _has(o.assignment, words)]
    if not failed:
        return held
    away = distances(view.pool.features[held], view.pool.encoder.matrix(failed)).min(axis=1)
    return np.asarray(held[away >= np.quantile(away, 0.9)])


def _has(assignment: Assignment, words: Words) -> bool:
    return all(path in assignment and canonical(assignment[path]) == value for path, value in words.items())


def _chance_to_hold(costs: Costs, groups: tuple[int, ...], x: Rows) -> Array:
    """Return each point's probability to meet every constraint."""
    known = costs.x[list(costs.measured)]
    chance = np.ones(len(x))
    for column in costs.broken.T:
        if (column <= 0).all() and len(column) < 4:
            continue
        mean, sd = fit(known, np.log1p(np.maximum(column, -0.999)), groups).predict(x)
        chance *= ndtr(-mean / sd)
    return chance


def believe(view: View, costs: Costs) -> Costs:
    """Return the costs with what runs now, as if it came out as predicted (Kriging believer)."""
    encoder = view.pool.encoder
    x = encoder.matrix(view.pending)
    rows = rows_of(x, members(encoder.groups))
    prior = Trusted.of(view, costs, [key_of(assignment) for assignment in view.pending])
    rest = prior.rest(costs)
    means = forecast(encoder, rest, rows).means + prior.ahead
    accept = None
    if costs.accept is not None and rest.accept is not None:
        known = costs.x[list(costs.measured)]
        longer = accepted(encoder, known, rest.accept, rows).means[:, 0] + prior.longer
        accept = np.concatenate([costs.accept, longer])
    start = len(costs.x)
    return replace(
        costs,
        x=np.concatenate([costs.x, x]),
        crashed=np.concatenate([costs.crashed, np.zeros(len(x))]),
        values=np.concatenate([costs.values, means]),
        broken=np.concatenate([costs.broken, np.zeros((len(x), costs.broken.shape[1]))]),
        scatter=np.concatenate([costs.scatter, np.zeros_like(means)]),
        whole=np.concatenate([costs.whole, np.zeros(len(x), dtype=np.bool_)]),
        accept=accept,
        measured=(*costs.measured, *range(start, start + len(x))),
    )


@dataclass(frozen=True)
class Trusted:
    """What the prior says of candidates (`ahead`) and of what was launched (`behind`), scaled as far as it is believed:
    costs, (points, objectives), and logarithms of accept lengths, (points,): `longer`, `long`. Zeros where it is not.
    """

    ahead: Array
    behind: Array
    longer: Array
    long: Array

    @classmethod
    def of(cls, view: View, costs: Costs, candidates: Sequence[str], *, guided: bool = True) -> Trusted:
        """Judge the guesses of rounds and of accept lengths, each by what was measured of it. `candidates` are keys."""
        count, index = costs.values.shape[1], view.pool.index
        keys = [observation.key for observation in view.observations if observation.values is not None]
        keys += [key_of(assignment) for assignment in view.pending]  # as they are believed to come out (`believe`)
        keys = keys[: len(costs.values)]
        guesses = view.pool.guesses
        if guesses is None or not guided or not all(key in index for key in (*keys, *candidates)):
            ahead, behind = np.zeros((len(candidates), count)), np.zeros_like(costs.values)
            return cls(ahead, behind, ahead[:, 0], behind[:, 0])
        new, old = guesses[[index[key] for key in candidates]], guesses[[index[key] for key in keys]]
        if costs.accept is None:
            ahead, behind = _believed(new[:, :count], old[:, :count], costs.values)
            return cls(ahead, behind, np.zeros(len(new)), np.zeros(len(old)))
        scale = costs.per_token.astype(np.float64)
        new_times, old_times = (each[:, :count] + np.where(scale, each[:, count:], 0.0) for each in (new, old))
        longer, long = _believed(new[:, count:], old[:, count:], costs.accept[:, None])
        ahead, behind = _believed(new_times, old_times, costs.values + scale * costs.accept[:, None])
        return cls(ahead - scale * longer, behind - scale * long, longer[:, 0], long[:, 0])

    def rest(self, costs: Costs) -> Costs:
        """Return what of the costs the prior does not say."""
        accept = None if costs.accept is None else costs.accept - self.long
        return replace(costs, values=costs.values - self.behind, accept=accept)


def _believed(new: Array, old: Array, measured: Array) -> tuple[Array, Array]:
    """Return guesses of candidates and of what was launched times the slopes that were measured, column by column."""
    slopes = [calibrate(old[:, column], values).slope for column, values in enumerate(measured.T)]
    used = np.where(np.isfinite(new).all(axis=0), slopes, 0.0)
    return used * np.where(used, new, 0.0), used * np.where(used, old, 0.0)


def believed(view: View) -> bool:
    """Tell whether the prior's guesses are used on any axis."""
    costs = Costs.of(view)
    if len(costs.values) < 1:
        return view.pool.guesses is not None
    return bool(np.any(Trusted.of(view, costs, view.pool.keys[:1]).behind != 0.0))


def reference_of(good: Array) -> Array:
    """Return the costs from which gains are counted: the worst of the front on each axis, and a tenth of its extent
    more (of all points, while the front is a single one)."""
    front = good[non_dominated(good)]
    extent = np.ptp(front, axis=0)
    wide = extent > 0
    worst = np.where(wide, front.max(axis=0), good.max(axis=0))
    return np.asarray(worst + 0.1 * np.where(wide, extent, np.ptp(good, axis=0)) + 1e-9)
