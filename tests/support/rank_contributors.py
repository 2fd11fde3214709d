"""Contributors of several ranks on gloo, in float64, each with a learner that merges what all hand in."""

import asyncio
import gc
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore
from torch.distributed.tensor import DTensor

from learner import contributor_role
from learner.contributor.config import ContributorConfig
from learner.contributor.local_masters import LocalMasters
from learner.contributor.local_trainer import LocalTrainer
from learner.contributor.terms import Terms
from learner.masters.master_words import MasterWords
from learner.merging.changes.word_changes import WordsBefore
from learner.merging.handed_in import HandedIn
from learner.merging.merge_settings import MergeSettings
from learner.merging.outer_optimizer import MergeInputs, OuterOptimizer
from learner.model.model import Policy
from learner.model.rank_exchanges import ONE_RANK, Instruction, Ranks
from learner.ranks import launching
from learner.ranks.instruction_stream import InstructionStream
from learner.ranks.rank_group import RankGroup
from learner.sizing.mesh_sizes import MeshSizes
from learner.step.step_inputs import StepInputs
from learner.step.trainer import Trainer
from learner.step_settings import StepSettings
from node.identity.identity_store import load_identity
from node.identity.run_description import RunDescription
from node.process.abandoned_threads import exit_without_them
from node.process.daemon import StartStage, run_daemon
from node.process.service import Service
from node.values.contribution import Contribution
from node.values.groups.rollout import EncodedGroup
from node.values.roles import Role
from node.weights.format.digests import Words
from node.weights.format.layout import TensorSpan
from node.wire.rollouts import group_to_wire
from support.made_up_groups import made_up_groups
from support.rank_processes import LIMIT, WarmRank, tiny_model
from support.roles import role_context
from support.step_settings import make_step_settings

ROUNDS: Final = 3
STEP: Final = make_step_settings(learning_rate=1e-3, micro_batch_tokens=24)


@dataclass(frozen=True)
class Method:
    """A layout of each site, and how its changes are merged."""

    sizes: MeshSizes
    merge: MergeSettings
    step: StepSettings = STEP


@dataclass(frozen=True)
class Place:
    """Where a site finds the others."""

    site: int
    sites: int
    port: int
    """The port of the store by which sites exchange contributions; 0: it is alone."""
    path: Path
    """Where it writes what became of it."""


class MergedVersions:
    """The learner's masters, and the words of the version that contributors train from."""

    def __init__(self, merge: MergeSettings) -> None:
        self.policy = Policy(tiny_model("llama"))
        self._merge = merge
        self._optimizer = OuterOptimizer(self.policy.parameters)
        self._words: Words = self._rounded()

    @property
    def before(self) -> WordsBefore:
        return WordsBefore(self.policy.layout, self.frame)

    def frame(self, number: int) -> Words:
        return self._words[self.policy.layout.frames[number].slice]

    def tensor(self, span: TensorSpan) -> Tensor:
        words = torch.from_numpy(self._words[span.start_word :][: span.words])
        return words.view(torch.bfloat16)[: span.elements]

    def merge(self, handed_in: list[HandedIn]) -> None:
        self._optimizer.merge(MergeInputs(handed_in, self._merge), self.before)

    def move_to(self, _: int) -> None:
        self._words = self._rounded()

    def _rounded(self) -> Words:
        words = np.empty(self.policy.layout.words, np.uint16)
        assert isinstance(self.policy.master_words, MasterWords)
        self.policy.snapshot(words)
        return words


def contribute(method: Method, place: Place, in_one_process: bool = False) -> None:
    """Train, hand in and adopt for some rounds; the first rank writes down what became of it."""
    ranks: Ranks = ONE_RANK
    instructions = None
    if not in_one_process:
        instructions = InstructionStream()
        ranks = RankGroup(method.sizes, device_type="cpu", instructions=instructions)
    policy = Policy(tiny_model("llama"), ranks=ranks)
    trainer, before = Trainer(policy, None), held_bytes()
    masters = LocalMasters(policy)
    payloads: list[bytes] = []
    grown = torch.zeros(1)
    merged = None
    if instructions is not None and dist.get_rank() > 0:
        grown += _follow(instructions, trainer, masters, since=before)
    else:
        merged = _lead(method, place, trainer, masters, payloads)
        ranks.tell(lambda: Instruction("end", {}))
    whole = _whole(policy)
    if instructions is not None:
        dist.all_reduce(grown, op=dist.ReduceOp.MAX)
    if merged is not None:
        versions = {name: one.detach() for name, one in merged.policy.tensors.items()}
        torch.save(
            {"payloads": payloads, "local": whole, "merged": versions, "grown_bytes": int(grown)}, place.path
        )


