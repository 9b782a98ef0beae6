"""Returns its input in the way that the request's parameter `how` selects, and reports properties of the input's memory."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """One instance."""

    def initialize(self, args):
        self.kept = []

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        how = json.loads(request.parameters()).get("how", "view")
        tensor = pb_utils.get_input_tensor_by_name(request, "IN")
        array = tensor.as_numpy()
        owns, writeable = bool(array.flags.owndata), bool(array.flags.writeable)
        if how == "copy":
            array = array.copy()
        elif how == "part":
            array = array[1:]
        elif how == "strided":
            array = array[::2]
        elif how == "changed":
            array += 1
        elif how == "kept":
            self.kept.append(array)
            array = np.array([part.sum() for part in self.kept], np.float32)
        elif how == "dlpack":
            array = np.from_dlpack(tensor)
        elif how == "torch":
            import torch

            out = pb_utils.Tensor.from_dlpack("OUT", torch.from_dlpack(tensor.to_dlpack()) * 2)
            return pb_utils.InferenceResponse([out], parameters={"owns": owns})
        given = {"owns": owns, "writeable": writeable, "rows": int(array.shape[0]) if array.ndim else 0}
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array)], parameters=given)
