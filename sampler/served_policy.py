"""Owns which policy version a sampler holds, whether it is sampled from, and what comes next; pure.

Engine, disk and fetcher report events and execute commands. Each row is a state, with the command that is
due there and the state after each event; a dot: the event changes nothing.

    state      command  restore    fetch     drop  verified  hold  damage   lose
    ---------  -------  ---------  --------  ----  --------  ----  -------  ----
    empty      serve    .          .         .     .         live  .        lost
    live       look     .          fetching  .     .         .     suspect  lost
    fetching   fetch    .          .         live  verified  .     suspect  lost
    verified   apply    .          .         live  .         live  suspect  lost
    suspect    restore  restoring  .         .     .         .     .        lost
    lost       restore  restoring  .         .     .         .     .        .
    restoring  wait     .          .         .     .         live  suspect  lost

The words in memory are those of ``held`` when live, fetching or verified. When suspect they may be damaged;
when lost they are the base model's or half of a change. Either way they are taken from the disk again, and
what the disk lacks is fetched. A version older than one sampled from before is held, and not sampled from.

A sampler stays at a version that is evaluated. It is told ahead from which version on, and stops at the first
newer one from there (at each, where it has passed that: the evaluation is overdue), where it hears that
prompts of the version it holds are left, and where it starts. It says so with each request for leases, and
goes on once it asked with none left to generate, got none for evaluation and heard that none are left for it,
or after ``LONGEST_STOP_S``. Without stops no version of a fast run would ever be evaluated as such. While it
stays, ``stay`` is due in the place of look and apply.
"""

import enum
from collections.abc import Callable, Mapping
from typing import Final

from node.values.groups.rollout import LeaseGrant
from node.values.policy import PolicyVersion

LONGEST_STOP_S: Final = 30.0
"""Longest stay without a prompt to generate: the hub is away, or has none for this sampler in that time."""


class State(enum.StrEnum):
    EMPTY = "empty"
    LIVE = "live"
    FETCHING = "fetching"
    VERIFIED = "verified"
    SUSPECT = "suspect"
    LOST = "lost"
    RESTORING = "restoring"


class Command(enum.StrEnum):
    SERVE = "serve"
    """Hand over what was loaded at the start."""
    LOOK = "look"
    """Look for a newer version."""
    FETCH = "fetch"
    APPLY = "apply"
    """Put the verified version on disk and change the live words to it."""
    STAY = "stay"
    RESTORE = "restore"
    WAIT = "wait"


class Event(enum.StrEnum):
    RESTORE = "restore"
    FETCH = "fetch"
    DROP = "drop"
    VERIFIED = "verified"
    HOLD = "hold"
    DAMAGE = "damage"
    LOSE = "lose"


COMMANDS: Final[Mapping[State, Command]] = {
    State.EMPTY: Command.SERVE,
    State.LIVE: Command.LOOK,
    State.FETCHING: Command.FETCH,
    State.VERIFIED: Command.APPLY,
    State.SUSPECT: Command.RESTORE,
    State.LOST: Command.RESTORE,
    State.RESTORING: Command.WAIT,
}

TRANSITIONS: Final[Mapping[tuple[State, Event], State]] = {
    (State.EMPTY, Event.HOLD): State.LIVE,
    (State.LIVE, Event.FETCH): State.FETCHING,
    (State.FETCHING, Event.DROP): State.LIVE,
    (State.FETCHING, Event.VERIFIED): State.VERIFIED,
    (State.VERIFIED, Event.DROP): State.LIVE,
    (State.VERIFIED, Event.HOLD): State.LIVE,
    (State.SUSPECT, Event.RESTORE): State.RESTORING,
    (State.LOST, Event.RESTORE): State.RESTORING,
    (State.RESTORING, Event.HOLD): State.LIVE,
    **{(state, Event.LOSE): State.LOST for state in State},
    **{
        (state, Event.DAMAGE): State.SUSPECT
        for state in (State.LIVE, State.FETCHING, State.VERIFIED, State.RESTORING)
    },
}

_WHOLE: Final = frozenset({State.LIVE, State.FETCHING, State.VERIFIED})

