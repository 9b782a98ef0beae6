"""Streams of tritonclient: the results that a stream reports, and the inputs of the model `repeat`."""

import threading
import time

import numpy as np
import tritonclient.grpc


def repeat_inputs(values, delay_ms=0, wait_ms=0) -> list:
    """Returns the inputs of `repeat` for tritonclient."""
    count = len(values)
    arrays = {
        "IN": ("INT32", np.array(values, np.int32)),
        "DELAY": ("UINT32", np.full(count, delay_ms, np.uint32)),
        "WAIT": ("UINT32", np.array([wait_ms], np.uint32)),
    }
    inputs = []
    for name, (datatype, array) in arrays.items():
        tensor = tritonclient.grpc.InferInput(name, list(array.shape), datatype)
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    return inputs


class Collected:
    """The callback of a tritonclient stream. Collects values, times and final flags by request ID, and errors."""

    def __init__(self):
        self.values, self.errors, self.finals, self.when = {}, [], [], {}
        self.lock = threading.Lock()

    def __call__(self, result, error):
        with self.lock:
            if error:
                self.errors.append(error)
                return
            response = result.get_response()
            array = result.as_numpy("OUT")
            if array is not None:
                self.values.setdefault(response.id, []).append(int(array.flat[0]))
                self.when.setdefault(response.id, []).append(time.monotonic())
            if response.parameters["triton_final_response"].bool_param:
                self.finals.append(response.id)
