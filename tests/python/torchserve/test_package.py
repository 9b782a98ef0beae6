"""The package `ts` that TorchServe handlers import, without a server: importable modules, the effects of calls, and independence
of PyTorch. Runs in a separate interpreter that has imported nothing else."""

import json
import logging
import os
import re
import runpy
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from harness.waiting import DEADLINE_S
from torchserve import models

HOME = Path(__file__).resolve().parents[3] / "worker/python/python/pharos_worker/torchserve"
PYTHON = os.environ.get("PHAROS_PYTHON") or sys.executable


@pytest.fixture(scope="module", autouse=True)
def path():
    """Adds `ts` to the module path, for this file alone."""
    sys.path.insert(0, str(HOME))
    yield
    sys.path.remove(str(HOME))
    for name in [name for name in sys.modules if name == "ts" or name.startswith("ts.")]:
        del sys.modules[name]


@pytest.fixture
def metrics(tmp_path):
    """The metrics of a file, and the recorded samples."""
    from ts.metrics import sink
    from ts.metrics.metric_cache_yaml_impl import MetricsCacheYamlImpl

    pytest.importorskip("yaml")
    text = "model_metrics:\n  gauge:\n    - {name: Depth, unit: ms, dimensions: [sea]}\n"
    (tmp_path / "metrics.yaml").write_text(text)
    cache = MetricsCacheYamlImpl(str(tmp_path / "metrics.yaml"))
    cache.initialize_cache()
    cache.model_name = "m"
    samples = []
    sink.record = lambda *sample: samples.append(sample)
    yield cache, samples
    sink.record = sink.log


IMPORTS = """
from ts.context import Context, RequestProcessor
from ts.handler_utils.micro_batching import MicroBatching
from ts.handler_utils.timer import timed
from ts.handler_utils.utils import import_class, send_intermediate_predict_response
from ts.metrics.caching_metric import CachingMetric
from ts.metrics.dimension import Dimension
from ts.metrics.metric import Metric
from ts.metrics.metric_cache_errors import (GeneralMetricsCacheError, MetricsCacheIOError, MetricsCacheKeyError,
    MetricsCachePyYamlError, MetricsCacheTypeError, MetricsCacheValueError)
from ts.metrics.metric_cache_yaml_impl import MetricsCacheYamlImpl
from ts.metrics.metric_encoder import MetricEncoder
from ts.metrics.metric_type_enum import MetricTypes
from ts.metrics.metrics_store import MetricsStore
from ts.metrics.unit import Units
from ts.model_loader import ModelLoaderFactory, TsModelLoader
from ts.protocol.otf_message_handler import send_intermediate_predict_response
from ts.service import Service, emit_metrics
from ts.torch_handler.base_handler import BaseHandler
from ts.torch_handler.image_classifier import ImageClassifier
from ts.torch_handler.image_segmenter import ImageSegmenter
from ts.torch_handler.object_detector import ObjectDetector
from ts.torch_handler.request_envelope.base import BaseEnvelope
from ts.torch_handler.request_envelope.kservev2 import KServev2Envelope
from ts.torch_handler.text_classifier import TextClassifier
from ts.torch_handler.text_handler import TextHandler
from ts.torch_handler.vision_handler import VisionHandler
from ts.utils.util import (CLEANUP_REGEX, PredictionException, check_valid_pt2_backend, get_yaml_config,
    list_classes_from_module, load_label_mapping, map_class_to_label)
"""


def test_what_handlers_import_needs_no_pytorch():
    code = f"import sys\nsys.modules['torch'] = None\nsys.path.insert(0, {str(HOME)!r})\n{IMPORTS}\nimport ts\nprint(ts.__version__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("0.12.0\n", "")


def test_another_package_of_this_name_has_lower_priority(tmp_path):
    (tmp_path / "ts").mkdir()
    (tmp_path / "ts/__init__.py").write_text("other = True\n")
    code = "import ts; assert ts.other\nfrom pharos_worker import torchserve; torchserve.activate()\nimport ts; print(ts.__version__)"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, env=environment)
    if "No module named 'pharos_worker'" in done.stderr:
        pytest.skip(f"{PYTHON} does not have the package pharos-worker: make python-worker")
    assert (done.stdout, done.stderr) == ("0.12.0\n", "")


