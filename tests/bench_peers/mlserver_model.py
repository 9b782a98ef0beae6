"""MLServer with adaptive batching: a custom runtime, as MLServer has none for ONNX files.

`POST /v2/models/NAME/infer` of the KServe v2 protocol.
"""

from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse
from session import Session


class Classifier(MLModel):
    """The model behind MLServer's interface."""

    async def load(self) -> bool:
        """Loads the model in the inference process."""
        self.classifier = Session()
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        """Runs a batch, which MLServer has joined from requests."""
        rows = NumpyCodec.decode_input(payload.inputs[0])
        output = self.classifier.run(rows)
        encoded = NumpyCodec.encode_output(self.classifier.output, output)
        return InferenceResponse(model_name=self.name, outputs=[encoded])
