"""A whole run's identities in a temporary directory, the good ones and those that must be refused."""

from dataclasses import dataclass
from pathlib import Path

from node.enrolment.authority import LEAF_LIFETIME_S, Authority
from node.enrolment.init_run import init_run, issue_identity
from node.identity.certificates import CLOCK_SKEW_S
from node.identity.identity_store import Identity, load_identity
from node.identity.peer import Peer
from node.identity.run_description import RunDescription
from node.identity.signatures import SigningKey
from node.values.roles import Role

NOW_S = 1_800_000_000.0
"""A moment for tests of pure code; real TLS takes the machine's time instead."""


@dataclass(frozen=True, slots=True)
class MadeRun:
    """A run as ``init`` makes it, and peers as enrolment would."""

    directory: Path
    """Directory that ``init`` made: serves as ``node.state_dir``."""
    run: RunDescription
    authority: Authority
    signing_key: SigningKey
    made_at_s: float
    coordinator: Identity
    learner: Identity
    operator: Identity
    sampler: Identity
    other_sampler: Identity
    relay: Identity
    verifier: Identity
    contributor: Identity
    expired: Identity
    """A sampler whose certificate ran out an hour ago."""
    not_yet_valid: Identity
    """A sampler whose certificate starts tomorrow."""
    foreign: Identity
    """A sampler of another authority that made a run of the same name."""

    @property
    def run_id(self) -> str:
        return self.run.run_id

    def issue(self, role: Role, node_id: str, *, issued_at_s: float | None = None) -> Identity:
        """Make one more peer."""
        now = self.made_at_s if issued_at_s is None else issued_at_s
        return issue_identity(
            self.authority, Peer(self.run_id, role, node_id), now=now, lifetime_s=LEAF_LIFETIME_S
        )

    def of(self, role: Role) -> Identity:
        """Return a good identity of a role."""
        return {
            Role.COORDINATOR: self.coordinator,
            Role.LEARNER: self.learner,
            Role.SAMPLER: self.sampler,
            Role.RELAY: self.relay,
            Role.VERIFIER: self.verifier,
            Role.CONTRIBUTOR: self.contributor,
            Role.OPERATOR: self.operator,
        }[role]


def make_run(directory: Path, *, now: float, run_id: str = "example", hosts: tuple[str, ...] = ()) -> MadeRun:
    """Make a run in ``directory / run_id``. Milliseconds: keys are ECDSA.

    Args:
        directory: a test's temporary directory.
        now: Unix seconds; ``time.time()`` where TLS is spoken.
        run_id: name of the run.
        hosts: extra names of the coordinator.
    """
    root = directory / run_id
    run = init_run(root, run_id=run_id, hosts=hosts, now=now)
    authority = Authority.load(root / "coordinator" / "authority")

    def stored(role: Role) -> Identity:
        identity = load_identity(root / role / "identity")
        assert identity is not None
        return identity

    def sampler(node_id: str, issuer: Authority = authority, issued_at_s: float = now) -> Identity:
        peer = Peer(run_id, Role.SAMPLER, node_id)
        return issue_identity(issuer, peer, now=issued_at_s, lifetime_s=LEAF_LIFETIME_S)

    def peer(role: Role, node_id: str) -> Identity:
        return issue_identity(authority, Peer(run_id, role, node_id), now=now, lifetime_s=LEAF_LIFETIME_S)

    return MadeRun(
        directory=root,
        run=run,
        authority=authority,
        signing_key=SigningKey.load(root / "learner" / "signing.key"),
        made_at_s=now,
        coordinator=stored(Role.COORDINATOR),
        learner=stored(Role.LEARNER),
        operator=stored(Role.OPERATOR),
        sampler=sampler("sampler-1"),
        other_sampler=sampler("sampler-2"),
        relay=peer(Role.RELAY, "relay-1"),
        verifier=peer(Role.VERIFIER, "verifier-1"),
        contributor=peer(Role.CONTRIBUTOR, "contributor-1"),
        expired=sampler("expired", issued_at_s=now - LEAF_LIFETIME_S - 3600),
        not_yet_valid=sampler("early", issued_at_s=now + CLOCK_SKEW_S + 86400),
        foreign=sampler("stranger", issuer=Authority.create(run_id, now=now)),
    )
