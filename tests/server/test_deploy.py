"""A live scrape has every metric that the panels and alerts of deploy/ use."""

from tests.test_deploy import used_labels, used_metrics
from tritium.loadtests.harness import complete, until


def test_panels_and_alerts_use_metrics_that_exist(server):
    complete(server, "The capital of France is", sampling={"temperature": 0, "max_tokens": 3})

    def ours() -> list[str]:
        return [line for line in server.metrics() if f'model="{server.model}"' in line]

    until(lambda: used_metrics() <= {line.split("{")[0] for line in ours()})
    lines = ours()
    for name, value in used_labels():
        assert any(f'{name}="{value}"' in line for line in lines), (name, value)
