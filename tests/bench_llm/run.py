"""Measures the server with the backend `llamacpp` beside llama.cpp's own loop in one process, in turns on the same machine.

    python tests/bench_llm/run.py --server PHAROS --own-loop PROGRAM --model FILE.gguf [--streams 1 8] [--tokens 128] [--rounds 3]

    python tests/bench_llm/run.py --server PHAROS --llama-cpp-python PYTHON --model FILE.gguf [--streams 8] [--tokens 128] [--rounds 3]

    python tests/bench_llm/run.py --server PHAROS --paced 1000 [--rate 20] [--seconds 20]

Prints, for each number of streams, the tokens per second of both with their ratio, and the time that the server adds to the first token.
With `--llama-cpp-python`, the other side is the server of llama-cpp-python in this interpreter (`llama_cpp.server`), with as many clients
that wait for whole answers; `LLAMA_CPP_LIB_PATH` makes it use the libraries of another llama.cpp. With `--paced`, measures many slow
streams instead: the share of late tokens, the frontend's memory for each stream, and the use of processors (`paced.py`).
"""

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))

import openai  # noqa: E402

import paced  # noqa: E402
from harness.ports import free_ports  # noqa: E402
from harness.server import Server  # noqa: E402
from harness.waiting import DEADLINE_S  # noqa: E402

PROMPT = "The history of the city begins"


def own(program: str, model: str, streams: int, tokens: int, threads: int) -> float:
    """Returns the tokens per second of llama.cpp's own loop."""
    command = [program, model, str(streams), str(tokens), str(threads)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


async def served(address: str, streams: int, tokens: int) -> tuple:
    """Returns the tokens per second of the server, from the first generated token to the last, and the times to the first tokens in
    milliseconds."""
    more = {"ignore_eos": True}

    async def one(client):
        began = time.perf_counter()
        times = []
        stream = await client.completions.create(
            model="m", prompt=PROMPT, max_tokens=tokens + 1, temperature=0, stream=True, extra_body=more,
            stream_options={"include_usage": True},
        )  # fmt: skip
        generated = 0
        async for chunk in stream:
            times.append(time.perf_counter())
            generated = chunk.usage.completion_tokens if chunk.usage else generated
        assert generated == tokens + 1
        return times[0], times[-1], (times[0] - began) * 1000

    async with openai.AsyncOpenAI(base_url=f"http://{address}/v1", api_key="none", max_retries=0) as client:
        found = await asyncio.gather(*(one(client) for _ in range(streams)))
    first = max(begin for begin, _, _ in found)
    last = max(end for _, end, _ in found)
    return streams * tokens / (last - first), [wait for _, _, wait in found]


@contextlib.contextmanager
def llama_cpp_python(python: str, model: str, threads: int):
    """Runs the server of llama-cpp-python; yields its address."""
    (port,) = free_ports(1)
    command = [python, "-m", "llama_cpp.server", "--model", model, "--model_alias", "m", "--n_ctx", "256", "--n_threads", str(threads)]
    process = subprocess.Popen([*command, "--host", "127.0.0.1", "--port", str(port), "--verbose", "false"])
    try:
        end = time.monotonic() + DEADLINE_S
        while True:
            try:
                openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0).models.list()
                break
            except openai.APIConnectionError:
                if process.poll() is not None or time.monotonic() > end:
                    raise
                time.sleep(0.1)
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


async def whole_answers(address: str, clients: int, tokens: int) -> float:
    """Returns the tokens per second of clients that each wait for one whole answer."""
    # The tokens that end a text, which would end it early on one side only.
    ends = {"1": -100, "106": -100}
    async with openai.AsyncOpenAI(base_url=f"http://{address}/v1", api_key="none", max_retries=0, timeout=600) as client:

        async def one() -> int:
            answer = await client.completions.create(model="m", prompt=PROMPT, max_tokens=tokens, temperature=0, logit_bias=ends)
            return answer.usage.completion_tokens

        began = time.perf_counter()
        found = await asyncio.gather(*(one() for _ in range(clients)))
        return sum(found) / (time.perf_counter() - began)


def compare_whole_answers(options, server):
    """Measures the server and llama-cpp-python's in turns, and prints their tokens per second."""
    rows = []
    with llama_cpp_python(options.llama_cpp_python, options.model, options.threads) as other:
        for clients in options.streams:
            theirs, here = [], []
            for address in (other, server.http):
                asyncio.run(whole_answers(address, 1, 8))
            for _ in range(options.rounds):
                theirs.append(asyncio.run(whole_answers(other, clients, options.tokens)))
                here.append(asyncio.run(whole_answers(server.http, clients, options.tokens)))
            ratios = [one / other for one, other in zip(here, theirs)]
            rows.append(
                {
                    "clients": clients,
                    "llama_cpp_python_tokens_per_second": round(statistics.median(theirs), 1),
                    "server_tokens_per_second": round(statistics.median(here), 1),
                    "ratio": round(statistics.median(ratios), 3),
                    "ratios": [round(ratio, 3) for ratio in ratios],
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    (options.to / "llama-cpp-python.json").write_text(json.dumps(rows, indent=2))


def main():
    """Reads the arguments and measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", required=True)
    parser.add_argument("--own-loop")
    parser.add_argument("--llama-cpp-python", metavar="PYTHON")
    parser.add_argument("--model")
    parser.add_argument("--paced", type=int, metavar="STREAMS")
    parser.add_argument("--rate", type=float, default=20, help="tokens per second of a paced stream")
    parser.add_argument("--seconds", type=float, default=20, help="the length of a paced stream")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--to", type=Path, default=Path("target/bench-llm"))
    options = parser.parse_args()
    if options.paced:
        options.to.mkdir(parents=True, exist_ok=True)
        row = paced.measure(options.server, options.to, options.paced, options.rate, options.seconds)
        (options.to / "paced.json").write_text(json.dumps(row, indent=2))
        print(json.dumps(row))
        return
    if not options.model or not (options.own_loop or options.llama_cpp_python):
        parser.error("--model, and --own-loop or --llama-cpp-python, are required without --paced")
    version = options.to / "models/m/1"
    version.mkdir(parents=True, exist_ok=True)
    (version / "model.gguf").unlink(missing_ok=True)
    (version / "model.gguf").symlink_to(Path(options.model).resolve())
    parameters = {"threads": options.threads, "max_sequences": max(options.streams), "context_length": 256}
    text = "".join(f'parameters {{ key: "{key}" value: {{ string_value: "{value}" }} }}\n' for key, value in parameters.items())
    (version.parent / "config.pbtxt").write_text(f'backend: "llamacpp"\n{text}')
    server = Server(options.to, [version.parent.parent])
    server.command[0] = options.server
    rows = []
    with server:
        if options.llama_cpp_python:
            compare_whole_answers(options, server)
            return
        for streams in options.streams:
            asyncio.run(served(server.http, streams, 8))
            alone, here, waits = [], [], []
            for _ in range(options.rounds):
                alone.append(own(options.own_loop, options.model, streams, options.tokens, options.threads))
                speed, wait = asyncio.run(served(server.http, streams, options.tokens))
                here.append(speed)
                waits += wait
            ratios = [one / other for one, other in zip(here, alone)]
            rows.append(
                {
                    "streams": streams,
                    "own_tokens_per_second": round(statistics.median(alone), 1),
                    "server_tokens_per_second": round(statistics.median(here), 1),
                    "ratio": round(statistics.median(ratios), 3),
                    "ratios": [round(ratio, 3) for ratio in ratios],
                    "first_token_ms": round(statistics.median(waits), 2),
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    (options.to / "results.json").write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
