r"""How far the policy drifts with age, and what each sampler's engine adds to it; pure.

The divergence of a group from the learner has two parts: the policy moved on since its tokens were drawn,
and the sampler's engine draws from another distribution than its weights say. Log ratios of the two are
independent, so to second order their KLs add:

    kl_g = mean over tokens d(age) + m_sampler + noise            d(0) = 0, nats per token

d is one curve for the whole fleet, linear between ``KNOTS``; m is measured for one sampler at a time, by
least squares, with the other samplers as what they should be, m = 0. So m is what a sampler's groups show
beyond those of others of the same age, or beyond nothing where their tokens are of age 0; and where neither
can be compared with, d takes up everything and the standard error says so. With basis b(age), weights
1 / variance, M the sum of b b' over all groups, r of b kl, and over one sampler's c of b, W of 1, s of kl:

    m = (s - c' M^-1 r) / (W - c' M^-1 c),     variance 1 / (W - c' M^-1 c)

The variance of a group is learned by age, from how far groups are beside what was expected of them.

Near each knot a sampler's groups count in d, together, at most as much as those of the sampler in the lower
middle: who delivers most does not say what age costs. Its own groups count in full for its own m, where M and
r are sums over others' shares and all of its own.
Everything is forgotten with a half-life: drift follows the learning rate and what is being learned.
What it cannot see: samplers that are off together, where they are most of the fleet and none is of age 0.
And it believes the ages that samplers name, which ``named_versions`` asks about.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

KNOTS: Final = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Ages in versions between which drift is a straight line; beyond the last it is flat."""

HALF_LIFE_STEPS: Final = 128
"""Half-life of the record: long enough for a rare sampler, short against changes of the learning rate."""

REMEMBERED_SAMPLERS: Final = 1024

LEAST_NOISE_NATS: Final = 0.005
"""Least noise of one group: bfloat16 against float32 over a few hundred tokens."""

_FIRST_NOISE_NATS: Final = 0.1
_FIRST_AGED_NOISE_NATS: Final = 0.5
_FIRST_NOISE_GROUPS: Final = 1
"""Prior of a group's noise at age 0 and beyond, and the number of groups it
counts as. Drift is as uneven over groups as it is large."""

_NOISE_GROUPS: Final = 64
"""Groups by which the noise at an age is known."""

_CURVE_ERROR: Final = 0.1
"""Share of the drift by which two samplers' groups of one age may differ for good: other prompts, other
moments within the half-life. It is part of the uncertainty."""

_LEAST_VOTE_GROUPS: Final = 4.0
"""Groups near a knot that count in full, however few others have there."""

_LARGEST_NATS: Final = 10.0
"""Beyond, an observation says nothing more."""

_SPREADS: Final = 4.0
_CAP_NATS: Final = 0.4
"""One group is believed to be beside what was expected of it by so many spreads and so much, at most."""

UNKNOWN_NATS: Final = 10.0
"""Standard error of a mismatch of which nothing is known."""

Vector = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Observed:
    """The divergence of one group."""

    sampler_id: str
    kl_nats: float
    """KL(behaviour || learner), mean over its tokens."""
    ages: tuple[tuple[float, float], ...]
    """Staleness in versions and the share of the group's tokens that have it; shares add up to 1."""
    said_by: str = ""
    """The contributor that measured it; empty: this learner did."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A divergence with its standard error, nats per token."""

    nats: float
    error_nats: float


def _zeros(*shape: int) -> Vector:
    return np.zeros(shape)


@dataclass(slots=True)
class _Sums:
    """Over the groups of one sampler, by the knot nearest to their age, as of ``step``."""

    step: int
    gram: Vector = field(default_factory=lambda: _zeros(len(KNOTS), len(KNOTS), len(KNOTS)))
    moment: Vector = field(default_factory=lambda: _zeros(len(KNOTS), len(KNOTS)))
    basis: Vector = field(default_factory=lambda: _zeros(len(KNOTS), len(KNOTS)))
    kl: Vector = field(default_factory=lambda: _zeros(len(KNOTS)))
    groups: Vector = field(default_factory=lambda: _zeros(len(KNOTS)))


