"""MLServer's runtime for models of Hugging Face, beside a later torch than its packages were made for.

The runtime has no pooling: `POST /v2/models/text/infer` answers with the vectors of all tokens of a text.
"""

import sys

from torch.onnx import symbolic_opset14
from torch.onnx._internal.torchscript_exporter import symbolic_opset14 as moved

# Triton comes with torch. It ends the process beside TensorFlow, which the runtime imports, and is of no use without a GPU.
sys.modules["triton"] = None
# Optimum before 2.0, which the runtime requires, expects these names of its exporter where torch had them before 2.9.
for name in ("_attention_scale", "_causal_attention_mask", "_onnx_symbolic", "_type_utils", "jit_utils", "symbolic_helper"):
    setattr(symbolic_opset14, name, getattr(moved, name))

from mlserver_huggingface import HuggingFaceRuntime  # noqa: E402

__all__ = ["HuggingFaceRuntime"]
