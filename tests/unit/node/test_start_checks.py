"""A dry run finds what a start would stumble over, all of it at once, without torch."""

import shutil
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from learner.config import LearnerConfig
from node.checks.check import DRY_RUN, Finding, Grade, examine
from node.checks.start_checks import start_checks
from node.config.settings import NodeConfig, NodeSection, TelemetrySection
from node.coordinator.config import CoordinatorConfig
from node.coordinator.data.row_sources import open_rows
from node.coordinator.ledger.ledger_file import Ledger
from node.coordinator.work.balance import Transaction
from node.coordinator.work.slots.slot import Slot, SlotState
from node.enrolment.init_run import init_run
from node.enrolment.tokens import issue_token
from node.errors import ConfigError
from node.values.roles import Role
from sampler.config import SamplerConfig, VerifierConfig
from support.byte_tokenizer import make_byte_tokenizer
from support.identity import MadeRun, make_run
from support.model_files import write_model_files
from support.present import present

NOW_S = time.time()


@pytest.fixture
def made(tmp_path: Path) -> MadeRun:
    return make_run(tmp_path, now=NOW_S)


def sampler(made: MadeRun, directory: Path, **node: Any) -> NodeConfig:
    """Return a configuration of a sampler that is about to enrol."""
    values: dict[str, Any] = {
        "state_dir": directory / "state",
        "run_file": made.directory / "run.json",
        "coordinator": "hub:7700",
        "token_file": directory / "token",
    }
    return NodeConfig(
        node=NodeSection(**(values | node)),
        telemetry=TelemetrySection(),
        roles={"sampler": SamplerConfig(model_dir=write_model_files(directory / "model"))},
    )


def configured(made: MadeRun, **roles: Any) -> NodeConfig:
    """Return a configuration of roles that share the run's directory."""
    return NodeConfig(
        node=NodeSection(state_dir=made.directory), telemetry=TelemetrySection(), roles=dict(roles)
    )


def coordinator(made: MadeRun, **values: Any) -> NodeConfig:
    """Return a configuration of the run's coordinator; of addition unless ``values`` name a task."""
    values = values or {"task": "addition", "prompts": 100}
    return configured(made, coordinator=CoordinatorConfig.model_validate(values))


def model_with_tokenizer(directory: Path) -> Path:
    """Return a directory that looks like a model's, with a tokenizer of bytes; torch is not loaded for it."""
    return make_byte_tokenizer(write_model_files(directory), template=None)


def write_token(made: MadeRun, directory: Path, *, mode: int = 0o600, **changes: Any) -> None:
    values = {"role": Role.SAMPLER, "node_id": None, "address": "hub:7701", "now": NOW_S} | changes
    path = directory / "token"
    path.write_text(issue_token(made.authority, **values))
    path.chmod(mode)


def findings_of(config: NodeConfig, *roles: Role) -> list[Finding]:
    return list(examine(start_checks(config, roles, now=NOW_S), needs=DRY_RUN))


def faults(config: NodeConfig, *roles: Role, warned: list[str] | None = None) -> list[str]:
    findings = findings_of(config, *roles)
    if warned is not None:
        warned += [f"{one.what}. {one.fix}" for one in findings if one.grade is Grade.WARN]
    return [str(one.fault) for one in findings if one.fault is not None]


def test_a_sampler_that_would_start_has_no_faults(made: MadeRun, tmp_path: Path) -> None:
    write_token(made, tmp_path)
    warned: list[str] = []
    assert faults(sampler(made, tmp_path), Role.SAMPLER, warned=warned) == []
    assert warned == []
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(
    ("token", "said"),
    [
        ({"now": NOW_S - 7200, "lifetime_s": 3600.0}, "expired at 20"),
        ({"role": Role.RELAY}, "The token is for a relay, this node is a sampler"),
        ({"node_id": "other"}, "is for other. Leave node.node_id out"),
        ({"mode": 0o666}, "may be replaced by others: the file has mode 666"),
    ],
)
def test_a_token_that_would_be_refused_is_found(
    made: MadeRun, tmp_path: Path, token: dict[str, Any], said: str
) -> None:
    write_token(made, tmp_path, **token)
    (found,) = faults(sampler(made, tmp_path, node_id="mine"), Role.SAMPLER)
    assert said in found


