"""The dashboards' files are what their code makes."""

from collections import Counter

import yaml

from deploy.monitoring import grafana
from deploy.monitoring.panels import DASHBOARDS


def test_the_files_are_what_the_code_makes() -> None:
    files = {path.name: path.read_text() for path in grafana.FOLDER.glob("*.json")}
    assert files == grafana.texts(), "python -m deploy.monitoring.grafana"


def test_the_component_of_kubernetes_has_every_file() -> None:
    component = yaml.safe_load((grafana.FOLDER / "kustomization.yaml").read_text())
    (generator,) = component["configMapGenerator"]
    assert sorted(generator["files"]) == sorted(grafana.texts())


def test_no_two_panels_of_a_dashboard_have_the_same_title() -> None:
    for dashboard in DASHBOARDS:
        titles = Counter(panel.title for row in dashboard.rows.values() for panel in row)
        assert titles.total() == len(titles), dashboard.name
