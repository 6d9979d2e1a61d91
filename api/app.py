"""The HTTP application: its routes and what every request passes through."""

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.routing import Route

from radixserve.api.auth import ApiKeys, RequireApiKey
from radixserve.api.beam_search import beam_search
from radixserve.api.cache import reset_cache, save_cache, show_cache
from radixserve.api.cache_tree import show_tree
from radixserve.api.chat import chat_completions
from radixserve.api.completions import completions
from radixserve.api.cors import Cors
from radixserve.api.error_responses import (
    AnswerUnexpectedErrors,
    on_client_disconnect,
    on_http_exception,
    on_request_error,
)
from radixserve.api.explain import explain
from radixserve.api.metrics import Metrics
from radixserve.api.models import list_models, show_model
from radixserve.api.operations import health, metrics, ready, version
from radixserve.api.pins import pin, unpin, warm
from radixserve.api.records import RecordRequests
from radixserve.api.service import Service
from radixserve.api.tokens import detokenize, tokenize
from radixserve.engine.async_engine import AsyncEngine
from radixserve.errors import RequestError

ROUTES = [
    Route("/v1/chat/completions", chat_completions, methods=["POST"]),
    Route("/v1/completions", completions, methods=["POST"]),
    Route("/v1/beam_search", beam_search, methods=["POST"]),
    Route("/v1/models", list_models),
    Route("/v1/models/{model_id:path}", show_model),
    Route("/tokenize", tokenize, methods=["POST"]),
    Route("/detokenize", detokenize, methods=["POST"]),
    Route("/v1/cache", show_cache),
    Route("/v1/cache/tree", show_tree),
    Route("/v1/cache/reset", reset_cache, methods=["POST"]),
    Route("/v1/cache/explain", explain, methods=["POST"]),
    Route("/v1/cache/warm", warm, methods=["POST"]),
    Route("/v1/cache/pin", pin, methods=["POST"]),
    Route("/v1/cache/pin/{id}", unpin, methods=["DELETE"]),
    Route("/v1/cache/save", save_cache, methods=["POST"]),
    Route("/health", health),
    Route("/ready", ready),
    Route("/metrics", metrics),
    Route("/version", version),
]


def create_app(engine: AsyncEngine) -> Starlette:
    """Return the application that serves an engine.

    The caller starts and stops the engine; while it takes no requests, neither does the application.
    """
    config = engine.config
    request_metrics = Metrics({route.endpoint: route.path for route in ROUTES}, lambda: engine.stats)
    # Outermost first. CORS lies outside the key check, so that a page can read a 401 and a preflight needs no key.
    middleware = [Middleware(RecordRequests, metrics=request_metrics)]
    if config.cors_origin:
        middleware.append(Middleware(Cors, origins=config.cors_origin))
    middleware += [
        Middleware(AnswerUnexpectedErrors),
        Middleware(RequireApiKey, keys=ApiKeys(config.api_key)),
    ]
    app = Starlette(
        routes=ROUTES,
        middleware=middleware,
        exception_handlers={
            RequestError: on_request_error,
            HTTPException: on_http_exception,
            ClientDisconnect: on_client_disconnect,
        },
    )
    # A redirect would be an answer without a JSON body, and POST bodies do not survive most of them.
    app.router.redirect_slashes = False
    app.state.service = Service(engine, request_metrics)
    return app
