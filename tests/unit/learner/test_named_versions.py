"""Who names other versions than it draws from is shut out, and nobody beside it."""

import math
import random
from dataclasses import dataclass, replace

import numpy as np
import pytest

from learner.intake.divergence_panel import Observed
from learner.intake.named_versions import (
    CLEARED_GROUPS,
    CLEARED_STEPS,
    LEAST_OFF_GROUPS,
    LEAST_SURE_TOKENS,
    LEAST_TOKENS,
    MISNAMED_GROUPS,
    OUT_OF_REACH_GROUPS,
    REMEMBERED_GROUPS,
    NamedVersions,
    Scored,
    fits_better,
)
from learner.intake.sampler_mismatch import LEAST_PROBES, SamplerMismatches
from node.values.limits import PROBE_S
from support.fleets import one

THRESHOLD_NATS = 0.05
DRIFT_NATS = 0.012
"""For each version of age."""

FITS = Scored("0.1", 5, 1e-6)
MISNAMED = Scored("0.1", 5, 0.03, 13, 1e-6, is_misnamed=True)
OFF = Scored("0.1", 5, 0.5, 6, 0.45)


@dataclass(frozen=True)
class Sampler:
    """Draws from versions of some ages, and names others."""

    ages: tuple[int, int]
    renamed: int = 0
    """By how much the ages that it names are too high."""
    share: float = 1.0
    """Share of its groups that it renames."""
    noise_nats: float = 1e-4


def run_of(samplers: dict[str, Sampler], *, seed: int, has_words: bool = True) -> tuple[set[str], int]:
    """Take 250 steps; return who was quarantined, and how many groups were scored."""
    draw = np.random.default_rng(seed)
    named = NamedVersions(THRESHOLD_NATS, random=random.Random(seed).random) if has_words else None
    mismatches = SamplerMismatches(THRESHOLD_NATS, named=named)
    quarantined: set[str] = set()
    scored, names = 0, list(samplers)
    for step in range(250):
        groups, truths = [], []
        for name in (names[n] for n in draw.integers(0, len(names), 24).tolist()):
            sampler = samplers[name]
            age = int(draw.integers(sampler.ages[0], sampler.ages[1] + 1))
            off = sampler.renamed if draw.random() < sampler.share else 0
            kl_nats = (DRIFT_NATS * age + sampler.noise_nats) * draw.lognormal(-0.06, 0.35)
            groups.append(one(name, kl_nats, age + off))
            truths.append((sampler, off))
        found = mismatches.observe(groups, quarantined=quarantined, now=float(step))
        quarantined |= found.beyond.keys()
        for place in (place for places in found.to_score for place in places):
            sampler, off = truths[place]
            nats = DRIFT_NATS * abs(off) * draw.lognormal(-0.5, 1.0) + sampler.noise_nats
            shown = Scored("0.1", 9, nats, 9 + off, sampler.noise_nats, is_misnamed=off != 0)
            scored += 1
            if mismatches.scored(groups[place], shown, is_probe=False):
                quarantined.add(groups[place].sampler_id)
        if found.to_score:
            mismatches.took(0.3, now=float(step))
    return quarantined, scored


HONEST = {"near": Sampler((0, 6)), "far": Sampler((6, 14)), "old": Sampler((10, 20))}


@pytest.mark.parametrize(
    "liars",
    [
        {"liar": Sampler((0, 6), renamed=8)},
        {"liar": Sampler((0, 6), renamed=2)},
        {"liar": Sampler((0, 6), renamed=20)},
        {"liar": Sampler((10, 16), renamed=-8)},
        {"liar": Sampler((0, 6), renamed=8, share=0.25)},
        {"liar": Sampler((0, 6), renamed=8), "liar-2": Sampler((0, 4), renamed=12)},
    ],
    ids=["8", "2", "20", "newer", "sometimes", "two"],
)
def test_a_sampler_that_names_other_versions_is_quarantined_and_nobody_honest_is(
    liars: dict[str, Sampler],
) -> None:
    quarantined, _ = run_of(HONEST | liars, seed=1)
    assert quarantined == set(liars)


