"""Checkpoints of a test: copied and written at once."""

from functools import partial
from pathlib import Path

import torch

from learner.journal.checkpoint import CheckpointCopy, CheckpointStore, ShardCopy, load_into
from learner.journal.entry_rows import Origin
from learner.journal.progress import Progress
from learner.journal.restart import JournalPlace
from learner.model.model import Policy


def origin_of(policy: Policy) -> Origin:
    return Origin("run", policy.layout.digest.hex(), "00" * 16)


def open_checkpoints(directory: Path, policy: Policy, *, keep_every_versions: int = 0) -> CheckpointStore:
    return CheckpointStore(directory, origin=origin_of(policy), keep_every_versions=keep_every_versions)


def save(
    store: CheckpointStore,
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    place: JournalPlace | None = None,
) -> None:
    store.write(copy_of(policy, optimizer, progress, place or JournalPlace()))


def copy_of(
    policy: Policy, optimizer: torch.optim.Optimizer, progress: Progress, place: JournalPlace
) -> CheckpointCopy:
    return CheckpointCopy(progress, place, ShardCopy.of(policy, optimizer, number=1), policy.ranks)


def restore(
    store: CheckpointStore, policy: Policy, optimizer: torch.optim.Optimizer
) -> tuple[Progress, JournalPlace]:
    return store.restore(partial(load_into, policy, optimizer))
