"""Lines that lose packets, and lines that are cut."""

import time
from collections.abc import Iterator
from typing import Final

from bench.sync_lab.lab import CONNECTIONS, Facts, Lab, is_exact, put, syncs, watched_bytes
from bench.sync_lab.network import Line, Network, is_available
from node.values.roles import Role

LOSSY: Final = Line(rate_mbit=100, round_trip_ms=150, loss=0.005)
WATCHED_S: Final = (6.0, 26.0)
"""Goodput is taken between these seconds of a fetch: one connection would take ten minutes."""


def loss(lab: Lab) -> Iterator[Facts]:
    """A keyframe over a line that loses 0.5 % of the packets, over one connection and over eight.

    With the congestion control that most senders on the Internet have (cubic) and with BBR, whose one
    connection fills such a line by itself.
    """
    for congestion_control in ("cubic",) if lab.is_quick else ("cubic", "bbr"):
        if not is_available(congestion_control):
            yield {"what": "lossy line", "left_out": f"this kernel has no {congestion_control}"}
            continue
        alone = 0.0
        for connections in (1, CONNECTIONS):
            facts = _goodput(lab, congestion_control, connections)
            alone = alone or facts["bytes_per_s"]
            yield facts | {"times_one_connection": facts["bytes_per_s"] / alone}


def _goodput(lab: Lab, congestion_control: str, connections: int) -> Facts:
    training = lab.smollm2()
    published = training.keyframes[0]
    size = published.size_bytes
    with lab.wired(training, LOSSY, connections=connections, congestion_control=congestion_control) as wired:
        announced_s = put(wired.hub, published.name)
        progress = watched_bytes(wired.receivers, until_bytes=size, until_s=announced_s + WATCHED_S[1])
        passed = wired.link.passed()
    end = progress[-1]
    start = next(point for point in progress if point[0] >= announced_s + WATCHED_S[0] or point[1] >= size)
    if start[1] >= size:
        start = progress[0]
    return {
        "what": "lossy line",
        "congestion_control": congestion_control,
        "connections": connections,
        "bytes_per_s": (end[1] - start[1]) / (end[0] - start[0]),
        "line_bytes_per_s": LOSSY.bytes_per_s,
        "lost": passed.lost / max(1, passed.segments),
    }


def cut(lab: Lab) -> Iterator[Facts]:
    """A keyframe through a relay whose line is cut at 90 %, gone on with through another relay."""
    training = lab.smollm2()
    size = training.keyframes[0].size_bytes
    line = Line(rate_mbit=100, round_trip_ms=150)
    with lab.fleet() as fleet, Network() as network:
        near, far = network.namespace("hub"), network.namespace("sampler")
        first, second = network.namespace("relay1"), network.namespace("relay2")
        upstream = [network.cable(near, relay)[0] for relay in (first, second)]
        links = [network.link(relay, far, line, seed=number) for number, relay in enumerate((first, second))]
        with (
            fleet.hub(near, training.directory) as hub,
            fleet.relay(first, "relay-1", upstream=upstream[0]),
            fleet.relay(second, "relay-2", upstream=upstream[1]),
        ):
            links[1].cut()
            sources = [link.a for link in links]
            with fleet.receivers(
                far, training.directory, sources=sources, connections=CONNECTIONS, server=Role.RELAY
            ) as receiver:
                announced_s = put(hub, training.keyframes[0].name)
                progress = watched_bytes(receiver, until_bytes=int(0.9 * size), until_s=announced_s + 120)
                links[0].cut()
                links[1].mend()
                cut_s = time.monotonic()
                (done,) = syncs(receiver, version=1, announced_s=announced_s)
                before, after = (link.passed().bytes for link in links)
                yield {
                    "what": "cut at 90 %, on through another relay",
                    "bytes": size,
                    "received_at_cut": progress[-1][1],
                    "received_bytes": done.received_bytes,
                    "wire_bytes_before": before,
                    "wire_bytes_after": after,
                    # The upper bound: headers of every packet and what was in flight count as sent again.
                    "sent_again_share": (before + after) / size - 1,
                    "seconds": done.verified_s,
                    "seconds_after_cut": done.verified_s - (cut_s - announced_s),
                    "is_exact": training.keyframes[0].version != training.steps[-1].version
                    or is_exact(receiver, training),
                }
