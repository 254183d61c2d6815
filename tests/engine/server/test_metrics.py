"""What an engine shows at /metrics, and that docs/alerts.md names nothing else."""

import re

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from engine.checksum.pending import PendingRecord
from engine.checksum.times import ChecksumTimes
from engine.checksum.verdict import NotCheckedReason, UnverifiedReason


@pytest.fixture
def shown(http, served_pair):
    """The samples of a consumer that has loaded: {(name, labels)}."""
    pair = served_pair()
    body, _ = pair.prefilled()
    assert http.within(http.ask(pair.d.app, body)).status == 200
    page = http.within(http.ask(pair.d.app, b"", method="GET", path="/metrics"))
    families = text_string_to_metric_families(page.data.decode())
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


@pytest.fixture(scope="module")
def alerts(root):
    return (root / "docs" / "alerts.md").read_text()


def names_in(text):
    """Metric names, as PromQL and the table write them."""
    found = set(re.findall(r"\bkvchaos_\w+", text))
    return found - {"kvchaos_positions_"}


def test_every_metric_of_the_alerts_page_is_shown(shown, alerts):
    names = {name for name, _ in shown}
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in names}
    missing = names_in(alerts) - names - families
    assert not missing
    assert len(names_in(alerts)) > 14


def test_every_metric_that_is_shown_is_on_the_alerts_page(shown, alerts):
    names = {re.sub(r"_(bucket|sum|count|created)$", "", name) for name, _ in shown if not name.endswith("_created")}
    assert names <= names_in(alerts)


def test_the_rules_are_rules(alerts):
    blocks = re.findall(r"```yaml\n(.*?)```", alerts, re.DOTALL)
    rules = [rule for block in blocks for group in yaml.safe_load(block)["groups"] for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules) > 8
    for rule in rules:
        assert names_in(rule["expr"]), rule["alert"]
        assert rule["annotations"]["summary"]
        assert rule["expr"].count("(") == rule["expr"].count(")")


def test_the_rules_that_prometheus_is_given_are_those_of_the_page(root, alerts):
    (block,) = re.findall(r"```yaml\n(.*?)```", alerts, re.DOTALL)
    assert yaml.safe_load((root / "deploy" / "alerts.yml").read_text()) == yaml.safe_load(block)


def test_the_label_values_of_the_rules_are_shown(shown, alerts):
    values = {value for _, labels in shown for _, value in labels}
    wanted = {v for group in re.findall(r'(?:verdict|finish_reason)=~?"([^"]+)"', alerts) for v in group.split("|")}
    # Reasons that have not occurred yet have no series: their rules divide rates, and none of them is by absence.
    assert wanted - values <= {"stop"}


def test_every_verdict_and_reason_is_there_before_it_has_happened(shown):
    """A counter that begins at 1 has no increase: the first mismatch would go unseen."""
    expected = {("mismatch", ""), ("verified", "")}
    expected |= {("unverified", str(reason)) for reason in UnverifiedReason}
    expected |= {("not_checked", str(reason)) for reason in NotCheckedReason}
    found = {
        tuple(dict(labels)[k] for k in ("verdict", "reason")): v
        for (n, labels), v in shown.items()
        if "loads_total" in n and labels
    }
    assert found.keys() == expected
    assert found["verified", ""] == 1
    assert sum(found.values()) == 1


def test_the_time_to_the_first_token(shown):
    assert shown["kvchaos_ttft_seconds_count", ()] == 1
    assert shown["kvchaos_ttft_seconds_sum", ()] > 0


def test_a_request_without_a_load_counts_as_none(http, served):
    http.within(http.ask(served.app, {"prompt": "a", "max_tokens": 1}))
    assert served.metric("loads_total", verdict="verified", reason="") == 0
    assert served.metric("loads_total", verdict="no_load", reason="") is None
    assert served.metric("requests_total", finish_reason="length") == 1


def test_measuring_checksums_waits_for_nothing():
    """The finaliser waits for the device as it did, once, and only then is its time taken."""
    waited = []

    class Ready:
        def synchronize(self):
            waited.append(times.wait_s)

    times = ChecksumTimes()
    record = PendingRecord("r", 0, 0, {}, Ready(), times)
    assert waited == []
    record.finalise()
    assert waited == [0.0]
    assert times.wait_s > 0
