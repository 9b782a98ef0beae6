"""Requests to TorchServe's endpoints, whose answers by a real TorchServe are in `golden_torchserve.json`. Rows of a
setup are asked in this order."""

from torchserve.rows import FAILURES, INFERENCE, SEQUENCES
from torchserve.rows_management import GRPC, MANAGEMENT, SMALL
from torchserve.rows_metrics import METRICS, NO_DIMENSIONS, PROMETHEUS

ROWS = [*INFERENCE, *SEQUENCES, *METRICS, *GRPC, *MANAGEMENT, *FAILURES, *PROMETHEUS, *SMALL, *NO_DIMENSIONS]
