"""Edges of TorchServe's endpoints: an empty snapshot, answers that are too large, and predictions while versions come and go."""

import json
import random
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from torchserve.home import INFERENCE, Home, body, call, has_worker

pytestmark = pytest.mark.skipif(not has_worker, reason="the package pharos-worker is not installed: make python-worker")
SNAPSHOT = 'model_snapshot={"name": "s", "modelCount": 0, "models": {}}'


def test_a_snapshot_without_models_registers_none(tmp_path):
    """Also if `--models` names some: the user has unregistered them since the first start."""
    home = Home(tmp_path, [SNAPSHOT], ("--disable-token-auth", "--enable-model-api", "--models", "shown=shown-1.0.mar"))
    home.archive("shown")
    with home:
        assert home.manage("GET", "/models") == (200, {"models": []})
        assert "model_snapshot has no models: none is registered at the start" in (tmp_path / "out").read_text()


def test_answers_have_a_maximum_size_over_both_protocols(tmp_path):
    with Home(tmp_path, ["max_response_size=1000"]) as home:
        home.register(home.archive("told", "told"))
        small, large = (json.dumps({"reply": "x" * size}).encode() for size in (100, 2000))
        assert home.predict("told", small)[0] == 200
        status, text = home.predict("told", large)
        assert status == 500 and b"max_response_size allows 1000" in text, text
        for method, stream in (("Predictions", False), ("StreamPredictions", True)):
            ask = lambda data: call(home.grpc, INFERENCE + method, (1, "told"), body(data), stream=stream)  # noqa: E731
            assert ask(small)
            with pytest.raises(grpc.RpcError) as refused:
                ask(large)
            assert "max_response_size allows 1000" in refused.value.details()


def test_predictions_during_registrations_are_answered_or_refused(tmp_path):
    """A version that is unregistered between its look-up and the execution is one that does not exist."""
    with Home(tmp_path) as home:
        files = {version: home.archive("shown", version=version) for version in ("1.0", "2.0")}
        ends = time.monotonic() + 6
        others = []

        def predict(version: str):
            while time.monotonic() < ends:
                status, answer = home.predict("shown", b"x", path=f"/{version}")
                if status not in (200, 404, 503):
                    others.append((status, answer))

        def change(seed: int):
            chance = random.Random(seed)
            while time.monotonic() < ends:
                version = chance.choice(list(files))
                home.manage("POST", f"/models?url={files[version]}&initial_workers=1&synchronous=false")
                home.manage("PUT", f"/models/shown/{version}?min_worker={chance.choice([0, 1, 2])}&synchronous={chance.choice(['true', 'false'])}")
                home.manage("DELETE", f"/models/shown/{version}")

        with ThreadPoolExecutor(6) as pool:
            running = [pool.submit(predict, version) for version in (*files, *files)] + [pool.submit(change, seed) for seed in (1, 2)]
            for task in running:
                task.result()
        assert not others, others[:3]
