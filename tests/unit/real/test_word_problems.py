import json
from pathlib import Path

from deploy.real.word_problems import ROWS, write_word_problems


def test_no_problem_comes_twice_and_every_answer_is_the_sum(tmp_path: Path) -> None:
    write_word_problems(tmp_path / "problems.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "problems.jsonl").read_text().splitlines()]
    assert len(rows) == len({row["question"] for row in rows}) == ROWS
    for row in rows:
        first, second = (int(word) for word in row["question"].split() if word.isdigit())
        assert int(row["answer"]) == first + second


def test_the_same_seed_writes_the_same_problems(tmp_path: Path) -> None:
    one, other, third = (tmp_path / name for name in ("1", "2", "3"))
    for path, seed in ((one, 0), (other, 0), (third, 1)):
        write_word_problems(path, rows=20, seed=seed)
    assert one.read_bytes() == other.read_bytes() != third.read_bytes()
