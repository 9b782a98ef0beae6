"""The identity for every datatype: output `O_X` is input `I_X`. `SEEN` describes each input as the model receives it."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils


def described(tensor):
    """Returns the properties of a tensor that the model can read."""
    array = tensor.as_numpy()
    return [
        list(tensor.shape()),
        tensor.is_cpu(),
        str(array.dtype),
        list(array.shape),
        array.flags.c_contiguous,
        type(array.flat[0]).__name__ if array.size and array.dtype == np.object_ else "",
    ]


class TritonPythonModel:
    """One instance."""

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        """Returns the given inputs as outputs."""
        tensors = [(tensor.name(), tensor) for tensor in request.inputs()]
        outputs = [self.passed(name.replace("I_", "O_"), tensor) for name, tensor in tensors]
        seen = json.dumps({name: self.seen(tensor) for name, tensor in tensors}, sort_keys=True)
        outputs.append(pb_utils.Tensor("SEEN", np.array([seen.encode()], np.object_)))
        return pb_utils.InferenceResponse(outputs)

    def passed(self, name, tensor):
        """Returns the same values under another name; BF16, which numpy lacks, is passed with DLPack."""
        if name == "O_BF16":
            return pb_utils.Tensor.from_dlpack(name, tensor)
        return pb_utils.Tensor(name, tensor.as_numpy())

    def seen(self, tensor):
        """Returns the description of a tensor, or the error."""
        try:
            return described(tensor)
        except pb_utils.TritonModelException as error:
            return str(error)
