"""Operations on a model repository, one after the other, and what a server must answer: `golden_repository.json` has what
a real Triton does. `repositories.py` performs them.

A scenario is a list of steps on a server and a repository of their own kind (`MODES`). Each step is a tuple: what is done,
and with what. Those that ask give a row of the answers.

| step | what is done | row |
|---|---|---|
| `put NAME CONFIG VERSIONS` | writes a model, in place of one of that name | no |
| `config NAME CONFIG`, `version NAME N`, `drop PATH`, `touch PATH`, `text PATH TEXT` | changes files | no |
| `load NAME PARAMETERS`, `unload NAME PARAMETERS`, `post PATH BODY` | HTTP | status and error |
| `grpc_load ...`, `grpc_unload ...`, `grpc_index REPOSITORY` | gRPC | code and error |
| `index NAMES READY` | waits until nothing is loading or unloading, then the entries of these models | entries |
| `ready NAME VERSION`, `infer NAME VERSION`, `field NAME FIELD`, `count NAME`, `versions NAME` | asks the model | answers |
| `await NAMES STATES` | waits until the index has these states | no |
"""

import sys

from server import ROOT

sys.path.insert(0, str(ROOT / "tests/models"))
from generate import parameters, tensor  # noqa: E402

CPU = "instance_group [ { kind: KIND_CPU } ]\n"
CPUS = "instance_group [ { kind: KIND_CPU count: 2 } ]\n"


def model(function="identity", batch=8, extra=CPU, **more) -> str:
    """A configuration without name and backend."""
    tensors = tensor("input", "INPUT0", "FP32", [-1]) + tensor("output", "OUTPUT0", "FP32", [-1])
    return f"max_batch_size: {batch}\n{tensors}{extra}{parameters(function=function, **more)}"


def ensemble(name: str, *members: str) -> str:
    """An ensemble of members one behind the other, without name."""
    text = 'platform: "ensemble"\nmax_batch_size: 8\n' + tensor("input", "INPUT0", "FP32", [-1])
    text += tensor("output", "OUTPUT0", "FP32", [-1]) + "ensemble_scheduling {\n"
    names = ["INPUT0", *(f"t{n}" for n in range(1, len(members))), "OUTPUT0"]
    for n, member in enumerate(members):
        text += (
            f'  step {{\n    model_name: "{member}"\n    model_version: -1\n'
            f'    input_map {{ key: "INPUT0" value: "{names[n]}" }}\n'
            f'    output_map {{ key: "OUTPUT0" value: "{names[n + 1]}" }}\n  }}\n'
        )
    return text + "}\n"


def override(function="identity", batch=8, **more) -> dict:
    """A configuration as JSON's objects. `BACKEND` is replaced by the server's own."""
    config = {
        "backend": "BACKEND",
        "max_batch_size": batch,
        "input": [{"name": "INPUT0", "data_type": "TYPE_FP32", "dims": ["-1"]}],
        "output": [{"name": "OUTPUT0", "data_type": "TYPE_FP32", "dims": [-1]}],
        "instance_group": [{"kind": "KIND_CPU"}],
        "parameters": {"function": {"string_value": function}},
    }
    return config | more


ALL = "version_policy { all {} }\n"
FILE = "file:1/model.py"
ODD_NAMES = ["%20", "%20%20", "a%2Fb", "..%2Fx", "..", "%2E%2E", "%20..%20", ".", "...", "..my_model", "model..1", "a%5Cb", "n" * 300, "unknown"]

