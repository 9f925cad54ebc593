"""Requests of a load test: bodies from files, or the examples of the app's OpenAPI schema."""

import json
import mimetypes
import re
from codecs import BOM_UTF8
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fast_batcher._load.client import Target
from fast_batcher._load.measurement import LoadError

JSON = "application/json"
# The methods in the order in which they are looked for where the schema has several. Others change
# too much.
METHODS = ("post", "put", "patch", "get")
# Nesting beyond which a skeleton has no further parts; a schema may contain itself.
DEEPEST = 4
# Endpoints that an error names.
LISTED = 8
REMEDY = "give --body FILE"


@dataclass(frozen=True)
class Requests:
    """The requests that are sent to one path."""

    method: str
    # One empty body for requests without a body.
    bodies: list[bytes]
    content_type: str
    # Where the bodies come from, in a few words.
    source: str

    def describe(self) -> str:
        """Say in one line what is sent."""
        sizes = sorted(map(len, self.bodies))
        if not sizes[-1]:
            return "no body"
        span = f"{sizes[-1]}" if sizes[0] == sizes[-1] else f"{sizes[0]} to {sizes[-1]}"
        count = "1 body" if len(sizes) == 1 else f"{len(sizes)} bodies"
        text = f"{count} {self.source}, {span} bytes, {self.content_type}"
        if self.content_type == JSON:
            first = self.bodies[0].decode(errors="replace")
            text += f": {first if len(first) <= 60 else first[:57] + '...'}"
        return text


def read_requests(paths: Sequence[Path], method: str, content_type: str | None) -> Requests:
    """Read bodies from files.

    A `.jsonl` file has a body in each line, a `.json` file with a list has a body in each item; any
    other file is one body.

    Raises:
        LoadError: A file cannot be read, or has no body.
    """
    bodies = [body for path in paths for body in _split_file(path)]
    if content_type is None:
        is_json = paths[0].suffix in (".json", ".jsonl")
        guessed = JSON if is_json else mimetypes.guess_type(paths[0].name)[0]
        content_type = guessed or "application/octet-stream"
    source = f"from {paths[0].name}" + (f" and {len(paths) - 1} more" if paths[1:] else "")
    return Requests(method, bodies, content_type, source)


def _split_file(path: Path) -> list[bytes]:
    try:
        content = path.read_bytes()
        if path.suffix == ".jsonl":
            found = [line for line in content.removeprefix(BOM_UTF8).split(b"\n") if line.strip()]
        else:
            values = json.loads(content) if path.suffix == ".json" else None
            found = [content]
            if isinstance(values, list):
                found = [json.dumps(value).encode() for value in values]
    except (OSError, ValueError) as error:
        raise LoadError(f"--body {path}: it cannot be read: {error}") from None
    if not found:
        raise LoadError(f"--body {path}: it has no body")
    return found


def find_requests(target: Target, path: str, method: str | None) -> Requests:
    """Take the requests that the app's schema at /openapi.json states.

    Args:
        target: The server.
        path: The endpoint, without a query.
        method: Its method; None for the one that the schema has.

    Raises:
        LoadError: The schema has no such endpoint, or states no body for it.
        OSError: The server cannot be reached.
    """
    status, answer = target.ask("GET", "/openapi.json")
    try:
        document = json.loads(answer) if status == 200 else None
    except ValueError:
        document = None
    if not isinstance(document, dict) or not isinstance(document.get("paths"), dict):
        raise LoadError(
            f"the app has no OpenAPI schema at /openapi.json: {REMEDY}, or --method GET for "
            "requests without a body"
        )
    return read_schema(document, path, method)


