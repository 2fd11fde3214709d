"""``python -m bench.learner_lines``: contributors behind slow lines: how long until a reward, what travels.

    sampler -- coordinator -- learner that merges          on one fast network
                        \\       /
                       a line each                          emulated: rate and round trip, all connections
                           |                                of a contributor share it
              contributor-1, contributor-2

Real processes over mutual TLS. Each case runs until the reward of the last groups reaches the target, then
leaves one line in OUT/learner_lines.jsonl; OUT/learner_lines.md is made of all lines there. A case that has
its line is not run again. ``--quick`` stops each case after a few rounds.
"""

import argparse
import contextlib
import itertools
import json
import random
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from bench.learners_lab.measured_line import Measured, read, write_report
from bench.shared.demo_run import DemoRun, demo_model, in_turn, kept_below, say
from deploy.demo.link_emulator import LinkEmulator, LinkProfile
from deploy.runs.contributions import Contributions, parameters_of
from deploy.runs.processes import Children
from deploy.runs.records import Step, StepTail
from deploy.runs.run_directory import COORDINATOR, LEARNER, Section, free_ports
from learner.merging.merge_settings import MergeSettings
from node.rpc.address import join_address
from node.system.clock import SystemClock

RECORD: Final = Path(__file__).parent / "results"
CONTRIBUTORS: Final = ("contributor-1", "contributor-2")
RATES_MBIT: Final = (10.0, 100.0)
ROUND_TRIP_S: Final = 0.15

METHODS: Final[Mapping[str, Mapping[str, object]]] = {
    "in_step": {"method": "in_step"},
    "wait, float32": {"method": "diloco", "local_steps": 8},
    "eager, float32": {"method": "eager", "compression": "full", "local_steps": 8},
    "parablock": {"method": "parablock"},
    "eager": {"method": "eager"},
    "decoupled": {"method": "decoupled"},
    "dilocox": {"method": "dilocox"},
    "word_changes": {"method": "word_changes"},
    "largest": {"method": "word_changes", "compression": "largest"},
}
"""Name -> keys of [learner.merge]. Of the two in float32, steps and exchange take about as long."""
TARGET: Final = 0.6
"""Mean reward at which the clock stops; the base model has about .36."""
BATCH_GROUPS: Final = 12
GROUP_SIZE: Final = 16
"""The completions of the demo's steps in half the groups, since each group costs sampler and ledger time."""
WINDOW_GROUPS: Final = 10 * BATCH_GROUPS
"""Newest groups whose reward is taken: its standard error is .01."""

MODEL_WIDTH: Final = 192
"""1.3 million parameters: a change takes four seconds at 10 Mbit/s in float32, and a step half a second."""
LEARNING_RATE: Final = 3e-4

_NO_BOUND: Final = 256
"""Versions; the room of learner and coordinator bounds how old groups become."""
_NO_QUARANTINE: Final = 1e3
"""A contributor's local steps take it further from the version of its groups than their age explains."""
_LEAST_ROUNDS: Final = 6
_QUICK_ROUNDS: Final = 4
_LIMIT_S: Final = 600.0
_POLL_S: Final = 0.2


@dataclass(frozen=True, slots=True)
class Case:
    """A method over a line."""

    name: str
    rate_mbit: float
    seed: int

    def __str__(self) -> str:
        """Return the key of its line."""
        return f"{self.name}, {self.rate_mbit:g} Mbit/s, seed {self.seed}"

    @property
    def local_steps(self) -> int:
        return MergeSettings.model_validate(METHODS[self.name]).local_steps

    def changes(self, addresses: Mapping[str, tuple[str, str]], merge_listen: str) -> dict[str, Any]:
        """Return what is other than in the demo: process -> section -> keys.

        Args:
            addresses: contributor -> coordinator and learner as it reaches them, over its line.
            merge_listen: where the learner serves contributors.
        """
        # Of each contributor: what travels, what is trained on, and two batches more.
        held = len(CONTRIBUTORS) * (2 * self.local_steps + 2) * BATCH_GROUPS
        coordinator = {
            "prompt_seed": self.seed,
            "batch_groups": BATCH_GROUPS,
            "group_size": GROUP_SIZE,
            "heartbeat_interval_s": 0.5,
            "max_staleness_versions": _NO_BOUND,
            "concurrency_groups": 2 * BATCH_GROUPS,
            "buffer_groups": held + 2 * BATCH_GROUPS,
        }
        merge = {"listen": merge_listen, "restart_wait_s": 0.0, **METHODS[self.name]}
        changes: dict[str, Mapping[str, Section]] = {
            COORDINATOR: {"coordinator": coordinator},
            LEARNER: {
                "learner": {
                    "learning_rate": LEARNING_RATE,
                    "buffer_groups": held,
                    "quarantine_mismatch_nats": _NO_QUARANTINE,
                },
                "learner.merge": merge,
            },
            "sampler-1": {"sampler": {"concurrency_groups": BATCH_GROUPS, "seed": self.seed}},
        }
        for name, (hub, learner) in addresses.items():
            changes[name] = {"node": {"coordinator": hub}, "contributor": {"learner": learner}}
        return changes


