"""Values whose iteration gives the parts of one value, not many values. Pure.

Tables (data frames), tuples with field names, mappings, pydantic models and texts. No library of
tables is imported.
"""

import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

# Values of these types are one text; iteration gives characters or numbers.
TEXTS: Final = (str, bytes, bytearray, memoryview)
# Ends the message about a table that a model has returned for a batch.
TABLE_FAULT: Final = (
    ": iteration over a table gives its columns; return a list with one output per input, as "
    'table.to_dict("records") (pandas) or table.to_dicts() (polars), or an array, as '
    "table.to_numpy()"
)


def is_table(value: Any) -> bool:
    """Return whether a value is a table, as of pandas, polars or PyArrow.

    Tables have an attribute `columns`, and are no sequences. The attribute is looked up without
    `__getattr__`, by which a pandas series finds its labels. A method `columns` makes no table: it
    chooses columns of a query's result, which iterates over rows.
    """
    if isinstance(value, Sequence):
        return False
    columns = inspect.getattr_static(value, "columns", None)
    return columns is not None and not callable(columns)


def has_field_names(value: Any) -> bool:
    """Return whether a value is a named tuple, or a struct sequence as `torch.max` returns."""
    kind = type(value)
    is_named = hasattr(kind, "_fields") or hasattr(kind, "n_fields")
    return issubclass(kind, tuple) and is_named


def is_one_value(value: Any) -> bool:
    """Return whether iteration over a value gives its parts: keys, columns, fields, characters."""
    model: Any = getattr(sys.modules.get("pydantic"), "BaseModel", None)
    # A model of the user may have its own `__iter__`, over many values.
    is_model = model is not None and getattr(type(value), "__iter__", None) is model.__iter__
    is_plain = isinstance(value, (*TEXTS, Mapping))
    return is_plain or is_model or has_field_names(value) or is_table(value)
