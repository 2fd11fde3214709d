"""A task that says what it was given to grade."""

from sampler.tasks.task import CompletionText


class Length:
    """Rewards each character of the text."""

    prompts = 100

    def prompt(self, index: int, row: object) -> str:
        return f"{index}+1="

    def grade(self, index: int, row: object, completion: CompletionText) -> float:
        return float(len(completion.text))
