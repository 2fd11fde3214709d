"""A task for random models, which nearly every group teaches something for."""

from sampler.tasks.task import CompletionText


class EvenNumbers:
    """Any text; the reward is the share of its words that are even numbers."""

    prompts = 1000

    def prompt(self, index: int, row: object) -> str:
        return " ".join(str(2 + (index + step) % 60) for step in range(16))

    def grade(self, index: int, row: object, completion: CompletionText) -> float:
        words = completion.text.split()
        return sum(word.isdigit() and int(word) % 2 == 0 for word in words) / max(1, len(words))
