"""The outcome of a simulated run: its story line by line, and the promises it broke."""

import hashlib
from collections import Counter
from dataclasses import dataclass

from simulation.faults import Plan


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a run's story."""

    at_s: float
    who: str
    what: str

    def __str__(self) -> str:
        return f"{self.at_s:7.2f} s  {self.who:12} {self.what}"


@dataclass(frozen=True, slots=True)
class Outcome:
    plan: Plan
    violations: tuple[str, ...]
    story: tuple[Line, ...]
    reached: Counter[str]
    steps: int
    virtual_s: float

    @property
    def digest(self) -> str:
        """Return a digest of the story; two runs with the same digest went the same way."""
        text = "\n".join(f"{line.at_s!r} {line.who} {line.what}" for line in self.story)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
