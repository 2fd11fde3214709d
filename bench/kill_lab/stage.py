"""The run as processes: makes what they need, starts them, kills them, drains them."""

import asyncio
import shutil
import socket
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from bench.kill_lab.plan import (
    COORDINATOR,
    HUB_LINK,
    LEARNER,
    LINK_FLAGS,
    RELAY,
    RELAY_LINK,
    Plan,
    Ports,
    configurations,
    role_of,
)
from deploy.runs.observation import is_ready
from deploy.runs.processes import Children
from deploy.runs.run_directory import to_toml
from node.enrolment.init_run import IDENTITY_DIRECTORY
from node.identity.identity_store import Identity, load_identity
from node.run import Role

READY_TIMEOUT_S: Final = 240.0
"""Several processes that import torch on cores that others use too."""

_READY_POLL_S: Final = 0.05


class Stage:
    """One run below ``root``. The caller ends the children that are left."""

    def __init__(self, plan: Plan, root: Path, *, children: Children) -> None:
        self.plan = plan
        self.root = root
        self.run_id = root.name
        self._children = children
        self._state = {name: root / "state" / name for name in plan.daemons}
        self.ports = _free_ports(plan)

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def run_file(self) -> Path:
        return self._state[COORDINATOR] / "run.json"

    def state(self, name: str) -> Path:
        """Return where a process keeps what its role writes."""
        return self._state[name] / role_of(name)

    def operator(self) -> Identity:
        """Return whoever may ask for the state of the run."""
        identity = load_identity(self._state[COORDINATOR] / Role.OPERATOR / IDENTITY_DIRECTORY)
        assert identity is not None, "init made it"
        return identity

    async def begin(self) -> None:
        """Make the run and bring every process up.

        Raises:
            ChildError: one did not come up.
        """
        await self._make_run()
        for name, port, target in (
            (HUB_LINK, self.ports.hub_link, self.ports.members),
            (RELAY_LINK, self.ports.relay_link, self.ports.relay),
        ):
            await self._children.start(
                name,
                *("deploy.demo.link_emulator", *LINK_FLAGS, "--seed", str(self.plan.seed)),
                *("--listen", f"127.0.0.1:{port}", "--target", f"127.0.0.1:{target}"),
                environ={},
            )
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._start_and_wait(COORDINATOR))
            tasks.create_task(self._make_model())
            for name in self.plan.enrolled:
                tasks.create_task(self._let_in(name))
        async with asyncio.TaskGroup() as tasks:
            for name in self.plan.daemons:
                if name != COORDINATOR:
                    tasks.create_task(self._start_and_wait(name))

    async def start(self, name: str) -> None:
        """Start a daemon; it serves some time later."""
        config = self.root / "config" / f"{name}.toml"
        await self._children.start(name, "node", "--role", role_of(name), "--config", str(config), environ={})

    async def wait_until_ready(self, name: str) -> None:
        """Wait until a daemon serves.

        Raises:
            ChildError: it does not.
        """
        deadline_s = time.monotonic() + READY_TIMEOUT_S
        while not await is_ready(self.ports.telemetry[name]):
            if time.monotonic() > deadline_s:
                raise self._children.failure(name, f"does not serve after {READY_TIMEOUT_S:.0f} s")
            await self._children.wait_for_end(name, timeout_s=_READY_POLL_S)

    async def are_all_ready(self) -> bool:
        """Say whether every daemon serves now."""
        return all([await is_ready(port) for port in self.ports.telemetry.values()])

    async def kill(self, name: str) -> None:
        """End a daemon with SIGKILL."""
        await self._children.kill(name)

    async def stop(self, name: str) -> int:
        """Let a daemon drain; return its exit code."""
        return await self._children.stop(name)

    async def drain(self) -> dict[str, int]:
        """Stop every process, each after those that need it; give exit codes."""
        codes: dict[str, int] = {}
        for names in ((LEARNER, *self.plan.samplers), (RELAY,), (COORDINATOR,), (HUB_LINK, RELAY_LINK)):
            stopping = [asyncio.create_task(self._children.stop(name)) for name in names]
            codes |= dict(zip(names, await asyncio.gather(*stopping), strict=True))
        return codes

    async def _start_and_wait(self, name: str) -> None:
        await self.start(name)
        await self.wait_until_ready(name)

    async def _make_run(self) -> None:
        hub = self._state[COORDINATOR]
        for folder in ("config", "logs", "state"):
            (self.root / folder).mkdir(parents=True)
        await self._children.run(
            "init", "node", "init", str(hub), "--run-id", self.run_id, "--host", "127.0.0.1"
        )
        for name in (LEARNER, *self.plan.enrolled):
            self._state[name].mkdir(mode=0o700)
        shutil.move(hub / LEARNER, self._state[LEARNER] / LEARNER)
        documents = configurations(
            self.plan, self.ports, model=self.model, run_file=self.run_file, state=self._state
        )
        for name, document in documents.items():
            (self.root / "config" / f"{name}.toml").write_text(to_toml(document))

    async def _make_model(self) -> None:
        await self._children.run(
            "model", "bench.kill_lab.model", str(self.model), "--seed", str(self.plan.seed)
        )

    async def _let_in(self, name: str) -> None:
        token = await self._children.run(
            f"token-{name}",
            *("node", "token", str(self._state[COORDINATOR]), "--role", role_of(name), "--node-id", name),
            *("--address", f"127.0.0.1:{self.ports.enrolment}"),
        )
        path = self._state[name] / "token"
        path.touch(mode=0o600)
        path.write_text(token)


def _free_ports(plan: Plan) -> Ports:
    """Find ports that are free now; a process that finds its own taken meanwhile says so and ends."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(5 + len(plan.daemons))]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        first, second, third, fourth, fifth, *telemetry = (one.getsockname()[1] for one in sockets)
    return Ports(first, second, third, fourth, fifth, dict(zip(plan.daemons, telemetry, strict=True)))
