"""Answers from a separate thread after execute has returned; the thread also creates the response senders."""

import queue
import threading

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """One instance."""

    def initialize(self, args):
        self.decoupled = pb_utils.using_decoupled_model_transaction_policy(__import__("json").loads(args["model_config"]))
        self.queue = queue.Queue()
        self.executed = 0
        threading.Thread(target=self.work, daemon=True).start()

    def execute(self, requests):
        self.executed += 1
        for request in requests:
            self.queue.put((request, self.executed))
        return None

    def work(self):
        while True:
            request, executed = self.queue.get()
            sender = request.get_response_sender()
            values = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            if self.decoupled:
                for value in values:
                    out = pb_utils.Tensor("OUT", np.array([value], np.float32))
                    sender.send(pb_utils.InferenceResponse([out], parameters={"executed": executed}))
                sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            else:
                out = pb_utils.Tensor("OUT", values * 2)
                sender.send(pb_utils.InferenceResponse([out]), pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