def test_every_call_for_metrics(metrics):
    from ts.metrics.dimension import Dimension
    from ts.metrics.metric_type_enum import MetricTypes

    cache, samples = metrics
    cache.set_request_ids({0: "a", 1: "b"})
    default = [("ModelName", "m"), ("Level", "Model")]
    own = [Dimension("step", 1)]
    cache.add_counter("C", 1)
    cache.add_counter("C", 2, 1, None)
    cache.add_time("T", 3, 7, "s", own)
    cache.add_size("S", 4, None, "GB")
    cache.add_percent("P", 5)
    cache.add_error("E", 6)
    cache.add_metric("M", 7, "loops", 0, [], MetricTypes.HISTOGRAM)
    assert samples == [
        (("C", "Count", "counter"), default, 1, "a,b"),
        (("C", "Count", "counter"), default, 2, "b"),
        (("T", "Seconds", "gauge"), [("step", "1"), *default], 3, "a,b"),
        (("S", "Gigabytes", "gauge"), default, 4, "a,b"),
        (("P", "Percent", "gauge"), default, 5, "a,b"),
        (("E", "unit", "counter"), [("Level", "Error")], 6, ""),
        (("M", "loops", "histogram"), default, 7, "a"),
    ]
    assert [dimension.name for dimension in own] == ["step", "ModelName", "Level"], "the caller's list must have them too"
    assert sorted(cache.cache_keys()) == [
        "counter:C", "counter:E", "gauge:Depth", "gauge:P", "gauge:S", "gauge:T", "histogram:M",
    ]  # fmt: skip
    samples.clear()
    depth = cache.get_metric("Depth", MetricTypes.GAUGE)
    depth.add_or_update(1.5, ["north"])
    depth.update(2.5, "id", [Dimension("lake", "x")])
    assert samples == [
        (("Depth", "Milliseconds", "gauge"), [("sea", "north")], 1.5, ""),
        (("Depth", "Milliseconds", "gauge"), [("lake", "x")], 2.5, "id"),
    ]


def test_invalid_metrics(metrics, caplog):
    from ts.metrics import metric_cache_errors as errors
    from ts.metrics.metric_type_enum import MetricTypes

    cache, samples = metrics
    counter = cache.add_metric_to_cache("C", "count", ["a"])
    with caplog.at_level(logging.ERROR):
        for call in [lambda: counter.add_or_update(1), lambda: counter.add_or_update(-1, ["x"]), lambda: counter.add_or_update(1, None)]:
            call()
    assert len(caplog.records) == 3 and not samples
    for error, call in [
        (errors.MetricsCacheValueError, lambda: cache.add_time("T", 1, unit="min")),
        (ValueError, lambda: cache.add_size("S", 1, unit="TB")),
        (errors.MetricsCacheTypeError, lambda: cache.add_metric_to_cache(1, "ms")),
        (errors.MetricsCacheTypeError, lambda: cache.add_metric_to_cache("a", None)),
        (errors.MetricsCacheTypeError, lambda: cache.add_metric_to_cache("a", "ms", ("b",))),
        (errors.MetricsCacheTypeError, lambda: cache.add_metric_to_cache("a", "ms", [], "gauge")),
        (errors.MetricsCacheKeyError, lambda: cache.get_metric("Depth")),
    ]:
        with pytest.raises(error):
            call()
    with pytest.raises(KeyError, match="Metric of type 'MetricTypes.GAUGE' and name 'X' doesn't exist"):
        cache.get_metric("X", MetricTypes.GAUGE)


def test_metrics_of_older_handlers(caplog):
    from ts.metrics.dimension import Dimension
    from ts.metrics.metric import Metric
    from ts.metrics.metric_encoder import MetricEncoder
    from ts.metrics.metrics_store import MetricsStore
    from ts.service import emit_metrics

    store = MetricsStore({0: "a", 1: "b"}, "m")
    store.add_counter("C", 1)
    store.add_time("T", 2, 0, "s", [Dimension("d", "e")])
    store.add_error("E", 3)
    assert list(store.cache) == ["C-count-a,b-ModelName:m-Level:Model", "T-s-a-d:e-ModelName:m-Level:Model", "E--None-Level:Error"]
    with caplog.at_level(logging.INFO):
        emit_metrics(store.store)
        store.add_counter("C", 4)
    texts = [record.getMessage().split("|#hostname")[0] for record in caplog.records]
    assert texts == [
        "[METRICS]C.Count:1|#ModelName:m,Level:Model|#type:COUNTER",
        "[METRICS]T.Seconds:2|#d:e,ModelName:m,Level:Model|#type:GAUGE",
        "[METRICS]E.unit:3|#Level:Error|#type:GAUGE",
        "[METRICS]C.Count:4|#ModelName:m,Level:Model|#type:COUNTER",
    ]
    metric = Metric("N", 1.5, "ms", [Dimension("a", 1)], "id")
    assert str(metric).startswith("N.Milliseconds:1.5|#a:1|#hostname:") and str(metric).endswith(",id")
    assert json.loads(json.dumps(metric, cls=MetricEncoder))["Dimensions"] == [{"Name": "a", "Value": 1}]


