"""``python -m bench.verdicts``: the verdicts of ``math_verify`` and ``number`` beside the libraries' own.

    python -m bench.verdicts [--seed 0] [--pairs 500]
    python -m bench.verdicts > bench/results/verdicts.md     keeps the report

A seeded generator makes right answers in public formats (GSM8K, MATH, multiple choice, dates and times), and
completions that say the same or something else, bare, in a sentence, in a box, after a mark.

math_verify's own   ``verify(parse("$right$"), parse(completion))``, as its documentation has it
number's own        the last number of both, by the regular expression of most trainers
"""

import argparse
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from node.grading.jsonl_options import JsonlOptions
from node.questions.data_row import RowError
from sampler.tasks.question_tasks import JsonlTask
from sampler.tasks.task import CompletionText

MOST_FALSE: Final = 0.005
"""False rewards that the graders may give, as a share of wrong answers."""


@dataclass(frozen=True, slots=True)
class Answers:
    """A right answer, other ways to write it, and answers that are wrong."""

    right: str
    same: Sequence[str]
    wrong: Sequence[str]


@dataclass(frozen=True, slots=True)
class Pair:
    """A right answer and a completion."""

    kind: str
    right: str
    said: str
    is_right: bool
    is_same_text: bool = False


def integers(draw: random.Random) -> Answers:
    number = draw.randint(2, 99_999)
    other = number + draw.choice((-1, 1, 10))
    same = (f"{number:,}", f"{number}.0", f"${number}$")
    return Answers(str(number), same, (str(other), f"-{number}", f"{number}.5", f"{number} or {other}"))


def fractions(draw: random.Random) -> Answers:
    share = Fraction(draw.randint(1, 19), draw.choice((2, 4, 5, 8, 20)))
    while share.denominator == 1:
        share += Fraction(1, 4)
    above, below = share.numerator, share.denominator
    right = draw.choice((f"{above}/{below}", rf"\frac{{{above}}}{{{below}}}"))
    same = (rf"$\dfrac{{{above}}}{{{below}}}$", f"{above}/{below}", str(float(share)))
    wrong = (f"{above + below}/{below}", rf"\frac{{{above + 1}}}{{{below}}}", str(below), f"{below}/{above}")
    return Answers(right, same, wrong)


def times(draw: random.Random) -> Answers:
    hour, minute = draw.randint(1, 12), draw.randint(10, 59)
    wrong = (f"{hour % 12 + 1}:{minute}", f"{hour}:{minute - 1:02}", str(minute))
    return Answers(f"{hour}:{minute}", (f"{hour:02}:{minute}",), wrong)


def dates(draw: random.Random) -> Answers:
    year, month, day = draw.randint(1900, 2030), draw.randint(1, 12), draw.randint(2, 28)
    wrong = (f"{year - 1}-{month:02}-{day - 1:02}", f"{year}-{month % 12 + 1:02}-{day:02}", str(day))
    return Answers(f"{year}-{month:02}-{day:02}", (f"{year}-{month}-{day}",), wrong)


def tuples(draw: random.Random) -> Answers:
    one, other = draw.sample(range(-9, 10), 2)
    same = (f"$({one},{other})$", rf"\left({one}, {other}\right)")
    wrong = (f"({one + 1}, {other})", f"({other}, {one})", str(other), f"({one}, {other}, 0)")
    return Answers(f"({one}, {other})", same, wrong)


def intervals(draw: random.Random) -> Answers:
    low = draw.randint(-9, 5)
    high = low + draw.randint(1, 9)
    wrong = (f"({low}, {high})", f"[{low}, {high}]", f"[{low - 1}, {high})", str(high), f"[{low}, \\infty)")
    return Answers(f"[{low}, {high})", (f"$[{low},{high})$", rf"\left[{low}, {high}\right)"), wrong)


def sets(draw: random.Random) -> Answers:
    one, two, three = draw.sample(range(1, 30), 3)
    same = (rf"$\{{{three}, {one}, {two}\}}$", rf"\left\{{{two}, {one}, {three}\right\}}")
    wrong = (
        rf"\{{{one}, {two}\}}",
        rf"\{{{one}, {two}, {three + 30}\}}",
        f"({one}, {two}, {three})",
        str(three),
    )
    return Answers(rf"\{{{one}, {two}, {three}\}}", same, wrong)


def percentages(draw: random.Random) -> Answers:
    number = draw.randint(1, 99)
    right = draw.choice((f"{number}%", rf"{number}\%"))
    same = (rf"${number}\%$", f"{number} percent", f"{number}%")
    return Answers(right, same, (f"{number + 1}%", f"{number}00%", f"{number} cm", f"{number}-{number + 5}%"))


