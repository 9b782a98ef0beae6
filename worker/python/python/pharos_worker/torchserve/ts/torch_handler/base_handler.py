"""The base class of most handlers: loads a PyTorch or ONNX file, and processes requests in three steps: `preprocess`,
`inference` and `postprocess`.

PyTorch is imported on first use, so a handler that overrides all methods that use it does not need it."""

import abc
import importlib
import logging
import os
import time

from ts.handler_utils.timer import timed
from ts.utils import available
from ts.utils.util import check_valid_pt2_backend, list_classes_from_module, load_label_mapping

logger = logging.getLogger(__name__)
__getattr__ = available.attribute_of(__name__, available.ALL)


def setup_ort_session(model_pt_path, map_location):
    """Returns a session of ONNX Runtime for a model file."""
    import onnxruntime

    providers = ["CUDAExecutionProvider"] if map_location == "cuda" else []
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = os.cpu_count() or 1
    return onnxruntime.InferenceSession(model_pt_path, options, providers=[*providers, "CPUExecutionProvider"])


class BaseHandler(abc.ABC):
    """A handler that loads a model and runs it on batches."""

    def __init__(self):
        self.model = None
        self.mapping = None
        self.device = None
        self.initialized = False
        self.context = None
        self.model_pt_path = None
        self.manifest = None
        self.map_location = None
        self.explain = False
        self.target = 0
        self.profiler_args = {}
        self.model_yaml_config = {}

    def initialize(self, context):
        """Loads the model that the manifest names: `modelFile` (a class, with the state in `serializedFile`), TorchScript
        (`.pt`), ONNX (`.onnx`), or an AOTInductor library (`.so`). Also loads the labels in `index_to_name.json`."""
        self.context = context
        self.model_yaml_config = getattr(context, "model_yaml_config", None) or {}
        self.manifest = context.manifest
        properties = context.system_properties
        self._choose_device(properties.get("gpu_id"))
        model_dir, model = properties.get("model_dir"), self.manifest["model"]
        serialized = model.get("serializedFile")
        self.model_pt_path = os.path.join(model_dir, serialized) if serialized else None
        self.model = self._load_model(model_dir, model.get("modelFile"))
        self._compile()
        self.mapping = load_label_mapping(os.path.join(model_dir, "index_to_name.json"))
        self.initialized = True

    def _choose_device(self, gpu_id):
        import torch

        self.map_location = "cpu"
        if gpu_id is not None:
            if torch.cuda.is_available():
                self.map_location = "cuda"
            elif os.environ.get("TS_IPEX_GPU_ENABLE", "false") == "true" and torch.xpu.is_available():
                self.map_location = "xpu"
            elif torch.backends.mps.is_available():
                self.map_location = "mps"
        numbered = self.map_location in ("cuda", "xpu")
        self.device = torch.device(f"{self.map_location}:{gpu_id}" if numbered else self.map_location)

    def _load_model(self, model_dir, model_file):
        path = self.model_pt_path
        if model_file:
            model = self._load_pickled_model(model_dir, model_file, path)
            model.to(self.device)
            model.eval()
            return model
        if path and path.endswith(".pt"):
            model = self._load_torchscript_model(path)
            model.eval()
            return model
        if path and path.endswith(".onnx"):
            return setup_ort_session(path, self.map_location)
        if path and path.endswith(".so") and self._use_torch_export_aot_compile():
            return self._load_torch_export_aot_compile(path)
        raise RuntimeError(
            f"No model weights could be loaded: the manifest has no modelFile, and its serializedFile is {path!r}, which must "
            "end with .pt, .onnx, or with .so where model-config.yaml has pt2: {export: {aot_compile: true}}"
        )

    def _load_torchscript_model(self, model_pt_path):
        """Loads a TorchScript model."""
        import torch

        return torch.jit.load(model_pt_path, map_location=self.device)

    def _load_torch_export_aot_compile(self, model_so_path):
        """Loads the function of an AOTInductor library."""
        import torch

        if self.map_location == "cuda":
            torch.cuda.set_device(self.device)
        return torch._export.aot_load(model_so_path, self.map_location)

    def _use_torch_export_aot_compile(self):
        options = self.model_yaml_config.get("pt2")
        export = options.get("export") if isinstance(options, dict) else None
        return isinstance(export, dict) and export.get("aot_compile") is True

    def _load_pickled_model(self, model_dir, model_file, model_pt_path):
        """Returns an instance of the only class in a model's file, with the state in the other file if there is one."""
        import torch

        if not os.path.isfile(os.path.join(model_dir, model_file)):
            raise RuntimeError(f"Missing the {model_file} file in {model_dir}")
        module = importlib.import_module(model_file.split(".")[0])
        classes = list_classes_from_module(module)
        if len(classes) != 1:
            raise ValueError(f"Expected only one class as model definition. {model_file} has {classes}")
        model = classes[0]()
        if model_pt_path:
            model.load_state_dict(torch.load(model_pt_path, map_location=self.device))
        return model

    def _compile(self):
        """Applies `torch.compile` as configured by `pt2` of model-config.yaml."""
        options = self._compile_options()
        if options is None or not check_valid_pt2_backend(options.get("backend", "inductor")):
            return
        import torch

        try:
            self.model = torch.compile(self.model, **options)
        except Exception:
            # Fall back to the uncompiled model.
            logger.warning("torch.compile with %s failed; using the uncompiled model", options, exc_info=True)

    def _compile_options(self):
        given = self.model_yaml_config.get("pt2")
        if given is None:
            return None
        if isinstance(given, str):
            return {"backend": given}
        if not isinstance(given, dict):
            raise ValueError(f"pt2 of model-config.yaml is {given!r}; it must be a string or a mapping")
        if "export" in given:
            return None
        options = dict(given.get("compile", {"enable": True, **given}))
        return options if options.pop("enable", False) is True else None

    @timed
    def preprocess(self, data):
        """Converts the bodies of a batch to a tensor."""
        import torch

        return torch.as_tensor(data, device=self.device)

    @timed
    def inference(self, data, *args, **kwargs):
        """Runs the model on a tensor."""
        import torch

        with torch.inference_mode():
            return self.model(data.to(self.device), *args, **kwargs)

    @timed
    def postprocess(self, data):
        """Returns a list of results, one for each row."""
        return data.tolist()

    def handle(self, data, context):
        """The entry point for a batch, which is a list of the requests' parts. Records `HandlerTime`."""
        begun = time.perf_counter()
        self.context = context
        if os.environ.get("ENABLE_TORCH_PROFILER"):
            self.manifest = self.manifest or context.manifest
            output, _ = self._infer_with_profiler(data=data)
        elif self._is_describe():
            output = [self.describe_handle()]
        else:
            prepared = self.preprocess(data)
            if self._is_explain():
                output = self.explain_handle(prepared, data)
            else:
                output = self.postprocess(self.inference(prepared))
        context.metrics.add_time("HandlerTime", round((time.perf_counter() - begun) * 1000, 2), None, "ms")
        return output

    def _infer_with_profiler(self, data):
        """Like `handle`, with PyTorch's profiler for all steps. Traces are written to `/tmp/pytorch_profiler/MODEL`."""
        from torch.profiler import ProfilerActivity, profile, record_function, tensorboard_trace_handler

        if not self.profiler_args:
            activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
            self.profiler_args.update(activities=activities, record_shapes=True)
        if "on_trace_ready" not in self.profiler_args:
            name = ((self.manifest or {}).get("model") or {}).get("modelName", "")
            self.profiler_args["on_trace_ready"] = tensorboard_trace_handler(os.path.join("/tmp/pytorch_profiler", name))
        with profile(**self.profiler_args) as prof:
            with record_function("preprocess"):
                prepared = self.preprocess(data)
            if self._is_explain():
                with record_function("explain"):
                    output = self.explain_handle(prepared, data)
            else:
                with record_function("inference"):
                    output = self.inference(prepared)
                with record_function("postprocess"):
                    output = self.postprocess(output)
        logger.info(prof.key_averages().table(sort_by="cpu_time_total", row_limit=10))
        return output, prof

    def explain_handle(self, data_preprocess, raw_data):
        """Returns the result of `get_insights` for a request and the class in its part `target`."""
        inputs, target = None, 0
        if isinstance(raw_data[0], dict):
            inputs = raw_data[0].get("data") or raw_data[0].get("body")
            target = raw_data[0].get("target") or 0
        return self.get_insights(data_preprocess, inputs, target)

    def _is_explain(self):
        if self._has_header("explain"):
            self.explain = True
            return True
        return False

    def _is_describe(self):
        return self._has_header("describe")

    def _has_header(self, name):
        return bool(self.context) and self.context.get_request_header(0, name) == "True"

    def describe_handle(self):
        """Returns the description of the model, which clients request with `customized=true`."""
        return None

    def get_device(self):
        """Returns the device of the model."""
        return self.device
