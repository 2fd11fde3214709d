"""A whole sampler in the background of a test, and the learner of its model."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from prometheus_client import CollectorRegistry

from bench.held_policy import HeldPolicy
from heterorl.v1 import common_pb2
from node.exit_code import ExitCode
from node.process.daemon import StartStage, run_daemon
from node.process.role_context import RoleContext, load_build
from node.system.waits import run_until
from node.text.text_rules import TextRules
from node.text.tokenizer import tokenizer_digest
from node.values.roles import Role
from sampler.config import SamplerConfig, VerifierConfig
from sampler.engines.torch.torch_engine import TorchEngine
from sampler.engines.words.model_words import frame_digests
from support.hub import HandPeer, RunningHub, running_hub
from support.identity import MadeRun
from support.model_words import words_of
from support.roles import role_context
from support.weights import Learner


@dataclass(slots=True)
class RunningPeer:
    """A sampler or a verifier in the background of a test."""

    role: Role
    registry: CollectorRegistry
    stop: "asyncio.Event"
    ending: "asyncio.Task[ExitCode]"

    def value(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"heterorl_{self.role}_{name}", labels) or 0.0

    def transferred(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"heterorl_node_{name}", labels) or 0.0

    async def drained(self) -> ExitCode:
        self.stop.set()
        return await self.ending


@asynccontextmanager
async def sampling(
    made: MadeRun, hub: str | None, model_dir: Path, **settings: Any
) -> AsyncIterator[RunningPeer]:
    """Run a whole sampler as a stage of the daemon until the body ends."""
    values = {
        "model_dir": model_dir,
        "threads": 1,
        "seed": 5,
        "concurrency_groups": 3,
        "outbox_groups": 4,
        "save_policy_every_s": 0.0,
    }
    context = role_context(made, Role.SAMPLER, SamplerConfig.model_validate(values | settings), hub=hub)
    async with _running(context) as running:
        yield running


@asynccontextmanager
async def verifying(
    made: MadeRun, hub: str, model_dir: Path, **settings: Any
) -> AsyncIterator["RunningPeer"]:
    """Run a whole verifier likewise."""
    config = VerifierConfig.model_validate({"model_dir": model_dir} | settings)
    async with _running(role_context(made, Role.VERIFIER, config, hub=hub)) as running:
        yield running


@asynccontextmanager
async def sampled(
    made: MadeRun,
    base: TorchEngine,
    model_dir: Path,
    *,
    sampler: Mapping[str, Any] = MappingProxyType({}),
    **settings: Any,
) -> AsyncIterator[tuple[RunningHub, HandPeer, RunningPeer]]:
    """Run a coordinator with these settings, its learner by hand, and a whole sampler."""
    async with (
        running_hub(made, **settings) as hub,
        learning(hub, base, model_dir) as learner,
        sampling(made, hub.address, model_dir, **sampler) as running,
    ):
        yield hub, learner, running


@asynccontextmanager
async def _running(context: RoleContext) -> AsyncIterator["RunningPeer"]:
    stop = asyncio.Event()

    class Stopper:
        name = "stopper"

        async def run(self, *, ready: Any, stopping: asyncio.Event) -> None:
            ready()
            await run_until(stopping, self._told())

        async def _told(self) -> None:
            await stop.wait()

    async def build() -> list[Any]:
        return [*await load_build(context.role)(context), Stopper()]

    ending = asyncio.create_task(
        run_daemon([StartStage(context.role, build)], drain_timeout_s=10, announce=lambda _: None)
    )
    try:
        yield RunningPeer(context.role, context.registry, stop, ending)
    finally:
        stop.set()
        await asyncio.wait({ending})


@asynccontextmanager
async def learning(
    hub: RunningHub, base: TorchEngine, model_dir: Path, *, version: int = 0
) -> AsyncIterator[HandPeer]:
    """Join as the learner of this model, whose checkpoint is of ``version``."""
    async with hub.peer() as learner:
        version0 = base.layout.base_model(frame_digests(base.weights.live, base.layout.frames))
        rules = TextRules.of(model_dir)
        await learner.join(
            layout_digest=base.layout.digest,
            base_root=version0.root,
            base_parts=version0.parts,
            tokenizer_digest=tokenizer_digest(model_dir),
            text_digest=rules.digest,
            text_summary=rules.summary,
            vocabulary_size=json.loads((model_dir / "config.json").read_bytes())["vocab_size"],
            held=common_pb2.PolicyVersion(number=version),
        )
        yield learner


def learner_of(made: MadeRun, base: TorchEngine) -> Learner:
    version0 = HeldPolicy.of(0, words_of(base.weights.live, layout=base.layout), layout=base.layout)
    return Learner(base.layout, run_id=made.run_id, key=made.signing_key, versions={0: version0})
