import json
import re
from collections.abc import Sequence
from dataclasses import replace
from html import unescape
from pathlib import Path

import numpy as np
import pytest

from learner.records.sample_writer import MOST_CHARACTERS, MOST_COMPLETIONS, SampleWriter, load_tokenizer
from node.commands.cli import main
from node.page.html import rendered
from node.page.run_sections import RunView, run_sections
from node.page.samples_file import FILE_NAME, CompletionSample, GroupSample, SamplesFile
from node.text.visible_text import visible
from node.values.groups.rollout import Completion, Finish, RolloutGroup
from support.groups import make_completion, make_group
from support.step_lines import make_step_line
from support.tiny_model import TOKENS, make_tiny_model

HOSTILE = (
    "<script>alert(1)</script>&amp;'\"\n"
    "\x1b[2J\x1b]0;title\x07\r\x9b31m\x00\u202eevil\u2066\u200b[bold red]markup[/]"
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), hidden=16, layers=1)


def sample(version: int = 1, *rewards: float, text: str = "4", **changes: object) -> GroupSample:
    completions = tuple(
        CompletionSample(text, reward, reward - 0.5, 3, "end", version - 1, version) for reward in rewards
    )
    group = GroupSample(version, 0.0, f"{version}.1", "far", "addition", 7, "2 + 2 =", 5, 1, 2, completions)
    return replace(group, **changes)  # type: ignore[arg-type]


def ids(text: str) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array([TOKENS.index(character) for character in text], np.int32)


def answer(text: str, reward: float, **changes: object) -> Completion:
    n = len(text)
    completion = make_completion(n, version=3, reward=reward, token_ids=ids(text))
    return replace(completion, **changes)  # type: ignore[arg-type]


def delivered(*completions: Completion) -> RolloutGroup:
    return make_group("5.1", prompt_token_ids=ids("2 + 2 ="), completions=completions, sampler_id="far")


def write(to: SampleWriter, version: int, batch: Sequence[RolloutGroup]) -> None:
    append = to.write_of(make_step_line(version), batch)
    if append is not None:
        append()


def writer(model_dir: Path, file: SamplesFile, *, every: int = 1, groups: int = 1) -> SampleWriter:
    return SampleWriter(file, load_tokenizer(model_dir), every_versions=every, groups=groups)


def test_the_first_groups_are_shown_before_the_first_step(model_dir: Path, tmp_path: Path) -> None:
    file = SamplesFile(tmp_path / FILE_NAME)
    to = writer(model_dir, file, every=10, groups=2)
    version0 = np.zeros(1, np.int32)  # there is no other before the first step
    group = delivered(*(answer(text, float(text == "4"), policy_version=version0) for text in "45"))
    for _ in range(3):
        if (append := to.write_of(None, [replace(group, spooled_at_s=7.0)])) is not None:
            append()
    assert [(group.version, group.at_s, group.staleness_versions) for group in file.all()] == [
        (0, 7.0, 0)
    ] * 2


def test_a_group_is_written_down_as_text_with_what_the_learner_made_of_it(
    model_dir: Path, tmp_path: Path
) -> None:
    file = SamplesFile(tmp_path / FILE_NAME)
    swapped = np.array([3, 4], np.int32)
    group = delivered(answer("4", 1.0), answer("22", 0.0, finish=Finish.LENGTH, policy_version=swapped))
    columns = {"words": np.array([2.5, np.nan], np.float32)}
    write(writer(model_dir, file), 6, [replace(group, metrics=columns)])
    [written] = file.newest(5)
    assert (written.version, written.group_id, written.sampler_id) == (6, "5.1", "far")
    assert (written.prompt, written.prompt_tokens) == ("2 + 2 =", 7)
    assert written.staleness_versions == 2
    right, wrong = written.completions
    assert (right.text, right.reward, right.tokens, right.finish) == ("4", 1.0, 1, "end")
    assert (wrong.text, wrong.tokens, wrong.finish) == ("22", 2, "length")
    assert (wrong.oldest_version, wrong.newest_version) == (3, 4)
    # Rewards 1 and 0: half a unit from the mean, and a deviation of sqrt(1/2).
    assert right.advantage == pytest.approx(0.5**0.5, rel=1e-3)
    assert wrong.advantage == -right.advantage
    assert [one.metrics for one in written.completions] == [{"words": 2.5}, {}]
    assert right.heading.endswith("sampled from version 3, words 2.5")


