import json
from pathlib import Path

import pytest

from deploy.runs.records import Step, StepTail, Trained, read_ledger
from learner.step_log import StepLine, StepLog, TrainedGroup
from node.coordinator.ledger.ledger_file import Ledger
from node.coordinator.work.balance import Transaction
from node.coordinator.work.samplers.tallies import Tally
from node.coordinator.work.slots.slot import Attempt, Slot, SlotState
from node.values.groups.verdict import Verdict
from node.values.run import StepRecord
from support.step_lines import make_step_line


def _line(version: int) -> StepLine:
    groups = (TrainedGroup(f"{version}.2", "sampler-1", 3),)
    numbers = {"kl_nats": 0.01, "ess_ratio": 0.9, "staleness_mean_versions": 2.0}
    return make_step_line(version, at_s=1000.5, step_s=0.1, groups=groups, **numbers)


def test_a_line_that_the_learner_wrote_is_read_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    StepLog(path).append(_line(7))
    assert StepTail(path).read() == [
        Step(
            version=7,
            at_s=1000.5,
            reward_mean=0.5,
            kl_nats=0.01,
            ess_ratio=0.9,
            staleness_mean_versions=2.0,
            step_s=0.1,
            groups=(Trained("7.2", "sampler-1", 3),),
        )
    ]


def test_a_growing_log_is_read_once_and_half_a_line_not_before_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    tail = StepTail(path)
    assert tail.read() == []
    StepLog(path).append(_line(1))
    text = _line(2).to_json() + "\n"
    with path.open("a") as file:
        file.write(text[:40])
        file.flush()
        assert [step.version for step in tail.read()] == [1]
        file.write(text[40:])
    StepLog(path).append(_line(3))
    assert [step.version for step in tail.read()] == [1, 2, 3]
    assert [step.version for step in tail.read()] == [1, 2, 3]


def test_slot_and_attempt_are_read_from_the_id() -> None:
    group = Trained("41.3", "sampler-1", 0)
    assert (group.slot, group.attempt) == (41, 3)
    with pytest.raises(ValueError, match="not the id of a group"):
        _ = Trained("41", "sampler-1", 0).slot


def test_the_ledger_is_read_as_the_coordinator_left_it(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger = Ledger.open(path, run_id="run")
    attempt = Attempt(1, "sampler-1", is_submitted=True)
    ledger.record(
        Transaction(
            slots=(
                Slot(0, 5, SlotState.TRAINED, (attempt,), granted=1, winner=1),
                Slot(1, 6, SlotState.LEASED, (Attempt(1, "sampler-1"),), granted=1),
            ),
            facts=(Tally("sampler-1", {Verdict.SPOOLED: 1, Verdict.TRAINED: 1}),),
            steps=(StepRecord(1, ("0.1",), (0,)),),
        )
    )
    ledger.close()
    record = read_ledger(path, run_id="run")
    assert record.steps == {1: ("0.1",)}
    assert {state: n for state, n in record.slots.items() if n} == {"trained": 1, "leased": 1}
    assert record.verdicts == {"sampler-1": {"spooled": 1, "trained": 1}}


def test_a_step_line_without_a_number_is_not_taken_for_one() -> None:
    with pytest.raises(KeyError):
        Step.parse(json.dumps({"version": 1, "groups": []}))
