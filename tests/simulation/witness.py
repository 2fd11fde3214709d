"""The promises of a run, whatever fails: checked from outside after every commit.

The witness remembers what peers were told and what the learner did. It shares no state with the coordinator,
whose accounts and ledger it reads.

    lost         a group that its sampler was told is safe is in the ledger, trained on, or refused by name
    twice        no slot is in two steps, no lease is granted twice, no group is taken in twice
    merged       a contribution is in one version at most, with all its groups, and its contributor is told so
    nothing      where there are several contributors, one's word alone consumes no group that would teach
    stale        no step takes a group beyond the staleness bound, and none is dealt to a contributor
    back         versions, steps and epochs never go back, whatever is restarted
    accounts     what is in memory is what the ledger adds up to
    bounds       leases and spooled groups stay within their bounds
    versions     no group is refused or put off for a version that the learner has published
    waits        whoever gets less than asked for is told why; once faults end, the run goes on and nobody is
                 left without work
"""

import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from node.coordinator.ledger.ledger_check import examine
from node.coordinator.ledger.ledger_file import FILE_NAME
from node.coordinator.work.accounts import Accounts
from node.coordinator.work.decisions.step_history import Hello
from node.coordinator.work.decisions.submitted_groups import Submission
from node.coordinator.work.samplers.sampler_standing import NEWCOMER_LEASES
from node.coordinator.work.samplers.standings import ALL_NEWCOMERS_PART
from node.coordinator.work.slots.slot import (
    UNTRAINED,
    SlotState,
    group_id,
    is_held_out,
    parse_group_id,
    slot_and_attempt,
)
from node.values.groups.failure import Failure
from node.values.groups.rollout import GroupHeader, LeaseGrant, LeasePurpose, RolloutGroup
from node.values.groups.verdict import GroupVerdict, Verdict
from node.values.policy import PolicyVersion
from node.values.run import StepRecord
from simulation.faults import Plan
from simulation.virtual_loop import VirtualLoop

if TYPE_CHECKING:
    from simulation.hub import Hub

_VERSION = re.compile(r"version (\d+)\b")

LATE_S = 5.0
"""How much later than due an expiry may be noticed, at most."""

FULL_CHECK_EVERY = 8
"""Commits between two comparisons of everything; in between, of the counts."""


