"""Our own OpenAPI document, made of the table of endpoints and the models of their bodies."""

import re
from collections.abc import Sequence
from typing import Any, Protocol

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from mirrorsd import __version__

_DESCRIPTION = "Every path is there with and without `/v1`."
_PLACE = "#/components/schemas/{model}"
_ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_REFUSALS = {
    **{"400": "The request is wrong.", "401": "No key, or a wrong one.", "403": "Asked for by a page of another site."},
    **{"404": "No such model or path.", "421": "Another Host.", "503": "Loading or stopping."},
}
_BODY_REFUSALS = {
    **{"408": "The body came too slowly.", "413": "The body is too long.", "415": "Not JSON."},
    **{"429": "The queue is full.", "500": "A device failed."},
}


class Described(Protocol):
    """What the document says of an endpoint."""

    path: str
    method: str
    body: type[BaseModel] | None
    summary: str


def openapi_document(endpoints: Sequence[Any]) -> dict[str, Any]:
    """The document; bodies' models become its schemas."""
    bodies = [endpoint.body for endpoint in endpoints if endpoint.body is not None]
    _, schemas = models_json_schema([(body, "validation") for body in bodies], ref_template=_PLACE)
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint)
    return {
        "openapi": "3.1.0",
        "info": {"title": "mirrorsd serve", "version": __version__, "description": _DESCRIPTION},
        "paths": paths,
        "components": {
            "schemas": {**schemas["$defs"], "Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _operation(endpoint: Described) -> dict[str, Any]:
    failures = _REFUSALS | (_BODY_REFUSALS if endpoint.body is not None else {})
    refused = {"application/json": {"schema": {"$ref": _PLACE.format(model="Error")}}}
    responses: dict[str, Any] = {status: {"description": text, "content": refused} for status, text in failures.items()}
    responses["200"] = {"description": "Done.", "content": _content(endpoint)}
    found: dict[str, Any] = {"summary": endpoint.summary, "responses": responses}
    if endpoint.path.endswith("health"):
        found["responses"]["503"] = {"description": "Not yet, or no more.", "content": _content(endpoint)}
    if endpoint.path.startswith("/v1/answers/"):
        found["responses"]["204"] = {"description": "No answer of this id is kept."}
    for name in re.findall(r"{(\w+)}", endpoint.path):
        found["parameters"] = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}}]
    if endpoint.path == "/props":
        found["parameters"] = [{"name": "model", "in": "query", "required": False, "schema": {"type": "string"}}]
    if endpoint.body is not None:
        schema = {"$ref": _PLACE.format(model=endpoint.body.__name__)}
        found["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return found


def _content(endpoint: Described) -> dict[str, Any]:
    if endpoint.path == "/metrics":
        return {"text/plain": {"schema": {"type": "string"}}}
    document: dict[str, Any] = {"schema": {"type": "array" if endpoint.path == "/slots" else "object"}}
    found = {"application/json": document}
    if endpoint.path.startswith("/v1/") and endpoint.method == "POST":
        found["text/event-stream"] = {"schema": {"type": "string"}}
    return found