def units(draw: random.Random) -> Answers:
    number, unit, other = (
        draw.randint(2, 500),
        *draw.choice((("km", "m"), ("cm", "mm"), ("kg", "g"), ("h", "min"))),
    )
    right = draw.choice((f"{number} {unit}", rf"{number}\text{{ {unit}}}"))
    wrong = (f"{number} {other}", f"{number + 1} {unit}", f"{number}/2 {unit}")
    return Answers(right, (f"{number}{unit}", rf"${number}\ \text{{{unit}}}$", f"${number}$ {unit}"), wrong)


def prices(draw: random.Random) -> Answers:
    number = draw.randint(1000, 9999)
    same = (rf"\${number:,}", f"{number:,} dollars", f"${number}.00")
    wrong = (f"${number + 1:,}", f"\N{EURO SIGN}{number:,}", f"{number:,} cents", f"${number:,}.50")
    return Answers(f"${number:,}", same, wrong)


def choices(draw: random.Random) -> Answers:
    letter, other = draw.sample("ABCDE", 2)
    same = (f"({letter})", rf"\text{{{letter}}}", f"{letter}.", f"**{letter}**", f"{letter}) 12 apples")
    wrong = (other, f"({other})", rf"\textbf{{{other}}}", f"{letter} or {other}", f"{other}. 5 {letter}")
    return Answers(letter, same, wrong)


def formulas(draw: random.Random) -> Answers:
    a, b, c = draw.randint(2, 9), draw.randint(2, 9), draw.choice((2, 3, 5, 7, 11))
    root, square, circle, bound = rf"\sqrt{{{c}}}", f"{a}x^2", rf"{a} \pi", rf"x \le {a}"
    some = (
        Answers(f"{a}{root}", (rf"${root} \cdot {a}$",), (f"{a + 1}{root}", root, str(c))),
        Answers(
            f"{square}+{b}", (f"${b} + {square}$",), (f"{square}-{b}", f"{a}x^3+{b}", f"{a}x+{b}", str(b))
        ),
        Answers(
            rf"{a}\pi", (f"${circle}$", rf"\pi \cdot {a}"), (f"1{circle}", str(a), rf"\frac{{\pi}}{{{a}}}")
        ),
        Answers(f"x={a}", (f"$x = {a}$", str(a)), (f"x={a + 1}", f"x=-{a}", f"{a}x")),
        Answers(bound, (rf"$x \leq {a}$", rf"$(-\infty, {a}]$"), (rf"x \ge {a}", f"x < {a}", f"{bound}{b}")),
        Answers(f"{a}+{b}i", (f"${a} + {b}i$", f"{b}i+{a}"), (f"{a}-{b}i", f"{b + 9}+{a}i", str(a))),
        Answers(
            f"{a}^{{{b}}}", (f"${a}^{b}$", str(a**b)), (f"{a}^{{{b + 1}}}", str(a * b + 1), str(a**b + 1))
        ),
    )
    return draw.choice(some)


def words(draw: random.Random) -> Answers:
    right, other = draw.choice(
        (("Monday", "Friday"), ("Yes", "No"), ("no", "on"), ("No solution", "All real numbers"),
         ("true", "false"), ("ellipse", "parabola"),
         ("Evelyn", "Carla"), ("listen", "silent"), ("north", "thorn"))
    )  # fmt: skip
    same = (right.lower(), rf"\text{{{right}}}", f"{right}.")
    return Answers(right, same, (other, rf"\text{{{other}}}", f"not {right.lower()}", f"{right} {other}"))


KINDS: Final[Sequence[Callable[[random.Random], Answers]]] = (
    integers, fractions, times, dates, tuples, intervals, sets, percentages, units, prices, choices, formulas,
    words,
)  # fmt: skip

FRAMES: Final = (
    "{}",
    "The answer is {}.",
    "Some steps: 2 + 3 = 5.\n\n#### {}",
    "\\boxed{{{}}}",
    "First 7, then 12.\n\\[\\boxed{{{}}}\\]\nI checked all 3 steps.",
    "**Answer:** {}",
    "We try 1, then 2.\nFinal answer: {}\nThis took 4 lines.",
    "<think>Is it 17? Or \\boxed{{1}}?</think>\n{}",
)


