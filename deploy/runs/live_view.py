"""Shows a run as it goes on: a table on a terminal, a line every few seconds elsewhere."""

import time
from collections.abc import Sequence
from itertools import pairwise
from types import TracebackType
from typing import Final, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from deploy.runs.observation import Observation
from deploy.runs.records import Step
from deploy.runs.run_directory import LEARNER
from node.values.run import PeerStatus

_BARS: Final = "▁▂▃▄▅▆▇█"
_CURVE_WIDTH: Final = 60


class View:
    """Shows observations and messages."""

    def __init__(
        self, console: Console, *, goal: str, samplers: Sequence[str], began_s: float, line_every_s: float
    ) -> None:
        """Show a run.

        Args:
            console: Where.
            goal: When the run ends, such as ``100 versions``.
            samplers: Their names.
            began_s: The start, monotonic seconds.
            line_every_s: Time between two lines where there is no terminal.
        """
        self._console = console
        self._goal = goal
        self._samplers = samplers
        self._line_every_s = line_every_s
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
            self._live.update(table(seen, goal=self._goal), refresh=True)
        elif seen.elapsed_s >= self._line_due_s and seen.steps:
            self._line_due_s = seen.elapsed_s + self._line_every_s
            self.say(line(seen, goal=self._goal, samplers=self._samplers))


def line(seen: Observation, *, goal: str, samplers: Sequence[str]) -> str:
    """Return the state of the run in one line; there is at least one step."""
    staleness = ", ".join(f"{name} {_staleness(name, seen.steps)}" for name in samplers)
    received = ", ".join(f"{name} {_received(seen, name)}" for name in samplers)
    return (
        f"version {seen.version}/{goal}  {_headline(seen.steps)}  staleness {staleness}  received {received}"
    )


def table(seen: Observation, *, goal: str) -> RenderableType:
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
            (f"version {seen.version}/{goal}", "bold"),
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
