"""Models of the same name in two repositories (`--model-namespacing`), as in a real Triton 2.51: the repository distinguishes
them, and an ensemble uses the members in its repository first."""

import json
import shutil

import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from harness.server import Server, total
from harness.waiting import eventually
from repository.repositories import World
from repository.repository_tables import CPU, ensemble, model

AMBIGUOUS = "There are 2 identifiers of model '{}' in global map, model namespace must be provided to resolve ambiguity."
MODES = {
    "explicit": ["--model-control-mode=explicit"],
    "poll": ["--model-control-mode=poll", "--repository-poll-secs=1"],
}


class Worlds:
    """One server with two repositories. Each repository has a different maximum batch size, which identifies its models."""

    BATCHES = {"a": 3, "b": 5}

    def __init__(self, folder, *options):
        self.folders = {name: folder / name for name in "ab"}
        self.worlds = {}
        for name, path in self.folders.items():
            path.mkdir()
            self.worlds[name] = World(None, path, False)
        self.server = Server(folder, self.folders.values(), ["--model-namespacing", *options])
        for world in self.worlds.values():
            world.server = self.server
        self.any = self.worlds["a"]

    def put(self, where: str, name: str, *members: str, namespace=""):
        """Writes a model, or an ensemble of members."""
        for repository in where:
            batch = self.BATCHES[repository]
            text = ensemble(name, *members).replace("max_batch_size: 8", f"max_batch_size: {batch}") if members else ""
            if namespace:
                text = text.replace("model_version: -1", f'model_version: -1 model_namespace: "{self.folders[namespace]}"')
            self.worlds[repository].put(name, text or model(batch=batch, extra=CPU), [1])

    def max_batch_size_of(self, name: str):
        """Returns the maximum batch size of the model with this name, or the error."""
        status, text = self.any.ask(f"v2/models/{name}/config")
        answer = json.loads(text)
        return answer["max_batch_size"] if status == 200 else answer["error"]

    def served(self, repository: str, name="same") -> float:
        """Returns the number of requests that this repository's model has answered."""
        labels = {"model": name, "namespace": str(self.folders[repository])}
        return total(self.server.scrape(), "nv_inference_request_success", **labels)

    def index(self) -> list:
        entries = json.loads(self.any.ask("v2/repository/index", "")[1])
        return [(entry["name"], entry.get("state")) for entry in entries]


@pytest.fixture(params=MODES)
def mode(request):
    """The model control mode."""
    return request.param


def test_ensembles_use_members_of_the_same_repository(tmp_path, mode):
    """A name that is in both repositories is ambiguous alone; an ensemble finds the member in its repository."""
    worlds = Worlds(tmp_path, *MODES[mode])
    worlds.put("ab", "same")
    worlds.put("a", "of_a", "same")
    worlds.put("b", "of_b", "same")
    worlds.put("a", "of_b_in_a", "same", namespace="b")
    worlds.put("b", "only")
    worlds.put("ab", "both", "same")
    with worlds.server:
        any_ = worlds.any
        if mode == "explicit":
            for name in ("of_a", "of_b", "of_b_in_a", "only", "both"):
                assert any_.load(name, {}) == [200, ""]
        assert worlds.index() == [(name, "READY") for name in
                                  ("both", "of_a", "of_b_in_a", "same", "both", "of_b", "only", "same")]  # fmt: skip
        assert [any_.infer(name, "")[0] for name in ("of_a", "of_b", "of_b_in_a", "only")] == [200] * 4
        assert (worlds.served("a"), worlds.served("b"), worlds.served("b", "only")) == (1, 2, 1)
        for name in ("same", "both"):
            status, text = any_.infer(name, "")
            assert status == 400 and AMBIGUOUS.format(name) in text and str(worlds.folders["b"] / name) in text
            assert any_.ready(name, "") != 200 and AMBIGUOUS.format(name) in worlds.max_batch_size_of(name)
        assert any_.infer("none", "") == [400, "Request for unknown model: 'none' is not found"]
        assert worlds.server.get("/v2/health/ready")[0] == 200
        # Where the protocol allows it, a model can be addressed by repository and name.
        with tritonclient.grpc.InferenceServerClient(worlds.server.grpc) as client:
            for name, path in worlds.folders.items():
                config = client.get_model_config(f"{path}/same").config
                assert (config.name, config.max_batch_size) == ("same", Worlds.BATCHES[name])
                assert client.get_inference_statistics(f"{path}/same").model_stats[0].name == "same"
            with pytest.raises(InferenceServerException):
                client.get_model_config(f"{path}/../a/same")
        stats = json.loads(any_.ask("v2/models/stats")[1])["model_stats"]
        assert sorted(entry["name"] for entry in stats) == sorted(name for name, _ in worlds.index())
        series = [dict(pairs) for name, pairs in worlds.server.scrape() if name == "ts_inference_requests_total"]
        assert {(labels["model_name"], labels["namespace"]) for labels in series} >= {
            ("same", str(path)) for path in worlds.folders.values()
        }


