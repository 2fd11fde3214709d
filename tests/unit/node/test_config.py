from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from learner.config import LearnerConfig
from node.config.setting_faults import REMOVED
from node.config.setting_sources import read_flags
from node.config.settings import Resolved, load
from node.errors import ConfigError, NotReadyError

STATE = {"node.state_dir": "/state"}


def resolve(
    *,
    roles: Sequence[str] = (),
    files: Sequence[Path] = (),
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, str] = STATE,
) -> Resolved:
    assignments = [f"{key}={value}" for key, value in flags.items()]
    return load(roles=roles, files=files, environ=environ or {}, flags=read_flags({}, assignments))


def faults(**arguments: Any) -> dict[str, ConfigError]:
    with pytest.raises(NotReadyError) as caught:
        resolve(**arguments)
    return {fault.key: fault for fault in caught.value.faults if isinstance(fault, ConfigError)}


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def value_and_source(resolved: Resolved, name: str) -> tuple[object, str]:
    return next((value.value, value.source) for value in resolved.values if value.name == name)


def test_flags_win_over_the_environment_over_later_files_over_earlier_files_over_defaults(
    tmp_path: Path,
) -> None:
    first = write(tmp_path / "1.toml", "[node]\nstate_dir='/1'\nrun_file='/1'\ntoken_file='/1'\nnode_id='n1'")
    second = write(tmp_path / "2.toml", "[node]\nstate_dir='/2'\nrun_file='/2'\ntoken_file='/2'")
    resolved = resolve(
        files=[first, second],
        environ={"HETERORL_NODE__STATE_DIR": "/environment", "HETERORL_NODE__RUN_FILE": "/environment"},
        flags={"node.state_dir": "/flag"},
    )
    assert value_and_source(resolved, "node.state_dir") == ("/flag", "flag --set")
    assert value_and_source(resolved, "node.run_file") == (
        "/environment",
        "environment HETERORL_NODE__RUN_FILE",
    )
    assert value_and_source(resolved, "node.token_file") == ("/2", f"{second} [node]")
    assert value_and_source(resolved, "node.node_id") == ("n1", f"{first} [node]")
    assert value_and_source(resolved, "node.drain_timeout_s") == (30.0, "default")


def test_the_run_file_lies_beside_the_state_unless_it_is_set() -> None:
    assert resolve().config.node.run_file == Path("/state/run.json")
    assert resolve(flags=STATE | {"node.run_file": "/elsewhere"}).config.node.run_file == Path("/elsewhere")


def test_text_is_read_as_what_its_key_holds() -> None:
    learner = {"learner.model_dir": "/m", "learner.learning_rate": "1e-3", "learner.betas": "[0.5, 0.75]"}
    config = resolve(
        flags=STATE | learner | {"node.tls": "false", "telemetry.http_listen": "[::1]:9000"},
        environ={"HETERORL_LEARNER__THREADS": "3"},
    ).config
    section = config.section(LearnerConfig)
    assert (section.model_dir, section.learning_rate, section.betas) == (Path("/m"), 1e-3, (0.5, 0.75))
    assert (section.threads, config.node.tls, config.telemetry.http_listen) == (3, False, "[::1]:9000")


def test_nothing_unsets_an_optional_key_and_is_an_error_for_any_other() -> None:
    assert resolve(flags=STATE | {"telemetry.http_listen": ""}).config.telemetry.http_listen is None
    assert faults(flags=STATE | {"node.drain_timeout_s": ""}).keys() == {"node.drain_timeout_s"}


def test_every_fault_of_every_source_is_reported_at_once(tmp_path: Path) -> None:
    not_toml = write(tmp_path / "bad.toml", "[node\n")
    loose = write(tmp_path / "loose.toml", "state_dir = '/s'")
    found = faults(
        files=[not_toml, loose],
        environ={"HETERORL_TELEMETRY__LOG_LEVEL": "loud"},
        flags={"node.drain_timeout_s": "-1", "learner.learning_rate": "2"},
    )
    assert found.keys() == {
        "--config",
        "state_dir",
        "node.state_dir",
        "node.drain_timeout_s",
        "telemetry.log_level",
        "learner.model_dir",
        "learner.learning_rate",
    }


