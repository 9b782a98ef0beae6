"""Custom metrics: creates families of all kinds in `initialize`, and follows the instructions of a request (input `DO`, JSON:
arrays of a metric, a verb and its argument). `SEEN` has the result or the exception of each call."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """One instance."""

    def initialize(self, args):
        self.kinds = kinds = pb_utils.MetricFamily
        counter = kinds(name="asked_total", description="Requests that asked", kind=kinds.COUNTER)
        gauge = kinds(name="held", description="What is held", kind=kinds.GAUGE)
        histogram = kinds(name="waited_ms", description="How long it waited", kind=kinds.HISTOGRAM)
        bare = kinds(name="bare", description="Has no labels", kind=kinds.GAUGE)
        self.families = [counter, gauge, histogram, bare]
        self.metrics = {
            "counter a": counter.Metric(labels={"model": "measuring", "who": "a"}),
            "counter b": counter.Metric(labels={"model": "measuring", "who": "b"}),
            "gauge": gauge.Metric(labels={"model": "measuring"}),
            "gauge without labels": bare.Metric(),
            "histogram": histogram.Metric(labels={"model": "measuring"}, buckets=[0.5, 1.0, 10.0]),
        }

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        """Returns the outcome of each call."""
        acts = json.loads(pb_utils.get_input_tensor_by_name(request, "DO").as_numpy().flat[0])
        found = json.dumps([self.act(*act) for act in acts])
        text = np.array([found.encode()], np.object_)
        return pb_utils.InferenceResponse([pb_utils.Tensor("SEEN", text)])

    def act(self, name, verb, *arguments):
        """Calls a method of a metric, or creates a family or a metric."""
        try:
            if name == "family":
                kind = getattr(self.kinds, arguments[1])
                family = self.kinds(name=verb, description="Made by a request", kind=kind)
                metric = family.Metric(labels=arguments[2], **({"buckets": arguments[3]} if len(arguments) > 3 else {}))
                self.families.append(family)
                self.metrics[arguments[0]] = metric
                return "made"
            if name == "described":
                family = self.kinds(name=verb, description=arguments[0], kind=self.kinds.COUNTER)
                self.families.append(family)
                return family.Metric(labels=arguments[1]).increment(1)
            if verb == "drop":
                del self.metrics[name]
                return "dropped"
            return getattr(self.metrics[name], verb)(*arguments)
        except Exception as error:  # noqa: BLE001 (every exception is part of the answer)
            return f"{type(error).__name__}: {error}"
