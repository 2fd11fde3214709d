"""The rows of a journal, each of which proves which one it follows; pure.

    entry    number | JSON {"step": ...} or {"news": ...} | random state | digests of its groups | digest
    groups   of a step: header | columns, in order

An entry's digest is BLAKE3 over the digest of the entry before, its text, its random state and the digests of
its groups. So an entry or a group that is changed, missing, moved or of another journal is noticed, and the
entries can be checked without reading the groups.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final

import blake3
from pydantic import TypeAdapter

from learner.journal.progress import Entry, NewsEntry, StepEntry
from node.values.groups.rollout import EncodedGroup

DIGEST_BYTES: Final = 16
NO_DIGEST: Final = b"\0" * DIGEST_BYTES
"""Before the first entry of a run."""

_STEP, _NEWS = TypeAdapter(StepEntry), TypeAdapter(NewsEntry)


class DamagedJournalError(ValueError):
    """An entry of a journal is not what was written; says which."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The run and the model that a journal or a checkpoint is of."""

    run_id: str
    layout_digest: str
    """Hex, as ``base_root``."""
    base_root: str
    """Root of version 0."""

    def difference(self, other: "Origin") -> str:
        """Return in which way another one differs, for people; empty: it does not."""
        differing = [
            f"{name} is {theirs}, here it is {ours}"
            for name, ours in asdict(self).items()
            if (theirs := getattr(other, name)) != ours
        ]
        return "; ".join(differing)


@dataclass(frozen=True, slots=True)
class EntryRow:
    """An entry as it is stored; its groups have rows of their own."""

    number: int
    """Entries are numbered from 1, without a gap."""
    text: str
    random_state: bytes
    group_digests: bytes
    """One after the other."""
    digest: bytes

    @classmethod
    def of(
        cls,
        entry: Entry,
        *,
        number: int,
        previous: bytes,
        random_state: bytes = b"",
        groups: Sequence[EncodedGroup] = (),
    ) -> "EntryRow":
        """Return the row of an entry; ``previous`` is the digest of the entry before."""
        kind = "step" if isinstance(entry, StepEntry) else "news"
        text = json.dumps({kind: asdict(entry)})
        group_digests = b"".join(map(group_digest, groups))
        digest = _digest(previous, text, random_state, group_digests)
        return cls(number, text, random_state, group_digests, digest)

    def entry(self, *, previous: bytes) -> Entry:
        """Read the entry, given the digest of the one before.

        Raises:
            DamagedJournalError: it is not what was written, or follows on another one.
        """
        if (
            not isinstance(self.text, str)
            or _digest(previous, self.text, self.random_state, self.group_digests) != self.digest
        ):
            raise DamagedJournalError(
                f"entry {self.number} is not what was written, or does not follow on the entry before"
            )
        try:
            # json's own reader: pydantic's takes no NaN, which an effective sample size may be.
            document = json.loads(self.text)
            if "news" in document:
                return _NEWS.validate_python(document["news"])
            entry = _STEP.validate_python(document["step"])
        except (ValueError, KeyError) as error:
            raise DamagedJournalError(f"entry {self.number} cannot be read: {error}") from error
        if not 0 <= entry.cuda_state_bytes <= len(self.random_state):
            raise DamagedJournalError(
                f"entry {self.number} has a random state of {len(self.random_state)} bytes, "
                f"{entry.cuda_state_bytes} of them CUDA's"
            )
        return entry

    def check_groups(self, groups: Sequence[EncodedGroup]) -> None:
        """Check that these are the groups of the entry. Raises DamagedJournalError."""
        if b"".join(map(group_digest, groups)) != self.group_digests:
            raise DamagedJournalError(f"the groups of entry {self.number} are not what was written")


def group_digest(group: EncodedGroup) -> bytes:
    """Return the digest of a group's header and columns."""
    sizes = len(group.header).to_bytes(8, "little")
    return blake3.blake3(sizes + group.header).update(group.columns).digest(length=DIGEST_BYTES)


def _digest(previous: bytes, text: str, random_state: bytes, group_digests: bytes) -> bytes:
    """Return the digest of an entry; each part's size is in it, so that no byte may move to the next."""
    told = text.encode()
    sizes = b"".join(len(part).to_bytes(8, "little") for part in (told, random_state, group_digests))
    hasher = blake3.blake3(previous + sizes)
    for part in (told, random_state, group_digests):
        hasher.update(part)
    return hasher.digest(length=DIGEST_BYTES)
