"""The speech example: Silero VAD with its state in the server returns the results of Silero VAD run offline, for interleaved
streams."""

import subprocess
import sys

import numpy as np
import onnxruntime
import pytest
import tritonclient.grpc

from harness.server import ROOT, Server, binary

SPEECH = ROOT / "examples/speech"
STREAMS = 4
sys.path.insert(0, str(SPEECH))
import detect  # noqa: E402


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    """Returns the folder with the fetched model and recording, which is kept below `target` between runs."""
    folder = binary().resolve().parent.parent / "speech"
    command = [sys.executable, SPEECH / "fetch.py", "--into", folder]
    fetched = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if fetched.returncode:
        pytest.skip(f"the model cannot be fetched: {fetched.stderr.strip()[-300:]}")
    (folder / "models/silero_vad/config.pbtxt").write_bytes((SPEECH / "models/silero_vad/config.pbtxt").read_bytes())
    return folder


@pytest.fixture(scope="module")
def streams(example) -> list:
    """Returns streams of different lengths from the recording."""
    whole = detect.cut(detect.read_wav(example / "fetched/speech.wav"), STREAMS, 15)
    return [stream[: len(stream) - 40 * number] for number, stream in enumerate(whole)]


def offline(model, streams: list) -> list:
    """Returns the published model's probabilities, one stream after the other, computed as in the package's wrapper."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
    probabilities = []
    for stream in streams:
        state, context, found = np.zeros((2, 1, 128), np.float32), np.zeros((1, 64), np.float32), []
        for piece in stream:
            sound = np.concatenate([context, piece[np.newaxis]], axis=1)
            probability, state = session.run(None, {"input": sound, "state": state, "sr": np.array(16000)})
            context = sound[:, -64:]
            found.append(probability.item())
        probabilities.append(np.array(found, np.float32))
    return probabilities


def test_interleaved_streams_equal_offline_results(example, streams, tmp_path):
    """Four streams are interleaved piece by piece over one connection, and their pieces are computed in batches."""
    expected = offline(example / "fetched/silero_vad.onnx", streams)
    with Server(tmp_path, [example / "models"]) as server:
        with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
            got = detect.detect(client, streams)
            statistics = client.get_inference_statistics("silero_vad").model_stats[0]
    for stream, (one, other) in enumerate(zip(got, expected)):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5, err_msg=f"stream {stream}")
    probabilities = np.concatenate(expected)
    assert probabilities.min() < 0.05 and probabilities.max() > 0.95, "the recording has speech and silence"
    assert statistics.inference_count == sum(map(len, streams))
    assert statistics.execution_count < statistics.inference_count, "no requests were batched"


def test_the_example_command_draws_the_probabilities(example, tmp_path):
    """Runs the command of examples/README.md with a server that it starts."""
    picture = tmp_path / "speech.svg"
    command = [sys.executable, SPEECH / "detect.py", example / "fetched/speech.wav", "--server", binary()]
    command += ["--models", example / "models", "--seconds", "3", "--plot", picture]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("stream ") == STREAMS, done.stdout
    text = picture.read_text()
    assert text.startswith("<svg") and text.count("<polyline") == STREAMS
