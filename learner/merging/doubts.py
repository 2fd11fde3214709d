"""Decides whether a contributor's word that groups taught it nothing is enough to consume them; pure.

    disputed by the learner --said by one--> doubted: dealt to others --said by a second--> believed
                                                '-- trained on: forgotten

Whose word alone consumed groups could keep the others from everything that it is dealt. A contributor that is
the only one is believed: nobody else could train on them, and they would come back to it for ever.
"""

from collections.abc import Collection, Iterable


class Doubts:
    """Who has said of which group that it taught nothing, and was not believed."""

    def __init__(self, *, most_groups: int) -> None:
        """Remember the newest ``most_groups``: as many as there may be in the learner."""
        self._most_groups = most_groups
        self._said: dict[str, str] = {}

    def doubted(self, name: str, disputed: Iterable[str], *, present: Collection[str]) -> frozenset[str]:
        """Note what a contributor says of groups that would teach; return those which it is not believed of.

        Args:
            present: names of all contributors that are connected.
        """
        if not frozenset(present) - {name}:
            return frozenset()
        found = frozenset(one for one in disputed if self._said.get(one, name) == name)
        self._said |= dict.fromkeys(found, name)
        for old in list(self._said)[: -self._most_groups]:
            del self._said[old]
        return found

    def may_have(self, name: str, group_id: str, *, present: Collection[str]) -> bool:
        """Whether a group may be dealt to a contributor: not again to the one that it taught nothing."""
        return self._said.get(group_id) != name or not frozenset(present) - {name}

    def consumed(self, group_ids: Iterable[str]) -> None:
        """Forget groups that are in a version, or that a second contributor said the same of."""
        for group_id in group_ids:
            self._said.pop(group_id, None)
