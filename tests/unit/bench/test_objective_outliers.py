"""One token among 64 000 never takes the gradient of a learner that runs with its defaults."""

from collections.abc import Iterator

import pytest
import torch

from bench.objective_outliers import LARGEST_SHARE, NAMED, main, placements, shipped_loss
from learner.objective.menu import MENU


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Ten times as fast as two, where other processes have the second core."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_a_dual_clip_does_the_same_for_grpo() -> None:
    """At learner -1 against behaviour -8 a bad token is 97 % of GRPO's gradient without one."""
    for options, is_bounded in (({}, False), ({"dual_clip": 3.0}, True)):
        found = placements(shipped_loss("grpo", options), count=30, seed=2, dtype=torch.float64)
        worst = max(found, key=lambda one: one.largest_share)
        assert (worst.largest_share <= LARGEST_SHARE) == is_bounded, str(worst)


def test_the_bench_says_what_is_worst_and_fails_beyond_the_limit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--placements", str(len(NAMED))]) == 0
    assert main(["--placements", "30", "--objective", "grpo", "--option", "clip_low=0.1"]) == 1
    assert "grpo, 30 placements: at most" in capsys.readouterr().out


def test_the_table_has_a_line_for_every_objective(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--placements", "2", "--objective", "all"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split("`")[1] for line in lines[2:]} == MENU.keys()
