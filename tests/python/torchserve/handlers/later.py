"""A handler with `async def`."""

import asyncio


class Later:
    def initialize(self, context):
        self.running, self.most = 0, 0

    async def handle(self, data, context):
        self.running += 1
        self.most = max(self.most, self.running)
        identity = context.get_request_id(0)
        await asyncio.sleep(float(data[0]["body"].decode()))
        self.running -= 1
        return [{"most": self.most, "same": identity == context.get_request_id(0)}]
