"""The daemons of a run: prepares their files, starts them, waits until they serve, drains them."""

import asyncio
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from deploy.runs.observation import Observation, Observer, is_ready
from deploy.runs.processes import Children
from deploy.runs.records import StepTail
from deploy.runs.run_directory import COORDINATOR, LEARNER, Ports, RunDirectory, Section, role_of, to_toml
from node.enrolment.init_run import IDENTITY_DIRECTORY
from node.identity.identity_store import Identity, load_identity
from node.values.roles import Role

READY_TIMEOUT_S: Final = 60.0
"""Three processes that import torch on one core take a third of this."""

_READY_POLL_S: Final = 0.1


class RunSession:
    """One run. The caller ends the children that are left."""

    def __init__(
        self,
        directory: RunDirectory,
        *,
        enrolled: Sequence[str],
        children: Children,
        others: Sequence[str] = (),
        recipe: Mapping[str, Sequence[Path]] | None = None,
        pythons: Mapping[str, str] | None = None,
        ready_timeout_s: float = READY_TIMEOUT_S,
    ) -> None:
        """Prepare a run; nothing is written yet.

        Args:
            directory: Of the run, with its folders.
            enrolled: Names of the peers that enrol with a token: samplers, relays.
            children: To start processes with.
            others: Who listens besides coordinator and telemetry: relays, emulated links.
            recipe: Configuration files that a process reads before its own, by process.
            pythons: Interpreters other than this one, by process.
            ready_timeout_s: Longest time for a process to serve.
        """
        self._directory = directory
        self._enrolled = tuple(enrolled)
        self._children = children
        self._recipe = recipe or {}
        self._pythons = pythons or {}
        self._ready_timeout_s = ready_timeout_s
        self.ports = Ports.free((COORDINATOR, LEARNER, *enrolled), others=others)

    async def make_run(self, documents: Mapping[str, Mapping[str, Section]]) -> None:
        """Make the run's authority and identities, and write the configuration of each process."""
        directory = self._directory
        init = ("node", "init", str(directory.coordinator_state), "--run-id", directory.run_id)
        await self._children.run("init", *init, "--host", "127.0.0.1", python=self._pythons.get(COORDINATOR))
        for name in (LEARNER, *self._enrolled):
            directory.state(name).mkdir(mode=0o700)
        # As on separate machines: the signing key leaves the coordinator.
        shutil.move(directory.coordinator_state / LEARNER, directory.state(LEARNER) / LEARNER)
        for name, document in documents.items():
            directory.config(name).write_text(to_toml(document))

    async def let_in(self, name: str) -> None:
        """Write the token with which a peer enrols."""
        token = await self._children.run(
            f"token-{name}",
            *("node", "token", str(self._directory.coordinator_state), "--role", role_of(name)),
            *("--node-id", name, "--address", f"127.0.0.1:{self.ports.enrolment}"),
            python=self._pythons.get(COORDINATOR),
        )
        path = self._directory.token(name)
        path.touch(mode=0o600)
        path.write_text(token)

    async def start(self, name: str, *, environ: Mapping[str, str], module: str = "node") -> None:
        """Start a daemon, as ``python -m module``, and wait until it serves.

        Raises:
            ChildError: it does not serve in time.
        """
        await self.launch(name, environ=environ, module=module)
        await self.wait_until_ready(name)

    async def launch(self, name: str, *, environ: Mapping[str, str], module: str = "node") -> None:
        """Start a daemon; it serves some time later."""
        files = (*self._recipe.get(name, ()), self._directory.config(name))
        configs = (part for file in files for part in ("--config", str(file)))
        await self._children.start(
            name,
            *(module, "--role", role_of(name), *configs),
            environ=environ,
            may_end=name == LEARNER,
            python=self._pythons.get(name),
        )

    async def wait_until_ready(self, name: str) -> None:
        """Wait until a daemon serves.

        Raises:
            ChildError: it does not in time.
        """
        deadline_s = time.monotonic() + self._ready_timeout_s
        while not await is_ready(self.ports.telemetry[name]):
            if time.monotonic() > deadline_s:
                raise self._children.failure(name, f"does not serve after {self._ready_timeout_s:.0f} s")
            await self._children.wait_for_end(name, timeout_s=_READY_POLL_S)

    async def kill(self, name: str) -> None:
        """Kill a daemon (SIGKILL)."""
        await self._children.kill(name)

    async def start_others(self) -> None:
        """Start everyone but the coordinator, which serves."""
        async with asyncio.TaskGroup() as group:
            for name in (LEARNER, *self._enrolled):
                group.create_task(self.start(name, environ={}))

    async def wait_for_last_step(self, *, timeout_s: float) -> bool:
        """Wait for the learner, which ends by itself after its last version; return whether it has."""
        return await self._children.wait_for_end(LEARNER, timeout_s=timeout_s) is not None

    async def watch(
        self,
        observer: Observer,
        show: Callable[[Observation], None],
        *,
        poll_s: float,
        stall_s: float,
        seconds: float = math.inf,
    ) -> None:
        """Observe the run until the learner has ended by itself or ``seconds`` are over.

        Raises:
            ChildError: no step was made for ``stall_s``.
        """
        began_s = moved_at_s = time.monotonic()
        version, has_ended = 0, False
        while not has_ended and time.monotonic() - began_s < seconds:
            has_ended = await self.wait_for_last_step(timeout_s=poll_s)
            seen = await observer.observe()
            show(seen)
            if seen.version > version:
                version, moved_at_s = seen.version, time.monotonic()
            elif time.monotonic() - moved_at_s > stall_s:
                raise self._children.failure(LEARNER, f"has made no step for {stall_s:.0f} s")

    async def end_learner(self) -> None:
        """Stop the learner alone, so that its last version can still be seen at the coordinator."""
        await self._children.stop(LEARNER)

    async def drain(self) -> dict[str, int]:
        """Stop every daemon, the coordinator after its peers; return exit codes by process."""
        codes = {name: asyncio.create_task(self._children.stop(name)) for name in (LEARNER, *self._enrolled)}
        exit_codes = {name: await code for name, code in codes.items()}
        exit_codes[COORDINATOR] = await self._children.stop(COORDINATOR)
        return exit_codes

    def operator(self) -> Identity:
        """Return the identity that may ask for the state of the run, which has been made."""
        identity = load_identity(self._directory.coordinator_state / Role.OPERATOR / IDENTITY_DIRECTORY)
        assert identity is not None, "init made it"
        return identity

    def observer(self, *, began_s: float) -> Observer:
        """Return an observer of this run, which has been made."""
        return Observer(
            step_tail=StepTail(self._directory.step_log),
            coordinator=f"127.0.0.1:{self.ports.members}",
            operator=self.operator(),
            telemetry_ports=self.ports.telemetry,
            incarnations=self._children.starts,
            began_s=began_s,
        )