def test_every_nth_version_has_a_few_groups_that_a_restart_would_choose_again(
    model_dir: Path, tmp_path: Path
) -> None:
    batch = [delivered(answer(str(n), 1.0), answer("0", 0.0)) for n in range(8)]
    chosen: list[list[str]] = []
    for name in ("a", "b"):
        file = SamplesFile(tmp_path / name)
        for version in range(1, 7):
            write(writer(model_dir, file, every=3, groups=2), version, batch)
        assert [group.version for group in file.all()] == [3, 3, 6, 6]
        chosen.append([group.completions[0].text for group in file.all()])
    assert chosen[0] == chosen[1]
    assert len(set(chosen[0][:2])) == 2


def test_groups_that_taught_nothing_are_written_down_whatever_the_version(
    model_dir: Path, tmp_path: Path
) -> None:
    file = SamplesFile(tmp_path / FILE_NAME)
    group = delivered(answer("4", 0.0), answer("22", 0.0))
    append = writer(model_dir, file, every=10).write_of(make_step_line(5, teaching_groups=0), [group])
    assert append is not None
    append()
    [written] = file.newest(1)
    assert (written.version, written.staleness_versions) == (5, 2)


def test_a_line_is_bounded_however_large_group_and_text_are(model_dir: Path, tmp_path: Path) -> None:
    file = SamplesFile(tmp_path / FILE_NAME)
    long = "1" * (MOST_CHARACTERS + 9)
    group = delivered(*(answer(long if n == 3 else "1", float(n)) for n in range(3 * MOST_COMPLETIONS)))
    write(writer(model_dir, file), 6, [group])
    [written] = file.newest(1)
    half = MOST_COMPLETIONS // 2
    assert [one.reward for one in written.completions] == [*range(half), *range(5 * half, 6 * half)]
    assert written.group_size == 3 * MOST_COMPLETIONS
    assert "\n[9 characters left out]\n" in written.completions[3].text
    assert len(written.completions[3].text) < MOST_CHARACTERS + 40


def test_a_full_file_is_rotated_once_and_readers_see_both(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    file = SamplesFile(path, file_bytes=1000)
    for version in range(1, 31):
        file.append([sample(version, 1.0)])
    assert {entry.name for entry in tmp_path.iterdir()} == {FILE_NAME, f"{FILE_NAME}.1"}
    assert all(entry.stat().st_size < 1500 for entry in tmp_path.iterdir())
    kept = [group.version for group in file.all()]
    assert kept == list(range(kept[0], 31))
    assert [group.version for group in file.newest(4)] == [27, 28, 29, 30]


def test_a_line_that_a_kill_cut_in_half_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    file = SamplesFile(path)
    file.append([sample(1, 1.0)])
    with path.open("a") as half:
        half.write(sample(2, 1.0).to_json()[:40] + "\n")
    file.append([sample(3, 1.0)])
    assert [group.version for group in file.all()] == [1, 3]


def test_control_characters_become_visible() -> None:
    assert visible("a\x1b[2J\x07\r\x9b\x00\x7f") == r"a\x1b[2J\x07\r\x9b\x00\x7f"
    assert visible("\u202e\u2066\u200b\ud800\u2028") == r"\u202e\u2066\u200b\ud800\u2028"
    assert visible("a\tb\n\u3000ß 数\u00a0") == "a\tb\n\u3000ß 数\u00a0"


def page_of(groups: Sequence[GroupSample]) -> str:
    return rendered("run", "now", run_sections(RunView(samples=groups))).decode()


def test_the_page_shows_hostile_text_and_obeys_none_of_it() -> None:
    group = sample(3, 1.0, 0.0, text=HOSTILE, prompt=HOSTILE, task="<b>", group_size=8)
    page = page_of([group])
    assert {"script", "b"}.isdisjoint(re.findall(r"<(\w+)", page))
    assert [page.count(f'<pre class="{tone}">') for tone in ("prompt", "above", "below")] == [1, 1, 1]
    assert (
        unescape(page).count("<script>alert(1)</script>&amp;'\"\n\\x1b[2J\\x1b]0;title\\x07\\r\\x9b31m") == 3
    )
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u202e\u2066]", page)
    assert "default-src 'none'" in page
    assert "2 of 8 completions by far" in page
    assert "learner.samples_every_versions" in page_of([])


