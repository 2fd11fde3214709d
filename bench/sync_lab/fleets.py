"""Many receivers, with and without a relay, and relays behind relays."""

import time
from collections.abc import Iterator
from typing import Final

from bench.sync_lab.lab import Facts, Lab, is_exact
from bench.sync_lab.network import Line
from bench.sync_lab.versions import LARGE, SMALL, Training

LINE: Final = Line(rate_mbit=100, round_trip_ms=150)
SETTLES_S: Final = 3.0
"""For every receiver to have told its source that it listens."""


def fanout(lab: Lab) -> Iterator[Facts]:
    """A step and a keyframe of 16 M parameters to 1 to 32 receivers, behind one relay and each by itself.

    The hub has 100 Mbit/s and 150 ms to the relay, which is next to the receivers; without a relay they
    share the same line.
    """
    training = lab.training(SMALL)
    for has_relay in (True, False):
        for receivers in ((1, 32) if has_relay else (1, 4)) if lab.is_quick else (1, 2, 4, 8, 16, 32):
            yield from _fanout(lab, training, receivers=receivers, has_relay=has_relay)


def _fanout(lab: Lab, training: Training, *, receivers: int, has_relay: bool) -> Iterator[Facts]:
    relays = int(has_relay)
    with lab.wired(training, LINE, relays=relays, ends_in_cable=has_relay, receivers=receivers) as wired:
        for published in (training.keyframes[0], training.steps[1]):
            time.sleep(SETTLES_S)
            before = wired.egress_bytes
            done = wired.synced(published)
            egress = wired.egress_bytes - before
            yield {
                "what": "keyframe" if published.version == 1 else "step",
                "receivers": receivers,
                "has_relay": has_relay,
                "bytes": published.size_bytes,
                "hub_egress_bytes": egress,
                "hub_egress_copies": egress / published.size_bytes,
                "first_s": min(each.verified_s for each in done),
                "seconds": max(each.verified_s for each in done),
                "is_exact": published.version == 1 or is_exact(wired.receivers, training),
            }


def chain(lab: Lab) -> Iterator[Facts]:
    """A keyframe through three relays after each other, each hop a line of its own, against one hop.

    183 MB, and 512 MB at 1 Gbit/s. Five processes and four links share this machine's cores: where there are
    two, these are what is measured at 1 Gbit/s. At 100 Mbit/s half of their time is idle.
    """
    runs = [(lab.smollm2(), 50.0), (lab.smollm2(), 100.0)]
    if not lab.is_quick:
        runs.append((lab.training(LARGE), 1000.0))
    for training, rate_mbit in runs:
        published, one_hop_s = training.keyframes[0], 0.0
        for relays in (0, 3):
            with lab.wired(training, Line(rate_mbit, 150), relays=relays) as wired:
                time.sleep(SETTLES_S)
                (done,) = wired.synced(published)
                one_hop_s = one_hop_s or done.verified_s
                yield {
                    "what": "chain",
                    "relays": relays,
                    "rate_mbit": rate_mbit,
                    "bytes": published.size_bytes,
                    "seconds": done.verified_s,
                    "hub_egress_copies": wired.egress_bytes / published.size_bytes,
                    "times_one_hop": done.verified_s / one_hop_s,
                }
