"""A decoupled model that follows the instructions of a request: input `DO` is a JSON array of steps, see [`Run.step`].

The step `notes` answers with the errors of earlier requests. For a model whose `execute` is a coroutine,
see `coroutine.py`.
"""

import json
import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


def values(numbers):
    """Returns `OUT` with these numbers."""
    return pb_utils.Tensor("OUT", np.array(numbers, np.float32))


def seen(value):
    """Returns `SEEN` with a value as JSON."""
    return pb_utils.Tensor("SEEN", np.array([json.dumps(value, sort_keys=True).encode()], np.object_))


class Run:
    """One request and its steps."""

    def __init__(self, request, notes):
        self.request, self.notes = request, notes
        self.sender = request.get_response_sender()
        self.steps = json.loads(pb_utils.get_input_tensor_by_name(request, "DO").as_numpy().flat[0])

    def go(self):
        """Runs the steps in order; a thread runs the steps after `thread` and continues after `execute` has returned."""
        for number, step in enumerate(self.steps):
            if "thread" in step:
                self.steps = self.steps[number + 1 :]
                threading.Thread(target=self.go).start()
                return
            self.noted(step)

    def noted(self, step):
        """Runs a step; with `note`, an exception is stored in the notes."""
        if not step.get("note"):
            return self.step(step)
        try:
            return self.step(step)
        except Exception as error:  # noqa: BLE001 (every exception is part of the answer)
            return self.notes.append(f"{type(error).__name__}: {error}")

    def step(self, step):
        """Runs a step. `send`: numbers of a response; `error`, `code`; `final`: send the final flag; `sleep`: seconds;
        `cancelled`: the time limit of the wait for a cancellation in seconds; `raise`; `notes`; `see`."""
        if "sleep" in step:
            return time.sleep(step["sleep"])
        if "raise" in step:
            raise ValueError(step["raise"])
        if "cancelled" in step:
            return self.wait_for_cancellation(step["cancelled"])
        flags = {"flags": FINAL} if step.get("final") else {}
        if "flags" in step:
            flags = {"flags": step["flags"]}
        response = self.response(step)
        return self.sender.send(response, **flags) if response is not None else self.sender.send(**flags)

    def response(self, step):
        """Returns the response of a step, or None."""
        if "error" in step:
            code = [getattr(pb_utils.TritonError, step["code"])] if "code" in step else []
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(step["error"], *code))
        if "notes" in step:
            told, self.notes[:] = list(self.notes), []
            return pb_utils.InferenceResponse([seen(told)])
        if "see" in step:
            return pb_utils.InferenceResponse([seen(json.loads(self.request.parameters()))])
        if "empty" in step:
            return pb_utils.InferenceResponse([])
        if "send" not in step:
            return None
        more = {"parameters": step["parameters"]} if "parameters" in step else {}
        return pb_utils.InferenceResponse([values(step["send"])], **more)

    def wait_for_cancellation(self, seconds):
        """Stores in the notes whether the request and its sender report a cancellation."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self.request.is_cancelled():
            time.sleep(0.01)
        self.notes.append(f"cancelled {self.request.is_cancelled()} {self.sender.is_cancelled()}")


class TritonPythonModel:
    """One instance."""

    def initialize(self, args):
        self.notes = []

    def execute(self, requests):
        runs = [Run(request, self.notes) for request in requests]
        for run in runs:
            run.go()
        returned = [step["return"] for run in runs for step in run.steps if "return" in step]
        return [pb_utils.InferenceResponse([values(numbers)]) for numbers in returned] or None
