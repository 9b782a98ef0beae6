"""Recordings of a real TorchServe's logs and scrapes."""

import re

from harness.server import ROOT

GOLDEN = ROOT / "tests/golden_torchserve"
SHIPPED = (ROOT / "src/metrics/testdata/torchserve.yaml").read_text()
"""The metrics.yaml that TorchServe ships."""
DECLARED = """  counter:
    - {name: InitializeCallCount, unit: count, dimensions: [*model_name, *level]}
    - {name: InferenceRequestCount, unit: count, dimensions: []}
    - {name: PreprocessCallCount, unit: count, dimensions: [*model_name]}
    - {name: PostprocessCallCount, unit: CallCount, dimensions: [*model_name, *level]}
  gauge:
    - {name: RequestBatchSize, unit: count, dimensions: [*model_name]}
    - {name: SizeOfImage, unit: kB, dimensions: [*model_name, *level]}
    - {name: HandlerTime, unit: ms, dimensions: [*model_name, *level]}
    - {name: PredictionTime, unit: ms, dimensions: [*model_name, *level]}
"""
"""The model metrics in the example's `metrics.yaml`; HandlerMethodTime and ExamplePercentMetric are missing there."""
DETECTED = """  counter:
    - {name: PreprocessCallCount, unit: count, dimensions: [*model_name]}
  gauge:
    - {name: RequestBatchSize, unit: count, dimensions: [*model_name]}
    - {name: HandlerTime, unit: ms, dimensions: [*model_name, *level]}
"""
"""The metrics in its `metrics_auto_detect.yaml`: TorchServe registers the others with their first sample."""


def kinds(text: str) -> dict:
    """Parses family -> type."""
    return dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.M))


def golden_scrape(mode: str) -> str:
    """Returns TorchServe's scrape; TorchServe writes a comma after the last label."""
    return (GOLDEN / mode / "metrics.txt").read_text().replace(",}", "}")
