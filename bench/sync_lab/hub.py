"""A hub of policy versions as a process: the coordinator's store, servicer and server, and no learner.

Obeys lines of JSON: {"put": NAME} stores an artifact of the training directory and answers with
{"announced_s": T}, the monotonic second at which the store announced it.
"""

import asyncio
import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import uvloop
from prometheus_client import CollectorRegistry

from bench.shared.played_run import PlayedRun
from bench.sync_lab.versions import load_artifact
from heterorl.v1 import policy_pb2_grpc
from node.errors import Reason
from node.identity.revocation import RevocationList
from node.identity.run_description import RunDescription
from node.process.memory import keep_freed_memory
from node.rpc.calls.live_rpcs import Admission
from node.rpc.calls.server import RpcServer
from node.serving.policy_servicer import PolicyServicer
from node.system.clock import SystemClock
from node.telemetry.logging import configure_logging
from node.telemetry.transfer_metrics import TransferMetrics
from node.values.roles import Role
from node.weights.store.artifact_store import ArtifactStore


async def serve(settings: dict[str, Any]) -> None:
    """Serve until the input ends."""
    root = Path(settings["run"])
    run = RunDescription.load(root / "run.json")
    store = ArtifactStore(
        Path(settings["state"]), public_key=run.learner_public_key, run_id=run.run_id, retained_keyframes=2
    )
    servicer = PolicyServicer(store, metrics=TransferMetrics(CollectorRegistry()))
    server = RpcServer(
        "bench hub",
        listen=settings["listen"],
        servicers=(partial(policy_pb2_grpc.add_PolicyServiceServicer_to_server, servicer),),
        identity=PlayedRun(root).own_identity(Role.COORDINATOR),
        admission=Admission(run.run_id, RevocationList(), SystemClock(), _ignore),
        drain_grace_s=0.1,
    )
    async with asyncio.TaskGroup() as tasks:
        ready, stopping = asyncio.Event(), asyncio.Event()
        tasks.create_task(server.run(ready=ready.set, stopping=stopping))
        await ready.wait()
        say(ready=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            name, announced_s = json.loads(line)["put"], list[float]()
            with store.listening(lambda: announced_s.append(time.monotonic())):  # noqa: B023 - not kept
                await asyncio.to_thread(_put, store, Path(settings["training"]), name)
            say(announced_s=announced_s[0])
        stopping.set()


def _put(store: ArtifactStore, training: Path, name: str) -> None:
    signed, payloads = load_artifact(training, name)
    with store.draft() as draft:
        for payload in payloads:
            draft.append(payload)
        store.put_version(store.offer_signed(signed)[0], draft)


def say(**facts: Any) -> None:
    """Write a line of JSON."""
    print(json.dumps(facts), flush=True)


def _ignore(*, service: str, reason: Reason) -> None:
    """Refusals are told to the caller, who says so."""


if __name__ == "__main__":
    keep_freed_memory()  # as node/process/bootstrap.py does
    configure_logging(log_format="json", level="info", roles=["hub"])
    uvloop.run(serve(json.loads(sys.argv[1])))
