"""GET /v1/models and /v1/models/{id}."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from radixserve.api.responses import ModelCard, ModelList
from radixserve.api.service import Service, service_of
from radixserve.protocol import EngineReady


async def list_models(request: Request) -> Response:
    """List the one model that is served."""
    service = service_of(request)
    card = _model_card(service, service.ready())
    return Response(msgspec.json.encode(ModelList([card])), media_type="application/json")


async def show_model(request: Request) -> Response:
    """Describe a model by its id, which may hold slashes."""
    service = service_of(request)
    ready = service.ready()
    service.check_model(request.path_params["model_id"], ready)
    return Response(msgspec.json.encode(_model_card(service, ready)), media_type="application/json")


def _model_card(service: Service, ready: EngineReady) -> ModelCard:
    return ModelCard(service.model_id(ready), service.started_at, ready.max_model_len)
