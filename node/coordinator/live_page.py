"""The page ``/`` of the coordinator's telemetry port: the run at a glance, for those without Grafana.

    threads of the telemetry port --> render --> one look on the event loop, which owns what it reads
    upkeep                        --> note   --> the newest steps, for the curves

Nothing is worked out until somebody looks, and then once in REFRESH_S however many look.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from math import isfinite
from typing import Final

from node.clock import moment
from node.coordinator.run_status import RunReport
from node.evaluation import Evaluation, EvaluationStatus
from node.run import PeerQuery, PeerStatus, Role, RunStatus, StepReport
from node.svg_chart import STYLE as CHART_STYLE
from node.svg_chart import Series, chart
from node.web_page import table, text, web_page

REFRESH_S: Final = 5
PEERS_SHOWN: Final = 50
STEPS_SHOWN: Final = 500

LOOK_S: Final = 2.0
"""Patience with an event loop that is busy, by one thread; others show the page before meanwhile."""

_CURVES: Final[tuple[tuple[str, Callable[[StepReport], float]], ...]] = (
    ("reward", lambda step: step.reward_mean),
    ("KL, nats", lambda step: step.kl_nats),
    ("staleness, versions", lambda step: step.staleness_mean_versions),
    ("effective sample size", lambda step: step.ess_ratio),
)
_OF_A_PEER: Final = ("peer", "role", "state", "heard of", "versions behind", "waits for")

_STYLE: Final = """\
h1 { margin: 0; }
h2 { font-size: 1.1em; margin: 1.4em 0 .3em; }
p, ul { margin: .3em 0; }
svg.chart { overflow: visible; }
svg.chart text { font-size: 16px; }
figure { display: inline-block; vertical-align: bottom; width: 46%; min-width: 22em; margin: 0 1em .5em 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .1em 1em .1em 0; overflow-wrap: anywhere; }
"""


class LivePage:
    """The page of one run."""

    def __init__(
        self, report: RunReport, loop: asyncio.AbstractEventLoop, *, other_pages: Collection[str]
    ) -> None:
        """Prepare; ``loop`` is the one that ``report`` may be asked on, ``other_pages`` may grow."""
        self._report = report
        self._loop = loop
        self._other_pages = other_pages
        self._steps: deque[StepReport] = deque(maxlen=STEPS_SHOWN)
        self._lock = threading.Lock()
        self._shown = b""
        self._fresh_until_s = float("-inf")

    def note(self, step: StepReport | None) -> None:
        """Keep a step for the curves, unless it is known."""
        if step is not None and (not self._steps or self._steps[-1].version != step.version):
            self._steps.append(step)

    def render(self) -> bytes:
        """Return the page, REFRESH_S old unless the event loop hangs. Any thread but the loop's.

        Raises TimeoutError: the event loop did not answer in LOOK_S, or never has.
        """
        now = self._report.clock.monotonic()
        if now >= self._fresh_until_s and self._lock.acquire(blocking=False):
            try:
                self._fresh_until_s = now + REFRESH_S  # also where the loop does not answer
                look = asyncio.run_coroutine_threadsafe(self._look(), self._loop)
                try:
                    status, steps = look.result(timeout=LOOK_S)
                finally:
                    look.cancel()
                self._shown = live_page(status, steps, has_samples="/samples" in self._other_pages)
            finally:
                self._lock.release()
        if not self._shown:
            raise TimeoutError("the coordinator has not answered yet")
        return self._shown

    async def _look(self) -> tuple[RunStatus, tuple[StepReport, ...]]:
        self.note(self._report.table.peers.step)
        return self._report.status(PeerQuery(sort_by="state", limit=PEERS_SHOWN)), tuple(self._steps)


def live_page(status: RunStatus, steps: Sequence[StepReport], *, has_samples: bool) -> bytes:
    """Return the page of a run in this state, after these steps."""
    headline = status.headline
    doing = "" if headline is None else f"<p>{text(headline.doing)}</p>\n"
    waits = "".join(
        f"<li>{text(f'{one.who} waits for {one.waits_for}, for {one.for_s:.0f} s. {one.remedy}')}</li>\n"
        for one in status.waits
    )
    unusual = "".join(
        f"<li>{text(one.what)}: {one.peers}, {text(', '.join(one.node_ids))}</li>\n" for one in status.unusual
    )
    counts = ((one.role, one.state, one.peers) for one in status.peer_counts)
    listed = f"Peers ({len(status.peers)} of {status.matching_peers})"
    body = (
        f"<h1>{text(status.run_id)}</h1>\n<p><small>{moment(status.now_s)}, by the coordinator's clock; "
        f"anew every {REFRESH_S} s</small></p>\n{doing}"
        + _section("Who waits for whom", f"<ul>\n{waits}</ul>\n" if waits else "<p>It moves.</p>\n")
        + (_section("Unusual", f"<ul>\n{unusual}</ul>\n") if unusual else "")
        + _section("Steps", "".join(_curve(name, steps, of) for name, of in _CURVES))
        + _section("Held-out prompts", _evaluations(status.evaluation))
        + _section("Fleet", _table(("role", "state", "peers"), counts))
        + _section(listed, _table(_OF_A_PEER, map(_row, status.peers)))
        + ('<p><a href="/samples">Samples</a></p>\n' if has_samples else "")
    )
    return web_page(status.run_id, body, style=CHART_STYLE + _STYLE, refresh_s=REFRESH_S)


def _section(title: str, body: str) -> str:
    return f"<h2>{title}</h2>\n{body}"


def _curve(name: str, steps: Sequence[StepReport], of: Callable[[StepReport], float]) -> str:
    """Return a figure of one number of the steps, by version; the newest value in words."""
    points = [(step.version, of(step)) for step in steps if isfinite(of(step))]
    if not points:
        return f"<figure>{name}: none yet</figure>\n"
    values = [value for _, value in points]
    return (
        f"<figure><figcaption>{name}: <b>{values[-1]:.4g}</b><br>"
        f"<small>at version {points[-1][0]}; {min(values):.4g} to {max(values):.4g}</small></figcaption>"
        f"{chart([Series('', points)], x_label='version')}</figure>\n"
    )


def _evaluations(status: EvaluationStatus) -> str:
    found: dict[str, Evaluation | None] = {
        "first": status.first, "best": status.best, "newest": status.newest, "under way": status.under_way,
    }  # fmt: skip
    rows = (
        (which, one.version, one.score_by(status.best_by), f"{one.counted_prompts} of {one.prompts}")
        for which, one in found.items()
        if one is not None
    )
    return _table(("", "version", "score", "prompts answered"), rows)


def _row(peer: PeerStatus) -> tuple[object, ...]:
    behind = "-" if peer.role is Role.VERIFIER else peer.version_lag_versions
    seen = f"{peer.last_seen_s:.0f} s ago"
    return peer.node_id, peer.role, peer.state, seen, behind, peer.waits_for


def _table(names: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    return table(names, rows) or "<p>None yet.</p>\n"
