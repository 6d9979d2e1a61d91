"""Every error radixserve raises on purpose.

RadixServeError
├── ConfigError              the engine or the server cannot start as asked; the command line exits with 2
│   └── ModelLoadError       the model's files are missing, truncated or of an unknown kind
│       └── Float16RangeError    float16 cannot hold the model's weights
├── RequestError             answered to one caller, in OpenAI's error shape; the server keeps serving
│   ├── InvalidRequest       400
│   │   └── PromptTooLong    400, code context_length_exceeded
│   ├── InvalidApiKey        401
│   ├── OperatorOnly         403: the key names a tenant, and the route tells of all tenants
│   ├── IntrospectionOff     403: the server does not tell callers what it has cached
│   ├── ModelNotFound        404
│   ├── PinBudgetExceeded    409: the prompt's blocks are more than may still be pinned
│   ├── PinNotFound          404: no such pin of the caller's, or its time is over
│   ├── BodyTooLarge         413
│   ├── QueueFull            429, with Retry-After
│   ├── RequestFailed        500: this request ended in the engine, by no fault of the caller
│   ├── EngineUnavailable    503, with Retry-After: loading, draining, or being started again
│   └── RequestTimeout       504
├── ServerCallFailed         a server that chat or bench calls cannot be reached, or answers with an error
│   └── NoBeamSearch         it answers, but without searching, what bench wants as beam searches
└── EngineDied               the engine process is gone, and starting it again was given up
"""


class RadixServeError(Exception):
    """Root of all errors that radixserve raises on purpose."""


class ConfigError(RadixServeError):
    """The engine or the server cannot start with these settings; the message says what to change."""


class ModelLoadError(ConfigError):
    """The model's files are missing, truncated or of a kind that is not supported."""


class Float16RangeError(ModelLoadError):
    """A weight of the model is too large for float16, or too small to keep its precision there."""


class RequestError(RadixServeError):
    """An error that is answered to one caller.

    status: HTTP status. type, param, code: the fields of OpenAI's error object; param names the offending field.
    """

    status = 500
    type = "server_error"
    default_code: str | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code if code is not None else self.default_code


class InvalidRequest(RequestError, ValueError):
    """The request itself is wrong; sending it again unchanged cannot help."""

    status = 400
    type = "invalid_request_error"


class PromptTooLong(InvalidRequest):
    """The prompt, or the prompt with its budget, does not fit the context."""

    default_code = "context_length_exceeded"


class InvalidApiKey(RequestError):
    """No API key, or one the server does not know."""

    status = 401
    type = "invalid_request_error"
    default_code = "invalid_api_key"


class OperatorOnly(RequestError):
    """The API key names a tenant, and what was asked for is not about one tenant."""

    status = 403
    type = "invalid_request_error"
    default_code = "operator_only"


class IntrospectionOff(RequestError):
    """What was asked for shows cached prompts, and the server runs without --enable-cache-introspection."""

    status = 403
    type = "invalid_request_error"
    default_code = "introspection_off"


class ModelNotFound(RequestError):
    """The named model is not served here."""

    status = 404
    type = "invalid_request_error"
    default_code = "model_not_found"


class PinBudgetExceeded(RequestError):
    """Pins may hold only a share of the K/V blocks, and these would be more; the message says what holds it."""

    status = 409
    type = "invalid_request_error"
    default_code = "pin_budget_exceeded"


class PinNotFound(RequestError):
    """The named pin is not there: it never was, it has ended, or it is another tenant's."""

    status = 404
    type = "invalid_request_error"
    default_code = "pin_not_found"


class BodyTooLarge(RequestError):
    """The request body is over the server's limit."""

    status = 413
    type = "invalid_request_error"
    default_code = "request_too_large"


class QueueFull(RequestError):
    """Too many requests are waiting."""

    status = 429
    type = "rate_limit_error"
    default_code = "queue_full"


class RequestFailed(RequestError):
    """The request ended in the engine with an error that the caller did not cause."""

    default_code = "internal_error"


class EngineUnavailable(RequestError):
    """The engine is loading, draining, or being started again."""

    status = 503
    type = "service_unavailable_error"
    default_code = "engine_unavailable"


class RequestTimeout(RequestError):
    """The request ran past the server's time limit."""

    status = 504
    type = "timeout_error"
    default_code = "request_timeout"


class ServerCallFailed(RadixServeError):
    """A server that was called over HTTP cannot be reached, or answered with an error.

    status: HTTP status of its answer; None if there was no answer, or it broke off.
    """

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class NoBeamSearch(ServerCallFailed):
    """A server that is to be measured by beam searches refuses them, or takes the fields for nothing."""


class EngineDied(RadixServeError):
    """The engine process is gone, and starting it again was given up."""
