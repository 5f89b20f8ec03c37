"""The alerts of alerts.py as a file of rules for Prometheus."""

import json
from collections.abc import Sequence

from penstock.telemetry.alerting import runbook
from penstock.telemetry.alerts import Rule, duration

HEAD = """\
# Written by `penstock alerts --rules` from the table in penstock/telemetry/alerts.py, with the objectives of
# the configuration: the same alerts as the server evaluates itself.
groups:
  - name: penstock
    rules:
"""


def rules_file(rows: Sequence[Rule]) -> str:
    """YAML; strings as in JSON, which is YAML too."""
    return HEAD + "".join(_rule(rule) for rule in rows)


def _rule(rule: Rule) -> str:
    lines = [f"- alert: {rule.name}", "  expr: |"]
    lines += [f"    {line}" for line in rule.promql().splitlines()]
    if rule.for_s:
        lines.append(f"  for: {duration(rule.for_s)}")
    lines.append("  labels:")
    for label, value in (("severity", rule.severity), *rule.labels):
        lines.append(f"    {label}: {json.dumps(value)}")
    lines.append("  annotations:")
    lines.append(f"    summary: {json.dumps(rule.summary)}")
    lines.append(f"    runbook: {json.dumps(runbook(rule.name))}")
    return "".join(f"      {line}\n" for line in lines)
