"""A learner's life for bench/learner_ranks.py: steps and their journal, checkpoints beside them, a restart.

Everything is the learner's own (ranks, training state, journal, checkpoints) but for its coordinator: groups
lie ready. Each life is in a process of its own, which starts the other ranks as the daemon does.
"""

import json
import multiprocessing
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from learner.config import LearnerConfig
from learner.journal.checkpoint import CheckpointCopy
from learner.journal.checkpoint_rules import Due
from learner.journal.entry_rows import Origin
from learner.model.model import load_policy
from learner.model.rank_exchanges import ONE_RANK, Ranks
from learner.ranks.launching import Fleet
from learner.training.training_state import TrainingState
from node.system.clock import SystemClock
from node.values.evaluation import EvaluationNotice
from node.values.rollout import RolloutGroup

EVERY_VERSIONS: Final = 20
"""Steps from a checkpoint to the next."""

REPLAYED: Final = 5
"""Steps after the newest checkpoint that a restart takes again."""

STEPS: Final = 3 * EVERY_VERSIONS + REPLAYED


def life(config: LearnerConfig, batch: Sequence[RolloutGroup], directory: Path) -> dict[str, Any]:
    """Return the figures of a life in an empty directory.

    The stall is what steps beside a checkpoint cost beyond those of the same cycle without one: copies,
    waits, and the disk's and the processors' time that a step beside a write loses. Steps of another time
    are no measure: the speed of a shared machine drifts by far more than a stall.
    """
    lived = _alone(config, batch, directory, STEPS)
    started_s = time.monotonic()
    again = _alone(config, batch, directory, 0)
    calm = statistics.fmean(lived["calm_s"])  # sums are compared, so means
    stalled_s = sum(took_s - calm for took_s in lived["beside_s"])
    written = lived["checkpoint_bytes"] / EVERY_VERSIONS + lived["journal_bytes"]
    return {
        "step_s": round(calm, 4),
        "stall_share": round(stalled_s / (lived["cycle_steps"] * calm), 4),
        "copy_s": round(lived["copy_s"], 4),
        "write_s": round(lived["write_s"], 3),
        "checkpoint_bytes": lived["checkpoint_bytes"],
        "journal_bytes": round(lived["journal_bytes"]),
        "written_bytes": round(written),
        "over_per_step": round(lived["checkpoint_bytes"] / written, 1),
        "resume_s": round(time.monotonic() - started_s, 2),
        "replayed_steps": again["replayed_steps"],
        "replay_s": round(again["replay_s"], 3),
    }


def _alone(
    config: LearnerConfig, batch: Sequence[RolloutGroup], directory: Path, steps: int
) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_tell, args=(config, batch, directory, steps))
    process.start()
    process.join()
    if process.exitcode != 0:
        raise RuntimeError(f"a learner of {config.dp_shard} ranks ended with exit code {process.exitcode}")
    told: dict[str, Any] = json.loads((directory / "figures").read_text())
    return told


def _tell(config: LearnerConfig, batch: Sequence[RolloutGroup], directory: Path, steps: int) -> None:
    (directory / "figures").write_text(json.dumps(live(config, batch, directory, steps=steps)))


def live(
    config: LearnerConfig, batch: Sequence[RolloutGroup], directory: Path, *, steps: int
) -> dict[str, Any]:
    """Go on from what is in a directory, and take steps; leave it as a kill would."""
    fleet = Fleet(config) if config.dp_shard > 1 else None
    if fleet is not None:
        fleet.meet()
    ranks: Ranks = ONE_RANK if fleet is None else fleet.group
    policy = load_policy(config.model_dir, device="cpu", ranks=ranks)
    state = TrainingState(
        config,
        policy,
        directory=directory,
        origin=Origin("bench", policy.layout.digest.hex(), "00" * 16),
        clock=SystemClock(),
        published=lambda: None,
    )
    figures = _take_steps(state, batch, steps) if steps else {}
    if fleet is not None:
        fleet.end()
    return figures | {"replayed_steps": state.restart.replayed_steps, "replay_s": state.restart.took_s}


def _take_steps(state: TrainingState, batch: Sequence[RolloutGroup], steps: int) -> dict[str, Any]:
    """Take steps and make checkpoints as the training loop does."""
    took, begun, copy_s, sizes, journal = list[tuple[float, bool]](), list[int](), [], list[int](), []
    writing: Future[int] | None = None
    write_s = list[float]()

    def write(copied: CheckpointCopy) -> int:
        started_s = time.monotonic()
        size_bytes = state.history.write(copied)
        write_s.append(time.monotonic() - started_s)
        return size_bytes

    with ThreadPoolExecutor(1) as thread:
        for number in range(steps):
            started_s, before = time.monotonic(), state.history.journal_bytes
            is_beside = writing is not None
            delivered = [
                replace(group, group_id=f"{number * len(batch) + place}.1", sampler_id="bench")
                for place, group in enumerate(batch)
            ]
            taken = state.take_step(delivered, unacknowledged=())
            if taken is None or taken.record is None:
                raise RuntimeError(f"step {number + 1} was not taken: its batch teaches nothing")
            state.save(taken, EvaluationNotice())
            journal.append(state.history.journal_bytes - before)
            state.master_access.hold(state.version)
            if writing is not None and writing.done():
                sizes.append(writing.result())
                state.history.cut_journal()
                writing = None
            if state.checkpoint_due() is not Due.NOT and writing is None:
                copied_s = time.monotonic()
                copied = state.copy()
                copy_s.append(time.monotonic() - copied_s)
                begun.append(number)
                is_beside = True
                writing = thread.submit(write, copied)
            took.append((time.monotonic() - started_s, is_beside))
        if writing is not None:
            sizes.append(writing.result())
            state.history.cut_journal()
    first, second = begun[0], begun[1]
    cycle = took[first:second]
    calm = [one for one in cycle if not one[1]] or took[:first]  # a tiny model's are all beside a write
    return {
        "cycle_steps": len(cycle),
        "calm_s": [took_s for took_s, _ in calm],
        "beside_s": [took_s for took_s, is_beside in cycle if is_beside],
        "copy_s": statistics.median(copy_s),
        "write_s": max(write_s),
        "checkpoint_bytes": max(sizes),
        "journal_bytes": statistics.fmean(journal[1:first]),
    }
