"""What the dashboards are made of: boards of panels, and the expressions that they share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

Json = dict[str, Any]

SCHEMA_VERSION = 39
WIDTH = 24
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}

NODE = 'instance=~"$instance"'
STAGE = 'instance=~"$instance", stage=~"$stage", replica=~"$replica"'


class Board:
    """One dashboard; panels flow from left to right, and wrap."""

    def __init__(self, uid: str, title: str, description: str, variables: Sequence[Json]) -> None:
        self.uid, self.title, self.description, self.variables = uid, title, description, variables
        self.panels: list[Json] = []
        self._x = self._y = self._row_height = 0

    def row(self, title: str) -> None:
        """Begin a section."""
        self._wrap()
        self._add({"type": "row", "title": title, "collapsed": False, "panels": []}, WIDTH, 1)

    def panel(
        self,
        kind: str,
        title: str,
        text: str,
        unit: str,
        *targets: tuple[str, str],
        w: int = 8,
        h: int = 8,
        **options: Any,
    ) -> None:
        """A panel. targets: (expression, legend; of a table the name of its column).

        options: ``stack``, ``max``, ``steps`` of thresholds.
        """
        custom: Json = {}
        if kind == "timeseries":
            custom = {
                "drawStyle": "line",
                "lineWidth": 1,
                "fillOpacity": 25 if options.get("stack") else 10,
                "showPoints": "never",
                "spanNulls": False,
                "stacking": {"mode": "normal" if options.get("stack") else "none", "group": "A"},
            }
        defaults: Json = {"unit": unit, "custom": custom, "min": 0}
        if "max" in options:
            defaults["max"] = options["max"]
        steps = options.get("steps", [(None, "green")])
        defaults["thresholds"] = {"mode": "absolute", "steps": [{"value": v, "color": c} for v, c in steps]}
        made: Json = {
            "type": kind,
            "title": title,
            "description": text,
            "datasource": DATASOURCE,
            "fieldConfig": {"defaults": defaults, "overrides": []},
            "targets": [
                {
                    "refId": chr(65 + index),
                    "expr": expression,
                    "legendFormat": legend,
                    "datasource": DATASOURCE,
                    # A stat draws its line from the range.
                    "range": kind in ("timeseries", "stat"),
                    "instant": kind not in ("timeseries", "stat"),
                }
                | ({"format": "table"} if kind == "table" else {})
                for index, (expression, legend) in enumerate(targets)
            ],
            "options": _options(kind),
        }
        if kind == "table":
            made["transformations"] = _one_table([legend for _, legend in targets])
        self._add(made, w, h)

    def _wrap(self) -> None:
        self._x, self._y = 0, self._y + self._row_height
        self._row_height = 0

    def _add(self, made: Json, w: int, h: int) -> None:
        if self._x + w > WIDTH:
            self._wrap()
        made["id"] = len(self.panels) + 1
        made["gridPos"] = {"x": self._x, "y": self._y, "w": w, "h": h}
        self.panels.append(made)
        self._x += w
        self._row_height = max(self._row_height, h)

    def to_json(self) -> str:
        """The file's content."""
        board = {
            "uid": self.uid,
            "title": self.title,
            "description": self.description,
            "tags": ["stagecache"],
            "schemaVersion": SCHEMA_VERSION,
            "editable": True,
            "graphTooltip": 1,
            "refresh": "10s",
            "time": {"from": "now-1h", "to": "now"},
            "timezone": "browser",
            "templating": {"list": list(self.variables)},
            "links": [
                {
                    "type": "dashboards",
                    "tags": ["stagecache"],
                    "title": "stagecache",
                    "asDropdown": False,
                    "includeVars": True,
                    "keepTime": True,
                }
            ],
            "panels": self.panels,
        }
        return json.dumps(board, indent=1) + "\n"


def _options(kind: str) -> Json:
    if kind == "timeseries":
        return {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    if kind == "table":
        return {"showHeader": True}
    return {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "value", "graphMode": "area"}


def _one_table(columns: Sequence[str]) -> list[Json]:
    """Joins the targets of a table into one row for equal labels, and names the columns of values."""
    names = {f"Value #{chr(65 + index)}": name for index, name in enumerate(columns)}
    if len(columns) == 1:
        names = {"Value": columns[0]}
    hidden = dict.fromkeys(("Time", "__name__", "job"), True)
    return [
        {"id": "merge", "options": {}},
        {"id": "organize", "options": {"excludeByName": hidden, "indexByName": {}, "renameByName": names}},
    ]


def _variable(name: str, metric: str, matchers: str = "") -> Json:
    query = f"label_values({metric}{{{matchers}}}, {name})" if matchers else f"label_values({metric}, {name})"
    return {
        "name": name,
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
        "sort": 1,
    }


SOURCE: Json = {"name": "datasource", "type": "datasource", "query": "prometheus", "current": {}, "hide": 0}
INSTANCE = _variable("instance", "stagecache_build_info")
STAGES = [
    SOURCE,
    INSTANCE,
    _variable("stage", "stagecache_session_info", NODE),
    _variable("replica", "stagecache_session_info", f'{NODE}, stage=~"$stage"'),
]
BAD = [(None, "green"), (1, "red")]
FULL = [(None, "green"), (0.85, "orange"), (0.95, "red")]


def rate(metric: str, where: str, by: str = "", more: str = "") -> str:
    """sum of a counter's rate."""
    inner = f"rate({metric}{{{where}{', ' + more if more else ''}}}[$__rate_interval])"
    return f"sum by ({by}) ({inner})" if by else f"sum({inner})"


def quantile(q: float, metric: str, where: str, by: str = "") -> str:
    """A quantile of a histogram over the rate interval."""
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({q}, sum by ({labels}) (rate({metric}_bucket{{{where}}}[$__rate_interval])))"


def ratio(where: str, by: str) -> str:
    """Hit tokens of hit and prefilled tokens."""
    hits = rate("stagecache_hit_tokens_total", where, by)
    return f"{hits} / ({rate('stagecache_queried_tokens_total', where, by)} > 0)"


def a_step(where: str, by: str = "") -> str:
    """Mean time of begin, save and materialize together."""
    spent = rate("stagecache_engine_phase_seconds_sum", where, by)
    return f"{spent} / ({rate('stagecache_steps_total', where, by)} > 0)"


def mean(metric: str, where: str, by: str) -> str:
    """Mean of a histogram over the rate interval."""
    return f"{rate(metric + '_sum', where, by)} / ({rate(metric + '_count', where, by)} > 0)"