def test_a_fault_has_key_value_source_rule_and_fix(tmp_path: Path) -> None:
    file = write(tmp_path / "run.toml", "[node]\nstate_dir='/s'\ndrain_timeout_s = -1")
    fault = faults(files=[file], flags={})["node.drain_timeout_s"]
    assert fault.value == -1
    assert fault.source == f"{file} [node]"
    assert fault.rule == "must be greater than 0"
    assert "the default is 30.0" in fault.fix


def test_the_faults_of_a_table_in_a_section_are_those_of_its_keys(tmp_path: Path) -> None:
    file = write(
        tmp_path / "run.toml",
        "[node]\nstate_dir='/s'\n[coordinator]\ntask='addition'\n"
        "[coordinator.evaluation]\nevery_version=5\nprompts=0\nmax_new_tokens='5 tokens'",
    )
    found = faults(files=[file], flags={})
    assert {name: (fault.value, fault.rule) for name, fault in found.items()} == {
        "coordinator.evaluation.every_version": (5, "[coordinator.evaluation] has no such key"),
        "coordinator.evaluation.every_versions": (None, "is required"),
        "coordinator.evaluation.prompts": (0, "must be greater than or equal to 1"),
        "coordinator.evaluation.max_new_tokens": ("5 tokens", "must be a plain number of tokens"),
    }
    assert "Did you mean every_versions" in found["coordinator.evaluation.every_version"].fix
    missing = found["coordinator.evaluation.every_versions"]
    assert missing.fix == (
        "Write it under [coordinator.evaluation] in a configuration file, or use "
        "--set coordinator.evaluation.every_versions=... or HETERORL_COORDINATOR__EVALUATION__EVERY_VERSIONS."
    )
    assert found["coordinator.evaluation.prompts"].source == f"{file} [coordinator]"
    (text,) = faults(
        files=[],
        flags=STATE
        | {"coordinator.task": "addition", "coordinator.evaluation": "{prompts = 0, every_versions = 1}"},
    ).values()
    assert (text.key, text.value) == ("coordinator.evaluation.prompts", 0)


def test_a_flag_or_a_variable_changes_one_key_of_a_table(tmp_path: Path) -> None:
    file = write(
        tmp_path / "run.toml",
        "[coordinator]\ntask='jsonl'\n[coordinator.data]\nfile='a.jsonl'\nevaluation_rows=3\n"
        "[coordinator.task_options]\ntemplate_arguments={first=1}",
    )
    resolved = resolve(
        files=[file],
        environ={"HETERORL_COORDINATOR__DATA__FILE": "environment.jsonl"},
        flags=STATE
        | {
            "coordinator.data.evaluation_rows": "9",
            "coordinator.task_options.template_arguments.enable_thinking": "false",
            "coordinator.task_options.system": "Add.",
            "sampler.model_dir": "/m",
            "sampler.engine": "torch",
            "sampler.engine_options.memory_bytes": "2000000",
        },
    )
    data, source = value_and_source(resolved, "coordinator.data")
    unset = dict.fromkeys(("subset", "evaluation_file", "evaluation_split"))
    assert data == {"file": "environment.jsonl", "split": "train", "evaluation_rows": 9, **unset}
    assert source == f"{file} [coordinator], environment HETERORL_COORDINATOR__DATA__FILE, flag --set"
    options, _ = value_and_source(resolved, "coordinator.task_options")
    assert options == {"template_arguments": {"first": 1, "enable_thinking": False}, "system": "Add."}
    engine, source = value_and_source(resolved, "sampler.engine_options")
    assert (engine, source) == ({"memory_bytes": 2_000_000}, "flag --set")


@pytest.mark.parametrize("key", REMOVED)
def test_a_key_that_a_release_took_away_is_refused_with_what_to_write_now(key: str) -> None:
    fault = faults(flags=STATE | {key: "1"}, roles=(key.partition(".")[0],))[key]
    release, fix = REMOVED[key]
    assert (fault.rule, fault.fix) == (f"was removed in {release}", fix)


