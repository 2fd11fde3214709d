"""The divergence panel against a naive twin that weighs every group it ever saw, as its formulas say."""

import math
from dataclasses import dataclass, field

import numpy as np
import pytest

from learner.intake.divergence_panel import (
    HALF_LIFE_STEPS,
    KNOTS,
    LEAST_NOISE_NATS,
    UNKNOWN_NATS,
    DivergencePanel,
    Estimate,
    Observed,
    Vector,
    mean_basis,
)


@dataclass
class Twin:
    """Remembers (step, sampler, basis, KL as it is believed) of each group, and sums afresh each time."""

    step: int = 0
    seen: list[tuple[int, str, Vector, float]] = field(default_factory=list)
    squares: list[float] = field(default_factory=lambda: [0.1**2, *[0.5**2] * (len(KNOTS) - 1)])
    counts: list[float] = field(default_factory=lambda: [1.0] * len(KNOTS))

    def groups_near(self, knot: int) -> dict[str, float]:
        """Return how many groups each sampler has near a knot, older ones as fractions."""
        groups: dict[str, float] = {}
        for step, name, basis, _ in self.seen:
            if int(np.argmax(basis)) == knot:
                groups[name] = groups.get(name, 0.0) + 0.5 ** ((self.step - step) / HALF_LIFE_STEPS)
        return groups

    def vote(self, name: str, knot: int) -> float:
        """Return what each of a sampler's groups near a knot counts: as many as the lower median of all."""
        groups = self.groups_near(knot)
        there = sorted(number for number in groups.values() if number >= 1)
        most = max(4.0, there[(len(there) - 1) // 2] if there else 4.0)
        return min(1.0, most / groups[name])

    def weights(self, full: str = "", *, only: str = "") -> list[tuple[float, Vector, float]]:
        """Return (weight, basis, KL) of every group, or of one sampler's; the groups of ``full`` count in
        full."""
        votes = {
            (name, knot): 1.0 if name == full else self.vote(name, knot)
            for name, knot in {(name, int(np.argmax(basis))) for _, name, basis, _ in self.seen}
        }
        return [
            (
                votes[name, int(np.argmax(basis))]
                * 0.5 ** ((self.step - step) / HALF_LIFE_STEPS)
                / self.variance(int(np.argmax(basis))),
                basis[1:],
                nats,
            )
            for step, name, basis, nats in self.seen
            if only in ("", name)
        ]

    def variance(self, knot: int) -> float:
        return max(self.squares[knot] / self.counts[knot], LEAST_NOISE_NATS**2)

    def curve(self, full: str = "") -> tuple[Vector, Vector]:
        """Return the drift at each knot but the first, and its covariance; as ``weights``."""
        gram = np.eye(len(KNOTS) - 1) / UNKNOWN_NATS**2
        moment = np.zeros(len(KNOTS) - 1)
        for weight, basis, nats in self.weights(full):
            gram += weight * np.outer(basis, basis)
            moment += weight * nats * basis
        inverse = np.linalg.inv(gram).astype(np.float64)
        return inverse @ moment, inverse

    def mismatch(self, sampler_id: str) -> Estimate:
        """m = (s - c' M^-1 r) / (W - c' M^-1 c), and its standard error."""
        curve, inverse = self.curve(sampler_id)
        own = self.weights(sampler_id, only=sampler_id)
        if not own:
            return Estimate(0.0, UNKNOWN_NATS)
        c = sum((weight * basis for weight, basis, _ in own), np.zeros(len(KNOTS) - 1))
        total = sum(weight for weight, _, _ in own)
        s = sum(weight * nats for weight, _, nats in own)
        precision = total - float(c @ inverse @ c) + 1 / UNKNOWN_NATS**2
        on_curve = float(c @ curve)
        error = math.hypot(precision**-0.5, 0.1 * max(on_curve / total, 0.0))
        return Estimate((s - on_curve) / precision, error)

    def believed(self, group: Observed) -> tuple[float, float | None]:
        """Return the KL that counts, and how far it is beside what was expected; None: nothing was."""
        nats, mismatch = min(max(group.kl_nats, 0.0), 10.0), self.mismatch(group.sampler_id)
        if mismatch.error_nats > 0.4:
            return nats, None
        basis = mean_basis(group.ages)
        expected = basis[1:] @ self.curve()[0] + mismatch.nats
        cap = 4 * self.variance(int(np.argmax(basis))) ** 0.5 + 0.4
        residual = min(max(nats - expected, -cap), cap)
        return expected + residual, residual

    def observe(self, groups: list[Observed]) -> None:
        believed = [self.believed(group) for group in groups]
        self.step += 1
        for group, (nats, residual) in zip(groups, believed, strict=True):
            basis = mean_basis(group.ages)
            self.seen.append((self.step, group.sampler_id, basis, nats))
            if residual is not None:
                knot = int(np.argmax(basis))
                self.squares[knot] = self.squares[knot] * 63 / 64 + residual**2
                self.counts[knot] = self.counts[knot] * 63 / 64 + 1


def batches(seed: int) -> list[list[Observed]]:
    """Return the groups of 40 steps: of three samplers, one far, one off, one seen now and then."""
    random = np.random.default_rng(seed)
    steps = []
    for step in range(40):
        groups = []
        for name, oldest, off in (("near", 2, 0.0), ("far", 30, 0.01), ("off", 6, 0.3)):
            age, share = int(random.integers(0, oldest + 1)), float(random.uniform(0.5, 1.0))
            nats = max(0.0, 0.02 * age * share + off + float(random.normal(0, 0.02)))
            groups.append(Observed(name, nats, ((age, share), (0, 1 - share))))
        if step % 7 == 3:
            groups.append(Observed("rare", float(random.choice([-1.0, 0.2, 3.0, 1e9])), ((1, 1.0),)))
        steps.append(groups[step % 2 :])
    return steps


@pytest.fixture(scope="module")
def pair() -> tuple[DivergencePanel, Twin]:
    panel, twin = DivergencePanel(), Twin()
    for groups in batches(0):
        panel.observe(groups)
        twin.observe(groups)
    return panel, twin


Pair = tuple[DivergencePanel, Twin]


@pytest.mark.parametrize("sampler", ["near", "far", "off", "rare", "nobody"])
def test_a_mismatch_is_the_least_squares_fit_of_all_groups_that_are_remembered(
    pair: Pair, sampler: str
) -> None:
    found, expected = (each.mismatch(sampler) for each in pair)
    assert found.nats == pytest.approx(expected.nats, rel=1e-6, abs=1e-9)
    assert found.error_nats == pytest.approx(expected.error_nats, rel=1e-6)


def test_drift_is_the_curve_between_its_knots_and_as_uncertain(pair: Pair) -> None:
    panel, twin = pair
    curve, inverse = twin.curve()
    for age in (0, 1, 5, 20, 300):
        basis = mean_basis(((age, 1.0),))[1:]
        assert panel.drift(age).nats == pytest.approx(basis @ curve, rel=1e-6, abs=1e-9)
        assert panel.drift(age).error_nats == pytest.approx(math.sqrt(basis @ inverse @ basis), rel=1e-6)


def test_groups_are_counted_with_the_half_life(pair: Pair) -> None:
    panel, twin = pair
    for name in panel.samplers():
        of_steps = [(step, basis) for step, sampler, basis, _ in twin.seen if sampler == name]
        ages = [0.5 ** ((twin.step - step) / HALF_LIFE_STEPS) for step, _ in of_steps]
        assert panel.groups(name) == pytest.approx(sum(ages))
        fresh = [age for age, (_, basis) in zip(ages, of_steps, strict=True) if np.argmax(basis) == 0]
        assert panel.fresh_groups(name) == pytest.approx(sum(fresh))
