"""The rounds of a contributor, as its log tells them.

steps ... -> handed in --------- exchange ----------> merged, and its version's words are here
             |<-- round: from one contribution to the next -->|
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

_HANDED_IN: Final = "contribution handed in"
_STEP: Final = "batch trained on"


@dataclass(frozen=True, slots=True)
class Round:
    """The time from one contribution to the next."""

    round_s: float
    steps_s: float
    """In steps: the computing."""
    exchange_s: float
    """From the first contribution to the words of the version that has it, which may be after the second."""


@dataclass(frozen=True, slots=True)
class Contributions:
    """The contributions of one contributor."""

    first_step_at_s: float
    """Unix seconds at which its first step began."""
    steps: int
    """Whose changes were handed in."""
    payload_bytes: int
    rounds: tuple[Round, ...]
    """One for each contribution that was merged, but the last."""

    @classmethod
    def of(cls, log: Path) -> "Contributions":
        """Read a log in JSON.

        Raises:
            ValueError: it tells of no step.
        """
        events = list(_events(log))
        steps = [one for one in events if one["event"] == _STEP]
        if not steps:
            raise ValueError(f"{log} tells of no step")
        handed_in = [one for one in events if one["event"] == _HANDED_IN]
        return cls(
            first_step_at_s=steps[0]["at_s"] - steps[0]["step_s"],
            steps=sum(one["steps"] for one in handed_in),
            payload_bytes=sum(one["bytes"] for one in handed_in),
            rounds=tuple(_rounds(events)),
        )

    def times_fewer(self, parameters: int) -> float:
        """Return how many times as many bytes float32 changes of each step would have."""
        return 4 * parameters * self.steps / max(1, self.payload_bytes)


def parameters_of(model: Path) -> int:
    """Return how many parameters a model has that is stored in bfloat16."""
    return sum(file.stat().st_size for file in model.glob("*.safetensors")) // 2


def _rounds(events: list[dict[str, Any]]) -> Iterator[Round]:
    merged = {one["number"]: one for one in events if one["event"] == "contribution merged"}
    mirrored = [one for one in events if one["event"] == "mirrored"]
    for one, following in pairwise(each for each in events if each["event"] == _HANDED_IN):
        answer = merged.get(one["number"])
        words = next((each for each in mirrored if answer and each["version"] >= answer["version"]), None)
        if answer is None or words is None:
            continue
        began_s, ended_s = one["at_s"], following["at_s"]
        steps = [each for each in events if each["event"] == _STEP and began_s < each["at_s"] <= ended_s]
        yield Round(
            round_s=ended_s - began_s,
            steps_s=sum(each["step_s"] for each in steps),
            exchange_s=max(answer["at_s"], words["at_s"]) - began_s,
        )


def _events(log: Path) -> Iterator[dict[str, Any]]:
    for line in log.read_text().splitlines():
        if line.startswith("{") and line.endswith("}"):
            event = json.loads(line)
            yield {**event, "at_s": datetime.fromisoformat(event["time"]).timestamp()}
