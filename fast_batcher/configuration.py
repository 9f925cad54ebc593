"""Options of a batcher from the environment and from a file, besides those in the code.

    code > environment > file > default

For a batcher named "reranker", the first one that is set counts:

    1. the argument of `DynBatcher`
    2. FAST_BATCHER_RERANKER__MAX_BATCH_SIZE, then FAST_BATCHER_MAX_BATCH_SIZE
    3. `max_batch_size` in [batchers.reranker] of the file, then at its top level
    4. the default

FAST_BATCHER_CONFIG is the path of the file, TOML in UTF-8. All are read when a batcher is
constructed. In a file a name that is no option is an error with its source; in the environment,
which other programs set, too, only one that is close to an option. A value out of range is an
error.
"""

import logging
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fast_batcher.errors import ConfigurationError
from fast_batcher.settings import OPTIONS, Option, find_similar_name, suggest_parameter

logger: logging.Logger = logging.getLogger("fast_batcher")

PREFIX = "FAST_BATCHER_"
FILE_VARIABLE = f"{PREFIX}CONFIG"
# The prefix, also with a slip.
_ANY_PREFIX = re.compile("^fast_?batcher_", re.IGNORECASE)
# Separates the name of a batcher from the name of an option.
SEPARATOR = "__"
# The table of a file that has one table for each batcher.
TABLE = "batchers"

_SWITCHES = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}
_WORDS = ("true", "false", "none", "null")
# The name of a batcher selects the others, so it is the code's.
_AVAILABLE = {name: option for name, option in OPTIONS.items() if option.types and name != "name"}


# Variables that Kubernetes sets for each Service, here for one whose name begins with fast-batcher.
_LINK = re.compile(
    r"(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)


class Outside(NamedTuple):
    """A value that is not from the code."""

    value: Any
    # The variable, or the file and the place in it.
    source: str
    # Whether it is for all batchers: each batcher that it fits uses it.
    is_general: bool


def find_options(batcher: str) -> dict[str, Outside]:
    """Return the options that the environment and the file have for a batcher, by their names.

    Args:
        batcher: Its name.

    Raises:
        ConfigurationError: An option is unknown, can be given by the code alone, or has a value out
            of range; or the file cannot be read.
    """
    path = _find_file()
    found = {} if path is None else dict(_read_file(path, batcher))
    found |= dict(_read_environment(os.environ, batcher))
    for source in find_similar(batcher):
        logger.warning(
            "%s is not for the batcher %r, whose name there is %s: correct it unless another "
            "batcher is meant",
            source,
            batcher,
            _label_of(batcher),
        )
    return found


def find_similar(batcher: str) -> list[str]:
    """Return the variables, and tables of the file, that name this batcher with a slip.

    Raises:
        ConfigurationError: The file cannot be read.
    """
    label = _label_of(batcher)
    path = _find_file()
    tables = {} if path is None else _load(path).get(TABLE, {})
    owners = {f"{path}: [{TABLE}.{name}]": _label_of(name) for name in tables}
    for variable in os.environ:
        if variable.startswith(PREFIX) and SEPARATOR in variable:
            owners[variable] = variable.removeprefix(PREFIX).rpartition(SEPARATOR)[0]
    return [source for source, owner in owners.items() if _is_misspelt(owner, label)]


def _is_misspelt(owner: str, label: str) -> bool:
    """Whether a name is another one with a slip, and not that of a sibling.

    Siblings differ in a number or in a whole word: EMBED_EN and EMBED_FR, RANKER1 and RANKER2.
    """
    if owner == label:
        return False
    words, others = owner.split("_"), label.split("_")
    if len(words) != len(others):
        words, others = [owner.replace("_", "")], [label.replace("_", "")]
    return all(
        word == other
        or (word.strip("0123456789") != other.strip("0123456789") and _is_close(word, other))
        for word, other in zip(words, others, strict=True)
    )


def _is_close(word: str, other: str) -> bool:
    return find_similar_name(word.lower(), [other.lower()]) is not None


def _find_file() -> Path | None:
    name = os.environ.get(FILE_VARIABLE)
    if name == "":
        raise ConfigurationError(f"{FILE_VARIABLE} is empty: name a file, or unset the variable")
    return None if name is None else Path(name)


def _read_environment(environ: Mapping[str, str], batcher: str) -> Iterator[tuple[str, Outside]]:
    """Yield options; options for one batcher last."""
    label, unknown = _label_of(batcher), []
    # Shorter names first: those without the name of a batcher.
    for variable in sorted(environ, key=lambda name: (SEPARATOR in name, name)):
        bare = _ANY_PREFIX.sub("", variable)
        if bare == variable or variable == FILE_VARIABLE or _LINK.fullmatch(bare):
            continue
        owner, _, name = bare.rpartition(SEPARATOR)
        option = _AVAILABLE.get(name.lower())
        if not variable.startswith(PREFIX):
            unknown += [variable] * (name.lower() in {*_AVAILABLE, "config"})
        elif option is None:
            reason = _describe_unknown(name.lower(), variable, ["config"])
            if reason is not None:
                raise ConfigurationError(reason)
            unknown.append(variable)
        elif owner in ("", label):
            value = _parse(option, environ[variable], variable)
            yield option.name, Outside(value, variable, not owner)
    if unknown:
        text = "%s: %s: no option of a batcher has such a name, as %s has; it is not used"
        logger.warning(text, batcher, ", ".join(unknown), f"{PREFIX}TIMEOUT")


def _read_file(path: Path, batcher: str) -> Iterator[tuple[str, Outside]]:
    """Yield options; options for one batcher last."""
    data = _load(path)
    tables = data.pop(TABLE, {})
    if not isinstance(tables, dict) or not all(map(_is_table, tables.values(), tables)):
        raise ConfigurationError(f"{path}: {TABLE} must be a table with one table for each batcher")
    places = [("", data), *((f"{TABLE}.{name}.", table) for name, table in tables.items())]
    own = {"", *(f"{TABLE}.{name}." for name in tables if _label_of(name) == _label_of(batcher))}
    for place, table in places:
        for name, value in table.items():
            source = f"{path}: {place}{name}"
            option = _find_option(name, source)
            if place in own:
                if isinstance(value, str):
                    value = _parse(option, value, source)
                elif isinstance(value, list) and tuple in option.types:
                    value = tuple(value)
                _check(option, value, source)
                yield option.name, Outside(value, source, not place)


def _load(path: Path) -> dict[str, Any]:
    """Return the contents of a TOML file."""
    try:
        # Editors of Windows begin a file with a byte order mark.
        data = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"{FILE_VARIABLE}={str(path)!r}: {error}") from error
    return data


