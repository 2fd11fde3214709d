"""Many receivers, with and without a relay, and relays behind relays."""

import itertools
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Final

from bench.sync_lab.lab import Facts, Lab, is_exact, put, syncs
from bench.sync_lab.network import Line, Network
from bench.sync_lab.versions import LARGE, SMALL, Model, Training
from node.values.run import Role

LINE: Final = Line(rate_mbit=100, round_trip_ms=150)
SETTLES_S: Final = 3.0
"""For every receiver to have told its source that it listens."""


def fanout(lab: Lab) -> Iterator[Facts]:
    """A step and a keyframe of 16 M parameters to 1 to 32 receivers, behind one relay and each by itself.

    The hub has 100 Mbit/s and 150 ms to the relay, which is next to the receivers; without a relay they
    share the same line.
    """
    training = lab.training(SMALL, steps=2, keyframes=2)
    for has_relay in (True, False):
        for receivers in ((1, 32) if has_relay else (1, 4)) if lab.is_quick else (1, 2, 4, 8, 16, 32):
            yield from _fanout(lab, training, receivers=receivers, has_relay=has_relay)


def _fanout(lab: Lab, training: Training, *, receivers: int, has_relay: bool) -> Iterator[Facts]:
    with lab.fleet() as fleet, Network() as network, ExitStack() as running:
        near, far = network.namespace("hub"), network.namespace("sampler")
        hub = running.enter_context(fleet.hub(near, training.directory))
        if has_relay:
            middle = network.namespace("relay")
            link, (source, _) = network.link(near, middle, LINE), network.cable(middle, far)
            running.enter_context(fleet.relay(middle, "relay-1", upstream=link.a))
        else:
            link = network.link(near, far, LINE)
            source = link.a
        group = running.enter_context(
            fleet.receivers(
                far,
                training.directory,
                sources=[source],
                connections=8,
                count=receivers,
                server=Role.RELAY if has_relay else Role.COORDINATOR,
            )
        )
        for version, published in ((1, training.keyframes[0]), (2, training.steps[1])):
            time.sleep(SETTLES_S)
            before = link.passed()[0].bytes
            announced_s = put(hub, published.name)
            done = syncs(group, version=version, announced_s=announced_s, count=receivers)
            yield {
                "what": "keyframe" if version == 1 else "step",
                "receivers": receivers,
                "has_relay": has_relay,
                "bytes": published.size_bytes,
                "hub_egress_bytes": link.passed()[0].bytes - before,
                "hub_egress_copies": (link.passed()[0].bytes - before) / published.size_bytes,
                "first_s": min(each.verified_s for each in done),
                "seconds": max(each.verified_s for each in done),
                "is_exact": version == 1 or is_exact(group, training),
            }


def chain(lab: Lab) -> Iterator[Facts]:
    """A keyframe through three relays after each other, each hop a line of its own, against one hop.

    183 MB, and 512 MB at 1 Gbit/s. Five processes and four links share this machine's cores: where there are
    two, these are what is measured at 1 Gbit/s. At 100 Mbit/s half of their time is idle.
    """
    small = lab.training(Model(), steps=6 if lab.is_quick else 12, keyframes=1)
    runs = [(small, 50.0), (small, 100.0)]
    if not lab.is_quick:
        runs.append((lab.training(LARGE, steps=2, keyframes=2), 1000.0))
    for training, rate_mbit in runs:
        one_hop_s = 0.0
        for relays in (0, 3):
            facts = _chain(lab, training, relays=relays, line=Line(rate_mbit, 150))
            one_hop_s = one_hop_s or facts["seconds"]
            yield facts | {"times_one_hop": facts["seconds"] / one_hop_s}


def _chain(lab: Lab, training: Training, *, relays: int, line: Line) -> Facts:
    published = training.keyframes[0]
    with lab.fleet() as fleet, Network() as network, ExitStack() as running:
        places = [network.namespace(f"hop{number}") for number in range(relays + 2)]
        links = [network.link(a, b, line) for a, b in itertools.pairwise(places)]
        hub = running.enter_context(fleet.hub(places[0], training.directory))
        for number in range(relays):
            running.enter_context(
                fleet.relay(
                    places[number + 1],
                    f"relay-{number + 1}",
                    upstream=links[number].a,
                    is_behind_relay=number > 0,
                )
            )
        receiver = running.enter_context(
            fleet.receivers(
                places[-1],
                training.directory,
                sources=[links[-1].a],
                connections=8,
                server=Role.RELAY if relays else Role.COORDINATOR,
            )
        )
        time.sleep(SETTLES_S)
        announced_s = put(hub, published.name)
        (done,) = syncs(receiver, version=1, announced_s=announced_s)
        return {
            "what": "chain",
            "relays": relays,
            "rate_mbit": line.rate_mbit,
            "bytes": published.size_bytes,
            "seconds": done.verified_s,
            "hub_egress_copies": links[0].passed()[0].bytes / published.size_bytes,
        }