def test_labels_of_classes(tmp_path):
    from ts.utils.util import load_label_mapping, map_class_to_label

    file = tmp_path / "index_to_name.json"
    assert load_label_mapping(str(file)) is None
    for content, expected in [
        ({"0": "cat", "1": ["n01", "dog"]}, {"0": "cat", "1": "dog"}),
        ({"object_type_names": ["a", "b"]}, {"0": "a", "1": "b"}),
    ]:
        file.write_text(json.dumps(content))
        assert load_label_mapping(str(file)) == expected
    for content in ([1], {"0": 5}):
        file.write_text(json.dumps(content))
        with pytest.raises(Exception, match="index_to_name.json"):
            load_label_mapping(str(file))
    assert map_class_to_label([[0.9, 0.1]], {"1": "dog", "0": "cat"}, [[1, 0]]) == [{"dog": 0.9, "cat": 0.1}]
    assert map_class_to_label([[0.9, 0.1], [1, 0]]) == [{"0": 0.9, "1": 0.1}, {"0": 1, "1": 0}]


def test_context_and_answers():
    from ts.context import Context, RequestProcessor

    context = Context("m", "/m", {}, 2, None, "1", True, None, {})
    assert context.get_request_id() is None
    context.request_ids = {0: "a"}
    context.request_processor = [RequestProcessor({"X-Own": "1"}), RequestProcessor({})]
    assert (context.get_request_id(0), context.get_request_id(3)) == ("a", None)
    assert [context.get_request_header(0, name) for name in ("X-Own", "x-own", "own")] == ["1", "1", None]
    assert context.get_all_request_header(1) == {}
    context.set_all_response_status(202, "Later")
    context.set_response_status(404, "No", 1)
    assert [context.get_response_status(at) for at in range(2)] == [(202, "Later"), (404, "No")]
    context.set_response_content_type(0, "image/png")
    assert context.get_response_content_type(0) == "image/png" and context.get_response_headers(1) == {}
    assert context == context and context != Context("n", "/m", {}, 2, None, "1")


def test_words():
    from ts.handler_utils.text_utils import get_tokenizer, ngrams_iterator
    from ts.torch_handler.text_handler import TextHandler

    assert get_tokenizer("basic_english")('You can\'t, "now"; <br />Go: 1.5!') == [
        "you", "can", "'", "t", ",", "now", "go", "1", ".", "5", "!",
    ]  # fmt: skip
    assert list(ngrams_iterator(["here", "we", "are"], 2)) == ["here", "we", "are", "here we", "we are"]
    handler = type("Handler", (TextHandler,), {})()
    assert handler._expand_contractions("I'll go, Can't've it's don't o'clock") == "I will go, Cannot have it is do not of the clock"
    assert handler._remove_html_tags("<b>a</b>&amp;b") == "ab"
    assert handler._remove_accented_characters("caf\u00e9") == "cafe"
    assert handler._remove_punctuation("a.b,c") == handler._remove_puncutation("a.b,c") == "abc"