class DivergencePanel:
    """Drift by age and mismatch by sampler, from the groups of each step."""

    def __init__(self) -> None:
        """Begin with nothing known."""
        size = len(KNOTS)
        self._step = 0
        self._noise_groups = np.full(size, float(_FIRST_NOISE_GROUPS))
        self._noise_squares = np.full(size, _FIRST_NOISE_GROUPS * _FIRST_AGED_NOISE_NATS**2)
        self._noise_squares[0] = _FIRST_NOISE_GROUPS * _FIRST_NOISE_NATS**2
        self._sums: dict[str, _Sums] = {}
        self._solve()

    def observe(self, groups: Sequence[Observed]) -> None:
        """Add the groups of one step."""
        # All against what was known before the step: a group does not soften the judgement on itself.
        known = [(group, mean_basis(group.ages)) for group in groups]
        expected = [self._expected(group.sampler_id, basis) for group, basis in known]
        self._step += 1
        for (group, basis), nats in zip(known, expected, strict=True):
            self._add(group, basis, expected_nats=nats)
        for forgotten in list(self._sums)[:-REMEMBERED_SAMPLERS]:
            del self._sums[forgotten]
        self._solve()

    def forget(self, sampler_id: str) -> None:
        """Forget a sampler's groups, and what they made of the curve."""
        if self._sums.pop(sampler_id, None) is not None:
            self._solve()

    def samplers(self) -> tuple[str, ...]:
        """Return the samplers remembered, the most recent last."""
        return tuple(self._sums)

    def groups(self, sampler_id: str) -> float:
        """Return how many groups of a sampler are remembered, older ones as fractions."""
        return float(self._groups(sampler_id).sum())

    def fresh_groups(self, sampler_id: str) -> float:
        """Return how many of them are next to age 0, where there is no drift."""
        return float(self._groups(sampler_id)[0])

    def drift(self, age_versions: float) -> Estimate:
        """Return what the policy's age alone makes of the divergence."""
        basis = mean_basis(((age_versions, 1.0),))[1:]
        variance = float(basis @ self._inverse @ basis)
        return Estimate(float(basis @ self._curve), math.sqrt(max(variance, 0.0)))

    def drift_by_age(self, *, least_groups: int) -> dict[int, Estimate]:
        """Return the drift at each age (of KNOTS) near which so many groups are remembered."""
        groups = sum((self._groups(name) for name in self._sums), _zeros(len(KNOTS))).round().tolist()
        return {age: self.drift(age) for age, n in zip(KNOTS, groups, strict=True) if n >= least_groups}

    def mismatch(self, sampler_id: str) -> Estimate:
        """Return what a sampler's groups show beyond the drift."""
        if sampler_id not in self._estimates:
            self._estimates[sampler_id] = self._estimated(sampler_id)
        return self._estimates[sampler_id]

    def _estimated(self, sampler_id: str) -> Estimate:
        sums = self._sums.get(sampler_id)
        if sums is None:
            return Estimate(0.0, UNKNOWN_NATS)
        weights = self._weights * _remembered(self._step - sums.step)
        basis, weight = (weights @ sums.basis)[1:], float(weights @ sums.groups)
        inverse, curve = self._seen_by(sums, weights)
        on_curve = float(basis @ curve)
        precision = max(weight - float(basis @ inverse @ basis), 0.0) + UNKNOWN_NATS**-2
        nats = (float(weights @ sums.kl) - on_curve) / precision
        drift_nats = max(on_curve / weight, 0.0)
        return Estimate(nats, math.hypot(precision**-0.5, _CURVE_ERROR * drift_nats))

    def _groups(self, sampler_id: str) -> Vector:
        sums = self._sums.get(sampler_id)
        return _zeros(1) if sums is None else sums.groups * _remembered(self._step - sums.step)

    def _expected(self, sampler_id: str, basis: Vector) -> float | None:
        """Return the divergence of a group that is like those before it; None: too little is known."""
        estimate = self.mismatch(sampler_id)
        if estimate.error_nats > _CAP_NATS:
            return None
        return float(basis[1:] @ self._curve) + estimate.nats

    def _add(self, group: Observed, basis: Vector, *, expected_nats: float | None) -> None:
        nearest = int(np.argmax(basis))
        kl_nats = min(max(group.kl_nats, 0.0), _LARGEST_NATS)
        if expected_nats is not None:
            cap_nats = _SPREADS * float(self._weights[nearest]) ** -0.5 + _CAP_NATS
            residual = min(max(kl_nats - expected_nats, -cap_nats), cap_nats)
            kl_nats = expected_nats + residual
            share = 1.0 - 1.0 / _NOISE_GROUPS
            self._noise_squares[nearest] = share * self._noise_squares[nearest] + residual**2
            self._noise_groups[nearest] = share * self._noise_groups[nearest] + 1.0
        sums = self._sums.pop(group.sampler_id, None) or _Sums(self._step)
        self._sums[group.sampler_id] = sums  # the last is the most recent
        if share := _remembered(self._step - sums.step):
            for sum_ in (sums.gram, sums.moment, sums.basis, sums.kl, sums.groups):
                sum_ *= share
        sums.step = self._step
        sums.gram[nearest] += np.outer(basis, basis)
        sums.moment[nearest] += kl_nats * basis
        sums.basis[nearest] += basis
        sums.kl[nearest] += kl_nats
        sums.groups[nearest] += 1.0

    def _solve(self) -> None:
        """Fit the curve to all groups, each with its weight as noise is known now and its sampler's share."""
        self._estimates: dict[str, Estimate] = {}
        self._weights = 1.0 / np.maximum(self._noise_squares / self._noise_groups, LEAST_NOISE_NATS**2)
        self._votes = self._largest_votes()
        size = len(KNOTS)
        self._gram, self._moment = _zeros(size, size), _zeros(size)
        for sums in self._sums.values():
            weights = self._weights * _remembered(self._step - sums.step) * self._share(sums)
            self._gram += np.tensordot(weights, sums.gram, axes=1)
            self._moment += weights @ sums.moment
        self._inverse, self._curve = _fitted(self._gram, self._moment)

    def _largest_votes(self) -> Vector:
        """Return, near each knot, how many groups of one sampler count at most: the lower median."""
        of_samplers = np.array([self._groups(name) for name in self._sums]).reshape(-1, len(KNOTS))
        votes: Vector = np.full(len(KNOTS), _LEAST_VOTE_GROUPS)
        for knot, groups in enumerate(of_samplers.T):
            if (there := np.sort(groups[groups >= 1])).size:
                votes[knot] = max(votes[knot], there[(there.size - 1) // 2])
        return votes

    def _share(self, sums: _Sums) -> Vector:
        """Return what a sampler's groups near each knot count for in the curve, up to 1."""
        groups = sums.groups * _remembered(self._step - sums.step)
        share: Vector = self._votes / np.maximum(groups, self._votes)
        return share

    def _seen_by(self, sums: _Sums, weights: Vector) -> tuple[Vector, Vector]:
        """Return inverse and curve for a sampler, whose own groups all count."""
        rest = weights * (1.0 - self._share(sums))
        if not rest.any():
            return self._inverse, self._curve
        return _fitted(self._gram + np.tensordot(rest, sums.gram, axes=1), self._moment + rest @ sums.moment)


def _fitted(gram: Vector, moment: Vector) -> tuple[Vector, Vector]:
    """Return the inverse of a Gram matrix without its first knot, where drift is 0, and the curve."""
    precision = gram[1:, 1:] + UNKNOWN_NATS**-2 * np.eye(len(gram) - 1)
    inverse = np.linalg.inv(precision).astype(np.float64, copy=False)
    curve: Vector = inverse @ moment[1:]
    return inverse, curve


def mean_basis(ages: Sequence[tuple[float, float]]) -> Vector:
    """Return the share of each knot in the drift of tokens of some ages."""
    mean = _zeros(len(KNOTS))
    for age_versions, share in ages:
        age = min(max(age_versions, 0), KNOTS[-1])
        after = min(int(np.searchsorted(KNOTS, age, side="right")), len(KNOTS) - 1)
        left, right = KNOTS[after - 1], KNOTS[after]
        mean[after] += share * (age - left) / (right - left)
        mean[after - 1] += share * (right - age) / (right - left)
    return mean


def _remembered(steps: int) -> float:
    return float(0.5 ** (steps / HALF_LIFE_STEPS))
