"""A model that answers OpenAI's API itself: its tokens are the words of the last message, the prompt or the input.

Fields of a request change it: `delay_ms` is the time of each token, `fail_at` the number of the token at which the request fails,
`error_at` the same with an error in OpenAI's JSON, `error` that error, and `garbage` an answer without JSON.
"""

import asyncio
import json

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


async def take(seconds):
    """Takes the time of a token."""
    await asyncio.wait([asyncio.get_running_loop().create_future()], timeout=seconds)


class TritonPythonModel:
    async def execute(self, requests):
        await asyncio.gather(*(self.answer(request) for request in requests))

    async def answer(self, request):
        sender = request.get_response_sender()
        try:
            await self.run(request, sender)
        except Exception as error:
            code = pb_utils.TritonError.CANCELLED if request.is_cancelled() else pb_utils.TritonError.UNAVAILABLE
            sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error), code)), FINAL)
            return
        sender.send(flags=FINAL)

    async def run(self, request, sender):
        path, body = of(request, "openai_path"), json.loads(of(request, "openai_request"))
        if "error" in body and "error_at" not in body:
            return send(sender, {"error": body["error"]})
        if "garbage" in body:
            return send(sender, body["garbage"])
        if path in ("embeddings", "rerank", "score"):
            return send(sender, pooled(path, body))
        words = words_of(path, body)
        usage = usage_of(path, words)
        if not body.get("stream"):
            return send(sender, whole(path, body, words, usage))
        for number, word in enumerate(words):
            await take(body.get("delay_ms", 0) / 1000)
            if request.is_cancelled():
                raise ValueError("the client has left")
            if number == body.get("fail_at"):
                raise ValueError(f"failed at token {number}, as asked")
            if number == body.get("error_at"):
                return send(sender, {"error": body["error"]})
            send(sender, chunk(path, body, word, "stop" if number + 1 == len(words) else None))
        if path == "responses":
            return send(sender, {"type": "response.completed", "response": whole(path, body, words, usage), "sequence_number": len(words)})
        if (body.get("stream_options") or {}).get("include_usage"):
            send(sender, {**head(path, body, True), "choices": [], "usage": usage})


def of(request, name):
    """Returns the only element of an input as text."""
    return pb_utils.get_input_tensor_by_name(request, name).as_numpy().reshape(-1)[0].decode()


def send(sender, answer):
    """Sends an answer or a chunk."""
    text = answer if isinstance(answer, str) else json.dumps(answer)
    sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("openai_response", np.array([text], dtype=object))]))


def words_of(path, body):
    """Returns the words of a request."""
    texts = {"chat/completions": lambda: body["messages"][-1]["content"], "completions": lambda: body["prompt"]}
    return texts.get(path, lambda: body["input"])().split()


def usage_of(path, words):
    """Returns the usage in the form of a path. The prompt has a token more than the output."""
    names = ("input_tokens", "output_tokens") if path == "responses" else ("prompt_tokens", "completion_tokens")
    details = {"input_tokens_details": {"cached_tokens": 1}, "output_tokens_details": {"reasoning_tokens": 0}}
    usage = {names[0]: len(words) + 1, names[1]: len(words), "total_tokens": 2 * len(words) + 1}
    return usage | details if path == "responses" else usage | {"prompt_tokens_details": {"cached_tokens": 1}}


def head(path, body, is_chunk=False):
    """Returns what an answer begins with. Its model is the one of the request."""
    kinds = {"chat/completions": "chat.completion" + ".chunk" * is_chunk, "completions": "text_completion"}
    return {"id": "own-1", "object": kinds[path], "created": 1, "model": body["model"]}


def whole(path, body, words, usage):
    """Returns a whole answer."""
    text = " ".join(words)
    if path == "responses":
        part = {"type": "output_text", "text": text, "annotations": []}
        message = {"id": "m", "type": "message", "role": "assistant", "status": "completed", "content": [part]}
        answer = {"id": "own-1", "object": "response", "created_at": 1, "model": body["model"], "status": "completed", "error": None}
        return answer | {"output": [message], "usage": usage, "parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
    end = {"index": 0, "finish_reason": "stop", "logprobs": None}
    content = {"message": {"role": "assistant", "content": text, "seen": body}} if path.startswith("chat") else {"text": text}
    return {**head(path, body), "choices": [end | content], "usage": usage}


def chunk(path, body, word, reason):
    """Returns a chunk with a token."""
    if path == "responses":
        return {"type": "response.output_text.delta", "delta": word, "item_id": "m", "output_index": 0, "content_index": 0}
    content = {"delta": {"content": word}} if path.startswith("chat") else {"text": word}
    return {**head(path, body, True), "choices": [{"index": 0, "finish_reason": reason, **content}]}


def pooled(path, body):
    """Returns an answer with vectors or scores."""
    if path == "embeddings":
        data = [{"object": "embedding", "index": 0, "embedding": [0.5, 0.25]}]
        return {"object": "list", "model": body["model"], "data": data, "usage": {"prompt_tokens": 4, "total_tokens": 4}}
    return {"id": path, "results": [{"index": 0, "relevance_score": 1.0}], "usage": {"total_tokens": 3}}