def command(tmp_path: Path, *flags: str) -> int:
    return main(["samples", "--state-dir", str(tmp_path), *flags])


@pytest.fixture
def file(tmp_path: Path) -> SamplesFile:
    (tmp_path / "learner").mkdir()
    return SamplesFile(tmp_path / "learner" / FILE_NAME)


def shown_versions(capsys: pytest.CaptureFixture[str]) -> list[int]:
    return [json.loads(line)["version"] for line in capsys.readouterr().out.splitlines()]


def test_the_command_shows_hostile_text_and_the_terminal_obeys_none_of_it(
    tmp_path: Path, file: SamplesFile, capsys: pytest.CaptureFixture[str]
) -> None:
    file.append([sample(3, 1.0, text=HOSTILE, prompt="2 + 2 =")])
    assert command(tmp_path) == 0
    out = capsys.readouterr().out
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b\u202e\u2066]", out)
    assert "| <script>alert(1)</script>&amp;'\"\n| \\x1b[2J" in out
    assert "[bold red]markup[/]" in out
    assert "version 3, 1970-01-01 00:00:00 UTC: group 3.1, 1 of 2 completions by far, 1 versions stale" in out
    assert "reward 1, advantage +0.50, 3 tokens, finish: end, sampled from versions 2 to 3" in out
    assert command(tmp_path, "--json") == 0
    assert capsys.readouterr().out.isascii()


def test_the_command_chooses_the_newest_a_version_or_the_extremes(
    tmp_path: Path, file: SamplesFile, capsys: pytest.CaptureFixture[str]
) -> None:
    file.append(sample(version, version / 10, -version / 10) for version in range(1, 10))
    assert command(tmp_path, "--json", "--count", "2") == 0
    assert shown_versions(capsys) == [8, 9]
    assert command(tmp_path, "--json", "--version", "4") == 0
    assert shown_versions(capsys) == [4]
    for flag, sign in (("--best", 1), ("--worst", -1)):
        assert command(tmp_path, "--json", flag, "--count", "3") == 0
        groups = [GroupSample.parse(line) for line in capsys.readouterr().out.splitlines()]
        assert [[one.reward for one in group.completions] for group in groups] == [
            [pytest.approx(sign * version / 10)] for version in (9, 8, 7)
        ]
    with pytest.raises(SystemExit):
        command(tmp_path, "--count", "0")
    with pytest.raises(SystemExit):
        command(tmp_path, "--best", "--worst")


def test_a_directory_without_samples_is_answered_with_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(tmp_path) == 3
    assert "There is no learner's state in" in capsys.readouterr().err
    (tmp_path / "learner").mkdir()
    assert command(tmp_path) == 3
    assert "learner.samples_every_versions" in capsys.readouterr().err


def test_following_shows_the_newest_and_then_each_group_appended_once(
    tmp_path: Path, file: SamplesFile, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = SamplesFile(tmp_path / "learner" / FILE_NAME, file_bytes=600)
    file.append([sample(1, 1.0)])
    pauses = 0

    def pause(_: float) -> None:
        """Append across a rotation, and a line that is half written for one refresh."""
        nonlocal pauses
        pauses += 1
        line = sample(9, 1.0).to_json() + "\n"
        if pauses <= 3:
            file.append([sample(2 * pauses, 1.0), sample(2 * pauses + 1, 1.0)])
        elif pauses <= 5:
            with (tmp_path / "learner" / FILE_NAME).open("a") as half:
                half.write(line[:30] if pauses == 4 else line[30:])
        else:
            raise KeyboardInterrupt

    monkeypatch.setattr("learner.records.samples_command.time.sleep", pause)
    assert command(tmp_path, "--follow", "--json") == 0
    assert shown_versions(capsys) == [1, 2, 3, 4, 5, 6, 7, 9]
