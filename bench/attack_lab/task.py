"""A task that cannot be learned, so that a run goes on teaching however long it is attacked."""

import zlib

from sampler.tasks.task import CompletionText


class CoinTask:
    """Any text; the reward is a bit of a digest of prompt and text, and hardly a prompt comes twice."""

    prompts = 1_000_000

    def prompt(self, index: int, row: object) -> str:
        return f"{index}="

    def grade(self, index: int, row: object, completion: CompletionText) -> float:
        return float(zlib.crc32(f"{index}={completion.text}".encode()) & 1)
