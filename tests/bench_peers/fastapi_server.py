"""FastAPI with ONNX Runtime, without dynamic batching.

    uvicorn fastapi_server:app --host 127.0.0.1 --port PORT

`POST /predict` takes `{"row": [...]}` and returns `{"output": [...]}`. The function is not a coroutine, so FastAPI calls it in a
thread; ONNX Runtime runs without Python's lock.
"""

from typing import List

from fastapi import FastAPI
from pydantic import BaseModel
from session import Session

session = Session()
app = FastAPI()
Row = List[int] if len(session.shape) == 1 else List[List[float]]


class Request(BaseModel):
    """The input of one request."""

    row: Row


class Response(BaseModel):
    """The output of one request."""

    output: List[float]


@app.post("/predict")
def predict(request: Request) -> Response:
    """Runs the model on one row."""
    return Response(output=session.run(session.row(request.row)[None])[0].tolist())
