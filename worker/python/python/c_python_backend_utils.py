"""Aliases for models that import the native module of Triton's Python backend."""

from pharos_worker._native import (
    InferenceRequest,
    InferenceResponse,
    InferenceResponseSender,
    InferenceTrace,
    Metric,
    PreferredMemory,
    ResponseIterator,
    Tensor,
    TritonError,
    TritonModelException,
    is_model_ready,
    load_model,
    unload_model,
)
from pharos_worker.custom_metrics import MetricFamily, MetricKind
from pharos_worker.logger import Logger
from triton_python_backend_utils import TRITONSERVER_MEMORY_CPU, TRITONSERVER_MEMORY_GPU

COUNTER, GAUGE, HISTOGRAM = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM

__all__ = [
    "COUNTER", "GAUGE", "HISTOGRAM", "InferenceRequest", "InferenceResponse", "InferenceResponseSender", "InferenceTrace",
    "Logger", "Metric", "MetricFamily", "MetricKind", "PreferredMemory", "ResponseIterator", "TRITONSERVER_MEMORY_CPU",
    "TRITONSERVER_MEMORY_GPU", "Tensor", "TritonError", "TritonModelException", "is_model_ready", "load_model", "unload_model",
]
