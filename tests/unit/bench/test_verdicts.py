import random
from itertools import islice

import pytest

from bench.verdicts import KINDS, main, pairs


def test_pairs_are_of_every_kind_and_the_same_for_a_seed() -> None:
    twice = [list(pairs(random.Random(7), count=26, is_right=True)) for _ in range(2)]
    assert twice[0] == twice[1]
    assert {pair.kind for pair in islice(twice[0], 13)} == {kind.__name__ for kind in KINDS}


def test_no_answer_that_is_equal_in_text_is_refused_and_no_wrong_one_rewarded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--pairs", "26", "--seed", "11"]) == 0
    assert "| `math_verify` | 26 | 0 | 0 | 26 | 0 | 0.0% |" in capsys.readouterr().out
