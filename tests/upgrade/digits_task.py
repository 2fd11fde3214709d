"""A task that nearly every group of a random model teaches something for; read by both releases."""

from sampler.tasks.task import CompletionText


class DigitsTask:
    """Any text; the reward is the share of its characters that are digits."""

    prompts = 100

    def prompt(self, index: int, row: object) -> str:
        return f"{index}="

    def grade(self, index: int, row: object, completion: CompletionText) -> float:
        return sum(map(str.isdigit, completion.text)) / max(1, len(completion.text))