Listener = Callable[[PolicyVersion | None], None]
"""Called after each event, with what was sampled from before it."""


class ServedPolicy:
    """One per sampler, for the event loop's thread; ``now`` is monotonic, seconds.

    Attributes:
        state: See the table.
        held: What the live words are, or were before they became suspect or lost.
        floor: The oldest version that may be sampled from.
        stop_from: Stop at the next version, if it is from here on; None: pass all by.
    """

    def __init__(self, *, is_generating: Callable[[int], bool]) -> None:
        """Begin empty; ``is_generating`` says whether leases are left that only this version may answer."""
        self._is_generating = is_generating
        self._listeners: list[Listener] = []
        self._probed_badly: PolicyVersion | None = None
        self._stop: int | None = None
        self._is_starting = True
        self._since_s = 0.0
        self.state = State.EMPTY
        self.held = PolicyVersion(0)
        self.floor = 0
        self.stop_from: int | None = None

    @property
    def served(self) -> PolicyVersion | None:
        """The version to sample from; None: nothing is."""
        return self.held if self.state in _WHOLE and self.held.number >= self.floor else None

    def listen(self, listener: Listener) -> None:
        self._listeners.append(listener)

    def command(self, *, now: float) -> Command:
        """Return what the follower is to do."""
        command = COMMANDS[self.state]
        return Command.STAY if command in (Command.LOOK, Command.APPLY) and self.stays(now=now) else command

    def load(self, version: PolicyVersion) -> None:
        """Note what the live words are at the start, to be handed over."""
        self.held = version

    def note(self, event: Event) -> None:
        """Note any event but HOLD, which has a version."""
        self._move(event, self.served)

    def hold(self, version: PolicyVersion, *, now: float) -> None:
        """Note that the live words were changed to ``version``, from the disk or by a fetch."""
        served, self.held = self.served, version
        is_newer = version.number > self.floor
        is_stop = is_newer and self.stop_from is not None and self.stop_from <= version.number
        if is_stop or self._is_starting:
            self._stop, self._since_s, self._is_starting = version.number, now, False
        self.floor = max(self.floor, version.number)
        self._move(Event.HOLD, served)

    def fails_probe(self) -> bool:
        """Note a probe without finite logprobs; return whether the version is not sampled from any more.

        The first time the engine is to blame, the second time the version.
        """
        served, is_second = self.served, self._probed_badly == self.held
        self._probed_badly = self.held
        if is_second:
            self.floor = self.held.number + 1
            self._tell(served)
        return is_second

    def stays(self, *, now: float) -> bool:
        """Whether the sampler is to stay at the version it holds."""
        if not self._is_at_stop:
            return False
        return self._is_generating(self.held.number) or now - self._since_s < LONGEST_STOP_S

    @property
    def has_to_ask(self) -> bool:
        """Whether the stop ends with the next answer to a request for leases, so that one is made now."""
        return self._is_at_stop and not self._is_generating(self.held.number)

    def answered(self, version: int, grant: LeaseGrant, *, had_to_ask: bool, now: float) -> None:
        """Note the answer to a request for leases that was made at ``version``."""
        self.stop_from, self._is_starting = grant.evaluate_from, False
        if version != self.held.number:
            return
        is_leased = any(lease.policy_version == version for lease in grant.leases)
        if is_leased or (grant.is_held_out_left and version != self._stop):
            self._stop, self._since_s = version, now
        elif had_to_ask and version == self._stop and not grant.is_held_out_left:
            self._stop = None
        else:
            return
        self._tell(self.served)

    @property
    def _is_at_stop(self) -> bool:
        # The cheapest way to the head may lead back through older versions, which are not sampled from: there
        # nothing can be asked for that would end a stop.
        return self.served is not None and self.held.number == self._stop

    def _move(self, event: Event, served: PolicyVersion | None) -> None:
        self.state = TRANSITIONS.get((self.state, event), self.state)
        self._tell(served)

    def _tell(self, served: PolicyVersion | None) -> None:
        for listener in self._listeners:
            listener(served)
