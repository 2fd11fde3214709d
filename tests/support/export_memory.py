"""How much memory an export takes beyond what was there, in a process of its own."""

from pathlib import Path
from typing import Final
from unittest import mock

from bench.shared.measure import return_freed_memory
from learner.export import export_version
from learner.masters import file_words
from learner.publishing.model_copy import ModelCopy
from node.weights.format.digests import Words

TAKE: Final = ModelCopy.take


def rise_in_export(directory: Path, state: Path, model_dir: Path, version: int) -> int:
    """Export twice; return how many bytes the second one held at most when it took a frame."""
    return_freed_memory()
    held: list[int] = []

    def take(self: ModelCopy, frame: int, words: Words) -> None:
        held.append(_anonymous_bytes())
        TAKE(self, frame, words)

    with mock.patch.object(file_words, "BATCH_BYTES", 1 << 22), mock.patch.object(ModelCopy, "take", take):
        export_version(directory / "first", state=state, model_dir=model_dir, version=version)
        before, frames = _anonymous_bytes(), len(held)
        export_version(directory / "second", state=state, model_dir=model_dir, version=version)
    return max(held[frames:]) - before


def _anonymous_bytes() -> int:
    """Return resident memory that is not of files, whose pages the kernel takes back as it likes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    [line] = (line for line in lines if line.startswith("RssAnon:"))
    return 1024 * int(line.split()[1])
