"""Lag: seconds between two stages of a group, and the clock offsets that make them comparable; pure.

sampled    sampling started -> finished         on the sampler
graded     finished -> graded                   on the sampler; where verifiers grade: spooled -> graded
uploaded   graded -> spooled                    sampler to hub, queueing included
delivered  spooled -> judged                    coordinator to learner
trained    spooled -> trained on                coordinator to gradient step
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from node.values.groups.rollout import GroupTerms

AHEAD_S: Final = 300.0
"""How far another peer's timestamp may be ahead: its estimate of this clock is good to a round trip."""

LONGEST_LAG_S: Final = 7 * 86_400.0
"""A group may wait for so long on a relay's disk."""


@dataclass(frozen=True, slots=True)
class ClockSample:
    """An estimate of another peer's clock from one exchange."""

    offset_s: float
    """Their clock minus ours."""
    round_trip_s: float
    """Time on the wire, both ways; the error of the offset is at most half of it."""


def clock_sample(
    *, sent_at_s: float, received_at_s: float, replied_at_s: float, returned_at_s: float
) -> ClockSample:
    """Estimate the other clock from one exchange.

    With t0 and t3 on our clock, t1 and t2 on theirs: offset = ((t1 - t0) + (t2 - t3)) / 2,
    exact where both ways take equally long.

    Source: NTP, RFC 5905 section 8.
    """
    out_s, back_s = received_at_s - sent_at_s, replied_at_s - returned_at_s
    round_trip_s = (returned_at_s - sent_at_s) - (replied_at_s - received_at_s)
    return ClockSample((out_s + back_s) / 2, round_trip_s)


def best_sample(samples: Iterable[ClockSample]) -> ClockSample | None:
    """Return the sample with the smallest possible error; None where there is none.

    Samples with a negative round trip (a clock was set meanwhile) are ignored.
    """
    plausible = (sample for sample in samples if sample.round_trip_s >= 0)
    return min(plausible, key=lambda sample: sample.round_trip_s, default=None)


def believed_lag_s(since_s: float, *, now: float) -> float | None:
    """Return the seconds since another peer's timestamp, at least 0; None: one of the clocks must be wrong.

    A histogram never forgets: one timestamp of 1e300 would be its sum for good.
    """
    lag_s = now - since_s
    return max(0.0, lag_s) if -AHEAD_S <= lag_s <= LONGEST_LAG_S else None


def submission_lags(group: GroupTerms, *, spooled_at_s: float) -> dict[str, float]:
    """Return the seconds of the stages up to the spool, by name; none where they cannot be believed.

    Timestamps are on the coordinator's clock as the sampler estimates it; a stage that comes out negative is
    0."""
    ends = (group.sampling_started_at_s, group.graded_at_s)
    if any(believed_lag_s(end, now=spooled_at_s) is None for end in ends):
        return {}
    stages = {
        "sampled": group.sampling_finished_at_s - group.sampling_started_at_s,
        "graded": group.graded_at_s - group.sampling_finished_at_s,
        "uploaded": spooled_at_s - group.graded_at_s,
    }
    return {stage: max(0.0, lag_s) for stage, lag_s in stages.items()}