def held_bytes() -> int:
    """Return the size of all tensors of this process."""
    gc.collect()
    tensors = [one for one in gc.get_objects() if isinstance(one, Tensor) and not isinstance(one, DTensor)]
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
    return sum(storages.values())


def _follow(instructions: InstructionStream, trainer: Trainer, masters: LocalMasters, *, since: int) -> int:
    """Do what the first rank says; return by how much what is held has grown when a change was handed in."""
    grown = 0
    while (instruction := instructions.receive()).name != "end":
        match instruction.name:
            case "step":
                trainer.step(StepInputs.of(instruction, objective=""))
            case "check":
                trainer.is_finite()
            case order:
                masters.obey(instruction)
                grown = max(grown, held_bytes() - since if order == "hand in" else 0)
    return grown


def _lead(
    method: Method, place: Place, trainer: Trainer, masters: LocalMasters, payloads: list[bytes]
) -> MergedVersions:
    merge, store = method.merge, None
    if place.port:
        store = TCPStore("127.0.0.1", place.port, is_master=False)
    versions = MergedVersions(merge)
    local = LocalTrainer(trainer, masters, versions)  # type: ignore[arg-type]
    local.take(Terms(method.step, merge, batch_groups=3))
    seeds = iter(range(place.site, 1 << 20, place.sites))

    def train(version: int) -> None:
        for _ in repeat(None, merge.local_steps):
            batch = [group_to_wire(group) for group in made_up_groups(next(seeds), lengths=0)]
            assert local.step(batch, version=version).is_applied

    train(0)
    for version in range(ROUNDS):
        own = local.hand_in(version + 1, version=version)
        contribution, norm = own.contribution, own.norm
        assert norm > 0
        payloads.append(contribution.payload)
        if merge.overlap != "wait":
            train(version)
        versions.merge(_exchanged(store, place, version, _handed_in(place, contribution)))
        local.adopt(version + 1, is_refused=False)
        if merge.overlap == "wait" and version + 1 < ROUNDS:
            train(version + 1)
    return versions


def _handed_in(place: Place, one: Contribution) -> HandedIn:
    return HandedIn.of(f"site-{place.site}", one)


def _exchanged(store: TCPStore | None, place: Place, version: int, own: HandedIn) -> list[HandedIn]:
    """Return the contributions of all sites, in the order of their names."""
    if store is None:
        return [own]
    row = own.journalled()
    store.set(f"{version} {place.site} header", row.header.hex())
    store.set(f"{version} {place.site} columns", row.columns.hex())

    def read(site: int) -> HandedIn:
        header, columns = (
            bytes.fromhex(store.get(f"{version} {site} {part}").decode()) for part in ("header", "columns")
        )
        return HandedIn.of_journal(EncodedGroup(header, columns))

    return [read(site) for site in range(place.sites)]


def serve_contributor(directory: Path, hub: str, config: ContributorConfig, told: Connection) -> None:
    """Be a contributor's daemon, whose identity and run are in a directory; tell the other rank's process."""

    def start(*arguments: Any, **options: Any) -> WarmRank:
        rank = WarmRank(*arguments, **options)
        told.send(rank.pid)
        return rank

    made: Any = SimpleNamespace(
        directory=directory,
        run=RunDescription.load(directory / "run.json"),
        of=lambda _: load_identity(directory),
    )

    async def build() -> Sequence[Service]:
        return await contributor_role.build(role_context(made, Role.CONTRIBUTOR, config, hub=hub))

    stages = [StartStage("contributor", build)]
    with (
        mock.patch.object(launching, "Popen", start),
        mock.patch.object(launching, "END_LIMIT_S", float(LIMIT.seconds)),  # on cores that are busy
    ):
        code = asyncio.run(run_daemon(stages, drain_timeout_s=LIMIT.seconds, announce=lambda _: None))
    exit_without_them(code)
    sys.exit(code)


@torch.no_grad()
def _whole(policy: Policy) -> Mapping[str, Tensor]:
    """Return the local masters of all ranks; on the first."""
    parts, found = policy.ranks.parts(policy.tensors), {}
    for span in policy.layout.tensors:
        here = policy.tensors.get(span.name)
        part = None if here is None else policy.ranks.local(here).detach().view(-1)
        found[span.name] = parts.gather(span.name, part, torch.float64).clone()
    return found
