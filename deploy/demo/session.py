"""The processes of a run: prepares their files, starts them, waits until they serve, drains them."""

import asyncio
import shutil
import socket
import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Final

from deploy.demo.observation import is_ready, scrape
from deploy.demo.plan import (
    BASE_ACCURACY,
    COORDINATOR,
    FAR,
    LEARNER,
    LINK,
    LINK_FLAGS,
    NEAR,
    SAMPLERS,
    Plan,
    Ports,
    RunDirectory,
    configurations,
    to_toml,
)
from deploy.demo.processes import Children

DAEMONS: Final = (COORDINATOR, LEARNER, NEAR, FAR)

READY_TIMEOUT_S: Final = 60.0
"""Three processes that import torch on one core take a third of this."""

_READY_POLL_S: Final = 0.1

_BUSY_LEASES: Final = 4
"""More than a sampler submits between being observed and being killed."""
_BUSY_POLL_S: Final = 0.02
_BUSY_POLLS: Final = 500


def free_ports() -> Ports:
    """Return ports that are free now; a process whose port is taken meanwhile fails with a message."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(3 + len(DAEMONS))]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        members, enrolment, link, *telemetry = (one.getsockname()[1] for one in sockets)
    return Ports(members, enrolment, link, dict(zip(DAEMONS, telemetry, strict=True)))


class Session:
    """One run. The caller ends the children that are left."""

    def __init__(self, plan: Plan, directory: RunDirectory, *, children: Children) -> None:
        self._plan = plan
        self._directory = directory
        self._children = children
        self.ports = free_ports()

    async def begin(self) -> None:
        """Make the run and start every process.

        Raises:
            ChildError: one did not start.
        """
        await self._make_run()
        await self._children.start(
            LINK,
            *("deploy.demo.link_emulator", *LINK_FLAGS, "--seed", str(self._plan.seed)),
            *("--listen", f"127.0.0.1:{self.ports.link}", "--target", f"127.0.0.1:{self.ports.members}"),
            environ={},
        )
        async with asyncio.TaskGroup() as group:
            group.create_task(self.start(COORDINATOR, environ={}))
            group.create_task(self._make_base_model())
            for name in SAMPLERS:
                group.create_task(self._let_in(name))
        async with asyncio.TaskGroup() as group:
            for name in (LEARNER, *SAMPLERS):
                group.create_task(self.start(name, environ={}))

    async def start(self, name: str, *, environ: Mapping[str, str]) -> None:
        """Start a daemon and wait until it serves.

        Raises:
            ChildError: it does not serve in time.
        """
        arguments = ("node", "--role", name.partition("-")[0], "--config", str(self._directory.config(name)))
        await self._children.start(name, *arguments, environ=environ, may_end=name == LEARNER)
        deadline_s = time.monotonic() + READY_TIMEOUT_S
        while not await is_ready(self.ports.telemetry[name]):
            if time.monotonic() > deadline_s:
                raise self._children.failure(name, f"does not serve after {READY_TIMEOUT_S:.0f} s")
            await self._children.wait_for_end(name, timeout_s=_READY_POLL_S)

    async def wait_until_busy(self, name: str) -> None:
        """Wait, within bounds, for a moment at which a sampler holds leases."""
        for _ in range(_BUSY_POLLS):
            metrics = await scrape(self.ports.telemetry[name])
            if metrics is not None and metrics.total("heterorl_sampler_running_leases") >= _BUSY_LEASES:
                return
            await self._children.wait_for_end(name, timeout_s=_BUSY_POLL_S)

    async def kill(self, name: str) -> None:
        """Kill a daemon (SIGKILL)."""
        await self._children.kill(name)

    async def wait_for_last_step(self, *, timeout_s: float) -> bool:
        """Wait for the learner, which ends by itself after its last version; return whether it has."""
        return await self._children.wait_for_end(LEARNER, timeout_s=timeout_s) is not None

    async def drain(self) -> dict[str, int]:
        """Stop every process, the coordinator after its peers; return exit codes by process."""
        codes = {name: asyncio.create_task(self._children.stop(name)) for name in (LEARNER, *SAMPLERS)}
        exit_codes = {name: await code for name, code in codes.items()}
        for name in (COORDINATOR, LINK):
            exit_codes[name] = await self._children.stop(name)
        return exit_codes

    async def _make_run(self) -> None:
        directory = self._directory
        await self._children.run(
            "init",
            *("node", "init", str(directory.coordinator_state)),
            *("--run-id", directory.run_id, "--host", "127.0.0.1"),
        )
        for name in (LEARNER, *SAMPLERS):
            directory.state(name).mkdir(mode=0o700)
        # As on separate machines: the signing key leaves the coordinator.
        shutil.move(directory.coordinator_state / LEARNER, directory.state(LEARNER) / LEARNER)
        for name, document in configurations(self._plan, directory, self.ports).items():
            directory.config(name).write_text(to_toml(document))

    async def _make_base_model(self) -> None:
        await self._children.run(
            "warm-start",
            *("deploy.demo.warm_start", str(self._directory.model)),
            *("--accuracy", str(BASE_ACCURACY), "--seed", str(self._plan.seed)),
        )

    async def _let_in(self, name: str) -> None:
        token = await self._children.run(
            f"token-{name}",
            *(
                "node",
                "token",
                str(self._directory.coordinator_state),
                "--role",
                "sampler",
                "--node-id",
                name,
            ),
            *("--address", f"127.0.0.1:{self.ports.enrolment}"),
        )
        path = self._directory.token(name)
        path.touch(mode=0o600)
        path.write_text(token)
