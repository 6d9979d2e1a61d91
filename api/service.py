"""What all routes share: the engine, the metrics, and whether the server takes requests."""

import hashlib
import os
import time
import uuid
from collections.abc import Callable
from typing import TypedDict, TypeVar, TypeVarTuple

import anyio
import anyio.to_thread
from starlette.requests import Request

from radixserve.api.fields import FieldCheck
from radixserve.api.generation import Generation
from radixserve.api.metrics import Metrics
from radixserve.engine.answer_memory import AnswerMemory, AnswerRecorder
from radixserve.engine.async_engine import AsyncEngine
from radixserve.engine.grammar_compiler import GrammarCompiler
from radixserve.errors import EngineUnavailable, ModelNotFound
from radixserve.protocol import EngineReady
from radixserve.version import __version__

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")


class HeadFields(TypedDict):
    """The fields that every body and chunk of one answer begins with."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class Service:
    """One server around one engine."""

    def __init__(self, engine: AsyncEngine, metrics: Metrics) -> None:
        self.engine = engine
        self.metrics = metrics
        self.field_check = FieldCheck()
        self.answer_memory = AnswerMemory(engine.tokenizer)
        self.grammars = GrammarCompiler(engine.tokenizer, engine.tokenizer.eos_token_ids)
        self.started_at = int(time.time())
        # Encoding a text takes a hundred times its size, so as many at once as can run, and not one for every caller.
        self._worker_places = anyio.CapacityLimiter(max(2, os.cpu_count() or 1))

    async def run_in_worker(self, function: Callable[[*Arguments], T], *arguments: *Arguments) -> T:
        """Return function(*arguments), run in a worker thread: what takes long must not hold up the event loop."""
        return await anyio.to_thread.run_sync(function, *arguments, limiter=self._worker_places)

    def ready(self) -> EngineReady:
        """Return what the engine said when it was ready. Raises EngineUnavailable if it takes no requests now."""
        ready = self.engine.ready
        if ready is None:
            # A loaded engine that takes no requests is one that was told to drain.
            status = "draining" if self.engine.status == "ready" else self.engine.status
            raise EngineUnavailable(f"the server takes no requests now: the engine is {status}; try again later")
        return ready

    def model_id(self, ready: EngineReady) -> str:
        """Return the name that the model is served under."""
        return self.engine.config.served_model_name or ready.model_name

    def check_model(self, name: str | None, ready: EngineReady) -> None:
        """Raise ModelNotFound unless name is the served model, or None: there is only one to mean."""
        served = self.model_id(ready)
        if name is not None and name != served:
            raise ModelNotFound(f"the model {name[:200]!r} is not served here; {served!r} is", param="model")

    def answer_recorder(self, generation: Generation) -> AnswerRecorder | None:
        """Return what takes the deltas of a chat and remembers its answers; None for what is no chat."""
        if not generation.is_chat:
            return None
        return AnswerRecorder(self.answer_memory, generation.namespace, generation.prompts[0])

    def new_head(self, prefix: str, ready: EngineReady) -> HeadFields:
        """Return the head of a new answer; its id is unique and begins with prefix."""
        return {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": self.model_id(ready),
            "system_fingerprint": system_fingerprint(ready),
        }


def system_fingerprint(ready: EngineReady) -> str:
    """Return a short name of all that decides the numbers: version, model, dtypes and device. Equal after a restart."""
    dtypes = (ready.weights_dtype, ready.dtype, ready.kv_cache_dtype)
    parts = (__version__, ready.model_name, ready.architecture, *dtypes, ready.device, str(ready.vocab_size))
    return "fp_" + hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def service_of(request: Request) -> Service:
    """Return the service of the app that a request came to."""
    service = request.app.state.service
    assert isinstance(service, Service)
    return service
