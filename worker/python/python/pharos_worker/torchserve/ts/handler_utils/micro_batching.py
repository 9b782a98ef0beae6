"""Pipelines micro-batches of a batch through a handler's steps, each step on separate threads."""

import os
import queue
import threading
import time
from dataclasses import dataclass

from ts.utils import available

HANDLER_METHODS = ["preprocess", "inference", "postprocess"]
_LOOK_S = 0.5
__getattr__ = available.attribute_of(__name__, {"PROFILER_AVAILABLE"})


@dataclass
class WorkerThread:
    """A thread of a step, and the event that stops it."""

    event: threading.Event
    thread: threading.Thread


@dataclass
class _Failed:
    """The exception of a step, in place of the result of a micro-batch."""

    error: BaseException


def _is_count(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


class MicroBatching:
    """Replaces a handler's `handle`: `self.handle = MicroBatching(self, micro_batch_size, {"inference": 2})`."""

    def __init__(self, parent_handler, micro_batch_size=1, parallelism=None):
        if not _is_count(micro_batch_size):
            raise ValueError(f"micro_batch_size is {micro_batch_size!r}; allowed are whole numbers from 1")
        self.handler = parent_handler
        self.micro_batch_size = micro_batch_size
        self._parallelism = {}
        self.thread_groups = {name: [] for name in HANDLER_METHODS}
        self.thread_local_data = threading.local()
        pipes = [queue.Queue() for _ in range(len(HANDLER_METHODS) + 1)]
        self.queues = {f"{name}_in": pipes[at] for at, name in enumerate(HANDLER_METHODS)}
        self.queues |= {f"{name}_out": pipes[at + 1] for at, name in enumerate(HANDLER_METHODS)}
        self.parallelism = {} if parallelism is None else parallelism

    @property
    def parallelism(self):
        """The number of threads of each step that has more than one."""
        return dict(self._parallelism)

    @parallelism.setter
    def parallelism(self, parallelism):
        steps = ", ".join(HANDLER_METHODS)
        if not isinstance(parallelism, dict):
            raise AssertionError(f"parallelism is {parallelism!r}; expected a number of threads for each of {steps}")
        for name, count in parallelism.items():
            # Without threads, no batch would end.
            if name not in HANDLER_METHODS or not _is_count(count):
                raise AssertionError(f"parallelism of '{name}' is {count!r}; steps are {steps}, with whole numbers from 1")
        self._parallelism.update(parallelism)
        for name, group in self.thread_groups.items():
            wanted = self._parallelism.get(name, 1)
            while len(group) < wanted:
                group.append(self._started(name))
            self._end(group[wanted:])
            del group[wanted:]

    def shutdown(self):
        """Stops all threads."""
        for group in self.thread_groups.values():
            self._end(group)
            group.clear()

    def __del__(self):
        for group in getattr(self, "thread_groups", {}).values():
            for worker in group:
                worker.event.set()

    @staticmethod
    def _end(workers):
        for worker in workers:
            worker.event.set()
        for worker in workers:
            worker.thread.join()

    def _started(self, name):
        event = threading.Event()
        pipes = (self.queues[f"{name}_in"], self.queues[f"{name}_out"])
        step = getattr(self.handler, name)
        arguments = (step, pipes, event, self.thread_local_data)
        thread = threading.Thread(target=_run, name=name, args=arguments, daemon=True)
        thread.start()
        return WorkerThread(event, thread)

    def handle(self, data):
        """Returns the results of a batch in order. Raises the exception of a step."""
        size = self.micro_batch_size
        pieces = [data[at : at + size] for at in range(0, len(data), size)]
        for numbered in enumerate(pieces):
            self.queues["preprocess_in"].put(numbered)
        done = dict(self.queues["postprocess_out"].get() for _ in pieces)
        ordered = [done[number] for number in range(len(pieces))]
        for piece in ordered:
            if isinstance(piece, _Failed):
                raise piece.error
        return [item for piece in ordered for item in piece]

    def get_micro_batch_idx(self):
        """Returns the index of the current micro-batch of this thread; None on other threads."""
        return getattr(self.thread_local_data, "micro_batch_idx", None)

    def __call__(self, data, context):
        """The entry point for a batch."""
        begun = time.perf_counter()
        handler = self.handler
        handler.context = context
        if os.environ.get("ENABLE_TORCH_PROFILER"):
            output, _ = handler._infer_with_profiler(data=data)
        elif handler._is_describe():
            output = [handler.describe_handle()]
        elif handler._is_explain():
            output = handler.explain_handle(handler.preprocess(data), data)
        else:
            output = self.handle(data)
        context.metrics.add_time("HandlerTime", round((time.perf_counter() - begun) * 1000, 2), None, "ms")
        return output


def _run(step, pipes, event, local):
    taken, given = pipes
    while not event.is_set():
        try:
            number, piece = taken.get(timeout=_LOOK_S)
        except queue.Empty:
            continue
        local.micro_batch_idx = number
        if not isinstance(piece, _Failed):
            try:
                piece = step(piece)
            except BaseException as error:  # noqa: B902: any error must end the wait for the batch
                piece = _Failed(error)
        given.put((number, piece))