@dataclass(slots=True)
class Witness:
    plan: Plan
    loop: VirtualLoop
    tell: Callable[[str, str], None]
    """Adds a line to the story: who, what."""
    violations: list[str] = field(default_factory=list)
    reached: Counter[str] = field(default_factory=Counter)
    history: list[StepRecord] = field(default_factory=list)
    delivered_by: Counter[str] = field(default_factory=Counter)
    """Groups of each sampler that the coordinator took in."""
    _granted: dict[str, str] = field(default_factory=dict)
    _granted_at_s: dict[str, float] = field(default_factory=dict)
    _safe: dict[str, str] = field(default_factory=dict)
    _excused: dict[str, str] = field(default_factory=dict)
    """Groups that need not be trained on, and why."""
    _trained: dict[int, str] = field(default_factory=dict)
    _handed_in: dict[tuple[str, int], tuple[str, ...]] = field(default_factory=dict)
    """Groups of the contributions by contributor and number, as they were trained on."""
    _said_nothing: dict[str, set[str]] = field(default_factory=dict)
    """By group: contributors that have said it taught nothing."""
    _merged: dict[tuple[str, int], int] = field(default_factory=dict)
    """Versions of the contributions that are in the journal, likewise."""
    _acknowledged: int = 0
    _newest: tuple[int, int, int] = (0, 0, 0)
    """Epoch, version and last step that the coordinator knew of."""
    _has_lost_versions: bool = False
    _heads: dict[str, int] = field(default_factory=dict)
    _held: dict[str, int] = field(default_factory=dict)
    _commits: int = 0

    def violated(self, what: str) -> None:
        self.violations.append(what)
        self.tell("witness", f"VIOLATED: {what}")

    # What peers were told.

    def granted(self, hub: "Hub", sampler_id: str, grant: LeaseGrant) -> None:
        """Note leases that a sampler is about to be told of."""
        if any(lease.purpose is LeasePurpose.TRAINING for lease in grant.leases):
            self._check_crowd(hub.accounts, sampler_id)
        for lease in grant.leases:
            self._granted_at_s[lease.lease_id] = self.loop.time()
            if lease.lease_id in self._granted:
                self.violated(
                    f"lease {lease.lease_id} was granted to {self._granted[lease.lease_id]} and again to "
                    f"{sampler_id}"
                )
            self._granted[lease.lease_id] = sampler_id

    def heard_grant(self, sampler_id: str, wanted: int, grant: LeaseGrant) -> None:
        self.reached[f"leases: {grant.waits_for or 'all'}"] += 1
        if len(grant.leases) < wanted and not grant.waits_for:
            self.violated(f"{sampler_id} got {len(grant.leases)} of {wanted} leases and was not told why")

    def told(self, sampler_id: str, name: str, verdict: Verdict) -> None:
        """Note the coordinator's answer to a group."""
        self.reached[f"group: {verdict}"] += 1
        if verdict is not Verdict.SPOOLED:
            return
        self.tell(sampler_id, f"is told that group {name} is safe")
        self.delivered_by[sampler_id] += 1
        if self._granted.get(name) != sampler_id:
            self.violated(f"group {name} was taken of {sampler_id}, leased to {self._granted.get(name)}")
        if name in self._safe:
            self.violated(f"group {name} was taken in twice")
        if not is_held_out(name):
            self._safe[name] = sampler_id

    def acknowledged(self, version: int) -> None:
        self._acknowledged = max(self._acknowledged, version)

    def heard_head(self, name: str, head: PolicyVersion | None) -> None:
        number = 0 if head is None else head.number
        if number < self._heads.get(name, 0) and not self._has_lost_versions:
            self.violated(f"{name} is told of head {number} after {self._heads[name]}")
        self._heads[name] = number

    def held(self, name: str, instance: str, number: int) -> None:
        if number < self._held.get(instance, 0):
            self.violated(f"{name} goes back from version {self._held[instance]} to {number}")
        if number > len(self.history):
            self.violated(f"{name} holds version {number}, and there are {len(self.history)}")
        self._held[instance] = number

    # What the learner did.

    def judged(self, judged: GroupVerdict, group: RolloutGroup | None = None) -> None:
        if group is not None and not group.is_graded:
            self.violated(f"group {group.group_id} was delivered without rewards")
        self.reached[f"judged: {judged.verdict}"] += 1
        if judged.verdict is Verdict.DUPLICATE and not self._is_needless(judged.group_id):
            self.violated(f"group {judged.group_id} was delivered after it was trained on")
        if group is not None and judged.verdict is Verdict.FOREIGN:
            self.violated(f"group {judged.group_id} was refused by the learner: {judged.detail}")
        if judged.verdict is not Verdict.ACCEPTED:
            self._excused[judged.group_id] = f"judged {judged.verdict}"

    def stepped(
        self, record: StepRecord, batch: tuple[RolloutGroup, ...], *, sampler_of: Mapping[str, str]
    ) -> None:
        """Note a step that is in the learner's journal."""
        self.tell("learner", f"takes step {record.version} with groups {', '.join(record.group_ids)}")
        if record.version != len(self.history) + 1:
            self.violated(f"step {record.version} follows on {len(self.history)}")
        self.history.append(record)
        for group in batch:
            slot, _ = slot_and_attempt(group.group_id)
            if slot in self._trained:
                self.violated(
                    f"slot {slot} was trained on twice, by {self._trained[slot]} and {group.group_id}"
                )
            sampler_id = sampler_of[group.group_id]
            if self._granted.get(group.group_id) != sampler_id:
                self.violated(f"group {group.group_id} of {sampler_id} was leased to somebody else")
            self._trained[slot] = group.group_id

    def batched(self, batch: tuple[RolloutGroup, ...], *, version: int) -> None:
        """Check a batch that the learner trains on, or deals to a contributor."""
        for group in batch:
            if (age := version - group.oldest_version) > self.plan.max_staleness_versions:
                self.violated(
                    f"group {group.group_id} was {age} versions stale, {self.plan.max_staleness_versions} "
                    "are allowed"
                )

    def merged(self, contributions: list[tuple[str, int]], *, version: int) -> None:
        """Note the contributions, by contributor and number, that a version in the journal is made of."""
        for one in contributions:
            if one in self._merged:
                self.violated(
                    f"contribution {one[1]} of {one[0]} is in versions {self._merged[one]} and {version}"
                )
            self._merged[one] = version

    def handed_in(self, contributor: str, number: int, group_ids: tuple[str, ...]) -> None:
        """Note what a contributor has trained on, whatever it says."""
        self._handed_in[contributor, number] = group_ids

    def said_nothing(self, contributor: str, group_ids: Iterable[str]) -> None:
        """Note what a contributor reports to have taught nothing, whether that is so or not."""
        for name in group_ids:
            self._said_nothing.setdefault(name, set()).add(contributor)

    def passed_over(self, group: RolloutGroup, *, contributors: int) -> None:
        """Check a group that a learner of so many connected contributors consumes without a step."""
        teaches = len({completion.reward for completion in group.completions}) > 1
        said = self._said_nothing.get(group.group_id, set())
        if teaches and contributors > 1 and len(said) < 2:
            self.violated(f"group {group.group_id} is consumed by the word of {', '.join(said)} alone")

    def answered(self, contributor: str, number: int, version: int | None) -> None:
        """Check a learner's answer to a contribution."""
        names, merged_version = self._handed_in[contributor, number], self._merged.get((contributor, number))
        self.reached[f"contribution {'refused' if version is None else 'merged'}"] += 1
        if version is None:
            self.tell(contributor, f"is told that contribution {number} is refused")
            if merged_version is not None:
                self.violated(
                    f"contribution {number} of {contributor} is in version {merged_version}, refused"
                )
            return
        self.tell(contributor, f"is told that contribution {number} is in version {version}")
        if version > len(self.history):
            self.violated(
                f"contribution {number} of {contributor} is in version {version}, which there is not"
            )
            return
        merged = set(self.history[version - 1].group_ids) if version else set()
        for name in names:
            if name not in merged and name not in self._excused:
                self.violated(
                    f"group {name} of {contributor}'s contribution {number} is not in version {version}"
                )

    def some_groups(self, draw: random.Random) -> list[str]:
        """Return groups that somebody who lies may name: trained on, waiting, or never made."""
        known = [*self._safe, "9999.1"]
        return draw.sample(known, min(3, len(known)))

    def versions_lost(self) -> None:
        """Note that a coordinator begins without versions: it tells of older heads at first."""
        self._has_lost_versions = True

    def excuse(self, name: str, why: str) -> None:
        self._excused[name] = why

    def drain_opened(self, hub: "Hub") -> Callable[[Hello], None]:
        def check(hello: Hello) -> None:
            self.reached[f"stream opened with {'records' if hello.records else 'no records'}"] += 1
            if hub.accounts.last_step < hello.version:
                self.violated(
                    f"a stream opened at version {hello.version}, and the ledger has {hub.accounts.last_step}"
                )

        return check

    # What the coordinator holds.

    def started(self, hub: "Hub") -> None:
        """Compare what a new life of the coordinator found with what anybody was told."""
        self._check_all(hub, "after a start")
        self._renew_terms(hub)

    def loss_accepted(self, hub: "Hub") -> None:
        """Forget what was told that an older ledger does not hold: an operator has accepted its loss."""
        settled = (SlotState.TRAINED, SlotState.UNINFORMATIVE)
        self._safe = {name: who for name, who in self._safe.items() if self._state(hub, name) in settled}
        # An evaluation that was lost is held again, under the same ids.
        self._granted = {name: who for name, who in self._granted.items() if not is_held_out(name)}
        self._acknowledged, self._newest = 0, (0, 0, 0)

    def objected(self, hub: "Hub", request: Submission, what: str) -> None:
        """Check that no group is refused or put off for a version that there is, once the learner has said
        which there are."""
        named, header = {int(number) for number in _VERSION.findall(what)}, request.header
        if not named or not isinstance(header, GroupHeader) or not hub.accounts.is_confirmed:
            return
        if named <= {header.oldest_version, header.newest_version} and max(named) <= len(self.history):
            self.violated(f"group {header.group_id} of a version that there is was not taken: {what}")

    def settled(self, hub: "Hub") -> None:
        """Compare memory and ledger after a commit, or after one that failed."""
        self._commits += 1
        if self._commits % FULL_CHECK_EVERY == 0:
            self._check_all(hub, "after a commit")
        else:
            self._check_counts(hub)

    def went_back(self, hub: "Hub") -> None:
        self._check_all(hub, "after a commit that failed")
        self._renew_terms(hub)

    def at_end(self, hub: "Hub") -> None:
        """Check that nothing is left over once the run has recovered."""
        self._check_all(hub, "at the end")
        self._check_ages(hub)
        findings = examine(hub.ledger._path.with_name(FILE_NAME))
        for problem in findings.problems:
            self.violated(f"the ledger contradicts itself: {problem}")
        for name, sampler_id in self._safe.items():
            if (what := self._fate(hub, name)) is not None:
                self.violated(f"group {name} of {sampler_id} is lost: it was taken in, and {what}")

    def _state(self, hub: "Hub", name: str) -> str | None:
        number, _ = slot_and_attempt(name)
        row = hub.ledger._connection.execute("SELECT state FROM slots WHERE number = ?", [number]).fetchone()
        return None if row is None else row[0]

    def _fate(self, hub: "Hub", name: str) -> str | None:
        """Return what is wrong with where a group ended; None: nothing."""
        number, attempt = slot_and_attempt(name)
        row = hub.ledger._connection.execute(
            "SELECT state, winner, attempts FROM slots WHERE number = ?", [number]
        ).fetchone()
        if row is None:
            return "its slot is not in the ledger"
        state, winner, attempts = row
        if [attempt, self._safe[name], True, Failure.GRADING_TIMED_OUT] in json.loads(attempts):
            self.reached["given up by verifiers"] += 1
            return None
        if winner == attempt and state == SlotState.TRAINED:
            return None if self._trained.get(number) == name else "the learner has not trained on it"
        if winner == attempt and (state in UNTRAINED or state == SlotState.UNINFORMATIVE):
            return None
        if name in self._excused or self._is_needless(name):
            return None
        return f"its slot is {state}, won by attempt {winner}"

    def _is_needless(self, name: str) -> bool:
        """Say whether the learner has trained on what this group was to replace.

        Its step was under way when the task's options changed, and the slot was leased again.
        """
        slot, _ = slot_and_attempt(name)
        return self._trained.get(slot) in self._excused

    def _check_crowd(self, accounts: Accounts, sampler_id: str) -> None:
        """Check that samplers which never delivered leave the others their room."""

        def has_delivered(name: str) -> bool:
            return accounts.tallies.of(name).verdicts.get(Verdict.SPOOLED, 0) > 0

        if has_delivered(sampler_id) or not any(map(has_delivered, self.plan.sampler_names)):
            return
        held = sum(len(own) for name, own in accounts.slots.open.by_holder.items() if not has_delivered(name))
        most = max(NEWCOMER_LEASES, accounts.terms.bounds.concurrency_groups // ALL_NEWCOMERS_PART)
        if held > most:
            self.violated(
                f"samplers that never delivered hold {held} leases after {sampler_id}, at most {most}"
            )

    def _renew_terms(self, hub: "Hub") -> None:
        """Note that leases got a full term: their times are in memory only."""
        for slot in hub.accounts.slots.open_slots.values():
            self._granted_at_s[group_id(slot.number, slot.granted)] = self.loop.time()

    def _check_ages(self, hub: "Hub") -> None:
        """Check that no lease outlives its maximal age, whatever clocks did."""
        most_s = self.plan.lease_max_s + self.plan.lease_ttl_s + LATE_S
        for slot in hub.accounts.slots.open_slots.values():
            if slot.lease is None:
                continue
            name = group_id(slot.number, slot.granted)
            age_s = self.loop.time() - self._granted_at_s.get(name, self.loop.time())
            if age_s > most_s:
                self.violated(
                    f"lease {name} of {slot.lease.holder} is {age_s:.0f} s old, at most {most_s:.0f} s"
                )

    def unfinished(self, hub: "Hub") -> set[str]:
        """Return what is under way at the coordinator: groups, leases, an evaluation."""
        slots, evaluation = hub.accounts.slots, hub.accounts.evaluations.under_way
        groups = {f"group {group_id(slot.number, slot.winner)}" for slot in slots.open.untrained_slots()}
        leases = {
            f"lease {group_id(slot.number, slot.granted)} of {slot.lease.holder}"
            for slot in slots.open_slots.values()
            if slot.lease is not None
        }
        return groups | leases | (set() if evaluation is None else {f"evaluation of {evaluation.version}"})

    def _check_counts(self, hub: "Hub") -> None:
        accounts, execute = hub.accounts, hub.ledger._connection.execute
        of_training = "FROM slots WHERE kind = 'train'"
        ledger = dict(execute(f"SELECT state, count(*) {of_training} GROUP BY state").fetchall())
        memory = {state.value: n for state, n in accounts.slots.counts().items() if n}
        if ledger != memory:
            self.violated(f"slots in memory are {memory}, in the ledger {ledger}")
        groups, size = execute(
            "SELECT count(*), coalesce(sum(length(header) + length(columns)), 0) FROM groups"
        ).fetchone()
        load = accounts.load()
        if (groups, size) != (len(accounts.spooled.at_s), load.untrained_bytes + accounts.held_out_bytes()):
            self.violated(f"{len(accounts.spooled.at_s)} groups in memory, {groups} in the ledger")
        verdicts = dict(
            execute(
                "SELECT n.key, sum(n.value) FROM facts, json_each(facts.value, '$.verdicts') AS n "
                "WHERE kind = 'tally' GROUP BY n.key"
            ).fetchall()
        )
        known = {verdict.value: n for verdict, n in accounts.tallies.total().items() if n}
        if verdicts != known:
            self.violated(f"verdicts in memory are {known}, in the ledger {verdicts}")
        self._check_progress(accounts)

    def _check_progress(self, accounts: Accounts) -> None:
        load, bounds, learner = accounts.load(), accounts.terms.bounds, accounts.learner
        if load.running_groups > bounds.concurrency_groups:
            self.violated(f"{load.running_groups} leases, {bounds.concurrency_groups} are allowed")
        if load.untrained_groups > bounds.buffer_groups:
            self.violated(f"{load.untrained_groups} groups wait, {bounds.buffer_groups} are allowed")
        newest = (0, 0, 0) if learner is None else (learner.epoch, learner.version, accounts.last_step)
        if any(now < before for now, before in zip(newest, self._newest, strict=True)):
            self.violated(f"epoch, version and step went back from {self._newest} to {newest}")
        self._newest = newest
        if accounts.last_step > len(self.history):
            self.violated(f"step {accounts.last_step} is recorded, {len(self.history)} were taken")

    def _check_all(self, hub: "Hub", when: str) -> None:
        accounts = hub.accounts
        again = Accounts(hub.ledger.balance(), accounts.terms, now=hub.process.loop.time())
        again.version_groups = accounts.version_groups  # of heartbeats alone
        for what, ours, theirs in (
            ("open slots", dict(accounts.slots.open_slots), dict(again.slots.open_slots)),
            ("counts", accounts.slots.counts(), again.slots.counts()),
            ("load", accounts.load(), again.load()),
            ("verdicts", accounts.tallies.total(), again.tallies.total()),
            ("newest step", accounts.newest_record, again.newest_record),
            ("learner", accounts.learner, again.learner),
            ("spool", accounts.spooled.at_s, again.spooled.at_s),
            ("next slot", accounts.slots.next_slot, again.slots.next_slot),
            ("standings", _by_name(accounts), _by_name(again)),
            ("bad prompts", accounts.bad_prompts.newest(99), again.bad_prompts.newest(99)),
            ("evaluations", accounts.evaluations.status, again.evaluations.status),
            ("held-out slots", accounts.evaluations.slots, again.evaluations.slots),
        ):
            if ours != theirs:
                self.violated(f"{what} differ {when}: memory {_short(ours)}, ledger {_short(theirs)}")
        for name in self._safe:
            if not accounts.slots.has_submitted(name):
                self.violated(
                    f"{when}, group {name} was never submitted, and its sampler was told it is safe"
                )
        if accounts.last_step < self._acknowledged:
            self.violated(f"{when}, steps end at {accounts.last_step}, acknowledged was {self._acknowledged}")
        for name, holder in self._granted.items():
            parsed = parse_group_id(name)
            if parsed is None:
                continue
            slot = accounts.slots.open_slots.get(parsed[0])
            if not accounts.slots.is_known(parsed[0]) or (slot is not None and slot.granted < parsed[1]):
                self.violated(f"{when}, lease {name} of {holder} was never granted")
        self._check_progress(accounts)


def _by_name(accounts: Accounts) -> dict[str, object]:
    return {standing.sampler_id: standing for standing in accounts.standings}


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) < 300 else f"{text[:300]}..."