def _is_table(data: object, name: object = "") -> bool:
    """Whether data is a table by names; and its own name, too."""
    if not isinstance(name, str) or not isinstance(data, dict):
        return False
    return all(isinstance(one, str) for one in data)


def _label_of(name: str) -> str:
    """Return the name of a batcher as it is in a variable."""
    # One underscore for any run, because two separate the name from that of the option.
    return re.sub(r"[\W_]+", "_", name).upper()


def _find_option(name: str, source: str) -> Option:
    if name not in _AVAILABLE:
        reason = _describe_unknown(name, source)
        raise ConfigurationError(reason or f"{source}: {name!r} is not an option of a batcher")
    return _AVAILABLE[name]


def _describe_unknown(name: str, source: str, others: Sequence[str] = ()) -> str | None:
    """Describe the mistake in a name that is close to that of an option; None for another name."""
    if name in OPTIONS or name in ("model_args", "model_kwargs"):
        return f"{source}: {name} can only be given in the code"
    option = next((one for one in _AVAILABLE if name.endswith(f"_{one}")), None)
    if source.startswith(PREFIX) and option is not None:
        start = source[: -len(option) - 1]
        hint = f". Did you mean {start}{SEPARATOR}{option.upper()}?"
    else:
        hint = suggest_parameter(name, [*_AVAILABLE, *others])
    return f"{source}: {name!r} is not an option of a batcher{hint}" if hint else None


def _parse(option: Option, text: str, source: str) -> Any:
    """Return the value that a text stands for."""
    lowered = text.strip().lower()
    value: Any = text
    if option.is_optional and lowered in ("none", "null"):
        value = None
    elif {bool, str} <= {*option.types} and lowered in ("none", "null"):
        value = False  # of a switch that may be a name
    elif bool in option.types and lowered in _SWITCHES:
        value = _SWITCHES[lowered]
    elif bool in option.types and (hint := suggest_parameter(lowered, _WORDS, 0.75)):
        # The switch may be a name, which would not be written like this.
        raise ConfigurationError(f"{source}={text!r:.100}: give {option}{hint}")
    elif list in option.types and "," in text:
        value = [part.strip() for part in text.split(",")]
    elif tuple in option.types and (ends := re.fullmatch(r"\s*(\d+)\s*-\s*(\d+)\s*", text)):
        value = int(ends[1]), int(ends[2])
    elif int in option.types or float in option.types:
        value = _parse_number(option, text, source)
    _check(option, value, source)
    return value


def _parse_number(option: Option, text: str, source: str) -> float:
    for kind in (int, float):
        if kind in option.types or kind is int:
            try:
                number: float = kind(text)
            except ValueError:
                continue
            return number
    raise ConfigurationError(f"{source}={text!r:.100}: give {option}")


def _check(option: Option, value: Any, source: str) -> None:
    if value is not None or not option.is_optional:
        option.range.check(source, value)
