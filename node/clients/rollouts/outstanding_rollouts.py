"""The account of what learner and coordinator owe each other over DrainRollouts; pure.

A delivered group is *held* until it is refused or trained on. The learner has room for ``capacity_groups``;
credits keep (held + credits outstanding) at that number. After a reconnection nothing is lost or doubled,
because the learner repeats all that the coordinator may not know: step records it has not acknowledged, which
groups are held, their verdicts, and which samplers it quarantined or released.

    delivered --> held --accepted--> held --step--> trained (owed until acknowledged)
                   |                  '---stale---> refused
                   '---refused--------------------> refused
"""

from collections.abc import Iterable
from dataclasses import dataclass

from node.values.groups.verdict import GroupVerdict, Verdict
from node.values.operator_order import OrderAnswer
from node.values.run import StepRecord


@dataclass(frozen=True, slots=True)
class Owed:
    """Messages to send to the coordinator now, in this order."""

    verdicts: tuple[GroupVerdict, ...]
    steps: tuple[StepRecord, ...]
    credit_groups: int
    quarantines: tuple[tuple[str, str], ...] = ()
    """(sampler, why); why is empty where it is released."""
    answers: tuple[OrderAnswer, ...] = ()


class OutstandingRollouts:
    """The learner's side of the account."""

    def __init__(self, *, version: int, capacity_groups: int, unacknowledged: Iterable[StepRecord]) -> None:
        """Begin at ``version``, with the step records that were not acknowledged."""
        if capacity_groups < 1:
            raise ValueError(f"capacity_groups is {capacity_groups}; a learner without room gets no group")
        self._version = version
        self._capacity_groups = capacity_groups
        self._held: dict[str, GroupVerdict | None] = {}
        self._unacknowledged = list(unacknowledged)
        self._owed_verdicts: dict[str, GroupVerdict] = {}
        self._owed_steps: list[StepRecord] = []
        self._credit_outstanding = 0
        self._quarantines: dict[str, str] = {}
        """By sampler, as it was decided last, here or there; empty: released."""
        self._owed_quarantines: set[str] = set()
        self._owed_answers: list[OrderAnswer] = []

    @property
    def quarantined(self) -> dict[str, str]:
        """Samplers whose groups are refused, and why."""
        return {name: why for name, why in self._quarantines.items() if why}

    @property
    def version(self) -> int:
        """Version of the newest step known here: those up to it are acknowledged or will be sent.

        The learner's journal may be one step ahead, whose record is about to come.
        """
        return self._version

    @property
    def held_group_ids(self) -> tuple[str, ...]:
        """Groups delivered and neither refused nor trained on."""
        return tuple(self._held)

    @property
    def unacknowledged(self) -> tuple[StepRecord, ...]:
        """Records the coordinator may not have."""
        return tuple(self._unacknowledged)

    def connected(self) -> None:
        """Begin a new stream: credits are void, and what may have been lost is owed again.

        Unacknowledged records are not owed here: they travel in the stream's hello.
        """
        self._credit_outstanding = 0
        self._owed_quarantines = set(self._quarantines)
        self._owed_steps.clear()
        self._owed_answers.clear()  # orders without an answer are told again
        verdicts = (verdict for verdict in self._held.values() if verdict is not None)
        self._owed_verdicts = {verdict.group_id: verdict for verdict in verdicts}

    def has_room_for(self, group_id: str) -> bool:
        """Whether a delivery is within the credits; one that is known already takes no room."""
        return self._is_known(group_id) or len(self._held) < self._capacity_groups

    def delivered(self, group_id: str) -> bool:
        """Note a delivery; False if the group is held already or was trained on."""
        self._credit_outstanding = max(0, self._credit_outstanding - 1)
        if self._is_known(group_id):
            return False
        self._held[group_id] = None
        return True

    def judged(self, verdict: GroupVerdict) -> None:
        """Note the verdict on a held group, which is held no longer unless it is ACCEPTED."""
        if verdict.group_id not in self._held:
            raise KeyError(f"group {verdict.group_id} is not held")
        self._owed_verdicts[verdict.group_id] = verdict
        if verdict.verdict is Verdict.ACCEPTED:
            self._held[verdict.group_id] = verdict
        else:
            del self._held[verdict.group_id]

    def stepped(self, step: StepRecord) -> None:
        """Note a step that is in the learner's journal."""
        for group_id in step.group_ids:
            del self._held[group_id]
            self._owed_verdicts.pop(group_id, None)
        self._version = step.version
        self._unacknowledged.append(step)
        self._owed_steps.append(step)

    def quarantine(self, sampler_id: str, why: str) -> None:
        """Note that a sampler is quarantined, or released where ``why`` is empty."""
        self._quarantines[sampler_id] = why
        self._owed_quarantines.add(sampler_id)

    def answered(self, answer: OrderAnswer) -> None:
        """Note what became of an operator's order."""
        self._owed_answers.append(answer)

    def quarantines_listed(self, listed: dict[str, str], *, releases_others: bool) -> None:
        """Take over the coordinator's list; what was decided here since it was made is owed to it."""
        if releases_others:
            self._quarantines = {name: why for name, why in self._quarantines.items() if name in listed}
        self._quarantines = listed | self._quarantines

    def acknowledged(self, version: int) -> None:
        """Note that every record up to ``version`` is on the coordinator's disk."""
        self._unacknowledged = [step for step in self._unacknowledged if step.version > version]

    def take_owed(self) -> Owed:
        """Return what to send now, and count it as sent."""
        credit = max(0, self._capacity_groups - len(self._held) - self._credit_outstanding)
        names = sorted(self._owed_quarantines)
        quarantines = tuple((name, self._quarantines.get(name, "")) for name in names)
        owed = Owed(
            tuple(self._owed_verdicts.values()),
            tuple(self._owed_steps),
            credit,
            quarantines,
            tuple(self._owed_answers),
        )
        self._owed_answers.clear()
        self._owed_quarantines.clear()
        self._owed_verdicts.clear()
        self._owed_steps.clear()
        self._credit_outstanding += credit
        return owed

    def _is_known(self, group_id: str) -> bool:
        return group_id in self._held or any(group_id in step.group_ids for step in self._unacknowledged)
