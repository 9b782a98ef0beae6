"""Ends, interrupts, forks or prints from its own process, as the request's parameter `do` selects."""

import json
import os
import signal
import sys

import triton_python_backend_utils as pb_utils
from pharos_worker import metrics


class TritonPythonModel:
    """One instance."""

    def initialize(self, args):
        self.family = pb_utils.MetricFamily("own_parents", "Of the parent", pb_utils.MetricFamily.COUNTER)
        self.counter = self.family.Metric(labels={})

    def execute(self, requests):
        for request in requests:
            told = json.loads(request.parameters())
            getattr(self, told.get("do", "nothing"))(told)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", r.inputs()[0].as_numpy())]) for r in requests]

    def nothing(self, told):
        pass

    def exit(self, told):
        sys.exit(told["status"])

    def os_exit(self, told):
        os._exit(3)

    def kill(self, told):
        os.kill(os.getpid(), signal.SIGKILL)

    def interrupt(self, told):
        os.kill(os.getpid(), signal.SIGINT)

    def print(self, told):
        print("printed by the model")
        print("and to standard error", file=sys.stderr)

    def fork(self, told):
        """Forks a child that uses inherited metrics and returns from execute."""
        if os.fork() == 0:
            self.counter.increment(1)
            try:
                pb_utils.MetricFamily("own_forked", "Of a child", pb_utils.MetricFamily.COUNTER).Metric(labels={})
            except pb_utils.TritonModelException as error:
                print(error)

    def deep(self, told):
        self.deeper(told)

    def deeper(self, told):
        raise ValueError("deep down")

    def record(self, told):
        metrics.add_counter("Orders", "Count", ["shop"]).add_or_update(2, ["north"])
        metrics.get_metric("Level", "gauge").add_or_update(7)
        metrics.add_or_update("Orders", 3, ["south"])
        metrics.flush()

    def undefined(self, told):
        metrics.add_counter("Undefined", "Count", ["shop"])


def nanoseconds(count=2000):
    """Returns the time of an increment in the fastest round; the pauses between rounds let the server read the increments."""
    import time
    import timeit

    family = pb_utils.MetricFamily("own_increments", "Increments", pb_utils.MetricFamily.COUNTER)
    increment = family.Metric(labels={"caller": "me"}).increment
    timer = timeit.Timer("increment(1)", setup=lambda: time.sleep(0.05), globals={"increment": increment})
    return min(timer.repeat(repeat=20, number=count)) / count * 1e9


TritonPythonModel.time = lambda self, told: print(f"an increment took {nanoseconds():.0f} ns")
