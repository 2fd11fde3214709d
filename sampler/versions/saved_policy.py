"""Everything of a policy that a sampler finds again after it was killed.

    held.words        a whole version, copied now and then
    delta_log/        what was fetched since
    base.words        the public base model: chains may start from it again
    high_water.json   the newest version ever believed: nothing older is believed again

At any moment what is on disk is a verified version or none. Blocking: called in threads, one call
after the other.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final

from node.clock import Clock
from node.errors import Reason, RefusedError, StartupError
from node.policy import ArtifactKey, PolicyVersion
from node.weights.format.layout import Layout
from node.weights.format.manifest import Manifest
from node.weights.store.head_file import StoreMark
from sampler.engines.model_words import LiveWords, ModelWords, copy_words
from sampler.versions.delta_log import DeltaLog, LoggedArtifact
from sampler.versions.version_assembly import InPlaceAssembly
from sampler.versions.version_files import PublicBase, load_held, save_held

logger = logging.getLogger(__name__)

HELD_FILE: Final = "held.words"
LOG_DIRECTORY: Final = "delta_log"
BASE_FILE: Final = "base.words"
MARK_FILE: Final = "high_water.json"

WORD_BYTES: Final = 2


class SavedPolicy:
    """The state directory of one sampler."""

    def __init__(
        self,
        directory: Path,
        *,
        layout: Layout,
        public_key: bytes,
        run_id: str,
        save_every_s: float,
        count_refusal: Callable[[Reason], None],
        clock: Clock,
    ) -> None:
        """Use ``directory``; nothing is read before ``load``.

        Args:
            save_every_s: shortest time between two copies, unless the log outgrows one.
            count_refusal: told why something was not logged.
        """
        self._directory = directory
        self._layout = layout
        self._public_key = public_key
        self._run_id = run_id
        self._save_every_s = save_every_s
        self._count_refusal = count_refusal
        self._clock = clock
        self._saved_version = 0
        self._saved_at_s = clock.monotonic()
        self._log: DeltaLog

    def keep_base(self, live: ModelWords) -> PublicBase:
        """Keep the base model, which is live.

        Raises:
            StartupError: it cannot be written.
        """
        return PublicBase.keep(self._directory / BASE_FILE, live, layout=self._layout)

    def load_mark(self) -> StoreMark:
        """Read the newest version ever believed.

        Raises:
            StartupError: it cannot be read.
        """
        path = self._directory / MARK_FILE
        try:
            return StoreMark.load(path)
        except (OSError, ValueError) as error:
            raise StartupError(
                f"{path} cannot be read: {error}",
                fix="Restore it; without it this sampler would believe policies older than it has seen",
            ) from error

    def load(self, weights: LiveWords, *, base: PublicBase) -> tuple[PolicyVersion, Manifest | None]:
        """Make the live words the newest version on disk, else ``base``; give it, and its manifest if logged.

        Raises:
            StartupError: the log cannot be used.
        """
        path = self._directory / LOG_DIRECTORY
        try:
            self._log = DeltaLog(
                path, public_key=self._public_key, run_id=self._run_id, count_refusal=self._count_refusal
            )
        except OSError as error:
            raise StartupError(
                f"{path} cannot be used: {error}", fix="Give the node a state directory it can write."
            ) from error
        while True:
            held = load_held(self._directory / HELD_FILE, layout=self._layout, into=weights.live)
            self._saved_version = 0 if held is None else held.number
            # After a long sleep the way begins at the base model again, whatever the copy is of.
            if held is None or self._log.reach(base.version) > self._log.reach(held):
                copy_words(base.words, weights.live, layout=self._layout)
                held = base.version
            weights.settle()
            try:
                return self._walked(held, weights)
            except _UnusableError as unusable:
                # Once for each artifact at most: this one is gone.
                logger.warning("logged version not usable", extra={"detail": str(unusable)})
                self._log.drop(unusable.key)

    def stage(self, manifest: Manifest, signed: bytes) -> LoggedArtifact | None:
        """Keep the payloads of an artifact as they arrive; None: they cannot be kept."""
        return self._log.begin(manifest, signed)

    def remember(self, mark: StoreMark, staged: LoggedArtifact | None) -> None:
        """Put a version on disk that is to be served: first its payloads, then that it was believed.

        Raises:
            RefusedError: DISK, if the mark cannot be written.
        """
        if staged is not None:
            try:
                staged.sync()
            except OSError as error:
                logger.warning("version not logged", extra={"detail": str(error)})
                self._log.drop(staged.key)
        try:
            mark.save(self._directory / MARK_FILE)
        except OSError as error:
            raise RefusedError(
                Reason.DISK, f"{self._directory / MARK_FILE} cannot be written: {error}"
            ) from error

    def fold(self, version: PolicyVersion, words: ModelWords) -> None:
        """Copy what is held and begin a new log, if that is due."""
        is_outgrown = self._log.size_bytes > WORD_BYTES * self._layout.words
        is_due = self._clock.monotonic() - self._saved_at_s >= self._save_every_s or is_outgrown
        if not is_due or version.number == self._saved_version:
            return
        try:
            save_held(self._directory / HELD_FILE, version, words, layout=self._layout)
        except OSError as error:
            logger.warning("policy not saved", extra={"detail": str(error)})
            return
        self._log.drop_until(version.number)
        self._saved_version = version.number
        self._saved_at_s = self._clock.monotonic()

    def _walked(self, held: PolicyVersion, weights: LiveWords) -> tuple[PolicyVersion, Manifest | None]:
        """Apply the log to the live words, which are ``held``.

        Raises:
            _UnusableError: an artifact is damaged; the live words may be no version any more.
        """
        newest = None
        while (logged := self._log.after(held)) is not None:
            manifest, payloads = logged
            try:
                staged = InPlaceAssembly(
                    manifest,
                    layout=self._layout,
                    base=weights.live,
                    base_version=held,
                    payloads=payloads,
                    weights=weights,
                )
                staged.take_held()
                staged.finish()
                staged.apply()
            except RefusedError as refused:
                raise _UnusableError(manifest.key, str(refused)) from refused
            held, newest = manifest.policy_version, manifest
        return held, newest


class _UnusableError(Exception):
    """An artifact of the log leads nowhere."""

    def __init__(self, key: ArtifactKey, what: str) -> None:
        super().__init__(what)
        self.key = key
