"""TorchServe's interfaces count the tenants of requests as the other protocols do."""

import grpc
import pytest

from harness.server import ROOT, samples
from harness.waiting import DEADLINE_S
from torchserve.home import INFERENCE, body, message
from torchserve.launched import NO_ARCHIVER, pharos
from torchserve.peers import Peer, at_start
from torchserve.repository import build
from torchserve.row_types import Grpc, Rest

PREDICTION = {"model_name": "echo", "input": {"data": b"x"}}


@pytest.mark.skipif(bool(NO_ARCHIVER), reason=NO_ARCHIVER)
def test_predictions_count_for_their_tenant(tmp_path):
    """By REST, and by each of the three gRPC calls."""
    definition = tmp_path / "metrics.yaml"
    definition.write_text((ROOT / "metrics.yaml").read_text() + "tenants: {header: x-tenant}\n")
    store = build(tmp_path / "store", ("start",))
    properties = f"load_models=echo.mar\nmetrics_config={definition}\nmetrics_mode=prometheus\n"
    with pharos(tmp_path / "server", store, properties, ("--ncs", "--disable-token-auth")) as server:
        peer = Peer(server)
        at_start(None, peer)
        for _ in range(2):
            assert peer.rest(Rest("/predictions/echo", b"x", {"X-Tenant": "rest"}))["status"] == 200
        assert peer.rest(Rest("/predictions/echo", b"x"))["status"] == 200
        for call in ("Predictions", "StreamPredictions"):
            peer.send(Grpc(call, PREDICTION, metadata=(("x-tenant", call),)))
        requests = [message((1, "echo"), body("x"), (4, "s")) for _ in range(2)]
        with grpc.insecure_channel(server.address("grpc_inference")) as channel:
            stream = channel.stream_stream(INFERENCE + "StreamPredictions2")
            assert len(list(stream(iter(requests), metadata=[("x-tenant", "many")], timeout=DEADLINE_S))) == 2
        found = {}
        for (name, labels), value in samples("\n".join(peer.scrape())).items():
            if name == "pharos_tenant_requests_total":
                found[dict(labels)["tenant"]] = value
    assert found == {"rest": 2, "none": 1, "Predictions": 1, "StreamPredictions": 1, "many": 2}
