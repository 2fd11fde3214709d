"""The versions that the store offers now: the head, and those that the ledger's log does not have yet."""

import contextlib
from dataclasses import dataclass

from node.coordinator.work.accounts import Accounts
from node.errors import RefusedError
from node.values.policy import PolicyVersion
from node.weights.store.artifact_store import ArtifactStore


@dataclass(frozen=True, slots=True)
class Published:
    store: ArtifactStore
    accounts: Accounts

    def head(self) -> PolicyVersion | None:
        announcement = self.store.announcement()
        return None if announcement is None else announcement.head

    def is_on_offer(self, number: int) -> bool:
        """Whether the store offers a version now."""
        announcement = self.store.announcement()
        return announcement is not None and any(a.key.version == number for a in announcement.artifacts)

    def unlogged(self) -> tuple[PolicyVersion, ...]:
        """Return the versions on offer that are not in the log, oldest first. Blocks on the store's lock."""
        announcement = self.store.announcement()
        artifacts = () if announcement is None else announcement.artifacts
        fresh = {a.key.version: a.key for a in artifacts if a.key.version not in self.accounts.versions}
        versions = []
        for _, key in sorted(fresh.items()):
            # One that is being removed was announced long ago; no peer holds it any more.
            with contextlib.suppress(RefusedError):
                versions.append(self.store.manifest(key).policy_version)
        return tuple(versions)