def test_micro_batches_keep_order_and_raise():
    from ts.handler_utils.micro_batching import MicroBatching

    class Handler:
        def preprocess(self, data):
            return data

        def inference(self, data):
            if None in data:
                raise ValueError("none")
            return [number * 2 for number in data]

        def postprocess(self, data):
            return data

    batching = MicroBatching(Handler(), 3, {"inference": 4})
    assert batching.handle(list(range(100))) == [number * 2 for number in range(100)]
    with pytest.raises(ValueError, match="none"):
        batching.handle([1, 2, 3, None, 5])
    assert batching.handle([5]) == [10] and batching.handle([]) == []
    batching.parallelism = {"inference": 1, "preprocess": 2}
    assert [len(group) for group in batching.thread_groups.values()] == [2, 1, 1]
    assert batching.handle([5, 6]) == [10, 12]
    batching.shutdown()
    with pytest.raises(AssertionError, match="'other' is 1"):
        batching.parallelism = {"other": 1}
    for wrong in [0, -1, 1.5, "2", None, True]:
        expected = f"parallelism of 'inference' is {wrong!r}; steps are preprocess, inference, postprocess, with whole numbers from 1"
        with pytest.raises(AssertionError, match=re.escape(expected)):
            MicroBatching(Handler(), 3, {"inference": wrong})
        with pytest.raises(ValueError, match=re.escape(f"micro_batch_size is {wrong!r}; allowed are whole numbers from 1")):
            MicroBatching(Handler(), wrong)
    for wrong in [0, 2, "inference", ["inference"]]:
        with pytest.raises(AssertionError, match=re.escape(f"parallelism is {wrong!r}; expected a number of threads for each of preprocess")):
            MicroBatching(Handler(), 3, wrong)
    for usual in [None, {}]:
        batching = MicroBatching(Handler(), 3, usual)
        assert batching.handle([5, 6]) == [10, 12]
        batching.shutdown()


def test_profiled_steps(metrics):
    from ts.context import Context, RequestProcessor
    from ts.torch_handler.base_handler import BaseHandler

    cache, samples = metrics

    class Handler(BaseHandler):
        preprocess = staticmethod(lambda data: data)

    from ts.handler_utils.timer import timed

    class Timed(Handler):
        @timed
        def inference(self, data):
            return data

        @timed
        def postprocess(self, data):
            return data

    for profile, names in [(True, ["ts_handler_inference", "ts_handler_postprocess", "HandlerTime"]), (False, ["HandlerTime"])]:
        context = Context("m", "", {}, 1, None, "1", metrics=cache, model_yaml_config={"handler": {"profile": profile}})
        context.request_processor = [RequestProcessor({})]
        assert Timed().handle([1], context) == [1]
        assert [metric[0] for metric, *_ in samples] == names
        samples.clear()


KILLED = """
import os, runpy, shutil, sys
archive, folder, key = runpy.run_path(sys.argv[1]), *sys.argv[2:]
shutil.rmtree = lambda path, **more: os.path.isdir(path) and (os.remove(os.path.join(path, "code.py")), os._exit(9))
archive["_remove_unused"](folder, "mine")
"""


def test_an_archive_whose_removal_is_killed_is_unpacked_again(tmp_path, monkeypatch):
    unpacked = runpy.run_path(str(HOME / "archive.py"))["unpacked"]
    version, folder = tmp_path / "1", tmp_path / "tmp"
    folder.mkdir()
    models.write(version, "told", models.contents("told", files={"code.py": b""}))
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(folder))
    directory, lock = unpacked(version)
    lock.close()
    path = Path(directory)
    os.utime(f"{path}.lock", (0, 0))
    process = subprocess.run([sys.executable, "-c", KILLED, HOME / "archive.py", path.parent, path.name], capture_output=True)
    assert process.returncode == 9, process.stderr
    directory, _ = unpacked(version)
    assert Path(directory) == path and (path / "code.py").exists()
    assert not path.with_suffix(".part").exists()


REMOVES = """
import runpy, sys
runpy.run_path(sys.argv[1])["_remove_unused"](sys.argv[2], "mine")
"""


def test_unused_archives_are_removed_by_several_at_once(tmp_path):
    """Files may vanish between listing and removal; archives in use and files with other names are kept."""
    import fcntl

    old = time.time() - 7200
    names = [f"{number:032x}" for number in range(301)]
    *unused, new = names
    kept = ["poetry", unused[7]]
    for name in [*unused, "poetry"]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "code.py").touch()
        for ending in ("lock", "making"):
            (tmp_path / f"{name}.{ending}").touch()
        os.utime(tmp_path / f"{name}.lock", (old, old))
    (tmp_path / f"{new}.lock").touch()
    (tmp_path / ".pharos-directory").touch()
    with (tmp_path / f"{unused[7]}.lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_SH)
        run = lambda: subprocess.Popen([sys.executable, "-c", REMOVES, HOME / "archive.py", tmp_path], stderr=subprocess.PIPE)
        for process in [run() for _ in range(6)]:
            assert (process.communicate(timeout=DEADLINE_S)[1], process.returncode) == (b"", 0)
    expected = [".pharos-directory", f"{new}.lock", *(f"{name}{ending}" for name in kept for ending in ("", ".lock", ".making"))]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(expected)
