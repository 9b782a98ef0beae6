"""Calls other models side by side, from a coroutine; what came of it is `SEEN`."""

import asyncio

import calls


async def one(call, parent):
    """One call."""
    try:
        request = calls.made(call, parent)
        if not call.get("decoupled"):
            return calls.told(await request.async_exec())
        return {"responses": calls.several(await request.async_exec(decoupled=True))}
    except Exception as error:  # noqa: BLE001 (whatever it is, is what is asked for)
        return calls.failure(error)


class TritonPythonModel:
    """One instance."""

    async def execute(self, requests):
        return [await self.answer(request) for request in requests]

    async def answer(self, request):
        """All calls of a request at once."""
        return calls.answer(await asyncio.gather(*(one(call, request) for call in calls.calls(request))))
