"""Completes its own configuration: the parameter `case` selects how; without it the whole configuration is added."""

import numpy as np
import triton_python_backend_utils as pb_utils

IN = {"name": "VALUE", "data_type": "TYPE_FP32", "dims": [-1]}
OUT = {"name": "OUT", "data_type": "TYPE_FP32", "dims": [-1]}


def whole(config):
    """Adds the input, the output and the batching."""
    config.add_input(IN)
    config.add_output(OUT)
    config.set_max_batch_size(8)
    config.set_dynamic_batching()


def decoupled(config):
    """Completes the configuration of a decoupled model."""
    config.add_input({**IN, "optional": True})
    config.add_output(OUT)
    config.set_max_batch_size(0)
    config.set_model_transaction_policy({"decoupled": True})


def failing(config):
    """Raises an exception."""
    raise ValueError("cannot complete")


CASES = {
    "": whole,
    "decoupled": decoupled,
    "raises": failing,
    "returns nothing": whole,
    "has nothing": lambda config: None,
    "other datatype": lambda config: config.add_input({**IN, "data_type": "TYPE_INT32"}),
    "other dims": lambda config: config.add_input({**IN, "dims": [4]}),
    "no name": lambda config: config.add_input({"data_type": "TYPE_FP32", "dims": [1]}),
    "no datatype": lambda config: config.add_input({"name": "MORE", "dims": [1]}),
    "no dims": lambda config: config.add_output({"name": "MORE", "data_type": "TYPE_FP32"}),
    "unknown key": lambda config: config.add_input({**IN, "name": "MORE", "colour": "red"}),
    "unknown datatype": lambda config: config.add_input({**IN, "name": "MORE", "data_type": "FP32"}),
    "one more": lambda config: config.add_input({**IN, "name": "MORE"}),
    "larger batch": lambda config: config.set_max_batch_size(64),
    "policy": lambda config: config.set_model_transaction_policy({"decoupled": True}),
    "wrong policy": lambda config: config.set_model_transaction_policy({"coupled": True}),
    "batching": lambda config: config.set_dynamic_batching(),
}


class TritonPythonModel:
    """One instance."""

    @staticmethod
    def auto_complete_config(auto_complete_model_config):
        given = auto_complete_model_config.as_dict()
        case = given.get("parameters", {}).get("case", {}).get("string_value", "")
        CASES[case](auto_complete_model_config)
        return None if case == "returns nothing" else auto_complete_model_config

    def execute(self, requests):
        values = [pb_utils.get_input_tensor_by_name(request, "VALUE").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array(value))]) for value in values]
