"""Requests of a load test: bodies from files, or made from the app's OpenAPI schema."""

import json
import math
import mimetypes
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fast_batcher._load.measurement import LoadError, Target

JSON = "application/json"
# Different bodies that are made: an app may cache answers, or compute equal inputs once.
MADE_BODIES = 32
# In the order in which they are looked for where the schema has several. Others change too much.
METHODS = ("post", "put", "patch", "get")
# Nesting beyond which lists are left empty where they may be, and beyond which nothing is made.
DEEP, DEEPEST = 4, 24
# Endpoints that an error names.
LISTED = 8
# Values of the formats that pydantic names.
FORMATS = {
    "byte": "dGV4dA==",
    "date": "2026-01-31",
    "date-time": "2026-01-31T12:00:00Z",
    "email": "name@example.com",
    "ipv4": "192.0.2.1",
    "time": "12:00:00Z",
    "uri": "https://example.com/",
    "uuid": "6f1f2e0c-8f0a-4b7e-9d3c-2a5b1c4d7e90",
}
REMEDY = "give --body FILE"


@dataclass(frozen=True)
class Requests:
    """The requests that are sent to one path."""

    method: str
    # One empty body for requests without a body.
    bodies: list[bytes]
    content_type: str
    # Of the bodies, in a few words.
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
            found = [line for line in content.splitlines() if line.strip()]
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


def generate_requests(target: Target, path: str, method: str | None) -> Requests:
    """Make requests from the schema that the app gives at /openapi.json.

    Args:
        target: The server.
        path: The endpoint, without a query.
        method: Its method; None for the one that the schema has.

    Raises:
        LoadError: The schema has no such endpoint, or no body can be made.
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
    """Make requests from an OpenAPI schema; raises as `generate_requests`."""
    name, operation = _find_operation(document["paths"], path, method)
    content = operation.get("requestBody", {}).get("content")
    if not content:
        return Requests(name.upper(), [b""], "", "")
    kind = next((kind for kind in content if re.match(r"application/(.*\+)?json", kind)), None)
    if kind is None:
        raise LoadError(f"{path} takes {' or '.join(content)}, which cannot be generated: {REMEDY}")
    try:
        values = _list_values(document, content[kind])
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise LoadError(f"the schema of {path} cannot be read ({reason}): {REMEDY}") from error
    bodies = list(dict.fromkeys(json.dumps(value).encode() for value in values))
    return Requests(name.upper(), bodies, kind, "made from the app's OpenAPI schema")


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


def _list_values(document: dict[str, Any], media: dict[str, Any]) -> list[Any]:
    examples = [one["value"] for one in media.get("examples", {}).values() if "value" in one]
    if "example" in media:
        examples.append(media["example"])
    maker = _Maker(document)
    schema = media.get("schema", {})
    return examples or [maker.make(schema, number, "the body") for number in range(MADE_BODIES)]


class _Maker:
    """Makes values of JSON schemas.

    Args:
        document: The OpenAPI schema, which references lead into.
    """

    def __init__(self, document: dict[str, Any]) -> None:
        self._document = document

    def make(self, schema: dict[str, Any], number: int, where: str, depth: int = 0) -> Any:
        """Make a value; another number makes another value where the schema allows it."""
        if depth > DEEPEST:
            raise LoadError(f"{where} is nested too deeply to be generated: {REMEDY}")
        schema = self._resolve(schema)
        named = _list_named(schema)
        if named:
            return named[number % len(named)]
        for choices in (schema.get("anyOf"), schema.get("oneOf")):
            if choices:
                chosen = next((one for one in choices if one.get("type") != "null"), choices[0])
                return self.make(chosen, number, where, depth + 1)
        return self._make_typed(schema, number, where, depth)

    def _resolve(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Follow references, and merge what `allOf` joins."""
        if "$ref" in schema:
            found: Any = self._document
            for key in schema["$ref"].removeprefix("#/").split("/"):
                found = found[key.replace("~1", "/").replace("~0", "~")]
            schema = self._resolve(found) | {k: v for k, v in schema.items() if k != "$ref"}
        merged: dict[str, Any] = {}
        for part in map(self._resolve, schema.get("allOf", [])):
            properties = merged.get("properties", {}) | part.get("properties", {})
            required = [*merged.get("required", []), *part.get("required", [])]
            merged |= part | {"properties": properties, "required": required}
        return merged | schema

    def _make_typed(self, schema: dict[str, Any], number: int, where: str, depth: int) -> Any:
        kind = schema.get("type", "object" if schema.get("properties") else None)
        if isinstance(kind, list):
            kind = next((one for one in kind if one != "null"), "null")
        match kind:
            case "object":
                return self._make_object(schema, number, where, depth)
            case "array":
                return self._make_array(schema, number, where, depth)
            case "string":
                return _make_string(schema, number, where)
            case "integer" | "number":
                return _make_number(schema, number, kind)
            case "boolean":
                return number % 2 == 0
            case "null":
                return None
            case _:
                raise LoadError(f"{where} can be anything: {REMEDY}")

    def _make_object(self, schema: dict[str, Any], number: int, where: str, depth: int) -> Any:
        properties = schema.get("properties", {})
        if not properties:
            raise LoadError(f"{where} is an object of unknown names: {REMEDY}")
        # Where nothing is required, a body without any of it would test little.
        names = [name for name in properties if name in schema.get("required", properties)]
        return {
            name: self.make(properties[name], number, f"{name} of {where}", depth + 1)
            for name in names or properties
        }

    def _make_array(self, schema: dict[str, Any], number: int, where: str, depth: int) -> Any:
        first = schema.get("prefixItems", [])
        length = max(len(first), schema.get("minItems", 0), 1 if depth < DEEP else 0)
        kinds = [*first, *[schema.get("items") or {}] * length][:length]
        return [
            self.make(kind, number + place, f"an item of {where}", depth + 1)
            for place, kind in enumerate(kinds)
        ]