EXPLICIT = {
    "names": [
        *(("load", name, {}) for name in ODD_NAMES),
        *(("unload", name, {}) for name in ODD_NAMES),
        *(("grpc_load", name, {}) for name in ["", " ", "\t\n", "a/b", "../x", "..", " .. ", ".", "...", "..my_model", "model..1", "a\\b", "/", "a/", "unknown"]),
        *(("grpc_unload", name, {}) for name in ["", " ", "a/b", "..", "...", "unknown"]),
        ("index", ["...", "..my_model", "model..1", "unknown"], False),
    ],
    "life": [
        ("index", ["life"], False),
        ("put", "life", model(), [1]),
        ("index", ["life"], False),
        ("ready", "life", ""),
        ("infer", "life", ""),
        ("load", "life", {}),
        ("index", ["life"], False),
        ("index", ["life"], True),
        ("ready", "life", ""),
        ("ready", "life", "1"),
        ("ready", "life", "2"),
        ("infer", "life", ""),
        ("count", "life"),
        ("load", "life", {}),
        ("count", "life"),
        ("infer", "life", ""),
        ("load", "life", {}),
        ("count", "life"),
        ("unload", "life", {}),
        ("index", ["life"], False),
        ("index", ["life"], True),
        ("ready", "life", ""),
        ("ready", "life", "1"),
        ("infer", "life", ""),
        ("infer", "life", "1"),
        ("infer", "life", "2"),
        ("field", "life", "max_batch_size"),
        ("count", "life"),
        ("unload", "life", {}),
        ("unload", "life_that_never_was", {}),
        ("load", "life", {}),
        ("count", "life"),
        ("infer", "life", ""),
        ("grpc_load", "life", {}),
        ("grpc_unload", "life", {}),
        ("index", ["life"], False),
    ],
    "parameters": [
        ("put", "par", model(), [1]),
        ("load", "par", {"unknown": "x"}),
        ("load", "par", {"unknown": 1}),
        ("load", "par", {"unknown": True}),
        ("load", "par", {"unknown": 1.5}),
        ("load", "par", {"unknown": None}),
        ("load", "par", {"unknown": {}}),
        ("load", "par", {"unload_dependents": True}),
        ("load", "par", {"config": 1}),
        ("load", "par", {"config": ""}),
        ("load", "par", {"config": "not json"}),
        ("load", "par", {"config": "[]"}),
        ("load", "par", {"config": '{"no_such_field":1}'}),
        ("load", "par", {"config": '{"max_batch_size":"many"}'}),
        ("load", "par", {"config": override(name="another")}),
        ("load", "par", {FILE: "eA=="}),
        ("load", "par", {FILE: 1}),
        ("post", "v2/repository/models/par/load", "not json"),
        ("post", "v2/repository/models/par/load", "[]"),
        ("post", "v2/repository/models/par/load", '{"parameters":[]}'),
        ("post", "v2/repository/models/par/load", '{"parameters":1}'),
        ("post", "v2/repository/models/par/load", '{"parameters":null}'),
        ("index", ["par"], False),
        ("post", "v2/repository/models/par/load", '{"other":1}'),
        ("index", ["par"], False),
        ("post", "v2/repository/models/par/unload", "not json"),
        ("post", "v2/repository/models/par/unload", '{"parameters":[]}'),
        ("unload", "par", {"unload_dependents": "yes"}),
        ("unload", "par", {"unload_dependents": 1}),
        ("unload", "par", {"unknown": 1}),
        ("index", ["par"], False),
        ("post", "v2/repository/models/par/load", ""),
        ("index", ["par"], False),
        ("grpc_load", "par", {"unknown": ("string_param", "x")}),
        ("grpc_load", "par", {"config": ("int64_param", 1)}),
        ("grpc_load", "par", {"config": ("bytes_param", b"{}")}),
        ("grpc_load", "par", {FILE: ("string_param", "x")}),
        ("grpc_load", "par", {"config": ("string_param", "not json")}),
        ("grpc_unload", "par", {"unknown": ("string_param", "x")}),
        ("grpc_unload", "par", {"unload_dependents": ("string_param", "x")}),
        ("grpc_unload", "par", {"unload_dependents": ("bool_param", False)}),
        ("index", ["par"], False),
        ("grpc_index", "somewhere"),
        ("post", "v2/repository/index", '{"ready":1}'),
        ("post", "v2/repository/index", '{"ready":"true"}'),
        ("post", "v2/repository/index", '{"ready":null}'),
        ("post", "v2/repository/index", "not json"),
        ("post", "v2/repository/somewhere/index", "{}"),
        ("post", "v2/repository/somewhere/models/par/load", "{}"),
    ],
    "config override": [
        ("put", "ov", model(), [1]),
        ("load", "ov", {"config": override(batch="16")}),
        ("field", "ov", "max_batch_size"),
        ("infer", "ov", ""),
        ("count", "ov"),
        ("load", "ov", {}),
        ("field", "ov", "max_batch_size"),
        ("count", "ov"),
        ("load", "ov", {"config": override(batch="16")}),
        ("count", "ov"),
        ("load", "ov", {"config": override(batch=4)}),
        ("field", "ov", "max_batch_size"),
        ("count", "ov"),
        ("config", "ov", model(batch=2)),
        ("load", "ov", {}),
        ("field", "ov", "max_batch_size"),
        ("infer", "ov", ""),
        ("load", "ov", {"config": override(batch=4, instance_group=[{"kind": "KIND_CPU", "count": 2}])}),
        ("field", "ov", "instance_group"),
        ("count", "ov"),
        ("load", "ov", {"config": override(function="no such function")}),
        ("infer", "ov", ""),
        ("index", ["ov"], False),
        ("field", "ov", "max_batch_size"),
        ("unload", "ov", {}),
        ("index", ["ov"], False),
        ("load", "ov", {}),
        ("field", "ov", "max_batch_size"),
        ("count", "ov"),
    ],
    "file override": [
        ("put", "fo", model(extra=CPU + ALL), [1, 3]),
        ("load", "fo", {}),
        ("index", ["fo"], False),
        ("load", "fo", {FILE: "MODEL"}),
        ("index", ["fo"], False),
        ("load", "fo", {"config": override(batch=5), "file:2/model.py": "MODEL"}),
        ("index", ["fo"], False),
        ("field", "fo", "max_batch_size"),
        ("load", "fo", {}),
        ("index", ["fo"], False),
        ("field", "fo", "max_batch_size"),
        ("load", "fo", {"config": override(batch=6)}),
        ("index", ["fo"], False),
        ("field", "fo", "max_batch_size"),
        ("unload", "fo", {}),
        ("load", "fo", {}),
        ("index", ["fo"], False),
        ("load", "fo_new", {"config": override(), FILE: "MODEL"}),
        ("index", ["fo_new"], False),
        ("infer", "fo_new", ""),
        ("unload", "fo_new", {}),
        ("index", ["fo_new"], False),
        ("load", "fo_new", {}),
        ("index", ["fo_new"], False),
        ("grpc_load", "fo_grpc", {"config": ("json_param", override()), FILE: ("model_param", "")}),
        ("infer", "fo_grpc", ""),
        ("unload", "fo_grpc", {}),
    ],
    "escapes": [
        ("put", "esc", model(), [1]),
        *(
            ("load", "esc", {"config": override(), f"file:{path}": "eA=="})
            for path in ["../x", "1/../../x", "/etc/pharos-escape", "..", "", "1/..", "/", "1/", "n" * 300, "1/" + "n/" * 3000 + "x", "1\0x", "a\nb"]
        ),
        ("load", "esc", {"config": override(), FILE: "not base64!"}),
        ("load", "esc", {"config": override(), "file:1/./model.py": "MODEL"}),
        ("load", "esc", {"config": override(), "file:1/model.py/x": "eA==", FILE: "MODEL"}),
        ("load", "esc", {"config": override(), "file:config.pbtxt": "eA==", FILE: "MODEL"}),
        ("index", ["esc"], False),
    ],
    "versions": [
        ("put", "ver", model(extra=CPU + ALL), [1, 2]),
        ("load", "ver", {}),
        ("index", ["ver"], False),
        ("infer", "ver", "1"),
        ("infer", "ver", "2"),
        ("version", "ver", 3),
        ("load", "ver", {}),
        ("index", ["ver"], False),
        ("count", "ver"),
        ("versions", "ver"),
        ("drop", "ver/1"),
        ("load", "ver", {}),
        ("index", ["ver"], False),
        ("count", "ver"),
        ("infer", "ver", "1"),
        ("config", "ver", model(extra=CPU + "version_policy { specific { versions: [ 2 ] } }\n")),
        ("load", "ver", {}),
        ("index", ["ver"], False),
        ("count", "ver"),
        ("touch", "ver/2/model.py"),
        ("load", "ver", {}),
        ("index", ["ver"], False),
        ("count", "ver"),
        ("config", "ver", model(extra=CPU + "version_policy { specific { versions: [ 2, 9 ] } }\n")),
        ("load", "ver", {}),
        ("index", ["ver"], False),
        ("config", "ver", model(extra=CPU + "version_policy { specific { versions: [ 9 ] } }\n")),
        ("load", "ver", {}),
        ("index", ["ver"], False),
        ("infer", "ver", ""),
    ],
    "a reload that fails": [
        ("put", "bad", model(), [1]),
        ("load", "bad", {}),
        ("infer", "bad", ""),
        ("config", "bad", "max_batch_size: what"),
        ("load", "bad", {}),
        ("index", ["bad"], False),
        ("infer", "bad", ""),
        ("count", "bad"),
        ("config", "bad", model(function="no such function")),
        ("load", "bad", {}),
        ("index", ["bad"], False),
        ("index", ["bad"], True),
        ("infer", "bad", ""),
        ("count", "bad"),
        ("config", "bad", model(batch=4)),
        ("load", "bad", {}),
        ("index", ["bad"], False),
        ("infer", "bad", ""),
        ("field", "bad", "max_batch_size"),
        ("count", "bad"),
        ("drop", "bad"),
        ("index", ["bad"], False),
        ("load", "bad", {}),
        ("index", ["bad"], False),
        ("infer", "bad", ""),
        ("unload", "bad", {}),
        ("index", ["bad"], False),
        ("put", "never", model(function="no such function"), [1]),
        ("load", "never", {}),
        ("index", ["never"], False),
        ("unload", "never", {}),
        ("index", ["never"], False),
        ("put", "bare", model(), []),
        ("load", "bare", {}),
        ("index", ["bare"], False),
    ],
    "instances": [
        ("put", "ins", model(), [1]),
        ("load", "ins", {}),
        ("infer", "ins", ""),
        ("config", "ins", model(extra=CPUS)),
        ("load", "ins", {}),
        ("field", "ins", "instance_group"),
        ("count", "ins"),
        ("infer", "ins", ""),
        ("config", "ins", model(extra=CPU)),
        ("load", "ins", {}),
        ("field", "ins", "instance_group"),
        ("count", "ins"),
        ("infer", "ins", ""),
        ("config", "ins", model(extra=CPU, batch=3)),
        ("load", "ins", {}),
        ("count", "ins"),
        ("touch", "ins/1/model.py"),
        ("infer", "ins", ""),
        ("load", "ins", {}),
        ("count", "ins"),
        ("text", "ins/1/another_file", "x"),
        ("infer", "ins", ""),
        ("load", "ins", {}),
        ("count", "ins"),
        ("text", "ins/a_file", "x"),
        ("infer", "ins", ""),
        ("load", "ins", {}),
        ("count", "ins"),
    ],
    "ensembles": [
        ("put", "en_a", model(), [1]),
        ("put", "en_b", model(), [1]),
        ("put", "en_c", model(), [1]),
        ("put", "en_ab", ensemble("en_ab", "en_a", "en_b"), [1]),
        ("put", "en_bc", ensemble("en_bc", "en_b", "en_c"), [1]),
        ("put", "en_top", ensemble("en_top", "en_ab", "en_c"), [1]),
        ("load", "en_ab", {}),
        ("index", ["en_a", "en_b", "en_ab", "en_bc"], False),
        ("infer", "en_ab", ""),
        ("count", "en_a"),
        ("load", "en_a", {}),
        ("count", "en_a"),
        ("unload", "en_a", {}),
        ("index", ["en_a", "en_b", "en_ab"], False),
        ("infer", "en_ab", ""),
        ("ready", "en_ab", ""),
        ("load", "en_a", {}),
        ("index", ["en_a", "en_b", "en_ab"], False),
        ("infer", "en_ab", ""),
        ("load", "en_bc", {}),
        ("unload", "en_ab", {}),
        ("index", ["en_a", "en_b", "en_c", "en_ab", "en_bc"], False),
        ("load", "en_ab", {}),
        ("unload", "en_ab", {"unload_dependents": True}),
        ("index", ["en_a", "en_b", "en_c", "en_ab", "en_bc"], False),
        ("infer", "en_bc", ""),
        ("load", "en_top", {}),
        ("index", ["en_a", "en_b", "en_c", "en_ab", "en_top"], False),
        ("infer", "en_top", ""),
        ("config", "en_a", model(batch=9)),
        ("load", "en_a", {}),
        ("index", ["en_a", "en_ab", "en_top"], False),
        ("infer", "en_top", ""),
        ("count", "en_a"),
        ("count", "en_ab"),
        ("config", "en_c", model(batch=3)),
        ("load", "en_c", {}),
        ("index", ["en_c", "en_bc", "en_top"], False),
        ("infer", "en_top", ""),
        ("grpc_unload", "en_top", {"unload_dependents": ("bool_param", True)}),
        ("index", ["en_a", "en_b", "en_c", "en_ab", "en_bc", "en_top"], False),
        ("put", "en_lost", ensemble("en_lost", "en_a", "en_nowhere"), [1]),
        ("load", "en_lost", {}),
        ("index", ["en_lost", "en_a"], False),
    ],
}

