"""Numbers in sentences for people."""


def counted(number: int, noun: str, verbs: str = "") -> str:
    """Return "1 sampler", "2 samplers"; with a verb for one and one for several, "1 sampler goes".

    ``verbs``: both, with a slash between: "goes/go".
    """
    one, _, several = verbs.partition("/")
    words = (str(number), noun, one) if number == 1 else (str(number), f"{noun}s", several)
    return " ".join(filter(None, words))


def duration(seconds: float) -> str:
    """Return a time for people, in seconds, minutes or hours."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
