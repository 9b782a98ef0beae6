"""A handler with `async def`."""

import asyncio

RAISED = {"value": ValueError, "cancelled": asyncio.CancelledError, "interrupt": KeyboardInterrupt, "generator": GeneratorExit}


class Later:
    def initialize(self, context):
        self.running, self.most = 0, 0

    async def handle(self, data, context):
        self.running += 1
        self.most = max(self.most, self.running)
        identity, body = context.get_request_id(0), data[0]["body"].decode()
        try:
            if body in RAISED:
                raise RAISED[body]
            await asyncio.sleep(float(body))
        finally:
            self.running -= 1
        return [{"most": self.most, "same": identity == context.get_request_id(0)}]
