import json
from pathlib import Path
from typing import Any

import pytest

from node.errors import StartupError
from node.identity.run_description import RunDescription
from support.identity import NOW_S, make_run
from support.refusals import cannot_start


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDescription:
    return make_run(tmp_path_factory.mktemp("run"), now=NOW_S).run


def test_a_run_is_read_back_whole_unless_a_bit_flipped_also_as_older_software_wrote_it(
    run: RunDescription, tmp_path: Path
) -> None:
    path = tmp_path / "copy.json"
    run.save(path)
    assert RunDescription.load(path) == run
    assert len(run.learner_public_key) == 32
    whole = path.read_bytes()
    for at in range(0, len(whole), 3):
        damaged = bytearray(whole)
        damaged[at] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(StartupError):
            RunDescription.load(path)
    path.write_text(run.model_dump_json(indent=2))
    assert RunDescription.load(path) == run


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"run_id": "Not A Name"}, "run_id"),
        ({"run_id": "name\n"}, "run_id"),
        ({"run_id": None}, "run_id"),
        ({"learner_public_key": "00" * 31}, "learner_public_key"),
        ({"learner_public_key": "zz" * 32}, "learner_public_key"),
        ({"ca_certificate_pem": "nonsense"}, "ca_certificate_pem"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_a_wrong_description_is_refused_by_the_name_of_what_is_wrong(
    run: RunDescription, tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    content = json.loads(run.model_dump_json()) | changes
    path = tmp_path / "run.json"
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
    with cannot_start(named, "run.json"):
        RunDescription.load(path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000])
def test_what_is_not_json_is_not_a_run_description(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "run.json").write_bytes(content)
    with cannot_start("run.json"):
        RunDescription.load(tmp_path / "run.json")


def test_a_missing_description_says_where_to_get_it(tmp_path: Path) -> None:
    with cannot_start("run.json", "heterorl-node init"):
        RunDescription.load(tmp_path / "run.json")
