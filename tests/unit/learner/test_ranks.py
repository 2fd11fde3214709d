"""Instructions, shares and diagnoses of ranks, without any."""

import errno
import math
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from learner.config import LearnerConfig
from learner.model.micro_batches import token_rows
from learner.model.rank_exchanges import Instruction
from learner.model.step_rows import PaddedRows
from learner.ranks.errors import is_out_of_memory
from learner.ranks.fates import Child, Neighbour
from learner.ranks.meeting import check_world_size
from learner.sizing.mesh_sizes import MeshSizes
from learner.step.step_inputs import StepInputs
from learner.step_settings import StepSettings
from node.errors import StartupError
from node.wire.rollouts import group_from_wire, group_to_wire
from support.made_up_groups import groups_with_replies
from support.refusals import cannot_start

CONFIG = LearnerConfig(
    model_dir=Path("model"), learning_rate=1e-3, objective="grpo", objective_options={"clip_high": math.inf}
)


@pytest.fixture
def child() -> Iterator[Child]:
    process = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    yield Child(2, process)
    process.kill()
    process.wait()


def test_the_fate_of_a_rank_is_told_with_its_number(child: Child) -> None:
    assert child.fate == ""
    child.process.send_signal(signal.SIGSTOP)
    while "is stopped" not in child.fate:
        pass
    assert child.fate.startswith(f"rank 2 (process {child.process.pid})")
    assert Neighbour(2, child.process.pid).fate == child.fate
    child.process.kill()
    child.process.wait()
    assert "was killed" in child.fate
    assert f"process {child.process.pid}) ended" in Neighbour(2, child.process.pid).fate


def test_an_allocation_that_fails_is_told_from_other_errors() -> None:
    for allocate in (lambda: np.empty(1 << 55), lambda: torch.empty(1 << 55)):
        with pytest.raises((MemoryError, RuntimeError)) as failed:
            allocate()
        assert is_out_of_memory(failed.value)
    assert is_out_of_memory(OSError(errno.ENOMEM, "Cannot allocate memory"))
    assert not is_out_of_memory(RuntimeError("Connection closed by peer"))
    assert not is_out_of_memory(OSError(errno.ENOSPC, "No space left on device"))


def test_another_number_of_processes_than_the_mesh_has_is_refused() -> None:
    with cannot_start("3", "pp 1, dp_replicate 1, dp_shard 2, tp 2", "4"):
        check_world_size(3, MeshSizes(1, 2, 2))


def test_the_instruction_of_a_step_says_all_of_it() -> None:
    first, *others = groups_with_replies(0)
    abstained = replace(first.completions[0], reward=math.nan)
    sent = replace(first, completions=(abstained, *first.completions[1:]))
    groups = [group_from_wire(group_to_wire(sent)).without_abstained(), *others]
    step = StepInputs(
        groups,
        version=5,
        settings=StepSettings.of(CONFIG),
    )
    heard = StepInputs.of(Instruction.from_bytes(step.instruction.to_bytes()), objective="grpo")
    assert (heard.version, heard.settings) == (5, step.settings)
    for group, other_group in zip(groups, heard.groups, strict=True):
        assert group.header == other_group.header
        for completion, heard_one in zip(group.completions, other_group.completions, strict=True):
            assert (completion.token_ids == heard_one.token_ids).all()
            assert (completion.drawn == heard_one.drawn).all()
            of_drawn = completion.of_drawn(completion.behaviour_logprob)
            assert (of_drawn == heard_one.of_drawn(heard_one.behaviour_logprob)).all()


def test_an_objective_of_ones_own_that_is_not_configured_is_not_imported() -> None:
    instruction = Instruction("step", {"settings": {"learning_rate": 1e-3, "objective": "os:system"}})
    with pytest.raises(StartupError) as refused:
        StepInputs.of(instruction, objective="grpo")
    assert "os:system" in str(refused.value)


def test_rows_are_shared_out_by_length_in_as_many_micro_batches_each() -> None:
    lengths = [len(row) for row in token_rows(groups_with_replies(0))]
    shares = PaddedRows(lengths).share_out(shares=3, budget_tokens=20)
    assert len({len(share) for share in shares}) == 1
    dealt = [row for share in shares for part in share for row in part]
    assert sorted(dealt) == list(range(len(lengths)))
    tokens = [sum(lengths[row] for part in share for row in part) for share in shares]
    assert max(tokens) - min(tokens) <= max(lengths)


def test_more_ranks_than_rows_leave_some_idle() -> None:
    lengths = [len(row) for row in token_rows(groups_with_replies(0))]
    shares = PaddedRows(lengths).share_out(shares=len(lengths) + 2, budget_tokens=20)
    assert [share == [[]] for share in shares].count(True) == 2