def test_members_of_another_repository_are_a_fallback(tmp_path, mode):
    """While a repository does not have the member, the ensemble uses that of the other repository."""
    worlds = Worlds(tmp_path, *MODES[mode])
    worlds.put("ab", "same")
    worlds.put("a", "of_a", "same")
    worlds.put("b", "of_b", "same")
    load = lambda *names: [worlds.any.load(name, {}) for name in names if mode == "explicit"]  # noqa: E731
    with worlds.server:
        load("of_a", "of_b")
        shutil.move(worlds.folders["a"] / "same", tmp_path / "aside")
        load("of_a", "of_b")
        eventually("one model has the name", lambda: worlds.max_batch_size_of("same") == Worlds.BATCHES["b"])

        def the_remaining_model_answers(ensemble: str) -> bool:
            before = worlds.served("b")
            return worlds.any.infer(ensemble, "")[0] == 200 and worlds.served("b") == before + 1

        # Requests that came before the change may still use the other model.
        for ensemble in ("of_a", "of_b"):
            eventually(f"the remaining model serves {ensemble}", lambda ensemble=ensemble: the_remaining_model_answers(ensemble))
        shutil.move(tmp_path / "aside", worlds.folders["a"] / "same")
        load("of_a")
        eventually("two models have the name", lambda: AMBIGUOUS.format("same") in str(worlds.max_batch_size_of("same")))

        def answers_from_its_repository():
            own, other = worlds.served("a"), worlds.served("b")
            answered = worlds.any.infer("of_a", "")[0] == 200
            return answered and (worlds.served("a"), worlds.served("b")) == (own + 1, other)

        eventually("the member in the same repository answers", answers_from_its_repository)


@pytest.mark.smoke
def test_loads_and_unloads_by_name(tmp_path):
    """A name refers to all models with it; parameters of a load apply to one model."""
    worlds = Worlds(tmp_path, *MODES["explicit"], "--load-model=same")
    worlds.put("ab", "same")
    worlds.put("b", "only")
    one = {"backend": "builtin", "max_batch_size": 7}
    for key, name in [("input", "INPUT0"), ("output", "OUTPUT0")]:
        one[key] = [{"name": name, "data_type": "TYPE_FP32", "dims": [-1]}]
    one["parameters"] = {"function": {"string_value": "identity"}}
    config = ("string_param", json.dumps(one))
    with worlds.server:
        any_ = worlds.any
        assert worlds.index() == [("same", "READY"), ("only", None), ("same", "READY")]
        status, text = any_.load("same", {"config": one})
        assert status == 400 and AMBIGUOUS.format("same") in text
        of_a = f"{worlds.folders['a']}/same"
        assert any_.grpc_load(of_a, {"config": config}) == ["OK", ""]
        assert any_.load("only", {"config": one}) == [200, ""] and worlds.max_batch_size_of("only") == 7
        for name in (f"{worlds.folders['a']}/../b/only", f"{worlds.folders['a']}/..", f"{tmp_path}/c/same", "/etc/passwd"):
            code, text = any_.grpc_load(name, {})
            assert code == "INVALID_ARGUMENT" and "path traversal" in text
        # The files are given with the load, and no repository has the model.
        assert any_.load("new", {"config": one, "file:1/weights": "eA=="}) == [200, ""]
        assert any_.infer("new", "")[0] == 200 and any_.load("new", {}) == [200, ""]
        # The name finds the remaining model.
        assert any_.grpc_unload(of_a, {}) == ["OK", ""]
        eventually("one model remains", lambda: worlds.max_batch_size_of("same") == Worlds.BATCHES["b"])
        assert any_.load("same", {}) == [200, ""]
        assert AMBIGUOUS.format("same") in worlds.max_batch_size_of("same")
        for name in ("same", "only", "new"):
            assert any_.unload(name, {}) == [200, ""]
        unloaded = [("same", "UNAVAILABLE"), ("only", "UNAVAILABLE"), ("same", "UNAVAILABLE")]
        eventually("all models are unloaded", lambda: worlds.index() == unloaded)
        eventually("all workers have ended", lambda: not worlds.server.workers())
        # A model that cannot be loaded does not prevent the load of another with its name.
        worlds.worlds["a"].config("same", "max_batch_size: what")
        assert any_.load("same", {})[0] == 500
        assert worlds.index().count(("same", "READY")) == 1


def test_without_namespaces_one_name_is_one_model(tmp_path):
    """Two models with one name are an error that contains the name; other models are not affected."""
    worlds = Worlds(tmp_path, *MODES["explicit"], "--model-namespacing=false")
    worlds.server.command.remove("--model-namespacing")
    worlds.put("ab", "same")
    worlds.put("b", "only")
    with worlds.server:
        status, text = worlds.any.load("same", {})
        assert status == 500 and "model appears in two or more repositories" in text
        assert worlds.any.load("only", {}) == [200, ""] and worlds.any.infer("only", "")[0] == 200
        labels = [dict(pairs) for name, pairs in worlds.server.scrape() if name.startswith("nv_inference")]
        assert labels and not any("namespace" in pairs for pairs in labels)


def test_the_reason_of_an_ambiguous_or_absent_member(tmp_path):
    """It names the repositories that contain the member, or those that do not."""
    worlds = Worlds(tmp_path, *MODES["explicit"])
    worlds.put("ab", "same")
    for name, member in [("of_same", "same"), ("of_none", "none")]:
        text = ensemble(name, member).replace("model_version: -1", 'model_version: -1 model_namespace: "/nowhere"')
        worlds.worlds["a"].put(name, text, [1])
    # Answers have `REPOSITORY` in the place of the first one.
    a, b = "REPOSITORY", worlds.folders["b"]
    with worlds.server:
        for name, reason in [
            ("of_same", f"same: model appears in two or more repositories: '{a}', '{b}'"),
            ("of_none", f"none: model 'none' is not in '{a}', '{b}'"),
        ]:
            status, text = worlds.any.load(name, {})
            assert status == 400 and f"not available or ambiguous: {reason}" in text, text