def test_a_token_that_others_may_read_is_a_warning(made: MadeRun, tmp_path: Path) -> None:
    write_token(made, tmp_path, mode=0o644)
    warned: list[str] = []
    assert faults(sampler(made, tmp_path), Role.SAMPLER, warned=warned) == []
    assert "has mode 644: others on this machine may read the token" in warned[0]


@pytest.mark.parametrize(("most", "is_enough"), [(1024, False), (4096, True)])
def test_a_hub_that_may_open_too_few_files_is_a_warning(
    made: MadeRun, monkeypatch: pytest.MonkeyPatch, most: int, is_enough: bool
) -> None:
    monkeypatch.setattr("node.system.descriptors.hard_limit", lambda: most)
    warned: list[str] = []
    faults(coordinator(made), Role.COORDINATOR, warned=warned)
    if is_enough:
        assert warned == []
    else:
        assert "may have 1024 files open, which is room for 208 peers" in warned[0]
        assert "concurrency_groups lets work at once 256. Raise the hard limit" in warned[0]


def test_all_faults_come_at_once(made: MadeRun, tmp_path: Path) -> None:
    config = sampler(made, tmp_path)
    (tmp_path / "model" / "tokenizer.json").unlink()
    found = faults(config, Role.SAMPLER, Role.COORDINATOR)
    for said in (
        f"There is no coordinator's certificate in {tmp_path}/state/coordinator/identity",
        f"{tmp_path}/token cannot be read: No such file or directory",
        f"{tmp_path}/model has no tokenizer.json",
    ):
        assert any(said in fault for fault in found), (said, found)


def test_a_verifier_needs_no_weights(made: MadeRun, tmp_path: Path) -> None:
    write_token(made, tmp_path)
    base = sampler(made, tmp_path)
    config = replace(base, roles={**base.roles, "verifier": VerifierConfig(model_dir=tmp_path / "model")})
    (tmp_path / "model" / "model.safetensors").unlink()
    assert not [fault for fault in faults(config, Role.VERIFIER) if "model" in fault]
    assert [fault for fault in faults(config, Role.SAMPLER) if "has no model.safetensors" in fault]


def test_a_state_directory_that_cannot_be_made_is_found(made: MadeRun, tmp_path: Path) -> None:
    (tmp_path / "state").touch()
    write_token(made, tmp_path)
    found = faults(sampler(made, tmp_path), Role.SAMPLER)
    assert f"{tmp_path}/state/sampler cannot be made: {tmp_path}/state is not a directory" in found[0]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("config.json", b"[]", "config.json is not a JSON object"),
        ("config.json", b"{", "is damaged"),
        ("model.safetensors", b"\xff" * 9, "is damaged"),
        ("model.safetensors", b"", "is damaged"),
    ],
)
def test_a_damaged_model_directory_is_found_by_what_one_sees_without_torch(
    made: MadeRun, tmp_path: Path, name: str, content: bytes, said: str
) -> None:
    write_token(made, tmp_path)
    config = sampler(made, tmp_path)
    (tmp_path / "model" / name).write_bytes(content)
    (found,) = faults(config, Role.SAMPLER)
    assert said in found
    assert "sampler.model_dir is a directory on this machine with" in found


def test_a_model_whose_index_names_a_shard_that_is_not_there_is_found(made: MadeRun, tmp_path: Path) -> None:
    write_token(made, tmp_path)
    config = sampler(made, tmp_path)
    (tmp_path / "model" / "model.safetensors").unlink()
    (tmp_path / "model" / "model.safetensors.index.json").write_text('{"weight_map": {"w": "shard-1"}}')
    (found,) = faults(config, Role.SAMPLER)
    assert f"{tmp_path}/model/shard-1 cannot be read: No such file or directory" in found


