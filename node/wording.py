"""Numbers in sentences for people."""


def counted(number: int, noun: str, verbs: str = "") -> str:
    """Return "1 sampler", "2 samplers"; with a verb for one and one for several, "1 sampler goes".

    ``verbs``: both, with a slash between: "goes/go".
    """
    one, _, several = verbs.partition("/")
    words = (str(number), noun, one) if number == 1 else (str(number), f"{noun}s", several)
    return " ".join(filter(None, words))