def main() -> int:
    """Do what was asked; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.learner_lines", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("methods", nargs="*", choices=[*METHODS, []], default=[], help="default: all")
    parser.add_argument("--rates", type=float, nargs="+", default=RATES_MBIT, help="Mbit/s")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help=f"{_QUICK_ROUNDS} rounds of each case")
    parser.add_argument("--out", type=Path, help=f"folder of results (default {RECORD})")
    parser.add_argument("--directory", help="where the runs are kept; default: a temporary one")
    arguments = parser.parse_args()
    out = arguments.out or (Path("runs/learner-lines-quick") if arguments.quick else RECORD)
    out.mkdir(parents=True, exist_ok=True)
    lines = out / "learner_lines.jsonl"
    known = {one.case for one in read(lines)}
    cases = [
        case
        for rate in arguments.rates
        for name in arguments.methods or METHODS
        if str(case := Case(name, rate, arguments.seed)) not in known
    ]

    async def measure_all(root: Path) -> bool:
        if cases:
            model = await demo_model(root, width=MODEL_WIDTH)
            runs = _Runs(model, is_quick=arguments.quick)
            async for case, measured in in_turn(root, cases, runs.measure):
                with lines.open("a") as file:
                    file.write(json.dumps(asdict(measured)) + "\n")
                say(f"{case}: {measured.seconds} s, {measured.groups} groups, reward {measured.reward:.2f}")
        write_report(out / "learner_lines.md", read(lines))
        print(out / "learner_lines.md")
        return True

    return kept_below(arguments.directory, "learner-lines", measure_all)


@dataclass(frozen=True, slots=True)
class _Runs:
    """Runs of one model."""

    model: Path
    is_quick: bool

    async def measure(self, case: Case, place: Path, children: Children) -> Measured:
        """Run a case until its reward is reached, or its time is over."""
        run = DemoRun(place, children=children, samplers=("sampler-1",), contributors=CONTRIBUTORS)
        (merge_port,) = free_ports(1)
        profile = LinkProfile(delay_s=ROUND_TRIP_S / 2, rate_bytes_per_s=case.rate_mbit * 1e6 / 8)
        emulators = {
            name: LinkEmulator(profile=profile, clock=SystemClock(), random_source=random.Random(0))
            for name in CONTRIBUTORS
        }
        async with contextlib.AsyncExitStack() as stack:
            addresses = {}
            for name, emulator in emulators.items():
                hub, learner = [
                    await stack.enter_async_context(_listening(emulator, port))
                    for port in (run.ports.members, merge_port)
                ]
                addresses[name] = (hub, learner)
            await run.make(self.model, case.changes(addresses, f"127.0.0.1:{merge_port}"))
            await run.start_others()
            steps = await self._train(case, run)
            await run.drain()
        logs = [Contributions.of(run.directory.log(name)) for name in CONTRIBUTORS]
        began_s = min(one.first_step_at_s for one in logs)
        reached = _reached(steps)
        until = steps if reached is None else steps[: reached + 1]
        return Measured(
            case=str(case),
            name=case.name,
            rate_mbit=case.rate_mbit,
            parameters=parameters_of(self.model),
            groups=sum(len(step.groups) for step in until),
            reward=_rewards(until)[-1],
            seconds=None if reached is None else round(until[-1].at_s - began_s, 2),
            steps=sum(one.steps for one in logs),
            payload_bytes=sum(one.payload_bytes for one in logs),
            up_bytes=sum(one.up.carried_bytes for one in emulators.values()),
            down_bytes=sum(one.down.carried_bytes for one in emulators.values()),
            rounds=tuple(each for one in logs for each in one.rounds[1:]),
        )

    async def _train(self, case: Case, run: DemoRun) -> list[Step]:
        tail, clock = StepTail(run.directory.step_log), SystemClock()
        ends_at_s = clock.monotonic() + _LIMIT_S
        while clock.monotonic() < ends_at_s:
            if await run.wait_for_last_step(timeout_s=_POLL_S):
                break
            steps = tail.read()
            least = _QUICK_ROUNDS if self.is_quick else _LEAST_ROUNDS
            if len(steps) >= least and (self.is_quick or _reached(steps) is not None):
                break
        return tail.read()


@contextlib.asynccontextmanager
async def _listening(emulator: LinkEmulator, port: int) -> AsyncIterator[str]:
    """Serve one target of a line; yield the address at its far end."""
    async with await emulator.listen("127.0.0.1", 0, target=("127.0.0.1", port)) as server:
        try:
            yield join_address(*server.sockets[0].getsockname()[:2])
        finally:
            server.close()
            await emulator.cut()


def _rewards(steps: Sequence[Step]) -> list[float]:
    """Return the mean reward of the last ``WINDOW_GROUPS`` after each step; of all while they are fewer."""
    rewards = []
    for last in range(len(steps)):
        groups, total = 0, 0.0
        for step in reversed(steps[: last + 1]):
            groups += len(step.groups)
            total += len(step.groups) * step.reward_mean
            if groups >= WINDOW_GROUPS:
                break
        rewards.append(total / max(1, groups))
    return rewards


def _reached(steps: Sequence[Step]) -> int | None:
    """Return which step reached the target, with a whole window behind it."""
    groups = itertools.accumulate(len(step.groups) for step in steps)
    pairs = enumerate(zip(groups, _rewards(steps), strict=True))
    return next((i for i, (count, reward) in pairs if count >= WINDOW_GROUPS and reward >= TARGET), None)


if __name__ == "__main__":
    sys.exit(main())
