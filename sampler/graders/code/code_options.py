"""Options of programs and their tests, and a peer's keys for running any."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class CodeOptions(BaseModel):
    """How a program that the policy wrote is tested, in a sandbox, where ``sampler.run_code`` allows it.

    The program is the completion's last fenced block, or all of it; the tests are the column ``answer``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    tests: Literal["asserts", "stdin"] = "asserts"
    """``asserts``: Python source with asserts, or a list of them (MBPP, HumanEval); each is a test.
    ``stdin``: inputs and outputs (APPS, LiveCodeBench), each pair a run of the program."""
    setup: str | None = None
    """Column with source that comes before the asserts, such as imports."""
    entry_point: str | None = None
    """Column with the name of the function that the asserts of a function ``check`` are about (HumanEval)."""
    prefix: str | None = None
    """Column with the source that the completion continues, such as the prompt itself (HumanEval)."""
    reward: Literal["share", "all"] = "share"
    """The share of the tests that passed, or 1 if all did, else 0."""
    time_limit_s: int = Field(default=2, ge=1, le=60)
    """CPU time of a run. After the first that takes longer, the others count as failed. All together get
    twice as much of wall time, and a second a run to start."""
    memory_limit_bytes: int = Field(default=512 << 20, ge=64 << 20, le=16 << 30)
    """Address space of the program."""
    most_tests: int = Field(default=10, ge=1, le=256)
    """Pairs of input and output that are run, the first ones. Asserts all are."""


class CodeSettings(BaseModel):
    """Keys of a peer that may run programs."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    run_code: bool = False
    """Whether this sampler runs programs that the policy wrote, in a sandbox, for runs whose grader is
    ``code``. Needs bubblewrap and user namespaces."""

    programs_socket: Path | None = None
    """Socket of a unit of this machine that runs them, as ``deploy/systemd/heterorl-programs.socket``: where
    the sampler itself may make no namespaces, or should not. Unset: its own processes do."""
