"""Checkpoints of a test: copied and written at once."""

from pathlib import Path

import torch

from learner.journal.progress import Progress
from learner.journal.records import Origin
from learner.journal.restart import JournalPlace
from learner.training.checkpoint import CheckpointCopy, CheckpointStore
from learner.training.model import Policy


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
    store.write(CheckpointCopy.of(policy, optimizer, progress, place or JournalPlace()))
