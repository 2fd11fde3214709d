"""The lies by name, and when each is told; pure."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

LIES: Final[Mapping[str, Callable[[float], float]]] = {
    "inverted": lambda reward: 1.0 - reward,
    "inflated": lambda reward: min(1.0, reward + 0.5),
    "constant": lambda reward: 1.0,
}


@dataclass(frozen=True, slots=True)
class Cheat:
    """A lie and its schedule."""

    lie: str
    every: int = 1
    """One group in so many is lied about."""
    after: int = 0
    """Honest groups before the first lie."""
    liars: int = 1
    """How many of the three samplers lie."""

    @property
    def name(self) -> str:
        parts = [self.lie]
        parts += [f"one in {self.every}"] if self.every > 1 else []
        parts += [f"after {self.after}"] if self.after else []
        parts += [f"{self.liars} liars"] if self.liars > 1 else []
        return ", ".join(parts)

    def rewards(self, number: int, rewards: list[float]) -> list[float]:
        """Return what a sampler claims for its ``number``-th group, from 0: the rewards, or a lie."""
        is_due = number >= self.after and (number - self.after) % self.every == 0
        return [LIES[self.lie](reward) for reward in rewards] if is_due else rewards


CHEATS: Final = (
    *(Cheat(lie) for lie in LIES),
    *(Cheat(lie, every=10) for lie in LIES),
    Cheat("inverted", after=500),
    Cheat("inverted", liars=2),
)
