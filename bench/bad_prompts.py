"""``python -m bench.bad_prompts``: how much of its speed a run keeps when one prompt in twenty is bad.

Each run is coordinator, learner and two samplers, processes of their own on this machine. A run with bad
prompts is compared with one without that runs beside it, so that both have the same machine at the same time,
from the first step on: the time in which the bad prompts are found out is part of it. Prints a line for each
pair and a JSON summary; exits with 1 if a run kept less than ``PROMISED`` of the speed.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from bench import bad_prompt_tasks as tasks
from deploy.runs.observation import is_ready
from deploy.runs.processes import ChildError, Children, children_below
from deploy.runs.records import StepTail
from deploy.runs.run_directory import Section, free_ports, to_toml
from node.commands.status_command import fetch_status
from node.identity.peer import Peer
from node.run import Role

PROMISED: Final = 0.9

NONE: Final = "none"

KINDS: Final[Mapping[str, type[tasks.GoodPrompts]]] = {
    NONE: tasks.GoodPrompts,
    "too_long": tasks.TooLong,
    "prompt_raises": tasks.PromptRaises,
    "prompt_hangs": tasks.PromptHangs,
    "grader_raises": tasks.GraderRaises,
    "grader_hangs": tasks.GraderHangs,
}
DEFAULT_KINDS: Final = ("too_long", "prompt_raises", "grader_raises", "grader_hangs")

SAMPLERS: Final = ("sampler-1", "sampler-2")
DAEMONS: Final = ("coordinator", "learner", *SAMPLERS)

WALL_LIMIT_S: Final = 2.0
"""Limit after which a hanging task is killed: a hundred times what a group takes here."""

READY_TIMEOUT_S: Final = 60.0
_POLL_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class Measured:
    """One run."""

    kind: str
    groups: int
    seconds: float
    bad_prompts: int
    """Found out by its end."""
    reasons: tuple[str, ...]
    slots: dict[str, int]

    @property
    def groups_per_second(self) -> float:
        return self.groups / self.seconds


async def measure(
    kind: str, root: Path, model: Path, *, seconds: float, both_wait: asyncio.Barrier
) -> Measured:
    """Run below ``root``, which is made, and count what was trained on.

    Args:
        both_wait: Passed by both runs once only their learners are missing.

    Raises:
        ChildError: a process ended by itself, or did not begin to train.
    """
    (root / "logs").mkdir(parents=True)
    ports = free_ports(1 + len(DAEMONS))
    hub, telemetry = f"127.0.0.1:{ports[0]}", dict(zip(DAEMONS, ports[1:], strict=True))
    async with children_below(root) as children:
        await children.run(
            "init", "node", "init", str(root / "hub"), "--run-id", "bad-prompts", "--host", "127.0.0.1"
        )
        for name, document in _configurations(kind, root, model, hub=hub, telemetry=telemetry).items():
            (root / f"{name}.toml").write_text(to_toml(document))
            role = name.partition("-")[0]
            await children.start(
                name, "node", "--role", role, "--config", str(root / f"{name}.toml"), environ={}
            )
            if name == "coordinator":
                await _wait_until_ready(children, name, telemetry[name])
            elif name == SAMPLERS[-1]:
                for sampler in SAMPLERS:
                    await _wait_until_ready(children, sampler, telemetry[sampler])
                await both_wait.wait()

        async def trained() -> Measured:
            tail = StepTail(root / "hub" / "learner" / "steps.jsonl")
            deadline_s = time.monotonic() + READY_TIMEOUT_S
            while not tail.read():
                if time.monotonic() > deadline_s:
                    raise children.failure("learner", f"made no step within {READY_TIMEOUT_S:.0f} s")
                await asyncio.sleep(_POLL_S)
            await asyncio.sleep(seconds)
            status = await fetch_status(hub, Peer("bad-prompts", Role.OPERATOR, "operator"))
            began_s = tail.steps[0].at_s
            groups = sum(len(step.groups) for step in tail.read() if step.at_s <= began_s + seconds)
            reasons = tuple(sorted({bad.reason for bad in status.bad_prompts}))
            return Measured(kind, groups, seconds, status.bad_prompts_total, reasons, status.slots)

        return await children.guard(trained())


def main() -> int:
    """Measure, print, and return the exit code."""
    arguments = _arguments()
    with tempfile.TemporaryDirectory(prefix="heterorl-bad-prompts-") as directory:
        try:
            pairs = asyncio.run(_measure_pairs(arguments.kinds, Path(directory), seconds=arguments.seconds))
        except ChildError as error:
            _say(f"a process failed: {error}")
            return 1
    ratios = {bad.kind: round(bad.groups_per_second / good.groups_per_second, 3) for good, bad in pairs}
    is_kept = all(ratio >= PROMISED for ratio in ratios.values())
    runs = [[asdict(one) for one in pair] for pair in pairs]
    print(json.dumps({"ratio": ratios, "promised": PROMISED, "is_kept": is_kept, "pairs": runs}, indent=2))
    return 0 if is_kept else 1


async def _measure_pairs(
    kinds: Sequence[str], root: Path, *, seconds: float
) -> list[tuple[Measured, Measured]]:
    await _make_model(root)
    pairs = []
    for kind in kinds:
        both_wait = asyncio.Barrier(2)
        good, bad = await asyncio.gather(
            *(
                measure(one, root / kind / one, root / "model", seconds=seconds, both_wait=both_wait)
                for one in (NONE, kind)
            )
        )
        pairs.append((good, bad))
        _say(
            f"{kind:14} {bad.groups_per_second:6.1f} groups/s, without {good.groups_per_second:6.1f}: "
            f"{bad.groups_per_second / good.groups_per_second:.1%}; "
            f"{bad.bad_prompts} bad prompts found: {', '.join(bad.reasons)}"
        )
    return pairs


async def _make_model(root: Path) -> None:
    (root / "logs").mkdir()
    async with children_below(root) as children:
        await children.run(
            "model", "deploy.demo.warm_start", str(root / "model"), "--accuracy", "0.2", "--seed", "0"
        )


async def _wait_until_ready(children: Children, name: str, port: int) -> None:
    deadline_s = time.monotonic() + READY_TIMEOUT_S
    while not await is_ready(port):
        if time.monotonic() > deadline_s:
            raise children.failure(name, f"does not serve after {READY_TIMEOUT_S:.0f} s")
        await children.wait_for_end(name, timeout_s=_POLL_S)


def _configurations(
    kind: str, root: Path, model: Path, *, hub: str, telemetry: Mapping[str, int]
) -> dict[str, dict[str, Section]]:
    task = KINDS[kind]
    # The learning rate is next to nothing: how fast the run goes must not depend on what it learns.
    sections: dict[str, dict[str, Section]] = {
        "coordinator": {
            "coordinator": {
                "listen": hub,
                "task": "sums",
                "group_size": 4,
                "batch_groups": 8,
                "max_staleness_versions": 64,
                "max_new_tokens": 8,
                "heartbeat_interval_s": 0.5,
                "concurrency_groups": 64,
                "buffer_groups": 64,
            }
        },
    }
    for number, name in enumerate(SAMPLERS):
        sections[name] = {
            "sampler": {
                "model_dir": str(model),
                "threads": 1,
                "seed": number,
                "concurrency_groups": 8,
                "grader_wall_limit_s": WALL_LIMIT_S,
            },
            "sampler.custom_tasks": {"sums": f"{task.__module__}:{task.__name__}"},
        }
    # The last to be started.
    sections["learner"] = {"learner": {"model_dir": str(model), "threads": 1, "learning_rate": 1e-9}}
    for name, section in sections.items():
        is_sampler = name in SAMPLERS
        section["node"] = {
            "state_dir": str(root / name if is_sampler else root / "hub"),
            "run_file": str(root / "hub" / "run.json"),
            # All on this machine; what TLS costs is measured elsewhere.
            "tls": False,
            **({} if name == "coordinator" else {"coordinator": hub}),
            **({"node_id": name} if is_sampler else {}),
        }
        section["telemetry"] = {"http_listen": f"127.0.0.1:{telemetry[name]}", "log_format": "json"}
    return sections


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.bad_prompts", description=__doc__.partition("\n")[0]
    )
    parser.add_argument(
        "--kinds",
        nargs="+",
        choices=[kind for kind in KINDS if kind != NONE],
        default=DEFAULT_KINDS,
        help="ways of being bad; default: %(default)s",
    )
    parser.add_argument("--seconds", type=float, default=30.0, help="of each pair; default: %(default)s")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