@pytest.mark.parametrize(
    ("key", "value", "rule", "fix"),
    [
        ("node.drain_timeout", "5", "[node] has no such key", "drain_timeout_s, which is in seconds"),
        ("node.drain_timeout_ms", "5000", "[node] has no such key", "drain_timeout_s, which is in seconds"),
        ("node.stat_dir", "/s", "[node] has no such key", "Did you mean state_dir?"),
        ("telemetry.colour", "red", "has no such key", "Known keys are http_listen, log_format, log_level."),
        ("lerner.threads", "1", "lerner", "Did you mean [learner]?"),
        ("coordinator.data.fil", "x", "[coordinator.data] has no such key", "Did you mean file?"),
        ("coordinator.dta.file", "x", "[coordinator] has no such key", "Did you mean data?"),
        ("node.drain_timeout_s.x", "5", "[node] has no such key", "Did you mean drain_timeout_s, which is"),
        ("coordinator.evaluation.prompts", "5s", "must be a valid integer", "Change it where it is set."),
    ],
)
def test_a_wrong_key_is_answered_with_the_one_that_was_meant(
    key: str, value: str, rule: str, fix: str
) -> None:
    fault = faults(flags=STATE | {"coordinator.task": "addition", key: value})[key]
    assert rule in str(fault)
    assert fix in fault.fix
    assert (fault.source, fault.value) == ("flag --set", value)


@pytest.mark.parametrize("written", ["5s", "500 ms", "5 apples"])
def test_a_number_with_its_unit_is_answered_with_the_unit_of_the_key(written: str) -> None:
    fault = faults(flags=STATE | {"node.drain_timeout_s": written})["node.drain_timeout_s"]
    assert fault.rule == "must be a plain number of seconds"
    assert fault.fix == "Leave the unit out: the key's name has it."


def test_one_value_in_place_of_a_list_is_answered_with_the_list() -> None:
    model = {"sampler.model_dir": "/m", "sampler.allowed_graders": "mine:grade"}
    fault = faults(flags=STATE | model)["sampler.allowed_graders"]
    assert (fault.rule, fault.fix) == ("must be a list", 'Write ["mine:grade"].')


def test_one_underscore_too_few_is_a_fault_and_not_silence() -> None:
    fault = faults(environ={"HETERORL_NODE_TLS": "false"})["node.tls"]
    assert fault.fix == "Write HETERORL_NODE__TLS."


def test_variables_that_kubernetes_makes_of_service_names_are_not_ours() -> None:
    resolve(
        environ={"HETERORL_COORDINATOR_PORT": "tcp://10.0.0.1:7700", "HETERORL_NODE_SERVICE_HOST": "10.0.0.1"}
    )


def test_a_role_has_its_section_even_where_nothing_of_it_is_set() -> None:
    assert faults(roles=["learner"]).keys() == {
        "learner.model_dir",
        "learner.learning_rate",
        "node.coordinator",
    }


def test_a_rule_about_several_keys_names_what_was_set_and_where() -> None:
    flags = STATE | {"learner.model_dir": "/m", "learner.learning_rate": "1e-3", "learner.betas": "[0.9, 2]"}
    fault = faults(flags=flags)["learner"]
    assert "2.0" in fault.rule
    assert fault.source == "flag --set"


def test_whoever_joins_needs_the_coordinators_address_and_the_coordinator_does_not() -> None:
    assert "node.coordinator" in faults(roles=["learner"])
    assert "node.coordinator" not in faults(roles=["coordinator"], flags={})


def test_two_peers_in_one_process_cannot_share_a_name() -> None:
    both = {"node.node_id": "here", "node.coordinator": "hub:1"}
    assert "node.node_id" in faults(roles=["learner", "sampler"], flags=STATE | both)


@pytest.mark.parametrize("address", ["hub", "hub:0"])
def test_an_address_that_cannot_be_dialled_is_refused(address: str) -> None:
    assert faults(flags=STATE | {"node.coordinator": address}).keys() == {"node.coordinator"}


def test_a_missing_file_is_a_fault(tmp_path: Path) -> None:
    fault = faults(files=[tmp_path / "none.toml"])["--config"]
    assert "No such file" in fault.rule


@pytest.mark.parametrize("assignment", ["node.tls", "tls=false", "=x", ".tls=x", "node.=x"])
def test_an_assignment_that_is_not_section_key_value_is_a_fault(assignment: str) -> None:
    (fault,) = read_flags({}, [assignment])
    assert isinstance(fault, ConfigError)
    assert fault.value == assignment


def test_asking_for_the_section_of_a_role_that_is_not_there_fails() -> None:
    with pytest.raises(LookupError, match="LearnerConfig"):
        resolve().config.section(LearnerConfig)
