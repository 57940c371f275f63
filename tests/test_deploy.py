"""deploy/: the configuration of Prometheus, Grafana and Docker Compose.

tests/server/test_deploy.py compares it with a live scrape.
"""

import json
import re
import shutil
import subprocess

import pytest
import yaml

from tests.helpers import ROOT

DEPLOY = ROOT / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana/dashboards/tritium.json").read_text())
ALERTS = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
RULES = [rule for group in ALERTS["groups"] for rule in group["rules"]]
METRIC = re.compile(r"\b(?:tritium:|vllm:|nv_)\w+")


def used_metrics() -> set[str]:
    """The metrics in all expressions of panels and alerts."""
    expressions = [target["expr"] for panel in PANELS for target in panel["targets"]]
    expressions += [rule["expr"] for rule in RULES]
    names = [METRIC.findall(expression) for expression in expressions]
    assert all(found or "up{" in text for found, text in zip(names, expressions, strict=True))
    return {name for found in names for name in found}


def test_panels_have_positions_queries_and_legends():
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    titles = [panel["title"] for panel in DASHBOARD["panels"] if panel["type"] == "row"]
    assert titles == ["SLO", "Saturation", "Prefix reuse", "Cost", "Health"]
    positions = set()
    for panel in PANELS:
        position = panel["gridPos"]
        assert position["x"] + position["w"] <= 24
        positions.add((position["x"], position["y"]))
        for target in panel["targets"]:
            assert target["expr"].count("(") == target["expr"].count(")")
            assert target["legendFormat"]
    assert len(positions) == len(PANELS)


def test_alerts_have_a_severity_and_a_summary():
    assert len({rule["alert"] for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert set(rule) == {"alert", "expr", "for", "labels", "annotations"}
        assert re.fullmatch(r"\d+[sm]", rule["for"])
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"]["summary"]
        assert rule["expr"].count("(") == rule["expr"].count(")")


def test_mounted_files_exist():
    compose = yaml.safe_load((DEPLOY / "docker-compose.yml").read_text())
    for service in compose["services"].values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert (DEPLOY / source).exists() if source[0] == "." else source in compose["volumes"]
    prometheus = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
    (targets,) = prometheus["scrape_configs"][0]["static_configs"]
    assert targets["targets"] == ["tritium:8002"]
    assert [DEPLOY / "prometheus" / name for name in prometheus["rule_files"]] == [
        DEPLOY / "prometheus/alerts.yml"
    ]
    source = yaml.safe_load(
        (DEPLOY / "grafana/provisioning/datasources/prometheus.yml").read_text()
    )["datasources"][0]
    assert {panel["datasource"]["uid"] for panel in PANELS} == {source["uid"]}


LABEL = re.compile(r'(\w+)=~?"([^"$]+)"')


def used_labels() -> set[tuple[str, str]]:
    """(name, value) of every label that an expression selects."""
    expressions = [target["expr"] for panel in PANELS for target in panel["targets"]]
    expressions += [rule["expr"] for rule in RULES]
    return {
        (name, value)
        for expression in expressions
        for name, values in LABEL.findall(expression)
        for value in values.split("|")
        if name != "job"  # a label of Prometheus itself
    }


@pytest.mark.skipif(not shutil.which("promtool"), reason="no promtool on PATH")
def test_promtool_accepts_the_panels(tmp_path):
    """The panels' expressions as rules, with Grafana's variables replaced."""
    rules = [
        {
            "record": f"panel_{panel['id']}_{i}",
            "expr": target["expr"].replace("$model", ".*").replace("$__rate_interval", "1m"),
        }
        for panel in PANELS
        for i, target in enumerate(panel["targets"])
    ]
    path = tmp_path / "panels.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    subprocess.run(["promtool", "check", "rules", path], check=True, timeout=60)


@pytest.mark.skipif(not shutil.which("promtool"), reason="no promtool on PATH")
def test_promtool_accepts_the_rules():
    for arguments in (
        ["check", "rules", DEPLOY / "prometheus/alerts.yml"],
        ["check", "config", "--syntax-only", DEPLOY / "prometheus/prometheus.yml"],
    ):
        subprocess.run(["promtool", *arguments], check=True, timeout=60)
