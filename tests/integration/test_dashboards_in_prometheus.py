"""A real Prometheus scrapes every metric there is, and is asked what the dashboards and the alerts ask."""

import json
import math
import re
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from deploy.check import DEPLOY
from deploy.monitoring.grafana import plain_query
from deploy.monitoring.panels import DASHBOARDS
from deploy.needs import tool_path
from support.http_server import served
from support.metric_fleet import MetricFleet

pytestmark = pytest.mark.needs("prometheus")

MONITORING: Final = DEPLOY / "monitoring"
SCRAPES: Final = 4
"""A rate needs two; a first one may be cut short."""
WITHIN_S: Final = 60.0


class Prometheus:
    """A server that scrapes a made-up fleet four times a second."""

    def __init__(self, address: str) -> None:
        self._api = f"http://{address}/api/v1"

    def ask(self, path: str, **arguments: object) -> Any:
        """Return the data that the server answers with, or its complaint."""
        query = urllib.parse.urlencode(arguments)
        try:
            with urllib.request.urlopen(f"{self._api}/{path}?{query}", timeout=10) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            if error.code not in (400, 422):
                raise
            return json.load(error)["error"]

    def has_scraped(self) -> bool:
        try:
            data = self.ask("query", query="sum(sum_over_time(up[1m]))")
        except OSError:
            return False  # it starts
        return bool(data["result"]) and float(data["result"][0]["value"][1]) >= SCRAPES


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    folder = tmp_path_factory.mktemp("prometheus")
    fleet = MetricFleet()
    # Made before they are asked for: a scrape that takes too long takes all series away.
    expositions = [fleet.next_exposition() for _ in range(SCRAPES)]

    def answer(request: BaseHTTPRequestHandler, _: bytes) -> None:
        request.send_response(200)
        request.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
        request.end_headers()
        request.wfile.write(expositions.pop(0) if len(expositions) > 1 else expositions[0])

    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with served("GET", answer) as hub:
        command = _command(folder, hub=hub.removeprefix("http://"), address=address)
        with (folder / "log").open("w") as log, subprocess.Popen(command, stderr=log) as process:
            try:
                server = Prometheus(address)
                deadline_s = time.monotonic() + WITHIN_S
                while not server.has_scraped():
                    assert time.monotonic() < deadline_s, (folder / "log").read_text()
                    time.sleep(0.1)
                yield server
            finally:
                process.terminate()


def _command(folder: Path, *, hub: str, address: str) -> list[str]:
    """Return the command of a server with this repository's configuration, faster and with another target."""
    config = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "250ms", "evaluation_interval": "250ms"}
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [hub]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    shutil.copy(MONITORING / "rules.yml", folder)
    program = tool_path("prometheus")
    assert program is not None, "deploy/needs.py looked for it"
    return [
        program,
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
        "--log.level=warn",
    ]


def test_each_query_of_a_panel_finds_series_with_the_labels_of_its_legend(prometheus: Prometheus) -> None:
    # Subqueries of a minute are answered at whole minutes.
    at_s = 60 * math.ceil(time.time() / 60)
    faults = {}
    for dashboard in DASHBOARDS:
        for panel in (panel for row in dashboard.rows.values() for panel in row):
            for legend, query in panel.queries.items():
                data = prometheus.ask("query", query=plain_query(query), time=at_s)
                found = [] if isinstance(data, str) else data["result"]
                wanted = set(re.findall(r"{{(\w+)}}", legend))
                if not any(wanted <= series["metric"].keys() for series in found):
                    faults[f"{dashboard.name}: {panel.title}: {legend}"] = data
    assert faults == {}, "\n".join(f"{where}: {data}" for where, data in faults.items())


def test_every_alert_rule_can_be_worked_out_over_the_series_of_a_whole_fleet(prometheus: Prometheus) -> None:
    rules: list[dict[str, Any]] = []
    deadline_s = time.monotonic() + WITHIN_S
    while not rules or any(rule["health"] == "unknown" for rule in rules):
        assert time.monotonic() < deadline_s
        rules = [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]
        time.sleep(0.1)
    assert {rule["name"]: rule["lastError"] for rule in rules if rule["health"] != "ok"} == {}
