"""The view of ``heterorl-node status``: headline, lines on the run, what is unusual, rows of peers."""

from collections.abc import Iterable, Iterator
from typing import Final

from rich.console import Group, RenderableType
from rich.text import Text

from node.commands.status.status_lines import counts, header, version_number
from node.commands.terminal import printable, table
from node.text.wording import counted, duration
from node.values.groups.verdict import Verdict
from node.values.peer_figures import text_of
from node.values.roles import VERSIONED_ROLES, Role
from node.values.run import PeerStatus, RunStatus

SHOW_TWINS_S: Final = 120.0
"""How long a refused process is shown: for several of its retries, which are up to 30 s apart."""

_USED: Final = (Verdict.SPOOLED, Verdict.ACCEPTED, Verdict.TRAINED, Verdict.UNINFORMATIVE)
_REFUSALS: Final = tuple(verdict for verdict in Verdict if verdict not in _USED)

_FIGURES_OF_ALL: Final = 16
"""Peers of a page of which each has a line with its numbers."""

_STATE_STYLES: Final = {
    "live": "green",
    "joined": "cyan",
    "silent": "yellow",
    "drained": "cyan",
    "left": "dim",
    "revoked": "red",
}


def render(status: RunStatus) -> RenderableType:
    """Return the run's state for a terminal: lines on the run, and a row for each peer of the page."""
    # One space between columns: the table fits a terminal of 80.
    rows = table("node", "role", "state", spaces=1)
    for heading in ("holds", "behind", "lag s", "seen s", "stale", "leases", "trained"):
        rows.add_column(heading, justify="right", no_wrap=True)
    rows.add_column("refused")
    rows.add_column("waits for")
    for peer in status.peers:
        rows.add_row(*_row(peer))
    return Group(
        *_headline(status),
        header(status),
        *_unusual(status),
        Text(),
        rows,
        *_rest(status),
        *_twins(status.peers),
        *_standings(status.peers),
        *_figures(status.peers, is_brief=len(status.peers) > _FIGURES_OF_ALL),
    )


def _headline(status: RunStatus) -> Iterator[Text]:
    """Yield what the run does, and what it waits for."""
    if (line := status.headline) is None:
        return
    if line.waits_for:
        said = f"{line.doing}; it waits for {line.waits_for}, for {duration(line.for_s)}"
    else:
        said = f"{line.doing}; that version is {duration(line.for_s)} old"
    said = f"{said[:1].upper()}{said[1:]}."
    if (pace := status.bottleneck) is not None:
        said += f" {pace.text[:1].upper()}{pace.text[1:]}."
    yield Text(printable(said), "bold")
    if pace is not None and pace.remedy:
        yield Text(printable(f"-> {pace.remedy}"))
    if status.peer_counts:
        peers = ", ".join(f"{counted(one.peers, one.role)} {one.state}" for one in status.peer_counts)
        yield Text(printable(peers))
    yield Text()


def _unusual(status: RunStatus) -> Iterator[Text]:
    """Yield a line for each thing that an operator should look at."""
    for number, one in enumerate(status.unusual):
        some = ", ".join(one.node_ids) + (", ..." if one.peers > len(one.node_ids) else "")
        heading = "unusual" if not number else ""
        yield Text(f"{heading:10}", "bold").append(printable(f"{one.peers} {one.what}: {some}"), "yellow")


def _rest(status: RunStatus) -> Iterator[Text]:
    """Yield how many peers are not on the page."""
    if status.matching_peers > len(status.peers):
        yield Text(
            f"{len(status.peers)} of {status.matching_peers} peers; --page, --sort, --state and --name", "dim"
        )


def _row(peer: PeerStatus) -> tuple[Text, ...]:
    has_groups = bool(peer.verdicts.get(Verdict.TRAINED))
    return (
        Text(printable(peer.node_id)),
        Text(peer.role),
        Text(printable(peer.state), style=_STATE_STYLES.get(peer.state, "")),
        Text(version_number(peer.held)),
        Text(str(peer.version_lag_versions) if peer.role in VERSIONED_ROLES else "-"),
        Text(f"{peer.lag_s:.1f}" if peer.role in VERSIONED_ROLES else "-"),
        Text(f"{peer.last_seen_s:.1f}"),
        Text(f"{peer.staleness_mean_versions:.2f}" if has_groups else "-"),
        Text(f"{peer.leases}/{peer.lease_allowance or '-'}" if peer.role is Role.SAMPLER else "-"),
        Text(str(peer.verdicts.get(Verdict.TRAINED, 0)) if peer.role is Role.SAMPLER else "-"),
        Text(counts(peer.verdicts, _REFUSALS)),
        Text(printable(peer.waits_for)),
    )


def _standings(peers: Iterable[PeerStatus]) -> Iterable[Text]:
    """Yield a line for each sampler of which an operator should know."""
    for peer in peers:
        if peer.standing_detail and peer.state != "left":
            detail = printable(peer.standing_detail)
            yield Text(f"{peer.node_id}: {printable(peer.standing)}, {detail}", style="yellow")


def _figures(peers: Iterable[PeerStatus], *, is_brief: bool) -> Iterable[Text]:
    """Yield a line for each peer with the numbers that it reports, of many peers only what is wrong."""
    for peer in peers:
        text = text_of(peer.machine, peer.sampler, is_brief=is_brief)
        if text and peer.state in ("joined", "live", "drained"):
            yield Text(f"{printable(peer.node_id)}: {text}")


def _twins(peers: Iterable[PeerStatus]) -> Iterable[Text]:
    """Yield a line for each peer of whose name a second process was refused lately."""
    for peer in peers:
        if peer.refused_twins and peer.refused_twin_s <= SHOW_TWINS_S:
            yield Text(
                f"{peer.node_id}: another process of this name was refused "
                f"{counted(peer.refused_twins, 'time')}, last {peer.refused_twin_s:.0f} s ago; "
                "stop one of the two",
                style="yellow",
            )
