"""Shows a running demo: a table on a terminal, a line every few seconds elsewhere."""

import time
from collections.abc import Sequence
from itertools import pairwise
from types import TracebackType
from typing import Final, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from deploy.demo.observation import Observation
from deploy.demo.plan import LEARNER, SAMPLERS
from deploy.demo.records import Step
from node.run import PeerStatus

LINE_EVERY_S: Final = 3.0

_BARS: Final = "▁▂▃▄▅▆▇█"
_CURVE_WIDTH: Final = 60


class View:
    """Shows observations and messages."""

    def __init__(self, console: Console, *, versions: int, began_s: float) -> None:
        """Count elapsed time from ``began_s``, monotonic seconds."""
        self._console = console
        self._versions = versions
        self._began_s = began_s
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._line_due_s = 0.0

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self._console.print(
            f"{time.monotonic() - self._began_s:5.1f} s  {text}", markup=False, soft_wrap=True
        )

    def show(self, seen: Observation) -> None:
        """Show the state of the run."""
        if self._live is not None:
            self._live.update(table(seen, versions=self._versions), refresh=True)
        elif seen.elapsed_s >= self._line_due_s and seen.steps:
            self._line_due_s = seen.elapsed_s + LINE_EVERY_S
            self.say(line(seen, versions=self._versions))


def line(seen: Observation, *, versions: int) -> str:
    """Return the state of the run in one line; there is at least one step."""
    staleness = ", ".join(f"{name} {_staleness(name, seen.steps)}" for name in SAMPLERS)
    received = ", ".join(f"{name} {_received(seen, name)}" for name in SAMPLERS)
    return (
        f"version {seen.version}/{versions}  {_headline(seen.steps)}  staleness {staleness}"
        f"  received {received}"
    )


def table(seen: Observation, *, versions: int) -> RenderableType:
    """Return the state of the run for a terminal."""
    if not seen.steps:
        return Text(f"{seen.elapsed_s:5.1f} s  waiting for the first step", style="dim")
    peers = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("peer", "state"):
        peers.add_column(heading)
    for heading in ("version", "behind", "lag s", "staleness", "trained", "received"):
        peers.add_column(heading, justify="right")
    peers.add_column("waits for")
    for peer in seen.status.peers if seen.status else ():
        peers.add_row(*_row(peer, seen))
    return Group(
        Text.assemble(
            (f"version {seen.version}/{versions}", "bold"),
            f"  {seen.elapsed_s:.0f} s  {_headline(seen.steps)}",
        ),
        Text.assemble("reward ", (curve([step.reward_mean for step in seen.steps]), "green")),
        peers if seen.status else Text("the coordinator does not answer", style="yellow"),
    )


def curve(values: Sequence[float]) -> str:
    """Draw values from 0 to 1 as bars, each the mean of several values."""
    width = min(_CURVE_WIDTH, len(values))
    bounds = [place * len(values) // width for place in range(width + 1)] if width else []
    means = (sum(values[a:b]) / (b - a) for a, b in pairwise(bounds))
    return "".join(_BARS[min(len(_BARS) - 1, max(0, int(mean * len(_BARS))))] for mean in means)


def _headline(steps: Sequence[Step]) -> str:
    lately = steps[-5:]
    reward, kl_nats, ess_ratio = (
        sum(getattr(step, name) for step in lately) / len(lately)
        for name in ("reward_mean", "kl_nats", "ess_ratio")
    )
    return f"reward {reward:.2f}  KL {kl_nats:.3f}  ESS {ess_ratio:.2f}"


def _row(peer: PeerStatus, seen: Observation) -> tuple[str, ...]:
    return (
        peer.node_id,
        peer.state,
        "-" if peer.held is None else str(peer.held.number),
        str(peer.version_lag_versions),
        f"{peer.lag_s:.1f}",
        _staleness(peer.node_id, seen.steps) if peer.node_id != LEARNER else "",
        str(peer.verdicts.get("trained", "")),
        _received(seen, peer.node_id),
        Text(peer.waits_for).plain,
    )


def _staleness(sampler_id: str, steps: Sequence[Step]) -> str:
    """Return the mean staleness of a sampler's groups in the newest batches."""
    lately = [g.staleness_versions for s in steps[-10:] for g in s.groups if g.sampler_id == sampler_id]
    return f"{sum(lately) / len(lately):.1f}" if lately else "-"


def _received(seen: Observation, name: str) -> str:
    received = seen.scrapes.total(name, "heterorl_node_transfer_bytes_total", direction="in")
    return f"{received / 1e6:.1f} MB"
