"""Calls other models concurrently, from a coroutine; `SEEN` has the outcomes."""

import asyncio

import calls


async def one(call, parent):
    """One call."""
    try:
        request = calls.made(call, parent)
        if not call.get("decoupled"):
            return calls.told(await request.async_exec())
        return {"responses": calls.several(await request.async_exec(decoupled=True))}
    except Exception as error:  # noqa: BLE001 (every exception is part of the answer)
        return calls.failure(error)


class TritonPythonModel:
    """One instance."""

    async def execute(self, requests):
        return [await self.answer(request) for request in requests]

    async def answer(self, request):
        """Makes all calls of a request concurrently."""
        return calls.answer(await asyncio.gather(*(one(call, request) for call in calls.calls(request))))
