"""Completions as graders see them."""

from sampler.tasks.task import CompletionText


def texts(*written: str) -> list[CompletionText]:
    """Return completions of these texts, a token a character, that ended by themselves."""
    return [CompletionText(text, len(text), "end") for text in written]
