"""Transformer blocks in BF16, as a model in Python and as the class that `plain_loop.py` calls: both share one implementation."""

import torch
from torch.nn.functional import gelu, layer_norm, scaled_dot_product_attention

DIFFERENT = 4
"""Number of blocks with different weights; passes cycle through them."""


class Blocks:
    def __init__(self, device, tokens, hidden, passes):
        self.device, self.tokens, self.hidden, self.passes = torch.device(device), tokens, hidden, passes
        self.heads = max(hidden // 128, 1)
        # Generated on the device: generating a thousand million numbers on the CPU takes long.
        numbers = torch.Generator(self.device).manual_seed(3)
        shapes = [(hidden, 3 * hidden), (hidden, hidden), (hidden, 4 * hidden), (4 * hidden, hidden)]
        self.blocks = [[self.weights(numbers, shape) for shape in shapes] for _ in range(DIFFERENT)]

    def weights(self, numbers, shape):
        return (torch.randn(shape, generator=numbers, device=self.device) / shape[0] ** 0.5).to(torch.bfloat16)

    @torch.inference_mode()
    def __call__(self, given):
        """Converts FP16 [tokens, hidden] on any device to FP32 [hidden] on the CPU."""
        values = given.to(self.device, non_blocking=True).to(torch.bfloat16)
        for number in range(self.passes):
            values = self.block(values, *self.blocks[number % DIFFERENT])
        return layer_norm(values, (self.hidden,)).float().mean(0).cpu()

    def block(self, values, projection, joined, up, down):
        parts = layer_norm(values, (self.hidden,)) @ projection
        query, key, value = parts.view(self.tokens, 3, self.heads, -1).permute(1, 2, 0, 3).unsqueeze(1)
        attended = scaled_dot_product_attention(query, key, value, is_causal=True)
        values = values + attended[0].transpose(0, 1).reshape(self.tokens, self.hidden) @ joined
        return values + gelu(layer_norm(values, (self.hidden,)) @ up) @ down


class TritonPythonModel:
    def initialize(self, args):
        import json

        config = json.loads(args["model_config"])["parameters"]
        tokens, hidden, passes = (int(config[key]["string_value"]) for key in ("tokens", "hidden", "passes"))
        on_gpu = args["model_instance_kind"].endswith("GPU")
        self.blocks = Blocks(f"cuda:{args['model_instance_device_id']}" if on_gpu else "cpu", tokens, hidden, passes)

    def execute(self, requests):
        import triton_python_backend_utils as pb_utils

        responses = []
        for request in requests:
            given = torch.from_numpy(pb_utils.get_input_tensor_by_name(request, "X").as_numpy())
            tensors = [pb_utils.Tensor("Y", self.blocks(given).numpy())]
            responses.append(pb_utils.InferenceResponse(tensors))
        return responses
