"""Graders by name, imported only when chosen.

``exact``                    a module or a folder of ``sampler.graders``: it is known because it is there
any other name               an entry point of the group ``heterorl.graders``, of another package that is
                             installed here; it is ``package.module:GRADER``
``package.module:function``  a function ``(row, completion) -> reward``

A module of ``sampler.graders`` and an entry point lead to the same thing, a subclass of ``AnswerGrader``
named ``GRADER``. The coordinator reads its options and its check of rows; samplers and verifiers grade with
it. Code that is not of this package runs only at peers whose ``allowed_graders`` names it.
"""

import importlib
import pkgutil
import re
from collections.abc import Sequence
from functools import cache
from importlib import metadata
from typing import Final

from node.grading.grader import AnswerGrader

PACKAGE: Final = "sampler.graders"
GROUP: Final = "heterorl.graders"

IMPORT_PATH: Final = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")

_OF_FUNCTIONS: Final = "sampler.tasks.function_grader:FunctionGrader"


@cache
def built_in() -> tuple[str, ...]:
    """Return the names of the graders of this package, sorted; none is imported."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(_folder())))


@cache
def installed() -> tuple[str, ...]:
    """Return the names of the graders that other packages bring, sorted; none is imported."""
    names = {entry.name for entry in metadata.entry_points(group=GROUP)}
    return tuple(sorted(names - {*built_in()}))


def check_name(name: str) -> str:
    """Return a grader's name, or what may be an import path; a ValueError lists the names."""
    if name in built_in() or IMPORT_PATH.fullmatch(name) or name in installed():
        return name
    known = ", ".join((*built_in(), *installed()))
    raise ValueError(f"must be {known}, or package.module:function of every sampler")


def grader_class(name: str) -> type[AnswerGrader]:
    """Import the grader of a name that ``check_name`` takes."""
    if name in built_in():
        grader: type[AnswerGrader] = importlib.import_module(f"{PACKAGE}.{name}").GRADER
        return grader
    if IMPORT_PATH.fullmatch(name):
        own: type[AnswerGrader] = pkgutil.resolve_name(_OF_FUNCTIONS)
        return own
    (entry, *_) = metadata.entry_points(group=GROUP, name=name)
    theirs: type[AnswerGrader] = entry.load()
    return theirs


def module_of(name: str) -> str:
    """Return the package or module at the top of a grader's code."""
    return name.partition(":")[0] if ":" in name else grader_class(name).__module__


def _folder() -> Sequence[str]:
    return list(importlib.import_module(PACKAGE).__path__)
