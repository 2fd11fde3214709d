"""The cheats by name, and when each cheats; pure."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

LIES: Final[Mapping[str, Callable[[float], float]]] = {
    "inverted": lambda reward: 1.0 - reward,
    "inflated": lambda reward: min(1.0, reward + 0.5),
    "constant": lambda reward: 1.0,
}
"""Honest tokens and logprobs, other rewards."""

DRAWS: Final = ("random tokens", "replay", "copies")
"""Other tokens than those drawn, graded honestly; see ``other_draws``."""

NAMES: Final = ("older name",)
"""Honest tokens and logprobs, said to be of a version that is ``Cheat.versions`` older than the one that drew
them. Who draws by a "stale version" names newer ones."""

WEIGHTS: Final = ("another model", "stale version", "base model", "8-bit weights", *NAMES)
"""Tokens drawn by other weights than the version they name has; see ``other_weights``, and
``NAMES``."""

PROMPTS: Final = ("other prompts",)
"""Sums with their digits exchanged: prompts that have the same answers, and are not the task's."""

AS_HONEST: Final = ("8-bit weights",)
"""Not to be told from honest engines of another precision: 5e-5 nats a token from the learner on the demo's
model, where bfloat16 is 2e-5. What they do to the reward is measured all the same."""

LATE: Final = "honest, late"
"""Every group is handed in ``lying_node.LATE_S`` after it was drawn."""

BFLOAT16: Final = "honest, bfloat16"


@dataclass(frozen=True, slots=True)
class Cheat:
    """A way to cheat and its schedule."""

    lie: str
    every: int = 1
    """One group in so many is lied about; other weights draw all of them."""
    after: int = 0
    """Honest groups before the first lie; likewise."""
    liars: int = 1
    """How many of the three samplers lie."""
    versions: int = 8
    """How far a name is from the truth."""
    has_late: bool = False
    """Whether one of the honest samplers is slow, so that its groups are as old as others claim to be."""

    @property
    def name(self) -> str:
        parts = [self.lie]
        parts += [f"one in {self.every}"] if self.every > 1 else []
        parts += [f"after {self.after}"] if self.after else []
        parts += [f"by {self.versions}"] if self.lie in NAMES else []
        parts += [f"{self.liars} liars"] if self.liars > 1 else []
        parts += ["late one"] if self.has_late else []
        return ", ".join(parts)

    def is_due(self, number: int) -> bool:
        """Whether a sampler cheats with its ``number``-th group, from 0."""
        return number >= self.after and (number - self.after) % self.every == 0

    def rewards(self, number: int, rewards: list[float]) -> list[float]:
        """Return what a sampler claims for its ``number``-th group, from 0: the rewards, or a lie."""
        if self.lie not in LIES or not self.is_due(number):
            return rewards
        return [LIES[self.lie](reward) for reward in rewards]


CHEATS: Final = (
    *(Cheat(lie) for lie in LIES),
    *(Cheat(lie, every=10) for lie in LIES),
    Cheat("inverted", after=500),
    Cheat("inverted", liars=2),
    *(Cheat(lie) for lie in (*DRAWS[:2], *WEIGHTS[:4])),
    Cheat("random tokens", liars=2),
    Cheat("copies", liars=2),
    Cheat("other prompts", liars=2),
    *(Cheat("older name", versions=versions, has_late=True) for versions in (2, 8, 20)),
    Cheat("older name", every=3, has_late=True),
    Cheat("older name", liars=2, has_late=True),
    Cheat("stale version", has_late=True),
    Cheat(BFLOAT16, liars=0),
)
"""The last is none: two of three samplers compute in another precision than the learner."""
