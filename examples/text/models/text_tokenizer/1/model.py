"""Turns texts into token ids and attention masks."""

import json
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils
from tokenizers import Tokenizer


class TritonPythonModel:
    def initialize(self, args):
        folder = Path(args["model_repository"]) / args["model_version"]
        parameters = json.loads(args["model_config"])["parameters"]
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.enable_truncation(int(parameters["max_length"]["string_value"]))
        # Few lengths: requests of the same length are executed together by the next model.
        self.tokenizer.enable_padding(pad_to_multiple_of=16)

    def execute(self, requests):
        arrays = [pb_utils.get_input_tensor_by_name(request, "text").as_numpy() for request in requests]
        texts = [text.decode("utf-8", "replace") for array in arrays for text in array.ravel()]
        encodings = self.tokenizer.encode_batch(texts)
        ids = np.array([encoding.ids for encoding in encodings], np.int64)
        mask = np.array([encoding.attention_mask for encoding in encodings], np.int64)
        ends = np.cumsum([len(array) for array in arrays])
        return [
            pb_utils.InferenceResponse([
                pb_utils.Tensor("input_ids", ids[end - len(array) : end]),
                pb_utils.Tensor("attention_mask", mask[end - len(array) : end]),
            ])
            for array, end in zip(arrays, ends)
        ]  # fmt: skip
