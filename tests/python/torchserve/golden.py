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
"""The metrics of models that the example's `metrics.yaml` declares; HandlerMethodTime and ExamplePercentMetric it does not."""
DETECTED = """  counter:
    - {name: PreprocessCallCount, unit: count, dimensions: [*model_name]}
  gauge:
    - {name: RequestBatchSize, unit: count, dimensions: [*model_name]}
    - {name: HandlerTime, unit: ms, dimensions: [*model_name, *level]}
"""
"""Those of its `metrics_auto_detect.yaml`: TorchServe registers the others by their first sample."""


def kinds(text: str) -> dict:
    """Family -> type."""
    return dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.M))


def golden_scrape(mode: str) -> str:
    """What TorchServe showed; the comma behind the last label is its own."""
    return (GOLDEN / mode / "metrics.txt").read_text().replace(",}", "}")
