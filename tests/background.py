"""A server in a thread of its own, for tests whose client does not run in an event loop."""

from collections.abc import Iterator
from contextlib import contextmanager

from anyio.from_thread import start_blocking_portal

from radixserve.engine.async_engine import AsyncEngine
from tests.api.serving import served


@contextmanager
def served_in_background(engine: AsyncEngine) -> Iterator[str]:
    """Serve the engine, not started yet, on a free port; yield the base URL of its OpenAI routes."""
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(served(engine)) as url:
        yield f"{url}/v1"
