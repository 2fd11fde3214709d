"""A digest of the code that makes a task's prompts and grades, as this process has loaded it.

It has, in the order of their names, the source of each module that the task's import loaded and that

    belongs to the same package as the task, its grader or its environment; for what is built in,
    to ``sampler.tasks``, ``sampler.graders``, ``node.grading``, ``node.kinds`` and ``node.questions``
    or lies beside such a module, where that is not the place of installed packages: helpers of one's own

and the version of the package that a built-in task needs. Where the modules lie does not count. What is
imported later, while grading, is not seen.
"""

import hashlib
import sys
import sysconfig
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Final

from node.tasks.built_in_tasks import BUILT_IN
from sampler.tasks.task import TaskSetup

DIGEST_BYTES: Final = 16

_INSTALLED: Final = frozenset(
    Path(sysconfig.get_paths()[name]).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")
)

_BUILT_IN_CODE: Final = frozenset(
    {"sampler.tasks", "sampler.graders", "node.grading", "node.kinds", "node.questions"}
)
"""Packages whose code makes the prompts of built-in tasks, and grades."""

_OURS: Final = frozenset({"__main__", "node", "sampler", "learner", "heterorl"})
"""This software, which a task may lie beside where it runs from a checkout."""


def code_digest(setup: TaskSetup) -> bytes:
    """Return the digest, ``DIGEST_BYTES`` long, of what ``load_task`` has loaded for ``setup``."""
    roots, packages = _roots(setup)
    digest = hashlib.sha256()
    for name, file in sorted(_modules(roots)):
        digest.update(f"{name}\n{hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    for package in packages:
        digest.update(f"{package} {' '.join(_versions(package))}\n".encode())
    return digest.digest()[:DIGEST_BYTES]


def _roots(setup: TaskSetup) -> tuple[set[str], tuple[str, ...]]:
    """Return the packages or modules whose code counts, and the installed packages whose version does."""
    name = next((name for name, places in BUILT_IN.items() if places.task == setup.path), None)
    if name is None:
        return {setup.path.partition(":")[0].partition(".")[0]}, ()
    if name == "addition":  # which has no options
        return {"sampler.tasks"}, ()
    # Here, for tasks that need them: pydantic takes most of a grader's start.
    from node.grading.registry import module_of
    from node.tasks.task_options import checked_options

    options = checked_options(name, setup.options)
    roots = {*_BUILT_IN_CODE}
    if options is not None and options.named_code is not None:
        roots.add(module_of(options.named_code[1]).partition(".")[0])
    return roots, () if options is None or options.package is None else (options.package.replace("_", "-"),)


def _versions(package: str) -> list[str]:
    from importlib import metadata

    return sorted(found.version for found in metadata.distributions(name=package))


def _modules(roots: Set[str]) -> Iterator[tuple[str, Path]]:
    files = {
        name: Path(file).resolve()
        for name, module in list(sys.modules.items())
        if (file := getattr(module, "__file__", None)) and file.endswith(".py")
    }
    own = [root for root in roots - _BUILT_IN_CODE if root in files]
    beside = {files[root].parent for root in own if files[root].name != "__init__.py"} - _INSTALLED
    for name, file in files.items():
        is_named = any(name == root or name.startswith(f"{root}.") for root in roots)
        is_beside = not beside.isdisjoint(file.parents) and _INSTALLED.isdisjoint(file.parents)
        if is_named or (is_beside and name.partition(".")[0] not in _OURS):
            yield name, file