def test_tls_that_is_off_towards_another_machine_is_a_fault_of_the_configuration(
    made: MadeRun, tmp_path: Path
) -> None:
    (fault,) = filter(
        None, (one.fault for one in findings_of(sampler(made, tmp_path, tls=False), Role.SAMPLER))
    )
    assert isinstance(fault, ConfigError)
    assert (fault.key, fault.value) == ("node.coordinator", "hub:7700")


def test_a_learner_without_its_signing_key_or_with_anothers_is_found(tmp_path: Path) -> None:
    init_run(tmp_path / "run", run_id="r", hosts=[], now=NOW_S)
    init_run(tmp_path / "other", run_id="r", hosts=[], now=NOW_S)
    config = NodeConfig(node=NodeSection(state_dir=tmp_path / "run"), telemetry=TelemetrySection())
    key = tmp_path / "run" / "learner" / "signing.key"
    key.write_bytes((tmp_path / "other" / "learner" / "signing.key").read_bytes())
    assert "is not the key that run r is signed with" in faults(config, Role.LEARNER)[0]
    key.unlink()
    assert f"{key} cannot be read: No such file or directory" in faults(config, Role.LEARNER)[0]


def test_a_package_that_is_configured_and_not_installed_is_found_with_the_command_that_installs_it(
    made: MadeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"prompt": "1+1=", "answer": "2"}]), rows)
    config = configured(
        made,
        coordinator=CoordinatorConfig.model_validate({"task": "jsonl", "data": {"file": rows}}),
        learner=LearnerConfig(
            model_dir=write_model_files(tmp_path / "model"),
            learning_rate=1e-3,
            tensorboard_dir=tmp_path / "t",
            wandb_project="p",
        ),
    )
    assert faults(config, Role.COORDINATOR) == []
    for package in ("tensorboard", "wandb", "pyarrow"):
        monkeypatch.setitem(sys.modules, package, None)
    found = [fault for fault in faults(config, Role.COORDINATOR, Role.LEARNER) if "not installed" in fault]
    assert len(found) == 3
    assert "coordinator.data.file" in found[0]
    assert "pip install 'heterorl-node[data]'" in found[0]
    assert "learner.tensorboard_dir" in found[1]
    assert found[2] == (
        "learner.wandb_project = 'p' (from the configuration): needs the package wandb, which is not "
        "installed. "
        "pip install 'heterorl-node[wandb]', or change the setting."
    )


