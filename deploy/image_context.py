"""Lays out what a Docker build would see, and builds the wheel there.

    repository --.dockerignore--> build context --COPY of the first stage--> WORKDIR --hatchling--> wheel

Decides what would reach the image as Docker does: the last pattern that matches wins, and a folder stands for
all below it. Runs no step of the Dockerfile but COPY: packages, users and the image's size are not looked at.
"""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Final

WORKDIR: Final = "work"
WHEELS: Final = "wheels"

_NEVER_LET_THROUGH: Final = (".git", ".venv", ".venv-proto", ".venv-vllm", ".venv-wheel", "runs", "site")
"""Large folders of a checkout, not searched for files; a pattern that lets one through is a complaint."""


def image_wheel_complaints(root: Path, dockerfile: Path, scratch: Path) -> list[str]:
    """Lay out the build context of ``dockerfile`` below ``scratch``, build the wheel there and start it.

    Needs hatchling in this Python and nothing from the network.
    """
    context = scratch / "context"
    patterns = _lines(dockerfile.with_name(f"{dockerfile.name}.dockerignore"))
    if opened := [name for name in _NEVER_LET_THROUGH if not is_ignored(name, patterns)]:
        return [f"{dockerfile.name}.dockerignore lets {name}/ through" for name in opened]
    for path in let_through(root, patterns):
        _copy_file(root / path, context / path)
    complaints = lay_out(dockerfile.read_text(), context, scratch / WORKDIR)
    return complaints or _build(scratch / WORKDIR, scratch / WHEELS) or _start(scratch)


def let_through(root: Path, patterns: Sequence[str]) -> Iterator[PurePosixPath]:
    """Yield the files below ``root`` that the patterns of a .dockerignore leave in the build context."""
    for folder, folders, files in os.walk(root):
        here = PurePosixPath(Path(folder).relative_to(root).as_posix())
        if str(here) == ".":
            folders[:] = [name for name in folders if name not in _NEVER_LET_THROUGH]
        yield from (here / name for name in files if not is_ignored(str(here / name), patterns))


def is_ignored(path: str, patterns: Sequence[str]) -> bool:
    """Return what the last pattern says that matches ``path`` or a folder above it."""
    parts = PurePosixPath(path).parts
    above = ["/".join(parts[: end + 1]) for end in range(len(parts))]
    ignored = False
    for pattern in patterns:
        expression = _expression(pattern.removeprefix("!"))
        if any(expression.fullmatch(each) for each in above):
            ignored = not pattern.startswith("!")
    return ignored


def lay_out(dockerfile: str, context: Path, workdir: Path) -> list[str]:
    """Do each COPY of the first stage from ``context`` to ``workdir``; return the missing sources."""
    complaints = []
    for *sources, destination in _copies(dockerfile):
        into = workdir / destination
        for source in sources:
            found = sorted(context.glob(source.rstrip("/")))
            if not found:
                complaints.append(f"COPY {source}: .dockerignore lets nothing of that name through")
            for path in found:
                if path.is_dir():  # its content, not the folder itself
                    shutil.copytree(path, into, dirs_exist_ok=True)
                else:
                    _copy_file(path, into / path.name if destination.endswith("/") else into)
    return complaints


def _copies(dockerfile: str) -> Iterator[list[str]]:
    """Yield source, source ..., destination of each COPY of the first stage."""
    stages = re.split(r"^FROM ", dockerfile.replace("\\\n", " "), flags=re.MULTILINE)
    for line in stages[1].splitlines():
        instruction, *words = line.split() or [""]
        if instruction == "COPY" and not any(word.startswith("--from") for word in words):
            yield [word for word in words if not word.startswith("--")]


def _build(tree: Path, wheels: Path) -> list[str]:
    """Build the wheel as pip does, without isolation and without compiling the kernel."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(wheels)]
    environ = {**os.environ, "HETERORL_NO_KERNEL": "1"}
    built = subprocess.run(command, cwd=tree, env=environ, capture_output=True, text=True, timeout=120)
    if built.returncode == 0:
        return []
    said = (built.stdout + built.stderr).strip().splitlines()
    return [f"the wheel does not build of what the Dockerfile copies: {said[-1] if said else 'no word'}"]


_IMPORTS: Final = """
import importlib, importlib.util, pathlib, pkgutil, sys
for package in ("node", "learner", "sampler", "heterorl.v1"):
    found = importlib.util.find_spec(package).submodule_search_locations
    assert found[0].startswith(sys.argv[1]), f"it lacks the package {package}"
import node
from node.commands.joining.systemd_unit import UNIT, unit_files
for module in pkgutil.walk_packages(node.__path__, "node."):
    is_of_a_kind = module.name.startswith("node.kinds.") and module.name.count(".") > 2
    if module.name != "node.__main__" and not is_of_a_kind:
        importlib.import_module(module.name)
from node.tasks.built_in_tasks import BUILT_IN
from node.tasks.task_options import options_model
for task in BUILT_IN:
    options_model(task)
assert unit_files("relay", program=pathlib.Path("/opt"), device="cpu")[UNIT]
"""
"""Imports what a core image has (the halves of a kind need torch) and reads the unit that `join` installs."""


def _start(scratch: Path) -> list[str]:
    """Import the program from the built wheel alone."""
    (wheel,) = (scratch / WHEELS).glob("*.whl")
    installed = scratch / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    # -P keeps the current folder off the path; PYTHONPATH comes before what this Python has installed.
    command = [sys.executable, "-P", "-c", _IMPORTS, str(installed)]
    environ = {**os.environ, "PYTHONPATH": str(installed)}
    started = subprocess.run(command, cwd=scratch, env=environ, capture_output=True, text=True, timeout=120)
    if started.returncode == 0:
        return []
    return [f"the program of the wheel does not start: {started.stderr.strip().splitlines()[-1]}"]


def _copy_file(path: Path, to: Path) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(path, to)


def _lines(file: Path) -> list[str]:
    lines = (line.strip() for line in file.read_text().splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def _expression(pattern: str) -> re.Pattern[str]:
    """Return Docker's pattern as an expression: ``**`` any folders, ``*`` and ``?`` within one name."""
    tokens = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    parts = re.split(r"(\*\*/|\*\*|\*|\?)", pattern.strip("/"))
    return re.compile("".join(tokens.get(part, re.escape(part)) for part in parts))
