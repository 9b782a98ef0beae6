"""A handler of sequences with continuous batching. The body of a request selects the action:

`stream N`     up to N parts, one for each execution
`-1`           cancels the streams of its sequence; the answer has their number
`ask`          one answer
`end`          one answer, which ends the sequence
`sleep S`      one answer after this many seconds
`die`          ends the process
"""

import os
import time

STEP_S = 0.05


class Talks:
    def initialize(self, context):
        context.cache = {}

    def handle(self, data, context):
        requests = []
        for at, row in enumerate(data):
            identity, sequence = context.get_request_id(at), context.get_sequence_id(at)
            context.set_response_header(at, context.header_key_sequence_id, sequence)
            if identity not in context.cache:
                text = (row.get("data") or row.get("body")).decode()
                context.cache[identity] = {"id": identity, "sequence": sequence, "text": text, "parts": 0, "cancelled": False}
            requests.append(context.cache[identity])
        new = [request for request in requests if request["parts"] == 0]
        for request in new:
            if request["text"] == "-1":
                request["streams"] = self.cancel(context, request["sequence"])
            elif request["text"] == "die":
                os._exit(1)
            elif request["text"].startswith("sleep"):
                time.sleep(float(request["text"].split()[1]))
        if any(request["parts"] for request in requests):
            time.sleep(STEP_S)
        context.stopping_criteria = [self.criterion(context, request) for request in requests]
        return [self.answer(context, at, request, requests) for at, request in enumerate(requests)]

    @staticmethod
    def cancel(context, sequence):
        mine = [known for known in context.cache.values() if known["sequence"] == sequence and not known["cancelled"]]
        streams = [known for known in mine if known["text"].startswith("stream")]
        for known in streams:
            known["cancelled"] = True
        return len(streams)

    @staticmethod
    def answer(context, at, request, requests):
        request["parts"] += 1
        if request["text"] == "end":
            context.set_response_header(at, context.header_key_sequence_end, f"other; {request['sequence']}")
        if request["text"] == "-1":
            return f"cancels {request['streams']}"
        if not request["text"].startswith("stream"):
            return f"{request['text']} beside {len(requests) - 1}"
        if request["cancelled"]:
            return "cancelled;"
        mine = context.get_request_header(at, "x-mine")
        order = "".join("s" if other["text"].startswith("stream") else "x" for other in requests)
        return f"{request['parts']} {mine} {order};"

    @staticmethod
    def criterion(context, request):
        """True ends a stream, None is for one answer, False continues."""

        def stop(result):
            streams = request["text"].startswith("stream")
            goes_on = streams and not request["cancelled"] and request["parts"] < int(request["text"].split()[1])
            if not goes_on:
                del context.cache[request["id"]]
            return (not goes_on) if streams else None

        return stop