def read_schema(document: dict[str, Any], path: str, method: str | None) -> Requests:
    """Take requests from an OpenAPI schema; raises as `find_requests`."""
    name, operation = _find_operation(document["paths"], path, method)
    content = operation.get("requestBody", {}).get("content")
    if not content:
        return Requests(name.upper(), [b""], "", "")
    kind = next((kind for kind in content if re.match(r"application/(.*\+)?json", kind)), None)
    if kind is None:
        raise LoadError(f"{path} takes {' or '.join(content)}: {REMEDY}")
    try:
        stated = _find_stated(document, content[kind])
        if not stated:
            skeleton = json.dumps(_make_skeleton(document, content[kind].get("schema", {})))
            raise LoadError(f"the schema of {path} has no example: {REMEDY}, like {skeleton}")
    except (AttributeError, LookupError, RecursionError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise LoadError(f"the schema of {path} cannot be read ({reason}): {REMEDY}") from error
    bodies = [json.dumps(value).encode() for value in stated]
    return Requests(name.upper(), bodies, kind, "of the app's OpenAPI schema")


def _find_operation(
    paths: dict[str, Any], path: str, method: str | None
) -> tuple[str, dict[str, Any]]:
    # A path without parameters is preferred to one that has some and fits, too.
    for template in sorted(paths, key=lambda template: "{" in template):
        pattern = "[^/]+".join(map(re.escape, re.split(r"\{[^}]*\}", template)))
        if re.fullmatch(pattern, path):
            wanted = METHODS if method is None else (method.lower(),)
            for name in wanted:
                if name in paths[template]:
                    return name, paths[template][name]
    known = [
        f"{name.upper()} {template}"
        for template, methods in paths.items()
        for name in METHODS
        if name in methods
    ]
    more = ", ..." if len(known) > LISTED else ""
    raise LoadError(
        f"the app's OpenAPI schema has {', '.join(known[:LISTED]) or 'nothing'}{more}, and no "
        f"{f'{method} {path}' if method else path}; for a hidden endpoint {REMEDY}, or --method GET"
    )


def _find_stated(document: dict[str, Any], media: dict[str, Any]) -> list[Any]:
    """List the bodies that a schema states, whole or property by property."""
    examples = [one["value"] for one in media.get("examples", {}).values() if "value" in one]
    if "example" in media:
        examples.append(media["example"])
    schema = _dereference(document, media.get("schema", {}))
    examples = examples or _list_named(schema)
    properties = schema.get("properties", {})
    if examples or not properties:
        return examples
    named = {
        name: _list_named(_dereference(document, part))
        for name, part in properties.items()
        if name in schema.get("required", [])
    }
    if not all(named.values()):
        return []
    count = max(map(len, named.values()), default=1)
    return [
        {name: values[number % len(values)] for name, values in named.items()}
        for number in range(count)
    ]


def _dereference(document: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """Follow references."""
    if "$ref" not in schema:
        return schema
    found: Any = document
    for key in schema["$ref"].removeprefix("#/").split("/"):
        found = found[key.replace("~1", "/").replace("~0", "~")]
    return _dereference(document, found) | {k: v for k, v in schema.items() if k != "$ref"}


def _list_named(schema: dict[str, Any]) -> list[Any]:
    """List the values that a schema states for one value."""
    if schema.get("examples"):
        return list(schema["examples"])
    return [schema[key] for key in ("example", "const", "default") if key in schema][:1]


# What stands in a skeleton for a value of a type.
_PLACES: dict[Any, Any] = {
    "string": "...",
    "integer": 0,
    "number": 0.0,
    "boolean": False,
    "null": None,
}


def _make_skeleton(document: dict[str, Any], schema: dict[str, Any], depth: int = 0) -> Any:
    """Make a value of the form that a schema describes, to be filled in."""
    if depth > DEEPEST:
        return "..."
    schema = _dereference(document, schema)
    named = _list_named(schema) or schema.get("enum", [])
    if named:
        return named[0]
    for part in (*schema.get("anyOf", []), *schema.get("oneOf", []), *schema.get("allOf", [])):
        if part.get("type") != "null":
            return _make_skeleton(document, part, depth + 1)
    kind = schema.get("type")
    if kind == "array":
        return [_make_skeleton(document, schema.get("items", {}), depth + 1)]
    if kind != "object":
        return _PLACES.get(kind, "...")
    return {
        name: _make_skeleton(document, part, depth + 1)
        for name, part in schema.get("properties", {}).items()
        if name in schema.get("required", schema["properties"])
    }
