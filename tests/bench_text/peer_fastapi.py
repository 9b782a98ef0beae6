"""sentence-transformers behind FastAPI, as people serve it without a server for models: OpenAI's path for embeddings.

    uvicorn --app-dir tests/bench_text peer_fastapi:app --port 9800       with MODEL_FOLDER, in the environment of the model

Requests run on the threads of FastAPI's pool, one after the other in the model's threads.
"""

import base64
import os
import threading

from fastapi import FastAPI
from pydantic import BaseModel
from sentence_transformers import SentenceTransformer

app = FastAPI()
model = SentenceTransformer(os.environ["MODEL_FOLDER"], device="cpu", backend=os.environ.get("MODEL_BACKEND", "torch"))
lock = threading.Lock()


class Request(BaseModel):
    """A request of OpenAI's API."""

    input: str | list[str]
    model: str = ""
    encoding_format: str = "float"


@app.post("/v1/embeddings")
def embeddings(request: Request) -> dict:
    """Returns the vectors of texts."""
    texts = [request.input] if isinstance(request.input, str) else request.input
    with lock:
        vectors = model.encode(texts, convert_to_numpy=True)
    vectors = [base64.b64encode(vector.tobytes()).decode() if request.encoding_format == "base64" else vector.tolist() for vector in vectors]
    return {"object": "list", "data": [{"object": "embedding", "index": at, "embedding": vector} for at, vector in enumerate(vectors)]}
