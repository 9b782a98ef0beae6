"""Counts its requests in a metric family that another model shares, with different labels; a request can add a series."""

import json

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """One instance."""

    def initialize(self, args):
        self.family = pb_utils.MetricFamily("own_shared_total", "Of several models", pb_utils.MetricFamily.COUNTER)
        labels = {"writer": args["model_name"]} | ({"version": args["model_version"]} if "more" in args["model_name"] else {})
        self.counter = self.family.Metric(labels=labels)

    def execute(self, requests):
        for request in requests:
            self.counter.increment(1)
            labels = json.loads(json.loads(request.parameters()).get("labels", "null"))
            if labels is not None:
                self.family.Metric(labels=labels).increment(10)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", r.inputs()[0].as_numpy())]) for r in requests]
