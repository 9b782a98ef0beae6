"""What requests to TorchServe's management port may bring and ask for."""

import pytest

from harness.waiting import eventually
from torchserve.home import Home, has_worker

pytestmark = pytest.mark.skipif(not has_worker, reason="the package pharos-worker is missing: make python-worker")


def test_the_workers_that_a_request_asks_for_are_limited(tmp_path):
    with Home(tmp_path) as server:
        server.register(server.archive("m"))
        for method, path in (
            ("PUT", "/models/m?min_worker=200&max_worker=200"),
            ("POST", f"/models?url={server.archive('n')}&initial_workers=200"),
        ):
            status, answer = server.manage(method, path)
            assert status == 400, answer
            assert "may ask for 0 to 128 workers of a model (--load-request-max-instances sets the limit)" in answer["message"], answer
        assert len(server.workers()) == 1
        assert server.manage("PUT", "/models/m?min_worker=2&synchronous=true")[0] == 200
        eventually("two workers run", lambda: len(server.workers()) == 2)


def test_archives_outside_of_the_model_store_need_a_permission(tmp_path):
    """`--allow-model-upload=false`: requests register what the operator has put into the model store, and nothing else."""
    server = Home(tmp_path)
    server.command.append("--allow-model-upload=false")
    name = server.archive("m")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    archive = (server.store / name).read_bytes()
    (elsewhere / "other.mar").write_bytes(archive)
    with server:
        for url in (f"file://{elsewhere}/other.mar", f"{elsewhere}/other.mar", str(elsewhere), "http://127.0.0.1:1/x.mar"):
            status, answer = server.manage("POST", f"/models?url={url}&model_name=x&initial_workers=1&synchronous=true")
            assert status >= 400 and "is outside of the model repositories" in answer["message"], (url, status, answer)
        assert not server.workers() and sorted(path.name for path in server.store.iterdir()) == [name]
        server.register(name)
        status, answer = server.manage("POST", f"/models?url=file://{server.store / name}&model_name=y")
        assert status == 200, answer