def _list_named(schema: dict[str, Any]) -> list[Any]:
    """List the values that a schema names itself."""
    if schema.get("examples"):
        return list(schema["examples"])
    named = [schema[key] for key in ("example", "const") if key in schema]
    named = named or list(schema.get("enum", []))
    return named or [schema[key] for key in ("default",) if schema.get(key) is not None]


def _make_string(schema: dict[str, Any], number: int, where: str) -> str:
    form = schema.get("format")
    if form in FORMATS:
        return FORMATS[form]
    if "pattern" in schema or form == "binary":
        limit = f"of the pattern {schema['pattern']}" if "pattern" in schema else "binary"
        raise LoadError(f"{where} is {limit}, which cannot be generated: {REMEDY}")
    text = f"Text number {number}."
    least = schema.get("minLength", 0)
    text = " ".join([text] * (1 + least // len(text)))
    return text[: schema.get("maxLength", len(text))]


def _make_number(schema: dict[str, Any], number: int, kind: str) -> float:
    low, high = schema.get("minimum"), schema.get("maximum")
    step = schema.get("multipleOf", 1)
    if kind == "number" and "multipleOf" not in schema:
        return _make_float(
            schema.get("exclusiveMinimum", low), schema.get("exclusiveMaximum", high), number
        )
    if "exclusiveMinimum" in schema:
        low = schema["exclusiveMinimum"] + step
    if "exclusiveMaximum" in schema:
        high = schema["exclusiveMaximum"] - step
    if low is None:
        low = step if high is None else min(step, high)
    first: int = math.ceil(low / step)
    count = MADE_BODIES if high is None else max(1, math.floor(high / step) - first + 1)
    made: float = (first + number % count) * step
    return made


def _make_float(low: float | None, high: float | None, number: int) -> float:
    if low is not None and high is not None:
        # Inside, whether or not the bounds belong to it.
        return low + (high - low) * (number % MADE_BODIES + 1) / (MADE_BODIES + 1)
    if high is not None:
        return high - 0.5 - number
    return (low or 0.0) + 0.5 + number
