"""Write the Grafana dashboards from ``panels.py``: ``python -m deploy.monitoring.grafana``.

A test holds ``dashboards/*.json`` to what this makes.
"""

import json
from pathlib import Path
from typing import Any, Final

from deploy.monitoring.panels import DASHBOARDS, Dashboard, Kind, Panel

FOLDER: Final = Path(__file__).parent / "dashboards"

_WIDTH: Final = 24
"""Columns of Grafana's grid."""
_PANEL: Final = {"w": 8, "h": 8}
_PROMETHEUS: Final = {"type": "prometheus", "uid": "${datasource}"}
_TAG: Final = "heterorl"


def texts() -> dict[str, str]:
    """Return the text of each file of the folder, by name."""
    return {f"{dashboard.name}.json": _text(dashboard) for dashboard in DASHBOARDS}


def plain_query(expression: str) -> str:
    """Return a panel's PromQL as Grafana sends it, its variables replaced by values."""
    values = {"$__rate_interval": "5m", "$__range": "1h", "$node": ".*", "$goal": "0.9"}
    for variable, value in values.items():
        expression = expression.replace(variable, value)
    return expression


def _text(dashboard: Dashboard) -> str:
    whole = {
        "uid": f"{_TAG}-{dashboard.name}",
        "title": f"heterorl: {dashboard.name}",
        "description": dashboard.text,
        "tags": [_TAG],
        "links": [{"title": "heterorl", "type": "dashboards", "tags": [_TAG], "keepTime": True}],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": _variables(dashboard)},
        "panels": [],
    }
    # A line a panel, for people who compare two versions.
    panels = ",\n".join(f"    {json.dumps(panel)}" for panel in _panels(dashboard))
    return json.dumps(whole, indent=2).replace('"panels": []', f'"panels": [\n{panels}\n  ]') + "\n"


def _variables(dashboard: Dashboard) -> list[dict[str, Any]]:
    variables: list[dict[str, Any]] = [
        {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
        {
            "name": "node", "label": "Peer", "type": "query", "datasource": _PROMETHEUS,
            "query": "label_values(heterorl_coordinator_peer_lag_seconds, node)",
            "refresh": 2, "multi": True, "includeAll": True, "allValue": ".*",
        },
        {"name": "goal", "label": "Goal (reward)", "type": "textbox", "query": "0.9"},
    ]  # fmt: skip
    queries = [query for row in dashboard.rows.values() for panel in row for query in panel.queries.values()]
    used = [one for one in variables if any(f"${one['name']}" in query for query in queries)]
    return variables[:1] + used


def _panels(dashboard: Dashboard) -> list[dict[str, Any]]:
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in dashboard.rows.items():
        place = {"x": 0, "y": y, "w": _WIDTH, "h": 1}
        panels.append({"id": len(panels) + 1, "type": "row", "title": title, "collapsed": False,
                       "gridPos": place, "panels": []})  # fmt: skip
        y += 1
        for number, panel in enumerate(row):
            x = number * _PANEL["w"] % _WIDTH
            y += _PANEL["h"] if number and x == 0 else 0
            panels.append({"id": len(panels) + 1, **_panel(panel), "gridPos": {"x": x, "y": y, **_PANEL}})
        y += _PANEL["h"]
    return panels


def _panel(panel: Panel) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit}
    if panel.kind is Kind.LINES:
        defaults["custom"] = {"fillOpacity": 10, "showPoints": "never"}
        if panel.from_zero:
            defaults["custom"]["axisSoftMin"] = 0
        if panel.unit == "percentunit":
            defaults["max"] = 1
    return {
        "type": panel.kind.value,
        "title": panel.title,
        "description": panel.text,
        "datasource": _PROMETHEUS,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + number), "expr": query, "legendFormat": legend, **_FORMS[panel.kind]}
            for number, (legend, query) in enumerate(panel.queries.items())
        ],
    }


_FORMS: Final[dict[Kind, dict[str, Any]]] = {
    Kind.LINES: {},
    Kind.HEAT: {"format": "heatmap"},
    Kind.NUMBER: {"instant": True},
}


def main() -> None:
    """Write the files, and remove those of dashboards that are no more."""
    written = texts()
    for old in FOLDER.glob("*.json"):
        if old.name not in written:
            old.unlink()
    for name, text in written.items():
        (FOLDER / name).write_text(text)


if __name__ == "__main__":
    main()
