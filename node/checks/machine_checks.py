"""Checks of what a machine does when it is tried: its disk, its device, the sandbox, the kernel."""

import errno
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from node.checks.check import Check, Finding, Grade, Needs
from node.rpc.address import is_loopback, split_address
from node.system.device import AUTO, chosen_device
from node.values.roles import ROLES, Role

_FREE_BYTES: Final = 5e9
_FSYNC_S: Final = 0.05
"""Ten times a disk's; a hub commits to its ledger before it answers."""

_GPU_PROBE: Final = """
import torch
x = torch.randn(512, 512, device="cuda")
assert bool(torch.isfinite(x @ x).all())
print(torch.cuda.get_device_name(), f"{torch.cuda.get_device_properties(0).total_memory / 2**30:.0f} GiB")
"""
_GPU_PROBE_S: Final = 120.0

_GPU_FIX: Final = "See nvidia-smi, and whether the driver is new enough for this build of torch."

_SANDBOX_S: Final = 10.0


def machine_checks(state_dir: Path, roles: Iterable[Role]) -> Iterator[Check]:
    """Yield the checks of what roles need of this machine; without roles, of what any may need."""
    traits = [ROLES[role] for role in roles]
    yield Check("disk", Needs.MACHINE, partial(_disk, state_dir))
    if not traits or any(one.has_model for one in traits):
        yield Check("device", Needs.MACHINE, _device)
    if not traits or any(one.grades for one in traits):
        yield Check("sandbox", Needs.MACHINE, _sandbox)
    yield Check("kernel", Needs.MACHINE, partial(_congestion, is_hub=any(one.is_hub for one in traits)))


def listen_check(address: str, *, key: str) -> Check:
    """Return the check that this machine can listen on an address that ``key`` names."""
    return Check("listen", Needs.MACHINE, partial(_listen, address, key=key))


def _listen(address: str, *, key: str) -> Iterator[Finding]:
    host, port = split_address(address)
    what, fix = f"{key} = {address}", "Name an address of this machine, 0.0.0.0 for all, and a free port."
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        grade = Grade.WARN if error.errno == errno.EADDRINUSE else Grade.FAIL  # perhaps by the daemon itself
        yield Finding("listen", grade, f"{what}: {os.strerror(error.errno or 0)}", fix)
        return
    if is_loopback(host):
        yield Finding("listen", Grade.WARN, f"{what}: only this machine reaches it", fix)
    else:
        yield Finding("listen", Grade.OK, f"{what} can be listened on")


def _disk(directory: Path) -> Iterator[Finding]:
    there = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(there).free
    what = f"{free / 1e9:.1f} GB free at {there}"
    if free < _FREE_BYTES:
        yield Finding(
            "disk", Grade.WARN, what, "Make room: a sampler keeps two copies of the model, a hub more."
        )
    else:
        yield Finding("disk", Grade.OK, what)
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            fsync_s = statistics.median(_synced(file.fileno()) for _ in range(5))
    except OSError as error:
        yield Finding(
            "disk", Grade.FAIL, f"{there} cannot be written: {error.strerror}", "Choose another --state-dir."
        )
        return
    what = f"a sync takes {1000 * fsync_s:.1f} ms"
    if fsync_s > _FSYNC_S:
        yield Finding("disk", Grade.WARN, what, "Put the state directory on a local disk that is less busy.")
    else:
        yield Finding("disk", Grade.OK, what)


def _synced(descriptor: int) -> float:
    os.pwrite(descriptor, os.urandom(4096), 0)
    began = time.monotonic()
    os.fsync(descriptor)
    return time.monotonic() - began


def _device() -> list[Finding]:
    device = chosen_device(AUTO)
    if find_spec("torch") is None:
        fix = "Learner and sampler need it: install the extra of the role, '.[sampler]' or '.[learner]'."
        return [Finding("device", Grade.WARN, "torch is not installed", fix)]
    if device == "cpu":
        if any(Path("/dev").glob("nvidia[0-9]*")):
            fix = "Install torch's CUDA build (without deploy/constraints.txt); see CUDA_VISIBLE_DEVICES too."
            return [Finding("device", Grade.WARN, "there is a GPU, and torch cannot use it: cpu", fix)]
        return [Finding("device", Grade.OK, f"cpu, {os.cpu_count()} cores; there is no GPU")]
    try:
        done = subprocess.run(
            [sys.executable, "-c", _GPU_PROBE],
            capture_output=True,
            text=True,
            timeout=_GPU_PROBE_S,
            check=False,
        )
        lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    except subprocess.TimeoutExpired:
        return [
            Finding("device", Grade.FAIL, f"{device} does not answer within {_GPU_PROBE_S:.0f} s", _GPU_FIX)
        ]
    said = lines[-1][:200] if lines else f"exit code {done.returncode}"
    if done.returncode:
        return [Finding("device", Grade.FAIL, f"{device} does not compute: {said}", _GPU_FIX)]
    return [Finding("device", Grade.OK, f"{device}: {said}")]


def _sandbox() -> list[Finding]:
    """Try what runs of the grader ``code`` need of a sampler's machine."""
    fix = "Only runs with the grader code need it: install bubblewrap, and allow user namespaces."
    if (bwrap := shutil.which("bwrap")) is None:
        return [Finding("sandbox", Grade.WARN, "bubblewrap is not installed", fix)]
    command = [bwrap, "--unshare-all", "--ro-bind", "/", "/", "true"]
    try:
        trial = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_SANDBOX_S)
    except subprocess.TimeoutExpired:
        return [Finding("sandbox", Grade.WARN, f"bubblewrap does not end within {_SANDBOX_S:.0f} s", fix)]
    if trial.returncode:
        return [Finding("sandbox", Grade.WARN, f"bubblewrap does not run: {trial.stderr.strip()[:200]}", fix)]
    return [Finding("sandbox", Grade.OK, "bubblewrap runs")]


def _congestion(*, is_hub: bool) -> list[Finding]:
    try:
        name = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    except OSError:
        return [Finding("kernel", Grade.OK, "the congestion control cannot be read here")]
    if name == "bbr" or not is_hub:
        return [
            Finding(
                "kernel", Grade.OK, f"congestion control {name}" + ("" if is_hub else "; it matters at hubs")
            )
        ]
    fix = "sysctl -w net.ipv4.tcp_congestion_control=bbr, on this machine, which sends the weights."
    return [Finding("kernel", Grade.WARN, f"congestion control {name}: long links carry less", fix)]
