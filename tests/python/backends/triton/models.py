"""The models that Triton's own Python backend runs, in Triton and in this server: `kind` of the configuration selects what a model
does."""

import asyncio
import json

import numpy as np
import triton_python_backend_utils as pb_utils


def passed_on(request) -> list:
    """Returns INPUTn of a request as OUTPUTn."""
    return [pb_utils.Tensor(tensor.name().replace("INPUT", "OUTPUT"), tensor.as_numpy()) for tensor in request.inputs()]


class TritonPythonModel:
    """One of the models."""

    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.kind = config["parameters"]["kind"]["string_value"]
        self.family = pb_utils.MetricFamily(name=f"peer_{self.kind}", description="requests of a model", kind=pb_utils.MetricFamily.COUNTER)
        self.metric = self.family.Metric(labels={"kind": self.kind, "version": args["model_version"]})
        pb_utils.Logger.log_info(f"loaded {args['model_name']} {args['model_instance_kind']} {args['model_instance_device_id']}")

    def execute(self, requests):
        self.metric.increment(len(requests))
        return getattr(self, self.kind)(requests)

    def echo(self, requests):
        """Returns the inputs; what the request has else is in parameters. A negative first element is an error."""
        responses = []
        for request in requests:
            tensors = passed_on(request)
            if tensors and tensors[0].as_numpy().dtype.kind == "i" and tensors[0].as_numpy().min(initial=0) < 0:
                responses.append(pb_utils.InferenceResponse(error=pb_utils.TritonError("negative", pb_utils.TritonError.INVALID_ARG)))
                continue
            wanted = [tensor for tensor in tensors if tensor.name() in request.requested_output_names()]
            responses.append(pb_utils.InferenceResponse(wanted))
        return responses

    def calls(self, requests):
        """Calls `echo` once, and three times at the same time; returns the sum, and the error of a model that does not exist."""

        async def at_once(called):
            return await asyncio.gather(*[called.async_exec() for _ in range(3)])

        responses = []
        for request in requests:
            values = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()

            def call(model, values=values):
                return pb_utils.InferenceRequest(
                    model_name=model, requested_output_names=["OUTPUT0"], inputs=[pb_utils.Tensor("INPUT0", values)], request_id="of a call"
                )

            answers = [call("echo").exec(), *asyncio.run(at_once(call("echo")))]
            failed = call("echo", -np.abs(values) - 1).exec()
            missing = call("missing").exec()
            total = sum(pb_utils.get_output_tensor_by_name(answer, "OUTPUT0").as_numpy() for answer in answers)
            texts = [failed.error().message(), str(missing.has_error())]
            tensors = [pb_utils.Tensor("OUTPUT0", total), pb_utils.Tensor("OUTPUT1", np.array([texts], dtype=object))]
            responses.append(pb_utils.InferenceResponse(tensors))
        return responses

    def streams(self, requests):
        """Sends as many responses as the first element says."""
        for request in requests:
            sender = request.get_response_sender()
            values = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            for number in range(values.flat[0]):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", values + number)]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def gathers(self, requests):
        """Calls `streams` and returns the number of its responses."""
        responses = []
        for request in requests:
            tensor = pb_utils.Tensor("INPUT0", pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy())
            called = pb_utils.InferenceRequest(model_name="streams", requested_output_names=["OUTPUT0"], inputs=[tensor])
            count = sum(bool(answer.output_tensors()) for answer in called.exec(decoupled=True))
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", np.array([[count]], np.int32))]))
        return responses

    def raises(self, requests):
        """Fails."""
        raise ValueError(f"raised for {len(requests)} request")

    def finalize(self):
        """Is in the log."""
        print(f"finalized {self.kind}", flush=True)
