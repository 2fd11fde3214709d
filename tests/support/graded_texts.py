"""Completions as graders see them."""

from sampler.tasks.task import CompletionText, Row


def texts(*written: str) -> list[CompletionText]:
    """Return completions of these texts, a token a character, that ended by themselves."""
    return [CompletionText(text, len(text), "end") for text in written]


def share_of_digits(row: Row, completion: CompletionText) -> tuple[float, dict[str, float]]:
    """Reward digits: a grader of one's own, which even a random model pleases now and then."""
    digits = sum(character.isdigit() for character in completion.text)
    return digits / max(1, len(completion.text)), {"tokens": completion.tokens, "row": row["sum"]}
