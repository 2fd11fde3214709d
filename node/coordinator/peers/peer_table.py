"""The table of peers: the rows that a query asks for, and looks at the whole fleet; it changes nothing.

Both look at all peers, with little work for each: what many of them share at one moment is worked out once.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from node.coordinator.fleet.membership import KnownPeer, PeerState
from node.coordinator.fleet.peer_reports import HeartbeatReport, Reported
from node.coordinator.fleet.survey import (
    NOTHING_SEEN,
    PEERS_PER_PART,
    FleetSurvey,
    Measured,
    Surveyor,
    survey_every_s,
)
from node.coordinator.peers.peers import Peers
from node.coordinator.work.accounts import Accounts
from node.errors import Reason, RefusedError
from node.identity.peer import Peer
from node.values.groups.verdict import Verdict
from node.values.policy import PolicyVersion
from node.values.roles import MEMBER_ROLES, VERSIONED_ROLES, Role
from node.values.run import (
    MOST_PEERS_A_PAGE,
    PEER_ORDERS,
    PEERS_A_PAGE,
    PeerQuery,
    PeerStatus,
    SamplerStanding,
)

_VALUES_OF_A_CONDITION: Final = 8


class PeerTable:
    """The peers of a run, as an operator looks at them."""

    def __init__(self, peers: Peers, *, revoked: Callable[[], Collection[str]]) -> None:
        """Look at ``peers``; ``revoked`` returns the node ids that are shut out."""
        self.peers = peers
        self._revoked = revoked
        self._survey = NOTHING_SEEN
        self._surveyed_at_s = float("-inf")

    def page(self, query: PeerQuery, now: float) -> tuple[tuple[PeerStatus, ...], int]:
        """Return the rows that a query asks for, and how many peers meet its conditions.

        Raises RefusedError: MALFORMED; there is no such state, role, standing, order or page.
        """
        _check(query)
        view = self._view(now)
        members: Sequence[KnownPeer] = self.peers.members
        if query.states or query.roles or query.standings or query.name or query.waits_for:
            members = [member for member in members if self._meets(member, query, view)]
        members = self._sorted(members, query, view)
        last = query.offset + (query.limit or PEERS_A_PAGE)
        return tuple(self._row(one, view) for one in members[query.offset : last]), len(members)

    def survey_parts(self, now: float) -> Iterator[None]:
        """Look at all peers if it is time, in parts between which heartbeats may be answered."""
        if now < self._surveyed_at_s + survey_every_s(len(self.peers)) and now >= self._surveyed_at_s:
            return
        self._surveyed_at_s = now
        surveyor = Surveyor(
            self.peers.accounts.terms.bounds.max_staleness_versions,
            self.peers.accounts.grader.digest,
        )
        view = self._view(now)
        for number, member in enumerate(self.peers.members, start=1):
            if member.peer in self.peers:  # not forgotten in a pause of this look
                self._see(surveyor, member, self.peers.of(member.peer), view)
            if number % PEERS_PER_PART == 0:
                yield
        self._survey = surveyor.result()

    @property
    def survey(self) -> FleetSurvey:
        """The result of the last look at all peers."""
        return self._survey

    def _view(self, now: float) -> "_View":
        return _View(
            now,
            self.peers.head,
            frozenset(self._revoked()),
            self.peers.accounts.slots.oldest_leases(),
            self.peers.accounts,
        )

    def _meets(self, member: KnownPeer, query: PeerQuery, view: "_View") -> bool:
        peer = member.peer
        if query.roles and peer.role not in query.roles:
            return False
        if query.states and view.state(member) not in query.states:
            return False
        if query.name not in peer.node_id or query.waits_for not in self.peers.of(peer).report.waits_for:
            return False
        if not query.standings:
            return True
        return peer.role is Role.SAMPLER and view.standing(peer.node_id)[0] in query.standings

    def _sorted(self, members: Sequence[KnownPeer], query: PeerQuery, view: "_View") -> Sequence[KnownPeer]:
        order = query.sort_by or PEER_ORDERS[0]

        def report(member: KnownPeer) -> HeartbeatReport:
            return self.peers.of(member.peer).report

        def lag(member: KnownPeer) -> tuple[int, float]:
            return view.lag(member.peer, report(member).held)

        if order == "joined":
            return members[::-1] if query.is_reversed else members
        if order == "name":
            return sorted(members, key=lambda one: one.peer.node_id, reverse=query.is_reversed)
        if order == "state":
            ranks = {state: rank for rank, state in enumerate(_BY_STATE)}
            return sorted(members, key=lambda one: ranks[view.state(one)], reverse=query.is_reversed)
        keys: dict[str, Callable[[KnownPeer], float]] = {
            "behind": lambda one: lag(one)[0],
            "lag": lambda one: lag(one)[1],
            "seen": lambda one: view.now - one.last_seen_s,
            "clock": lambda one: abs(report(one).clock_offset_s),
            "leases": lambda one: self.peers.accounts.held(one.peer.node_id),
        }
        return sorted(members, key=keys[order], reverse=not query.is_reversed)

    def _see(self, surveyor: Surveyor, member: KnownPeer, known: Reported, view: "_View") -> None:
        peer, name = member.peer, member.peer.node_id
        behind, lag_s = view.lag(peer, known.report.held)
        is_sampler = peer.role is Role.SAMPLER
        surveyor.see(
            peer,
            view.state(member),
            Measured(
                behind,
                lag_s,
                max(0.0, view.now - member.last_seen_s),
                known.report.clock_offset_s,
                known.figures,
            ),
            standing=view.standing(name)[0] if is_sampler else None,
            grader=known.grader if is_sampler else b"",
            twin_for_s=max(0.0, view.now - member.refused_twin_at_s) if member.refused_twins else None,
            speaks=known.speaks,
            waits_for=known.report.waits_for,
        )

    def _row(self, member: KnownPeer, view: "_View") -> PeerStatus:
        peer, known, now = member.peer, self.peers.of(member.peer), view.now
        report = known.report
        lag_versions, lag_s = view.lag(peer, report.held)
        row = PeerStatus(
            node_id=peer.node_id,
            role=peer.role,
            state=view.state(member).value,
            held=report.held,
            version_lag_versions=lag_versions,
            lag_s=lag_s,
            last_seen_s=max(0.0, now - member.last_seen_s),
            clock_offset_s=report.clock_offset_s,
            waits_for=report.waits_for,
            verdicts={},
            staleness_mean_versions=0.0,
            joins=member.joins,
            software_version=known.speaks.software_version,
            protocol=known.speaks.protocol,
            refused_twins=member.refused_twins,
            refused_twin_s=max(0.0, now - member.refused_twin_at_s) if member.refused_twins else 0.0,
            grader_digest=known.grader,
            machine=known.machine,
            sampler=known.sampler,
        )
        return self._as_sampler(row, view) if peer.role is Role.SAMPLER else row

    def _as_sampler(self, row: PeerStatus, view: "_View") -> PeerStatus:
        name, accounts = row.node_id, self.peers.accounts
        standing, detail = view.standing(name)
        return replace(
            row,
            verdicts={verdict.value: n for verdict, n in accounts.tallies.of(name).verdicts.items()},
            staleness_mean_versions=accounts.tallies.staleness_mean(name),
            leases=accounts.held(name),
            lease_allowance=accounts.standings.of(name).allowance,
            oldest_lease_s=view.oldest_lease_s(name),
            standing=standing.value,
            standing_detail=detail,
        )


@dataclass(slots=True)
class _View:
    """One moment, at which peers are looked at; what many of them share is worked out once."""

    now: float
    head: PolicyVersion | None
    revoked: Collection[str]
    oldest_leases: Mapping[str, float]
    """Sampler -> when its oldest lease was granted."""
    accounts: Accounts
    _lags: dict[int | None, tuple[int, float]] = field(default_factory=dict)

    def state(self, member: KnownPeer) -> PeerState:
        return PeerState.REVOKED if member.peer.node_id in self.revoked else member.state

    def lag(self, peer: Peer, held: PolicyVersion | None) -> tuple[int, float]:
        """Return versions and seconds to the head; see ``VersionLog.lag``, which looks at all versions."""
        if peer.role not in VERSIONED_ROLES:
            return 0, 0.0
        number = None if held is None else held.number
        if (known := self._lags.get(number)) is not None:
            return known
        lag = self._lags[number] = self.accounts.versions.lag(held, self.head, now=self.now)
        return lag

    def oldest_lease_s(self, sampler_id: str) -> float:
        return max(0.0, self.now - self.oldest_leases.get(sampler_id, self.now))

    def standing(self, sampler_id: str) -> tuple[SamplerStanding, str]:
        accounts = self.accounts
        return accounts.standings.word(
            sampler_id,
            delivered=accounts.tallies.of(sampler_id).verdicts.get(Verdict.SPOOLED, 0),
            held=accounts.held(sampler_id),
            oldest_s=self.oldest_lease_s(sampler_id),
            max_age_s=accounts.max_age_s(sampler_id),
            now=self.now,
        )


_BY_STATE: Final = (PeerState.SILENT, PeerState.JOINED, PeerState.LIVE, PeerState.REVOKED, PeerState.LEFT)

_CLOSED: Final[dict[str, frozenset[str]]] = {
    "states": frozenset(PeerState),
    "roles": frozenset(MEMBER_ROLES),
    "standings": frozenset(SamplerStanding),
    "sort_by": frozenset({"", *PEER_ORDERS}),
}


def _check(query: PeerQuery) -> None:
    for name, allowed in _CLOSED.items():
        said = getattr(query, name)
        wrong = sorted(
            {said} - allowed if isinstance(said, str) else set(said[:_VALUES_OF_A_CONDITION]) - allowed
        )
        if wrong or (not isinstance(said, str) and len(said) > _VALUES_OF_A_CONDITION):
            raise RefusedError(
                Reason.MALFORMED,
                f"a query for peers with {name} = {wrong[0][:50] if wrong else len(said)!r}",
                fix=f"allowed are {', '.join(sorted(filter(None, allowed)))}",
            )
    if query.offset < 0 or not 0 <= query.limit <= MOST_PEERS_A_PAGE:
        raise RefusedError(
            Reason.MALFORMED,
            f"a page of {query.limit} peers from the {query.offset}th on",
            fix=f"ask for 1 to {MOST_PEERS_A_PAGE} peers, from the 0th or a later one on",
        )
