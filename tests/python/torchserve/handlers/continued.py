"""A handler with continuous batching: the body of a request has its number of steps; the handler's state is in a cache."""


class Continued:
    def initialize(self, context):
        context.cache = {}

    def handle(self, data, context):
        results = []
        for at, row in enumerate(data):
            identity = context.get_request_id(at)
            if row:
                context.cache[identity] = {"left": int(row["body"].decode()), "seen": []}
            known = context.cache[identity]
            known["left"] -= 1
            known["seen"].append(len(data))
            results.append(f"{known['left']} of a batch of {len(data)};")
        caches = [context.cache[context.get_request_id(at)] for at in range(len(data))]
        context.stopping_criteria = [lambda result, known=known: known["left"] <= 0 for known in caches]
        return results
