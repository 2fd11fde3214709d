"""The units of a sampler and its programs on a real systemd: ``python -m deploy.programs_trial``, as root.

    this machine's files, with an overlay --> systemd-nspawn boots them --> heterorl-programs.socket
    a unit with all of heterorl-node@.service but its program --> grades two programs over the socket

Takes half a minute, systemd-nspawn (Debian: systemd-container) and this machine's systemd. Prints what the
sampler's side saw; exit 1 unless programs are graded there and the sampler itself may make no sandbox.
"""

import asyncio
import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Final

from node.errors import StartupError
from node.tasks.built_in_tasks import BUILT_IN
from sampler.graders.code.sandbox import find_sandbox
from sampler.tasks.processes.grader_pool import GraderPool, Prompt
from sampler.tasks.processes.grader_process import Grader
from sampler.tasks.task import CompletionText, TaskSetup

ROOT: Final = Path(__file__).parents[1]
SOCKET: Final = "/run/heterorl-programs.sock"
WANTED: Final = "rewards [1.0, 0.0], sandbox refused"
SAID: Final = "var/lib/private/heterorl-node/sampler/said"

BOUND: Final = {
    "/opt/python": sys.base_prefix,
    "/opt/packages": sysconfig.get_paths()["purelib"],
    "/opt/code": ROOT,
}
"""Where the container has them: what lies under /home or /root is hidden from the units."""

PYTHON: Final = f"""#!/bin/sh
export PYTHONPATH=/opt/code:/opt/code/proto:/opt/packages
exec /opt/python/bin/{Path(os.path.realpath(sys.executable)).name} "$@"
"""

TRIAL: Final = """[Unit]
Wants=basic.target heterorl-programs.socket trial.service off.service
[Install]
"""

OFF: Final = """[Unit]
After=trial.service
[Service]
Type=oneshot
ExecStart=/bin/systemctl --no-block poweroff
"""


def main() -> int:
    """Boot the machine's files and return the exit code."""
    with tempfile.TemporaryDirectory() as directory:
        room, tree = Path(directory) / "room", Path(directory) / "tree"
        room.mkdir()
        tree.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", room], check=True)
        try:
            (room / "upper").mkdir()
            (room / "work").mkdir()
            layers = f"lowerdir=/,upperdir={room}/upper,workdir={room}/work"
            subprocess.run(["mount", "-t", "overlay", "overlay", "-o", layers, tree], check=True)
            try:
                said = _booted(tree)
            finally:
                subprocess.run(["umount", tree], check=True)
        finally:
            subprocess.run(["umount", room], check=True)
    print(said)
    return int(WANTED not in said)


def _booted(tree: Path) -> str:
    units = tree / "etc/systemd/system"
    for name in ("heterorl-programs.socket", "heterorl-programs@.service"):
        (units / name).write_text((ROOT / "deploy/systemd" / name).read_text())
    unit = (ROOT / "deploy/systemd/heterorl-node@.service").read_text().replace("%i", "sampler")
    unit = re.sub(r"^(WatchdogSec|Restart\w*|NotifyAccess)=.*\n", "", unit, flags=re.MULTILINE)
    unit = re.sub(r"^Type=.*", "Type=oneshot", unit, flags=re.MULTILINE)
    grade = "ExecStart=/opt/heterorl-node/bin/python -m deploy.programs_trial inside"
    unit = re.sub(r"^ExecStart=.*", grade, unit, flags=re.MULTILINE)
    (units / "trial.service").write_text(unit.replace("[Unit]\n", "[Unit]\nAfter=heterorl-programs.socket\n"))
    (units / "trial.target").write_text(TRIAL)
    (units / "off.service").write_text(OFF)
    python = tree / "opt/heterorl-node/bin/python"
    python.parent.mkdir(parents=True, exist_ok=True)
    python.write_text(PYTHON)
    python.chmod(0o755)
    for target in BOUND:
        (tree / target[1:]).mkdir(parents=True, exist_ok=True)
    command = ["systemd-nspawn", "-D", str(tree), "--boot", "--register=no", "--keep-unit", "--quiet"]
    command += [f"--bind-ro={source}:{target}" for target, source in BOUND.items()]
    subprocess.run(
        [*command, "systemd.unit=trial.target"],
        env={**os.environ, "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        timeout=300,
    )
    return (tree / SAID).read_text() if (tree / SAID).exists() else "the trial did not begin"


async def _graded() -> str:
    options = {"grader": "code", "code": {"time_limit_s": 20}, "answer": "tests"}
    local = {"at_once": 2, "is_sandbox_tried": False}
    setup = TaskSetup(BUILT_IN["jsonl"].task, options, local=local, served_at=SOCKET)
    grader = Grader(setup, wall_limit_s=120, cpu_limit_s=60, memory_limit_bytes=2 << 30, killed=lambda: None)
    pool = GraderPool(lambda: grader, most=1)
    try:
        await pool.start()
        prompt = Prompt(0, json.dumps({"tests": ["assert f(2) == 4"]}), "", grader, 1)
        programs = ("def f(x): return x * x", "import socket\nsocket.socket()\ndef f(x): return 4")
        grades = await pool.grade(prompt, [CompletionText(text, 1, "end") for text in programs])
        return f"rewards {grades.rewards}"
    finally:
        await pool.close()


def _inside() -> None:
    """Grade in the sampler's unit, and write what came of it to its directory."""
    try:
        find_sandbox().check()
        own = "sandbox works"
    except StartupError as error:
        own = f"sandbox refused: {error}"
    try:
        graded = asyncio.run(_graded())
    except Exception as error:
        graded = repr(error)
    Path(os.environ["STATE_DIRECTORY"], "said").write_text(f"{graded}, {own}\n")


if __name__ == "__main__":
    if sys.argv[1:] == ["inside"]:
        _inside()
    else:
        sys.exit(main())
