"""Notice a client that goes away while its answer is being made."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import Receive


@asynccontextmanager
async def cancelled_on_disconnect(receive: Receive) -> AsyncIterator[None]:
    """Cancel the body, once and for good, as soon as the client disconnects; what follows it runs on.

    receive: of a request whose body has been read, so that the next message can only be the disconnect.
    """
    try:
        # A timeout without an end that the watcher moves to now. Unlike anyio's cancel scopes, which wait for a task
        # that is not about to run, it reaches one that a fast engine keeps awake.
        async with asyncio.timeout(None) as until_disconnect:
            watcher = asyncio.create_task(_expire_on_disconnect(receive, until_disconnect))
            try:
                yield
            finally:
                watcher.cancel()
    except TimeoutError:
        if not until_disconnect.expired():
            raise


async def _expire_on_disconnect(receive: Receive, until_disconnect: asyncio.Timeout) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    until_disconnect.reschedule(asyncio.get_running_loop().time())
