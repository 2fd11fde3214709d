"""The policy on disk: where a restarted sampler finds its version.

    held.words        a whole version, copied now and then
    delta_log/        the artifacts fetched since
    base.words        the public base model, from which a chain may start
    high_water.json   the newest version ever believed: nothing older is believed again

Whenever the process is killed, the disk holds a verified version or none. Blocking: call it in threads, one
call at a time.
"""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from node.errors import Reason, RefusedError, StartupError
from node.system.clock import Clock
from node.values.policy import PolicyVersion
from node.weights.assembly.public_base import PublicBase
from node.weights.format.layout import Layout
from node.weights.format.manifest import Manifest
from node.weights.store.high_water import HighWater
from sampler.engines.restartable_engine import EngineEndedError
from sampler.engines.words.model_words import ArrayWords, LiveWords, ModelWords, copy_words
from sampler.versions.delta_log import DeltaLog, LoggedArtifact
from sampler.versions.version_assembly import VersionAssembly
from sampler.versions.version_files import keep_base, load_held, save_held

logger = logging.getLogger(__name__)

HELD_FILE: Final = "held.words"
LOG_DIRECTORY: Final = "delta_log"
BASE_FILE: Final = "base.words"
MARK_FILE: Final = "high_water.json"


class SavedPolicy:
    """The policy in one sampler's state directory. ``open`` comes first, then ``load``.

    Attributes:
        base: The public base model.
        base_words: Its words, as those of engines are read.
        mark: The newest version ever believed.
    """

    base: PublicBase
    base_words: ArrayWords
    _log: DeltaLog

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
        """Use ``directory``.

        Args:
            save_every_s: Shortest time between two copies, unless the log becomes larger than a copy.
            count_refusal: Called with the reason when a version is not logged.
        """
        self._directory = directory
        self._layout = layout
        self._open_log = partial(
            DeltaLog,
            directory / LOG_DIRECTORY,
            public_key=public_key,
            run_id=run_id,
            count_refusal=count_refusal,
        )
        self._save_every_s = save_every_s
        self._monotonic = clock.monotonic
        self._saved_version = 0
        self._saved_at_s = clock.monotonic()
        self.mark = HighWater()

    def open(self, live: ModelWords) -> None:
        """Read the mark, and write the base model, which is live, to disk.

        Raises StartupError: the mark cannot be read, or the base model not be written.
        """
        path = self._directory / MARK_FILE
        try:
            self.mark = HighWater.load(path)
        except (OSError, ValueError) as error:
            raise StartupError(
                f"{path} cannot be read: {error}",
                fix="Restore it. Without it this sampler would believe policies older than it has seen.",
            ) from error
        self.base = keep_base(self._directory / BASE_FILE, live, layout=self._layout)
        self.base_words = ArrayWords(self.base.words)

    def load(self, weights: LiveWords) -> PolicyVersion:
        """Load the newest version on disk, else the base model, into the live words, and return it.

        Raises StartupError: the log cannot be used. RefusedError: FENCED or ROLLBACK, if the version
        contradicts the mark.
        """
        try:
            self._log = self._open_log()
        except OSError as error:
            raise StartupError(
                f"{self._directory / LOG_DIRECTORY} cannot be used: {error}",
                fix="Set node.state_dir to where this process can write.",
            ) from error
        while True:
            held = load_held(self._directory / HELD_FILE, layout=self._layout, into=weights.live)
            self._saved_version = 0 if held is None else held.number
            # After a long absence the log may start from the base model instead of the copy.
            if held is None or self._log.reach(self.base.version) > self._log.reach(held):
                copy_words(self.base_words, weights.live, layout=self._layout)
                held = self.base.version
            weights.settle()
            newest: Manifest | None = None
            try:
                while (logged := self._log.after(held)) is not None:
                    self._apply(logged, held, weights)
                    newest, held = logged.manifest, logged.manifest.policy_version
                break
            except EngineEndedError:
                raise
            except RefusedError as refused:
                # At most once for each artifact, because this one was dropped.
                logger.warning("logged version not usable", extra={"detail": str(refused)})
        if newest is not None:
            self.mark = self.admitted(newest)
        return held

    def admitted(self, manifest: Manifest) -> HighWater:
        """Return the mark after believing a manifest. Versions on the way to the head leave it unchanged.

        Raises RefusedError: FENCED or ROLLBACK.
        """
        if self.mark.head is not None and manifest.version < self.mark.head.number:
            return self.mark
        self.mark.check(learner_epoch=manifest.learner_epoch, version=manifest.policy_version)
        return self.mark.after(manifest)

    def begin(self, manifest: Manifest) -> LoggedArtifact | None:
        """Return where to write an artifact's payloads as they arrive; None: they cannot be kept."""
        return self._log.begin(manifest)

    def remember(self, manifest: Manifest, payloads: LoggedArtifact | None) -> None:
        """Make a version durable before it is served: first its payloads, then the mark.

        Raises RefusedError: FENCED or ROLLBACK; DISK, if the mark cannot be written.
        """
        mark, path = self.admitted(manifest), self._directory / MARK_FILE
        if payloads is not None:
            try:
                payloads.sync()
            except OSError as error:
                logger.warning("version not logged", extra={"detail": str(error)})
                self._log.drop(payloads.manifest.key)
        try:
            mark.save(path)
        except OSError as error:
            raise RefusedError(Reason.DISK, f"{path} cannot be written: {error}") from error
        self.mark = mark

    def compact(self, version: PolicyVersion, words: ModelWords) -> None:
        """Copy the held version and drop the log up to it, if that is due."""
        is_outgrown = self._log.size_bytes > 2 * self._layout.words
        is_due = self._monotonic() - self._saved_at_s >= self._save_every_s or is_outgrown
        if not is_due or version.number == self._saved_version:
            return
        try:
            save_held(self._directory / HELD_FILE, version, words, layout=self._layout)
        except OSError as error:
            logger.warning("policy not saved", extra={"detail": str(error)})
            return
        self._log.drop_until(version.number)
        self._saved_version = version.number
        self._saved_at_s = self._monotonic()

    def _apply(self, logged: LoggedArtifact, held: PolicyVersion, weights: LiveWords) -> None:
        """Apply an artifact to the live words, which are ``held``.

        Raises RefusedError: it is damaged and was dropped; the live words may be no version any more.
        EngineEndedError: the artifact may be right.
        """
        try:
            assembly = VersionAssembly(
                logged.manifest,
                layout=self._layout,
                base=weights.live,
                base_version=held,
                payloads=logged,
                weights=weights,
            )
            assembly.take_held()
            assembly.finish()
            assembly.apply()
        except EngineEndedError:
            raise
        except RefusedError:
            self._log.drop(logged.manifest.key)
            raise
