"""Every metric that a panel or an alert of deploy/ uses is there in a live scrape."""

from tests.server.harness import complete, until
from tests.test_deploy import used_metrics


def test_panels_and_alerts_use_metrics_that_exist(server):
    complete(server, "The capital of France is", sampling={"temperature": 0, "max_tokens": 3})

    def missing() -> set[str]:
        model = f'model="{server.model}"'
        there = {line.split("{")[0] for line in server.metrics() if model in line}
        return used_metrics() - there

    until(lambda: not missing())
