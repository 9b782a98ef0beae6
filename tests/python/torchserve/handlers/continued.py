"""A handler with continuous batching: the body of a request has its number of steps, and `raises` if its criterion raises an
exception at the last one; the handler's state is in a cache."""


class Continued:
    def initialize(self, context):
        context.cache = {}

    def handle(self, data, context):
        results = []
        for at, row in enumerate(data):
            identity = context.get_request_id(at)
            if row:
                steps, _, more = row["body"].decode().partition(" ")
                context.cache[identity] = {"left": int(steps), "seen": [], "raises": more == "raises"}
            known = context.cache[identity]
            known["left"] -= 1
            known["seen"].append(len(data))
            results.append(f"{known['left']} of a batch of {len(data)};")
        caches = [context.cache[context.get_request_id(at)] for at in range(len(data))]
        context.stopping_criteria = [self.criterion(known) for known in caches]
        return results

    @staticmethod
    def criterion(known):
        def stop(result):
            if known["raises"] and known["left"] <= 0:
                raise KeyError("raised by a criterion")
            return known["left"] <= 0

        return stop
