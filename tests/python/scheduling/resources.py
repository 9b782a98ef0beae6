"""Models with resources of the rate limiter, and clients that keep them busy."""

import threading

from harness.inference import one
from harness.waiting import join_all

REQUEST = one("FP32", [1, 2], [1, 2])


def config(function: str, groups: str, parameters=None, more: str = "") -> str:
    """Returns a configuration of the backend `test`."""
    text = "".join(
        f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n'
        for key, value in {"function": function, **(parameters or {})}.items()
    )
    tensor = 'name: "{}" data_type: TYPE_FP32 dims: [ -1 ]'
    return (
        f'backend: "test"\nmax_batch_size: 4\ninput {{ {tensor.format("INPUT0")} }}\n'
        f'output {{ {tensor.format("OUTPUT0")} }}\n{text}{groups}\n{more}\n'
    )


def delay(milliseconds: int, groups: str, more: str = "") -> str:
    return config("delay", groups, {"delay_ms": milliseconds}, more)


def group(resources: str, more: str = "", limiter: str = "") -> str:
    """Returns one instance group; the resources have the form `R 1 global, S 2`."""
    parts = [part.split() for part in resources.split(",") if part]
    texts = [f'{{ name: "{p[0]}" count: {p[1]} {"global: true" if p[2:] else ""} }}' for p in parts]
    return f"instance_group {{ {more} rate_limiter {{ resources [ {', '.join(texts)} ] {limiter} }} }}"


class Load:
    """Keeps models busy with `clients` threads for each. A context manager."""

    def __init__(self, server, models, clients=3):
        self.answers, self.over = {model: [] for model in models}, threading.Event()
        self.threads = [threading.Thread(target=self.run, args=(server, m), daemon=True) for m in models for _ in range(clients)]

    def run(self, server, model):
        while not self.over.is_set():
            self.answers[model].append(server.infer(model, REQUEST)[0])

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self.over.set()
        join_all(self.threads)