def test_without_the_words_an_honest_sampler_pays_for_a_name_that_is_not_true() -> None:
    """The reason to score with the words: the panel believes the ages that samplers name."""
    liars = {"liar": Sampler((0, 6), renamed=8), "liar-2": Sampler((0, 4), renamed=12)}
    assert run_of(HONEST | liars, seed=0, has_words=False)[0] & HONEST.keys()


def test_nobody_honest_is_quarantined_alone_and_few_groups_are_scored() -> None:
    quarantined, scored = run_of(HONEST, seed=0)
    assert quarantined == set()
    assert scored < 250


def named(draws: float = 0.99) -> NamedVersions:
    return NamedVersions(THRESHOLD_NATS, random=lambda: draws)


def test_a_few_groups_that_another_version_drew_are_proof_and_fewer_are_not() -> None:
    record = named()
    for n in range(MISNAMED_GROUPS):
        assert record.drawn(["a"], suspected=frozenset(["a"]), now=0.0) == (0,)
        record.note("a", MISNAMED)
        assert bool(record.verdict("a", MISNAMED)) is (n == MISNAMED_GROUPS - 1)
    assert "3 of 3" in record.verdict("a", MISNAMED)
    assert "0.1 names 5, from which it is 0.03 nats a token, and 1e-06 from 13" in record.verdict(
        "a", MISNAMED
    )
    assert record.verdict("a", FITS) == ""  # not for a group that fits


def test_a_sampler_that_no_version_fits_is_quarantined_on_the_mean_of_several_groups() -> None:
    record = named()
    for n in range(LEAST_OFF_GROUPS):
        record.note("a", replace(OFF, nats=0.4 + 0.1 * (n % 2)))
        assert bool(record.verdict("a", OFF)) is (n == LEAST_OFF_GROUPS - 1)
    assert "nats a token from the versions they name" in record.verdict("a", OFF)


def test_an_engines_noise_below_the_threshold_is_no_reason() -> None:
    record = named()
    for _ in range(64):
        record.note("a", replace(OFF, nats=0.04, other_nats=0.03))
        assert record.verdict("a", OFF) == ""


def test_a_suspect_whose_groups_fit_is_left_alone_for_a_while() -> None:
    record, suspects = named(), frozenset(["a"])
    for _ in range(CLEARED_GROUPS):
        assert record.drawn(["b", "a"], suspected=suspects, now=0.0) == (1,)
        record.note("a", FITS)
    for _ in range(CLEARED_STEPS):
        assert record.drawn(["b", "a"], suspected=suspects, now=0.0) == ()
    assert record.drawn(["b", "a"], suspected=suspects, now=0.0) == (1,)


def test_who_named_another_version_once_is_asked_before_those_that_the_panel_suspects() -> None:
    record = named()
    record.note("a", MISNAMED)
    assert record.drawn(["b", "a", "b", "a"], suspected=frozenset(["b"]), now=0.0) == (3, 1)


def test_a_sampler_that_named_another_version_is_followed_however_many_of_its_groups_fit_since() -> None:
    record = named()
    record.note("a", MISNAMED)
    for _ in range(REMEMBERED_GROUPS - 1):
        record.note("a", FITS)
        assert record.drawn(["b", "a"], suspected=frozenset(), now=0.0) == (1,)
    record.took(1.0, now=0.0)
    assert record.drawn(["a"], suspected=frozenset(), now=3.9) == ()
    assert record.drawn(["a"], suspected=frozenset(), now=4.0) == (0,)  # a fifth of the time, not a twentieth
    record.note("a", FITS)
    assert record.drawn(["b", "a"], suspected=frozenset(), now=100.0) == ()


def test_now_and_then_a_group_is_drawn_of_whoever_is_there() -> None:
    assert named(0.5).drawn(["a", "b"], suspected=frozenset(), now=0.0) == ()
    assert named(0.01).drawn(["a", "b"], suspected=frozenset(), now=0.0) == (0,)
    assert named(0.01).drawn([], suspected=frozenset(), now=0.0) == ()


