"""A contributor in the foreground of a test: real steps with the real Trainer, over a real stream."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import blake3
import torch

from bench.shared.fed_back_encoder import FedBackEncoder
from heterorl.v1 import merge_pb2, merge_pb2_grpc, rollout_pb2
from learner.config import LearnerConfig
from learner.merging.contribution import ContributionReport, LocalStep
from learner.merging.merge_settings import MergeSettings
from learner.model.model import load_policy
from learner.step.step_inputs import StepInputs
from learner.step.trainer import Trainer
from learner.step_log import TrainedGroup
from learner.step_settings import StepSettings
from node.identity.peer import Peer
from node.rpc.call_ends import classified
from node.rpc.channel import Purpose, dial
from node.values.groups.rollout import RolloutGroup
from node.values.roles import Role
from node.wire.rollouts import encoded_from_wire, group_from_wire
from support.changes import changed
from support.training_loop import RunningLearner

WITHIN_S = 30.0


class HandContributor:
    """Does what a test says; holds what it was dealt."""

    def __init__(self, running: RunningLearner, name: str, model_dir: Path) -> None:
        self.name = name
        self.running = running
        self.policy = load_policy(model_dir, device="cpu")
        self.held: dict[str, RolloutGroup] = {}
        self.version = 0
        self.number = 0
        self.terms: merge_pb2.MergeTerms | None = None
        self.heard: list[merge_pb2.ContributeResponse] = []
        self.sent: list[merge_pb2.ContributeRequest] = []
        """The newest contribution."""
        self._config = LearnerConfig(model_dir=model_dir, learning_rate=1e-3, device="cpu")
        self._trainer = Trainer(self.policy, self._config)
        self._call: Any = None
        self._responses: Any = None
        self._channel: Any = None

    async def connect(self, held_ids: Sequence[str] | None = None, *, credit: int = 8) -> None:
        server = self.running.server
        assert server is not None
        self._channel = dial(
            server.address,
            Peer("run", Role.CONTRIBUTOR, self.name),
            purpose=Purpose.CONTRIBUTIONS,
            now=0.0,
        )
        self._call = merge_pb2_grpc.MergeServiceStub(self._channel).Contribute()
        self._responses = aiter(self._call)
        await self.say(
            merge_pb2.ContributeRequest(
                hello=merge_pb2.ContributorHello(
                    layout_digest=self.policy.layout.digest,
                    base_root=self.running.base.model.root,
                    held_group_ids=list(self.held) if held_ids is None else held_ids,
                )
            ),
            merge_pb2.ContributeRequest(credit=rollout_pb2.DrainCredit(groups=credit)),
        )

    async def disconnect(self) -> None:
        if self._call is not None:
            self._call.cancel()
            await self._channel.close(None)
            self._call = None

    async def say(self, *requests: merge_pb2.ContributeRequest) -> None:
        for request in requests:
            await self._call.write(request)

    async def hear(self) -> merge_pb2.ContributeResponse:
        """Return the next message, taken note of."""
        async with asyncio.timeout(WITHIN_S):
            with classified():
                response = await anext(self._responses)
        self.heard.append(response)
        match response.WhichOneof("message"):
            case "terms":
                self.terms = response.terms
            case "group":
                group = group_from_wire(encoded_from_wire(response.group)).without_abstained()
                self.held[group.group_id] = group
            case "taken":
                for group_id in response.taken.group_ids:
                    self.held.pop(group_id, None)
            case "answer" if response.answer.HasField("merged_version"):
                self.version = max(self.version, response.answer.merged_version)
        return response  # type: ignore[no-any-return]

    async def heard_of(self, kind: str) -> Any:
        """Wait for the next message of a kind; return it."""
        while (response := await self.hear()).WhichOneof("message") != kind:
            pass
        return getattr(response, kind)

    async def batch(self, groups: int) -> list[RolloutGroup]:
        """Wait until it holds so many groups; return the first of them."""
        while len(self.held) < groups:
            await self.hear()
        return list(self.held.values())[:groups]

    async def credit(self, groups: int) -> None:
        await self.say(merge_pb2.ContributeRequest(credit=rollout_pb2.DrainCredit(groups=groups)))

    def trained(self, batches: Sequence[Sequence[RolloutGroup]]) -> list[merge_pb2.ContributeRequest]:
        """Take a step on each batch; return the contribution, which is not sent."""
        assert self.terms is not None
        settings = StepSettings.model_validate(json.loads(self.terms.step_settings))
        merge = MergeSettings.model_validate(json.loads(self.terms.merge_settings))
        anchor = {name: one.detach().clone() for name, one in self.policy.parameters.items()}
        steps, uninformative = [], list[TrainedGroup]()
        for batch in batches:
            outcome = self._trainer.step(StepInputs(batch, version=self.version, settings=settings))
            told = tuple(TrainedGroup(one.group_id, one.sampler_id, 0) for one in batch)
            if outcome.is_applied:
                steps.append(LocalStep(outcome.numbers, told, outcome.kl_nats_of_groups))
            else:
                uninformative += told
            for one in batch:
                self.held.pop(one.group_id, None)
        shapes = {name: one.shape for name, one in anchor.items()}
        payload = b""
        if steps:
            changes = changed(self.policy.parameters, anchor)
            payload = FedBackEncoder(merge, shapes).encode(changes)
        self.number += 1
        report = ContributionReport(tuple(steps), tuple(uninformative))
        return self.contribution(report.to_json(), payload)

    def instead(self, changes: Mapping[str, torch.Tensor]) -> list[merge_pb2.ContributeRequest]:
        """Return the newest contribution with another change."""
        assert self.terms is not None
        merge = MergeSettings.model_validate(json.loads(self.terms.merge_settings))
        shapes = {name: one.shape for name, one in self.policy.parameters.items()}
        payload = FedBackEncoder(merge, shapes).encode(changes)
        return self.contribution(self.sent[0].contribution.report, payload)

    def contribution(self, report: bytes, payload: bytes) -> list[merge_pb2.ContributeRequest]:
        header = merge_pb2.ContributionHeader(
            number=self.number,
            base_version=self.version,
            report=report,
            payload_bytes=len(payload),
            digest=blake3.blake3(report + payload).digest(length=16),
        )
        parts = [payload[first : first + 1000] for first in range(0, len(payload), 1000)]
        self.sent = [
            merge_pb2.ContributeRequest(contribution=header),
            *(merge_pb2.ContributeRequest(payload=part) for part in parts),
        ]
        return self.sent

    def follow(self) -> None:
        """Take the learner's weights over, where they do not round to the same words."""
        with torch.no_grad():
            for name, own in self.policy.parameters.items():
                words = self.running.policy.parameters[name].detach().to(torch.bfloat16).float()
                own.copy_(torch.where(own.to(torch.bfloat16).float() == words, own, words))

    def restart(self, model_dir: Path) -> None:
        """Forget all, as a process that starts again."""
        self.held.clear()
        self.number = 0
        with suppress(KeyError):
            self.policy = load_policy(model_dir, device="cpu")
            self._trainer = Trainer(self.policy, self._config)


@asynccontextmanager
async def contributor(
    running: RunningLearner, model_dir: Path, name: str = "c1", *, credit: int = 8
) -> AsyncIterator[HandContributor]:
    hand = HandContributor(running, name, model_dir)
    await hand.connect(credit=credit)
    try:
        yield hand
    finally:
        await hand.disconnect()
