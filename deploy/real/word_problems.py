"""Word problems with one addition, as JSON lines with the columns ``question`` and ``answer``.

Every problem differs from every other in its numbers, its people or its story, so that the last rows, which
are held out for evaluation, are none of those that are trained on.
"""

import argparse
import itertools
import json
import random
from pathlib import Path
from typing import Final

ROWS: Final = 2000
_MOST: Final = 9

_NAMES: Final = ("Ada", "Ben", "Eva", "Ida", "Leo", "Max", "Mia", "Sam", "Tom", "Zoe")
_THINGS: Final = ("apples", "books", "cards", "coins", "eggs", "keys", "pens", "shells")
_STORIES: Final = (
    "{name} has {first} {things} and gets {second} more. How many {things} does {name} have now?",
    "There are {first} {things} in a box. {name} puts {second} more in. How many {things} are in the box?",
    "{name} found {first} {things} today and {second} yesterday. How many {things} is that in all?",
)


def write_word_problems(path: Path, *, rows: int = ROWS, seed: int = 0) -> None:
    """Write ``rows`` problems in an order drawn by ``seed``; the same ones for the same arguments."""
    numbers = range(1, _MOST + 1)
    choices = list(itertools.product(_STORIES, _NAMES, _THINGS, numbers, numbers))
    drawn = random.Random(seed).sample(choices, rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        for story, name, things, first, second in drawn:
            question = story.format(name=name, things=things, first=first, second=second)
            file.write(json.dumps({"question": question, "answer": str(first + second)}) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("path", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    write_word_problems(arguments.path, seed=arguments.seed)
