from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from support import dashboards
from support.toy_engine import engine

from slotwise.observe.fold import Timelines
from slotwise.observe.metrics import Metrics

promtool = pytest.mark.skipif(not shutil.which("promtool"), reason="needs promtool, of Prometheus")

MIXTURE = engine()
MIXTURE.expert_layers = (0, 2)


def test_what_is_named_is_shown_from_the_start_with_its_labels() -> None:
    shown: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(Metrics("toy", MIXTURE, Timelines()).exposition().decode()):
        for sample in family.samples:
            shown.setdefault(sample.name, {"instance"}).update(sample.labels)
    shown["slotwise:admission_rejections_total"] = {"model_name", "instance", "reason"}  # none until there is one
    for expr in [*dashboards.queries(), *(rule["expr"] for rule in dashboards.alerts())]:
        named = dashboards.names(expr)
        assert named and named <= shown.keys(), expr
        assert dashboards.labels(expr) <= {"le"}.union(*(shown[name] for name in named)), expr


def test_everything_shown_is_described() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "metrics.md").read_text()
    families = text_string_to_metric_families(Metrics("toy", MIXTURE, Timelines()).exposition().decode())
    names = {family.name + "_total" * (family.type == "counter") for family in families}
    described = set(re.findall(r"`(?:slotwise:)?([a-z0-9_]+)(?:\{[a-z_]+\})?`", page))
    assert {name.removeprefix("slotwise:") for name in names} <= described


def test_panels_have_a_place_of_their_own_and_say_what_they_show() -> None:
    panels = dashboards.board()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 20
    places = [(panel["gridPos"]["x"] + x, panel["gridPos"]["y"] + y)
              for panel in panels for x in range(panel["gridPos"]["w"]) for y in range(panel["gridPos"]["h"])]
    assert len(set(places)) == len(places) and max(x for x, _ in places) < 24
    for panel in panels:
        assert panel["type"] == "row" or (panel["description"] and panel["targets"]), panel["title"]


def test_alerts_tell_a_person_something() -> None:
    for rule in dashboards.alerts():
        assert rule["labels"]["severity"] in ("critical", "warning", "info") and rule["annotations"]["summary"]


@promtool
def test_prometheus_takes_every_query(tmp_path: Path) -> None:
    rules = [{"record": f"q{number}", "expr": expr} for number, expr in enumerate(dashboards.queries())]
    (tmp_path / "queries.yaml").write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    for path in (tmp_path / "queries.yaml", dashboards.FOLDER / "alerts.yaml"):
        checked = subprocess.run(["promtool", "check", "rules", str(path)], capture_output=True, text=True)
        assert checked.returncode == 0, checked.stderr


@promtool
def test_alerts_fire_when_they_should_and_only_then() -> None:
    tests = Path(__file__).with_name("alerts.yaml")
    run = subprocess.run(["promtool", "test", "rules", str(tests)], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
