"""sentence-transformers in MLServer, with adaptive batching: a custom runtime that pools, as `peer_mlserver_huggingface.py` cannot.

`POST /v2/models/text/infer` of the KServe v2 protocol.
"""

from mlserver import MLModel
from mlserver.codecs import NumpyCodec, StringCodec
from mlserver.types import InferenceRequest, InferenceResponse
from sentence_transformers import SentenceTransformer


class Embeddings(MLModel):
    """The model behind MLServer's interface."""

    async def load(self) -> bool:
        """Loads the model in the inference process."""
        self.encoder = SentenceTransformer(self.settings.parameters.uri, device="cpu")
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        """Computes a batch, which MLServer has joined from requests."""
        texts = StringCodec.decode_input(payload.inputs[0])
        vectors = self.encoder.encode(texts, convert_to_numpy=True)
        return InferenceResponse(model_name=self.name, outputs=[NumpyCodec.encode_output("embedding", vectors)])
