"""A bounded room shared out by peer: each may use as much of it as is left free; pure.

One peer alone fills half. The more peers fill it, the less each may have, and some of it is always left for
one that comes later: of k peers that take all they may, each has 1 / (k + 1), and as much is free.
Source: dynamic thresholds, Choudhury and Hahne, IEEE/ACM Transactions on Networking 6(2), 1998.
"""

from dataclasses import dataclass, field


@dataclass(slots=True)
class SharedRoom:
    most: int
    total: int = 0
    _of: dict[str, int] = field(default_factory=dict)

    def of(self, name: str) -> int:
        """Return how much a peer uses."""
        return self._of.get(name, 0)

    def has_room(self, name: str, size: int = 1) -> bool:
        return self.of(name) + size <= self.most - self.total

    def take(self, name: str, size: int = 1) -> None:
        """Note that a peer uses so much more, which may be more than it should; below 0: less."""
        self._of[name] = self.of(name) + size
        self.total += size
        if not self._of[name]:
            del self._of[name]
