"""A role's hardened systemd unit, installed by `join --systemd`; deploy/systemd/README.md explains it."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from node.errors import StartupError
from node.system import durable
from node.values.roles import Role

STATE_DIRECTORY: Final = Path("/var/lib/heterorl-node")
CONFIG_DIRECTORY: Final = Path("/etc/heterorl-node")
UNITS_DIRECTORY: Final = Path("/etc/systemd/system")

UNIT: Final = "heterorl-node@.service"
GPU_CONF: Final = "heterorl-node@sampler.service.d/gpu.conf"

_PROGRAM: Final = "/opt/heterorl-node/bin/heterorl-node"
"""In the unit as it is kept."""

_HOMES: Final = ("/home", "/root", "/run/user")
"""Folders that the unit cannot see (ProtectHome)."""


_SYSTEMCTL_S: Final = 660.0
"""Longest a call of systemctl may take: a minute more than the unit's TimeoutStartSec."""


def unit_files(role: Role, *, program: Path, device: str) -> dict[str, str]:
    """Return the unit, and the drop-in that lets a sampler reach a GPU: name -> text.

    Raises StartupError: ``program`` is where the unit cannot see it.
    """
    _check_seen(program)
    kept = _kept_units()
    names = [UNIT, *([GPU_CONF] if role is Role.SAMPLER and device != "cpu" else [])]
    return {name: (kept / name).read_text().replace(_PROGRAM, str(program)) for name in names}


def _check_seen(program: Path) -> None:
    if any(program.is_relative_to(home) for home in _HOMES):
        raise StartupError(
            f"{program} is in a home directory, which the service cannot see",
            fix="Install the package elsewhere: /usr/bin/python3 -m venv /opt/heterorl-node",
        )


def check_installable(role: Role, *, device: str) -> dict[str, str]:
    """Return the files of the unit, name -> text. Raises StartupError: no service can be installed here."""
    if os.geteuid() != 0 or not Path("/run/systemd/system").is_dir():
        raise StartupError(
            "A service takes root, and a machine that systemd has booted",
            fix="Run this with sudo; or leave --systemd out and let your own supervisor run the command.",
        )
    _check_seen(Path(sys.executable).resolve())
    return unit_files(role, program=Path(sys.prefix) / "bin" / "heterorl-node", device=device)


def install_unit(role: Role, *, device: str) -> Iterator[str]:
    """Install, enable and start the unit; yield what was done. Raises StartupError: it cannot be."""
    for name, text in check_installable(role, device=device).items():
        path = UNITS_DIRECTORY / name
        durable.make_directory(path.parent)
        durable.write(path, text.encode(), mode=0o644)
        yield f"wrote {path}"
    service = UNIT.replace("@", f"@{role}")
    for command in (["daemon-reload"], ["enable", "--now", service]):
        try:
            done = subprocess.run(
                ["systemctl", *command], capture_output=True, text=True, check=False, timeout=_SYSTEMCTL_S
            )
            problem = done.stderr.strip() if done.returncode else ""
        except subprocess.TimeoutExpired:
            problem = f"no answer within {_SYSTEMCTL_S:.0f} s"
        if problem:
            raise StartupError(
                f"systemctl {' '.join(command)} failed: {problem}", fix=f"See: journalctl -u {service}"
            )
        yield f"ran systemctl {' '.join(command)}"
    yield f"its log: journalctl -f -u {service}"


def _kept_units() -> Path:
    """Return the folder of units: beside this file in a wheel, in deploy/ of a checkout."""
    here = Path(__file__).resolve()
    return next(
        path for path in (here.parent / "systemd", here.parents[3] / "deploy" / "systemd") if path.is_dir()
    )