def test_data_that_is_not_there_is_found(made: MadeRun, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    config = coordinator(made, task="jsonl", data={"file": file})
    (found,) = faults(config, Role.COORDINATOR)
    assert str(file) in found
    file.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    assert faults(config, Role.COORDINATOR) == []


@pytest.mark.parametrize(
    ("rows", "data", "said"),
    [
        ('{"question": "1+1=", "answer": "2"}\n', {}, "no such column: its first row has question, answer"),
        (
            '{"prompt": "1", "answer": "2"}\n' * 3 + '{"prompt": "1"}\n' * 2,
            {},
            "2 of 5 rows cannot be used: 2 as row 3 of rows.jsonl, whose column 'answer' is missing: "
            "the row has prompt (the first row of a file is row 0). Correct or remove these rows",
        ),
        ('{"prompt": "1+1="\n', {}, "line 1 of rows.jsonl is not JSON"),
        ('{"prompt": "1", "answer": "2"}\n', {"evaluation_rows": 1}, "leaves no row to train on"),
    ],
)
def test_data_that_a_start_would_refuse_is_found(
    made: MadeRun, tmp_path: Path, rows: str, data: dict[str, Any], said: str
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(rows)
    (found,) = faults(coordinator(made, task="jsonl", data={"file": file, **data}), Role.COORDINATOR)
    assert said in found


def test_each_check_says_what_is_right(made: MadeRun, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "1+1=", "answer": "2"}\n' * 3)
    config = coordinator(made, task="jsonl", data={"file": file}, task_options={"grader": "number"})
    findings = findings_of(config, Role.COORDINATOR)
    assert {one.grade for one in findings} == {Grade.OK}
    layers = ["state directory", "run file", "identity", "authority", "data"]
    assert [one.layer for one in findings] == layers
    assert findings[-1].what == (
        "all 3 rows of rows.jsonl (each can be a prompt and has an answer for the grader number)"
    )


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (["1", "2", "3"], "they are those that the run began with"),
        (["1", "2", "3", "4"], "they are those that the run began with"),
        (["1", "2"], "this run began with 3 rows"),
        (["1", "2", "4"], "this run began with 3 rows"),
    ],
)
def test_other_rows_than_the_run_began_with_are_found(
    made: MadeRun, tmp_path: Path, rows: list[str], said: str
) -> None:
    def write(answers: list[str]) -> CoordinatorConfig:
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(f'{{"prompt": "x", "answer": "{answer}"}}\n' for answer in answers))
        return CoordinatorConfig.model_validate({"task": "jsonl", "data": {"file": file}})

    data = present(write(["1", "2", "3"]).data)
    began = open_rows(data, scratch=tmp_path)
    with closing(Ledger.open(made.directory / "coordinator" / "ledger.sqlite", run_id="r")) as ledger:
        slot = Slot(0, 0, SlotState.AVAILABLE, attempts=(), granted=0)
        ledger.record(Transaction(slots=(slot,), facts=(began.seen,)))
        began.close()
        # As it would be found beside a coordinator that runs.
        *_, last = findings_of(configured(made, coordinator=write(rows)), Role.COORDINATOR)
    assert last.layer == "data"
    assert said in last.what


def test_rows_that_are_too_long_for_the_model_are_a_warning_that_names_keys_that_help(
    made: MadeRun, tmp_path: Path
) -> None:
    file, model_dir = tmp_path / "rows.jsonl", model_with_tokenizer(tmp_path / "base")
    file.write_text('{"prompt": "1", "answer": "2"}\n{"prompt": "%s", "answer": "2"}\n' % ("1+" * 50))
    data = {"task": "jsonl", "data": {"file": file}, "task_options": {"max_prompt_tokens": 40}}
    write_token(made, tmp_path)
    roles = {
        "coordinator": CoordinatorConfig.model_validate(data),
        "sampler": SamplerConfig(model_dir=model_dir),
    }
    config = replace(sampler(made, tmp_path), roles=roles)
    warned: list[str] = []
    faults(config, Role.COORDINATOR, Role.SAMPLER, warned=warned)
    assert warned == [
        "1 of 2 prompts have more than 40 tokens, which is what model, max_new_tokens and max_prompt_tokens "
        "leave; the first is row 1 with 100. They are set aside one by one during the run: shorten or remove "
        "these rows, or lower coordinator.max_new_tokens. "
    ]


def test_graders_that_cannot_be_imported_and_a_template_that_does_not_render_are_found(
    made: MadeRun, tmp_path: Path
) -> None:
    write_token(made, tmp_path)
    base, model_dir = sampler(made, tmp_path), model_with_tokenizer(tmp_path / "base")
    graders = ("support.graded_texts:share_of_digits", "support.graded_texts:none")
    roles = {"sampler": SamplerConfig(model_dir=model_dir, allowed_graders=graders)}
    (found,) = faults(replace(base, roles=roles), Role.SAMPLER)
    assert "sampler.allowed_graders = 'support.graded_texts:none'" in found
    assert (
        "cannot be imported: AttributeError: module 'support.graded_texts' has no attribute 'none'" in found
    )
    chatty = shutil.copytree(model_dir, tmp_path / "chatty")
    (chatty / "chat_template.jinja").write_text("{{ raise_exception('only systems may speak') }}")
    (found,) = faults(replace(base, roles={"sampler": SamplerConfig(model_dir=chatty)}), Role.SAMPLER)
    assert (
        "does not render a question: the chat template refuses the prompt: only systems may speak (" in found
    )
