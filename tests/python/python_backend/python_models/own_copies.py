"""Sleeps for 0.1 s, and reports 0.07 s of that time as copies of its inputs."""

import time

import triton_python_backend_utils as pb_utils
from pharos_worker import _native


class TritonPythonModel:
    """One instance."""

    def execute(self, requests):
        time.sleep(0.1)
        for seconds in (0.03, 0.04):
            _native.inputs_took(seconds)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", ask(request))]) for request in requests]


def ask(request):
    """Returns the input; a negative first element is reported as an invalid duration of a copy."""
    given = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
    if given[0] < 0:
        _native.inputs_took(float(given[0]))
    return given
