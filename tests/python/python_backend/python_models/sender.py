"""An ordinary model that answers through response senders, where a request tells it to (input `DO`, JSON):
`sends` are the responses that are sent, `returns` whether one is returned as well, `final` says when the flag comes."""

import json
import threading

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


def response(number):
    """`OUT` with one number."""
    return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([number], np.float32))])


class TritonPythonModel:
    """One instance."""

    def initialize(self, args):
        self.notes = []

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        """What is returned for a request: nothing where its sender has answered."""
        act = json.loads(pb_utils.get_input_tensor_by_name(request, "DO").as_numpy().flat[0])
        if "notes" in act:
            told, self.notes = self.notes, []
            seen = np.array([json.dumps(told).encode()], np.object_)
            return pb_utils.InferenceResponse([pb_utils.Tensor("SEEN", seen)])
        if act.get("thread"):
            threading.Thread(target=self.send, args=(request.get_response_sender(), act)).start()
        elif "sends" in act:
            self.send(request.get_response_sender(), act)
        return response(act["returns"]) if "returns" in act else None

    def send(self, sender, act):
        """The responses, and what went wrong."""
        try:
            numbers = act["sends"]
            for place, number in enumerate(numbers):
                last = act["final"] == "with" and place + 1 == len(numbers)
                sender.send(response(number), flags=FINAL if last else 0)
            if act["final"] == "alone":
                sender.send(flags=FINAL)
        except Exception as error:  # noqa: BLE001 (whatever it is, is what is asked for)
            self.notes.append(f"{type(error).__name__}: {error}")