def pairs(draw: random.Random, *, count: int, is_right: bool) -> Iterator[Pair]:
    """Yield right answers with completions that say them, or something else."""
    for number in range(count):
        kind = KINDS[number % len(KINDS)]
        answers = kind(draw)
        is_same_text = is_right and draw.random() < 0.5
        said = answers.right if is_same_text else draw.choice(answers.same if is_right else answers.wrong)
        frame = draw.choice(FRAMES)
        yield Pair(kind.__name__, answers.right, frame.format(said), is_right, is_same_text)


def ours(grader: str) -> Callable[[Pair], bool | None]:
    """Return the verdict of this software's grader; None: a run refuses the row."""
    task, options = JsonlTask(grader=grader), JsonlOptions(grader=grader)

    def verdict(pair: Pair) -> bool | None:
        row = {"prompt": "?", "answer": pair.right}
        try:
            options.check_row(row)
        except RowError:
            return None
        graded = task.grade(0, row, CompletionText(pair.said, 1, "end"))
        return graded in (1.0, (1.0, {}))

    return verdict


def math_verify_alone(pair: Pair) -> bool:
    """Return the package's verdict."""
    from math_verify import parse, verify

    return bool(verify(parse(f"${pair.right}$"), parse(pair.said)))


def last_number_alone(pair: Pair) -> bool:
    """Return whether the last numbers are equal."""
    found = [re.findall(r"-?\d[\d,]*(?:\.\d+)?", text)[-1:] for text in (pair.right, pair.said)]
    numbers = [float(each[0].replace(",", "")) for each in found if each]
    return len(numbers) == 2 and numbers[0] == numbers[1]


@dataclass(frozen=True, slots=True)
class Count:
    """Verdicts of one grader."""

    graded_right: int
    graded_wrong: int
    refused_same_text: int
    refused_other_text: int
    false_rewards: int
    faults: Sequence[Pair]


def counted(verdict: Callable[[Pair], bool | None], everything: Sequence[Pair]) -> Count:
    """Return what ``verdict`` says of all pairs; those whose row is refused are not counted."""
    tally: Counter[str] = Counter()
    faults = []
    for pair in everything:
        if (said := verdict(pair)) is None:
            continue
        tally["right" if pair.is_right else "wrong"] += 1
        if said is not pair.is_right:
            faults.append(pair)
            tally[("same" if pair.is_same_text else "other") if pair.is_right else "false"] += 1
    return Count(tally["right"], tally["wrong"], tally["same"], tally["other"], tally["false"], faults)


def main(arguments: Sequence[str]) -> int:
    """Print the report; return 1 if a promise is broken."""
    parser = argparse.ArgumentParser(prog="python -m bench.verdicts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pairs", type=int, default=500, help="right ones, and as many wrong ones")
    given = parser.parse_args(arguments)
    draw = random.Random(given.seed)
    everything = [
        pair for is_right in (True, False) for pair in pairs(draw, count=given.pairs, is_right=is_right)
    ]
    rows = {
        "`math_verify`": counted(ours("math_verify"), everything),
        "math-verify alone": counted(math_verify_alone, everything),
        "`number`": counted(ours("number"), everything),
        "last number alone, all rows": counted(last_number_alone, everything),
        "last number alone, rows that `number` takes": counted(
            last_number_alone, [pair for pair in everything if ours("number")(pair) is not None]
        ),
    }
    print("# Verdicts of graders on right and wrong answers\n")
    print(
        f"Made by `python -m bench.verdicts --seed {given.seed} --pairs {given.pairs}`. Formats: "
        f"{', '.join(kind.__name__ for kind in KINDS)}. "
        "`number` refuses rows whose answer is not one number.\n"
    )
    print(
        "| grader | right answers | refused, same text | refused, other text "
        "| wrong answers | false rewards | share |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, count in rows.items():
        share = count.false_rewards / max(1, count.graded_wrong)
        print(
            f"| {name} | {count.graded_right} | {count.refused_same_text} | {count.refused_other_text} | "
            f"{count.graded_wrong} | {count.false_rewards} | {share:.1%} |"
        )
    is_kept = True
    for name in ("`math_verify`", "`number`"):
        count = rows[name]
        is_kept &= not count.refused_same_text and count.false_rewards <= MOST_FALSE * count.graded_wrong
        if count.faults:
            print(f"\nOther verdicts of {name} than the generator's:\n")
        for pair in count.faults:
            what = "refused" if pair.is_right else "rewarded"
            print(f"- {what}, {pair.kind}: right `{pair.right}`, said `{' / '.join(pair.said.splitlines())}`")
    print(
        f"\nNo right answer refused that is equal in text, false rewards <= {MOST_FALSE:.1%}: "
        f"{'held' if is_kept else 'MISSED'}."
    )
    return 0 if is_kept else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
