"""Requests to TorchServe's endpoints; the answers of a real TorchServe are in `golden_torchserve.json`. The rows of a setup
are sent in this order."""

from torchserve.rows import FAILURES, INFERENCE, SEQUENCES
from torchserve.rows_management import GRPC, MANAGEMENT, SMALL
from torchserve.rows_metrics import METRICS, NO_DIMENSIONS, PROMETHEUS

ROWS = [*INFERENCE, *SEQUENCES, *METRICS, *GRPC, *MANAGEMENT, *FAILURES, *PROMETHEUS, *SMALL, *NO_DIMENSIONS]
