"""``python -m bench.alert_times``: seconds from a fault to the alert that names it, with a real Prometheus.

A run of the demo's task: coordinator, learner and two samplers, real processes over mutual TLS; Prometheus
with the configuration and the rules that are shipped, at their intervals. Each fault is made once the run
trains: a process is killed (SIGKILL), or stopped (SIGSTOP), as a machine that vanished looks. Prints a row
for each; exits with 1 if an alert came later than promised.
"""

import argparse
import asyncio
import json
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from bench.demo_run import DemoRun, demo_model, kept_below
from deploy.needs import tool_path
from deploy.runs.processes import children_below
from deploy.runs.run_directory import COORDINATOR, LEARNER

SAMPLERS: Final = ("sampler-1", "sampler-2")
MONITORING: Final = Path(__file__).parents[1] / "deploy" / "monitoring"
GIVE_UP_S: Final = 300.0
TRAINS_WITHIN_S: Final = 180.0


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that happens to a process, and the alert that is promised for it."""

    process: str
    number: signal.Signals
    alert: str
    within_s: float

    @property
    def name(self) -> str:
        return f"{self.process} {'killed' if self.number is signal.SIGKILL else 'stopped'}"


FAULTS: Final = (
    Fault(SAMPLERS[1], signal.SIGKILL, "SamplerSilent", 120.0),
    Fault(SAMPLERS[1], signal.SIGSTOP, "SamplerSilent", 120.0),
    Fault(LEARNER, signal.SIGKILL, "LearnerDead", 60.0),
    Fault(LEARNER, signal.SIGSTOP, "LearnerDead", 60.0),
)


class Prometheus:
    """A server that scrapes one coordinator."""

    def __init__(self, address: str) -> None:
        self._url = f"http://{address}/api/v1/alerts"

    async def firing(self) -> set[str]:
        """Return the names of the alerts that fire; none while the server starts."""
        try:
            answer = await asyncio.to_thread(self._ask)
        except (urllib.error.URLError, ConnectionError):
            return set()
        return {one["labels"]["alertname"] for one in answer["data"]["alerts"] if one["state"] == "firing"}

    def _ask(self) -> Any:
        with urllib.request.urlopen(self._url, timeout=10) as answer:
            return json.load(answer)


@contextmanager
def prometheus(folder: Path, *, target: str) -> Iterator[Prometheus]:
    """Run a server with what is shipped, but for the target's address."""
    program = tool_path("prometheus")
    if program is None:
        raise SystemExit("there is no prometheus here: run `make needs-test`")
    folder.mkdir()
    config = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [target]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    shutil.copy(MONITORING / "rules.yml", folder)
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = (
        *(program, f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"),
        *(f"--web.listen-address={address}", "--log.level=warn"),
    )
    with (folder / "log").open("w") as log, subprocess.Popen(command, stderr=log) as process:
        try:
            yield Prometheus(address)
        finally:
            process.terminate()


async def measure(root: Path, fault: Fault, model: Path) -> float:
    """Return the seconds from a fault to its alert. Raises ChildError, TimeoutError."""
    async with children_below(root) as children:
        run = DemoRun(root, children=children, samplers=SAMPLERS)
        await children.guard(_begin(run, model))
        target = f"127.0.0.1:{run.ports.telemetry[COORDINATOR]}"
        with prometheus(root / "prometheus", target=target) as server:
            async with asyncio.timeout(TRAINS_WITHIN_S):
                while not _has_stepped(run):  # noqa: ASYNC110 - a file of another process
                    await asyncio.sleep(0.5)
            if before := await server.firing():
                raise SystemExit(f"{', '.join(sorted(before))} fires before anything has happened")
            children.signal(fault.process, fault.number)
            began_s = time.monotonic()
            async with asyncio.timeout(GIVE_UP_S):
                while fault.alert not in await server.firing():  # noqa: ASYNC110 - of another process
                    await asyncio.sleep(0.2)
            return time.monotonic() - began_s


async def _begin(run: DemoRun, model: Path) -> None:
    await run.make(model, {})
    await run.start_others()


def _has_stepped(run: DemoRun) -> bool:
    log = run.directory.step_log
    return log.exists() and log.stat().st_size > 0


async def _measure_all(root: Path, faults: Sequence[Fault]) -> bool:
    model, is_kept = await demo_model(root), True
    print("fault                 alert            s  promised", flush=True)
    for number, fault in enumerate(faults):
        took_s = await measure(root / f"run-{number}", fault, model)
        is_kept &= took_s <= fault.within_s
        print(f"{fault.name:20}  {fault.alert:13} {took_s:5.0f}  {fault.within_s:8.0f}", flush=True)
    return is_kept


def main() -> int:
    """Measure, print, and return the exit code."""
    about = __doc__.partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m bench.alert_times", description=about)
    parser.add_argument("--directory", help="where the runs are kept; default: a temporary one")
    given = parser.parse_args()
    return kept_below(given.directory, "alerts", lambda root: _measure_all(root, FAULTS))


if __name__ == "__main__":
    sys.exit(main())
