#!/usr/bin/env python3
"""Sends requests with KServe's unmodified SDK, and prints the results as JSON.

    kserve_client.py HTTP_ADDRESS GRPC_ADDRESS

Runs with the interpreter that has the package `kserve`, not with the interpreter of the tests.
"""

import asyncio
import json
import sys

import httpx
import numpy as np
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest, RESTConfig

ROW = np.arange(16, dtype=np.int32).reshape(1, 16)


def request(binary: bool) -> InferRequest:
    """Returns a request to `simple`."""
    inputs = []
    for name in ("INPUT0", "INPUT1"):
        tensor = InferInput(name, [1, 16], "INT32")
        tensor.set_data_from_numpy(ROW, binary_data=binary)
        inputs.append(tensor)
    return InferRequest(model_name="simple", infer_inputs=inputs)


def tensors(response) -> dict:
    """Returns the outputs of a response."""
    return {output.name: output.as_numpy().tolist() for output in response.outputs}


async def status_of(call) -> int:
    """Returns the status of the error that a call must raise."""
    try:
        await call
    except httpx.HTTPStatusError as error:
        return error.response.status_code
    raise AssertionError("no error")


async def rest(url: str) -> dict:
    """Uses the protocols v1 and v2 over HTTP."""
    columns = {"inputs": {name: ROW.tolist() for name in ("INPUT0", "INPUT1")}}
    rows = {"instances": [{name: ROW[0].tolist() for name in ("INPUT0", "INPUT1")}] * 2}
    async with InferenceRESTClient(RESTConfig(protocol="v1")) as v1, InferenceRESTClient(RESTConfig(protocol="v2")) as v2:
        return {
            "v1": {
                "live": await v1.is_server_live(url),
                "ready": await v1.is_model_ready(url, "simple"),
                "rows": await v1.infer(url, rows, model_name="simple"),
                "columns": await v1.infer(url, columns, model_name="simple"),
                "unknown": await status_of(v1.infer(url, rows, model_name="unknown")),
                "unknown_ready": await status_of(v1.is_model_ready(url, "unknown")),
            },
            "v2": {
                "live": await v2.is_server_live(url),
                "ready": await v2.is_server_ready(url),
                "model": [await v2.is_model_ready(url, name) for name in ("simple", "unknown")],
                "json": tensors(await v2.infer(url, request(False), model_name="simple")),
                "binary": tensors(await v2.infer(url, request(True), model_name="simple")),
            },
        }


async def over_grpc(address: str) -> dict:
    """Uses the protocol v2 over gRPC."""
    async with InferenceGRPCClient(address) as client:
        return {
            "live": await client.is_server_live(),
            "ready": await client.is_server_ready(),
            "model": await client.is_model_ready("simple"),
            "raw": tensors(await client.infer(request(True))),
        }


async def main():
    """Uses all protocols."""
    found = await rest(f"http://{sys.argv[1]}")
    found["grpc"] = await over_grpc(sys.argv[2])
    print(json.dumps(found))


if __name__ == "__main__":
    asyncio.run(main())
