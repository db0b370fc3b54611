"""Errors of requests whose key does not allow them."""

from __future__ import annotations

from ridgeline.core.errors import Overloaded, RequestError


class LimitReached(Overloaded):
    """A limit of the key is reached. It is free again after `retry_after_s`."""


class OverBudget(RequestError):
    """The key has spent its budget. Retrying does not help."""

    status = 429
    type = "insufficient_quota"
    code = "insufficient_quota"


class AdminOnly(RequestError):
    status = 403
    type = "permission_error"
    code = "admin_key_required"


class ModelNotAllowed(RequestError):
    status = 403
    type = "permission_error"
    code = "model_not_allowed"
