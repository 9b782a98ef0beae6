"""An ordinary model that answers through response senders if a request says so (input `DO`, JSON): `sends` are the responses
to send, `returns` a response that is returned as well, `final` is `with` or `alone`: where the final flag is sent."""

import json
import threading

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


def response(number):
    """Returns a response with one number in `OUT`."""
    return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([number], np.float32))])


class TritonPythonModel:
    """One instance."""

    def initialize(self, args):
        self.notes = []

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        """Returns the response to a request; None if its sender answers."""
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
        """Sends the responses; stores an exception in the notes."""
        try:
            numbers = act["sends"]
            for place, number in enumerate(numbers):
                last = act["final"] == "with" and place + 1 == len(numbers)
                sender.send(response(number), flags=FINAL if last else 0)
            if act["final"] == "alone":
                sender.send(flags=FINAL)
        except Exception as error:  # noqa: BLE001 (every exception is part of the answer)
            self.notes.append(f"{type(error).__name__}: {error}")