NONE = {
    "mode none": [
        ("load", "one", {}),
        ("unload", "one", {}),
        ("load", "a%2Fb", {}),
        ("load", "one", {"unknown": 1}),
        ("grpc_load", "one", {}),
        ("grpc_unload", "one", {}),
        ("index", ["one"], False),
        ("put", "two", model(), [1]),
        ("index", ["one", "two"], False),
    ]
}

POLL = {
    "mode poll": [
        ("load", "one", {}),
        ("unload", "one", {}),
        ("infer", "one", ""),
        ("put", "two", model(), [1]),
        ("await", ["two"], ["READY"]),
        ("index", ["one", "two"], False),
        ("config", "one", model(batch=2)),
        ("field_becomes", "one", "max_batch_size", 2),
        ("count", "one"),
        ("infer", "one", ""),
        ("version", "one", 2),
        ("await", ["one"], ["UNAVAILABLE", "READY"]),
        ("index", ["one"], False),
        ("drop", "two"),
        ("await", ["two"], []),
        ("index", ["one", "two"], False),
        ("config", "one", "what"),
        ("sleep", 2.5),
        ("index", ["one"], False),
        ("infer", "one", ""),
        ("put", "half", "", []),
        ("sleep", 2.5),
        ("index", ["half"], False),
    ]
}

STARTED = {
    "one named": ["--model-control-mode=explicit", "--load-model=one"],
    "all": ["--model-control-mode=explicit", "--load-model=*"],
    "one and all": ["--model-control-mode=explicit", "--load-model=one", "--load-model=*"],
    "unknown": ["--model-control-mode=explicit", "--load-model=nowhere"],
    "unknown, going on": ["--model-control-mode=explicit", "--load-model=nowhere", "--exit-on-error=false", "--strict-readiness=false"],
    "named without the mode": ["--load-model=one"],
    "ensemble": ["--model-control-mode=explicit", "--load-model=both"],
}
"""Command lines: the index that comes of each, or the exit code and the error."""