def test_scoring_takes_a_small_share_of_the_time() -> None:
    record, suspects = named(), frozenset(["a"])
    record.took(2.0, now=10.0)
    assert record.drawn(["a"], suspected=suspects, now=47.9) == ()
    assert record.drawn(["a"], suspected=suspects, now=48.0) == (0,)


def test_where_the_words_are_gone_the_panel_decides_alone() -> None:
    mismatches = SamplerMismatches(THRESHOLD_NATS, named=named())
    asked = 0
    for _ in range(OUT_OF_REACH_GROUPS + 8):
        found = mismatches.observe([one("a", 1.0), one("b", 0.001)])
        assert bool(found.beyond) is (asked == OUT_OF_REACH_GROUPS)
        if found.beyond:
            break
        for _ in found.to_score:
            asked += 1
            assert mismatches.scored(one("a", 1.0), None, is_probe=False) is None
    assert list(found.beyond) == ["a"]


@pytest.mark.parametrize(("shown", "is_released"), [(FITS, True), (MISNAMED, False), (OFF, False)])
def test_a_probe_is_measured_by_the_version_that_it_names(shown: Scored, is_released: bool) -> None:
    mismatches = SamplerMismatches(THRESHOLD_NATS, named=named())
    mismatches.takes_probe("a", now=0.0)
    released = False
    for n in range(1, LEAST_PROBES + 1):
        assert mismatches.takes_probe("a", now=n * PROBE_S)
        found = mismatches.observe([one("a", 0.0, age=8)], quarantined={"a"})  # nearer than its age says
        assert found.to_score == ((0,),)
        released |= mismatches.scored(one("a", 0.0, age=8), shown, is_probe=True) == ""
    assert released is is_released


def test_without_the_words_a_probe_that_is_too_near_fits_no_better_than_one_that_is_too_far() -> None:
    mismatches = SamplerMismatches(THRESHOLD_NATS)
    for _ in range(40):
        mismatches.observe([one("b", 0.4, age=8), one("b", 0.0)])
    mismatches.takes_probe("a", now=0.0)
    for n in range(1, LEAST_PROBES + 1):
        assert mismatches.takes_probe("a", now=n * PROBE_S)
        assert mismatches.observe([one("a", 0.0, age=8)], quarantined={"a"}).content == ()


def test_an_infinite_threshold_scores_nothing() -> None:
    mismatches = SamplerMismatches(math.inf, named=NamedVersions(math.inf, random=lambda: 0.0))
    for _ in range(32):
        assert mismatches.observe([one("a", 1e3), one("b", 0.0)]).to_score == ()


def test_another_version_fits_better_over_most_tokens_or_not_at_all() -> None:
    noise = np.full(LEAST_TOKENS, 0.001)
    assert fits_better(noise, noise / 5)
    assert not fits_better(noise, noise / 3)
    assert not fits_better(noise[1:], noise[1:] / 5)
    assert fits_better(noise[:LEAST_SURE_TOKENS], noise[:LEAST_SURE_TOKENS] / 1e4)
    assert not fits_better(noise[1:LEAST_SURE_TOKENS], noise[1:LEAST_SURE_TOKENS] / 1e4)
    assert not fits_better(noise / 10, noise / 1e6)  # fits well enough
    few = noise.copy()
    few[:2] = 1.0
    without = np.where(few == 1.0, 1e-6, noise)
    assert few.sum() > 100 * without.sum()
    assert not fits_better(few, without)


def test_a_relabellers_groups_do_not_stay_in_the_curve() -> None:
    mismatches = SamplerMismatches(THRESHOLD_NATS, named=named(0.0))
    for _ in range(40):
        mismatches.observe([one("liar", 0.01, age=16), one("a", 0.16, age=16), one("a", 0.0)])
    before = mismatches.panel.drift(16).nats
    for _ in range(MISNAMED_GROUPS):
        why = mismatches.scored(Observed("liar", 0.01, ((16, 1.0),)), MISNAMED, is_probe=False)
    assert why
    assert before < 0.1
    assert mismatches.panel.drift(16).nats == pytest.approx(0.16, rel=0.05)
