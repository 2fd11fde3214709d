"""A task that says what it was given to grade."""


class Length:
    """Rewards each character of the text."""

    prompts = 100

    def prompt(self, index: int) -> str:
        return f"{index}+1="

    def grade(self, index: int, text: str) -> float:
        return float(len(text))
