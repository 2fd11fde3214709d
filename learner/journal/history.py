"""Owns what a learner remembers beside its tensors: progress, journal and checkpoints, which move together.

    entry --on disk in the journal--> progress        copy: progress, its place in the journal, tensors
                                                         '--on disk--> entries before it are cut

Whether a checkpoint may be made, and of which tensors, is ``training.training_state``'s to say.
"""

from collections.abc import Callable, Sequence

from learner.journal.checkpoint import CheckpointCopy, CheckpointStore, ShardCopy
from learner.journal.checkpoint_rules import CheckpointRules, Due
from learner.journal.progress import Entry, NewsEntry, Progress
from learner.journal.step_journal import StepJournal
from learner.model.rank_exchanges import Ranks
from node.values.evaluation import EvaluationNotice
from node.values.groups.rollout import EncodedGroup


class History:
    """A learner's history up to now. Blocking: one thread at a time, but for ``write``."""

    def __init__(
        self,
        progress: Progress,
        journal: StepJournal,
        checkpoints: CheckpointStore,
        rules: CheckpointRules,
        *,
        window: int,
        copied_version: int,
        monotonic: Callable[[], float],
    ) -> None:
        """Go on from where ``progress`` is, behind the last entry of ``journal``.

        Args:
            window: newest rewards to remember.
            copied_version: of the newest checkpoint.
        """
        self._progress = progress
        self._journal = journal
        self._checkpoints = checkpoints
        self._rules = rules
        self._window = window
        self._monotonic = monotonic
        self._copied_version, self._copied_at_s = copied_version, monotonic()
        self._is_rolling_back = False

    @property
    def progress(self) -> Progress:
        """As it is on disk."""
        return self._progress

    @property
    def journal_bytes(self) -> int:
        """Size of the journal on disk."""
        return self._journal.size_bytes

    def append(self, entry: Entry, *, random_state: bytes = b"", groups: Sequence[EncodedGroup] = ()) -> None:
        """Write an entry, durable on return, and move the progress on.

        Args:
            random_state: torch's before the step, and ``groups`` are the step's; nothing with news.
        Raises:
            RefusedError: DISK, where the disk is full or failing; nothing has changed.
        """
        progress = self._progress.after(entry, window=self._window)
        if progress.version:  # of the base model, nothing is worth remembering
            self._journal.append(entry, random_state=random_state, groups=groups)
        self._progress = progress

    def has_news_of_best(self, evaluated: EvaluationNotice) -> bool:
        """Whether evaluations say that another version is the best than is written down."""
        return evaluated.is_evaluated and self._progress.best != self._progress.best_told(evaluated)

    def keep_best(self, evaluated: EvaluationNotice) -> None:
        """Write down which version is the best, if evaluations have news of it.

        Raises:
            RefusedError: as ``append``.
        """
        # A rollback's checkpoint says where the journal goes on: nothing may come between.
        if not self._is_rolling_back and self.has_news_of_best(evaluated):
            self.append(NewsEntry(None, self._progress.best_told(evaluated)))

    @property
    def has_new_steps(self) -> bool:
        """Whether steps were taken since the newest checkpoint was begun."""
        return self._progress.version > self._copied_version

    def checkpoint_due(self) -> Due:
        """Return whether a checkpoint of the newest step is due."""
        return self._rules.due(
            version=self._progress.version,
            copied_version=self._copied_version,
            age_s=self._monotonic() - self._copied_at_s,
            new_bytes=self._journal.new_bytes,
            all_bytes=self._journal.size_bytes,
        )

    def copy(self, shard: ShardCopy, ranks: Ranks) -> CheckpointCopy:
        """Return a checkpoint of now with these tensors; ``write`` and ``cut_journal`` must follow."""
        copied = CheckpointCopy(self._progress, self._journal.roll(), shard, ranks)
        self._note_copied()
        return copied

    def write(self, copied: CheckpointCopy) -> int:
        """Write a checkpoint, durable on return; return its bytes. In any thread, one at a time.

        Raises:
            OSError: as ``CheckpointStore.write``.
        """
        return self._checkpoints.write(copied)

    def cut_journal(self) -> None:
        """Forget the entries that the checkpoints on disk have made worthless."""
        self._journal.cut(self._checkpoints.places())

    def begin_rollback(self, progress: Progress, shard: ShardCopy, ranks: Ranks) -> CheckpointCopy:
        """Return the checkpoint that is a rollback, once it is written; ``end_rollback`` must follow then.

        Until then the progress stays what it was: a restart knows nothing of the rollback.
        """
        self._is_rolling_back = True
        return CheckpointCopy(progress, self._journal.roll(), shard, ranks)

    def end_rollback(self, copied: CheckpointCopy) -> None:
        """Go on from a rollback that is on disk."""
        self._progress, self._is_rolling_back = copied.progress, False
        self._note_copied()

    def _note_copied(self) -> None:
        self._copied_version, self._copied_at_s = self._progress.version, self._monotonic()
