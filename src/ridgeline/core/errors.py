"""Every error that Ridgeline raises on purpose, with its HTTP status.

RidgelineError                 500  a fault of the server
├── RequestError               400  a fault of the request; names the field and the remedy
│   ├── UnsupportedField       400  a known field with a value that is not supported
│   ├── ContextTooLong         400  prompt and answer do not fit the model's context
│   ├── BadGrammar             400  a schema, regex or grammar that does not compile
│   ├── Unauthorized           401
│   ├── HostNotAllowed         403  the header Host names a host that is not allowed
│   ├── CrossSiteRequest       403  a browser sent it for a page of a site that is not allowed
│   ├── ModelNotFound          404
│   ├── NotFound               404  no such route or object
│   ├── MethodNotAllowed       405
│   ├── BodyTooSlow            408  the connection stalled before the end of the body
│   ├── BodyTooLarge           413
│   ├── NotJson                415  the header content-type names another type than JSON
│   └── Overloaded             429  the queue is full; says when to retry
├── Unavailable                503  the engine loads, drains or restarts; never used for overload
├── EngineFailed               500  a step failed or the engine process ended
└── ConfigError                 -   start-up: an option or a model that cannot be served
    ├── UnsupportedModel        -   names the architecture, format or feature
    └── DoesNotFit              -   not enough memory; contains a command that works
"""

from __future__ import annotations

import reprlib
from typing import Any, ClassVar


class RidgelineError(Exception):
    """Base of all errors. `status` is the HTTP status; `type` and `code` fill OpenAI's error object."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str | None] = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class RequestError(RidgelineError):
    """The caller can correct it. `param` names the field."""

    status = 400
    type = "invalid_request_error"


class UnsupportedField(RequestError):
    code = "unsupported_value"


class ContextTooLong(RequestError):
    code = "context_length_exceeded"


class BadGrammar(RequestError):
    code = "invalid_grammar"


class Unauthorized(RequestError):
    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class HostNotAllowed(RequestError):
    status = 403
    code = "host_not_allowed"


class CrossSiteRequest(RequestError):
    status = 403
    code = "cross_site_request"


class ModelNotFound(RequestError):
    status = 404
    code = "model_not_found"


class NotFound(RequestError):
    status = 404
    code = "not_found"


class MethodNotAllowed(RequestError):
    status = 405
    code = "method_not_allowed"


class BodyTooSlow(RequestError):
    status = 408
    code = "body_too_slow"


class BodyTooLarge(RequestError):
    status = 413
    code = "body_too_large"


class NotJson(RequestError):
    status = 415
    code = "unsupported_media_type"


class Overloaded(RequestError):
    """The queue is full. `retry_after_s`: seconds until a place is expected."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unavailable(RidgelineError):
    status = 503
    type = "service_unavailable"
    code = "unavailable"


class EngineFailed(RidgelineError):
    code = "engine_failed"


class ConfigError(RidgelineError):
    """Raised at start-up. The command line prints the message and exits with status 2."""


class UnsupportedModel(ConfigError):
    pass


class DoesNotFit(ConfigError):
    pass


def shown(value: Any) -> str:
    """A caller's value as quoted in a message, at most 60 characters long."""
    text = repr(value[:60]) if isinstance(value, str) else reprlib.repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
