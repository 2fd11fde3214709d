"""The run as processes: makes what they need, starts them, waits until they serve, drains them."""

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
from deploy.demo.processes import Fleet

DAEMONS: Final = (COORDINATOR, LEARNER, NEAR, FAR)

READY_TIMEOUT_S: Final = 60.0
"""Three processes that import torch on one core take a third of it."""

_READY_POLL_S: Final = 0.1

_BUSY_LEASES: Final = 4
"""More than a sampler hands in between being asked and being killed."""
_BUSY_POLL_S: Final = 0.02
_BUSY_POLLS: Final = 500


def free_ports() -> Ports:
    """Find ports that are free now; a process that finds its own taken meanwhile says so and ends."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(3 + len(DAEMONS))]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        members, enrolment, link, *telemetry = (one.getsockname()[1] for one in sockets)
    return Ports(members, enrolment, link, dict(zip(DAEMONS, telemetry, strict=True)))


class Session:
    """One run. Whoever made the fleet ends what is left in it."""

    def __init__(self, plan: Plan, directory: RunDirectory, *, fleet: Fleet) -> None:
        self._plan = plan
        self._directory = directory
        self._fleet = fleet
        self.ports = free_ports()

    async def begin(self) -> None:
        """Make the run and bring every process up.

        Raises:
            ChildError: one did not come up.
        """
        await self._make_run()
        await self._fleet.start(
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
            ChildError: it does not.
        """
        arguments = ("node", "--role", name.partition("-")[0], "--config", str(self._directory.config(name)))
        await self._fleet.start(name, *arguments, environ=environ, may_end=name == LEARNER)
        deadline_s = time.monotonic() + READY_TIMEOUT_S
        while not await is_ready(self.ports.telemetry[name]):
            if time.monotonic() > deadline_s:
                raise self._fleet.failure(name, f"does not serve after {READY_TIMEOUT_S:.0f} s")
            await self._fleet.wait_for_end(name, timeout_s=_READY_POLL_S)

    async def wait_until_busy(self, name: str) -> None:
        """Wait, within bounds, for a moment at which a sampler holds leases."""
        for _ in range(_BUSY_POLLS):
            metrics = await scrape(self.ports.telemetry[name])
            if metrics is not None and metrics.total("heterorl_sampler_running_leases") >= _BUSY_LEASES:
                return
            await self._fleet.wait_for_end(name, timeout_s=_BUSY_POLL_S)

    async def kill(self, name: str) -> None:
        """End a daemon as a power cut would."""
        await self._fleet.kill(name)

    async def wait_for_last_step(self, *, timeout_s: float) -> bool:
        """Wait for the learner, which ends by itself after its last version; say whether it has."""
        return await self._fleet.wait_for_end(LEARNER, timeout_s=timeout_s) is not None

    async def drain(self) -> dict[str, int]:
        """Stop every process, the hub after its peers; give exit codes by process."""
        codes = {name: asyncio.create_task(self._fleet.stop(name)) for name in (LEARNER, *SAMPLERS)}
        exit_codes = {name: await code for name, code in codes.items()}
        for name in (COORDINATOR, LINK):
            exit_codes[name] = await self._fleet.stop(name)
        return exit_codes

    async def _make_run(self) -> None:
        directory = self._directory
        await self._fleet.run(
            "init",
            *("node", "init", str(directory.hub_state)),
            *("--run-id", directory.run_id, "--host", "127.0.0.1"),
        )
        for name in (LEARNER, *SAMPLERS):
            directory.state(name).mkdir(mode=0o700)
        # As on machines of their own: the signing key leaves the hub.
        shutil.move(directory.hub_state / LEARNER, directory.state(LEARNER) / LEARNER)
        for name, document in configurations(self._plan, directory, self.ports).items():
            directory.config(name).write_text(to_toml(document))

    async def _make_base_model(self) -> None:
        await self._fleet.run(
            "warm-start",
            *("deploy.demo.warm_start", str(self._directory.model)),
            *("--accuracy", str(BASE_ACCURACY), "--seed", str(self._plan.seed)),
        )

    async def _let_in(self, name: str) -> None:
        token = await self._fleet.run(
            f"token-{name}",
            *("node", "token", str(self._directory.hub_state), "--role", "sampler", "--node-id", name),
            *("--address", f"127.0.0.1:{self.ports.enrolment}"),
        )
        path = self._directory.token(name)
        path.touch(mode=0o600)
        path.write_text(token)
