"""`Collation`: the rules that join inputs to one batch and split its outputs. Pure values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, get_args

from fast_batcher.errors import ConfigurationError
from fast_batcher.settings import COUNT, choice, whole

Unequal = Literal["error", "group"]
Outputs = Literal["auto", "rows", "several"]
Side = Literal["left", "right"]
PadValue = bool | int | float | complex

# More axes than NumPy arrays can have (64 since NumPy 2.0) are a typing error.
MOST_DIMS: Final = 64
_AXIS: Final = whole(-MOST_DIMS, MOST_DIMS - 1)


@dataclass(frozen=True, kw_only=True)
class Padding:
    """Rules that fill features of unequal lengths up to one length; made by `Collation.pad`."""

    value: PadValue | None
    # Pad values of single features, by name.
    values: Mapping[str, PadValue]
    side: Side
    sides: Mapping[str, Side]
    dims: tuple[int, ...]
    mask: str | None
    mask_of: str | None
    lengths: tuple[int, ...] = ()
    # The least length of some `dims`: a warm-up computes longer batches than its inputs.
    least: Mapping[int, int] = field(default_factory=dict)

    def fit(self, length: int, *dims: int) -> int:
        """Return the length to which an axis is filled, whose longest row has this `length`.

        `dims` are the numbers of the axis, from the first one and from the last one.
        """
        length = max([length, *(self.least.get(dim, 0) for dim in dims)])
        return next((allowed for allowed in self.lengths if allowed >= length), length)

    def value_of(self, feature: str) -> PadValue | None:
        """Return the number that fills up a feature, None if it is not padded."""
        if feature == self.mask:
            return 0
        return self.values.get(feature, self.value)

    def side_of(self, feature: str) -> Side:
        """Return the side of a feature's data on which the filling goes."""
        if feature == self.mask and self.mask_of is not None:
            return self.side_of(self.mask_of)
        return self.sides.get(feature, self.side)

    def axes_of(self, feature: str, ndim: int) -> frozenset[int]:
        """Return the padded axes of a row of `ndim` axes, counted from 0; empty if not padded."""
        if self.value_of(feature) is None:
            return frozenset()
        return frozenset(dim % ndim for dim in self.dims if -ndim <= dim < ndim)


@dataclass(frozen=True, kw_only=True)
class Collation:
    """Rules that join inputs to one batch and split the model's outputs into rows.

    Made by `Collation.stack`, `pad` or `concatenate`. A *row* is one input or one output, without a
    batch axis: an array, a tensor, or a structure of them (mappings, lists, tuples, named tuples,
    dataclasses, pydantic models). A *feature* is one array of a structure, and its name is its path
    with dots: "image", "vision.pixels", "0". A row that is itself an array has the feature "".
    """

    batch_dim: tuple[int, int] = (0, 0)
    unequal: Unequal = "error"
    outputs: Outputs = "auto"
    allowed_batch_sizes: tuple[int, ...] = ()
    padding: Padding | None = None
    # The name of the offsets with which rows are joined along their first axis.
    lengths: str | None = None

    @classmethod
    def stack(
        cls,
        *,
        batch_dim: int | tuple[int, int] = 0,
        unequal: Unequal = "error",
        outputs: Outputs = "auto",
        allowed_batch_sizes: Sequence[int] = (),
    ) -> "Collation":
        """Join rows of equal shapes and dtypes along a new axis.

        Args:
            batch_dim: Positions of the batch axis in the model's inputs and in its outputs; one
                number for both. Negative numbers count from the last axis of the batch.
            unequal: Treatment of rows that differ in structure, dtype, device or shape. "error":
                rows that differ from more than half of their batch fail with `CollationError`; if
                no half agrees, the whole batch fails. "group": the model is called once for each
                kind. Rows are never cast or cut.
            outputs: Meaning of a list or tuple from the model. "rows": one entry for each row.
                "several": several outputs, each of which has a batch axis. "auto": rows if its
                entries cannot have a batch axis, else an error, because the reading must not
                depend on the size of the batch. Any other output has one reading only.
            allowed_batch_sizes: The sizes that a compiled model takes. A batch of another size is
                filled up to the next one with copies of its last row, whose outputs are dropped.
                No batch is larger than the largest of them. The time of each size is learned, and a
                batch has as many of the waiting requests as answers most per second: 32 of 33 if 64
                would take much longer. Empty: any size.

        Raises:
            ConfigurationError: An argument is wrong.
        """
        remedy = "give the number of an axis, or two: (in, out)"
        axes = _check_axes("batch_dim", batch_dim, 2, remedy)
        return cls(
            batch_dim=(axes[0], axes[-1]),
            unequal=_check_choice("unequal", unequal, get_args(Unequal)),
            outputs=_check_choice("outputs", outputs, get_args(Outputs)),
            allowed_batch_sizes=check_sizes(allowed_batch_sizes),
        )

    @classmethod
    def pad(
        cls,
        *,
        value: PadValue | None,
        values: Mapping[str, PadValue] | None = None,
        side: Side = "right",
        sides: Mapping[str, Side] | None = None,
        dims: int | tuple[int, ...] = 0,
        mask: str | None = None,
        mask_of: str | None = None,
        batch_dim: int | tuple[int, int] = 0,
        unequal: Unequal = "error",
        outputs: Outputs = "auto",
        allowed_batch_sizes: Sequence[int] = (),
        allowed_lengths: Sequence[int] = (),
    ) -> "Collation":
        """Fill rows up to the longest of their batch, then join them as `stack` does.

        Rows keep their dtype. Only the lengths of padded axes may differ.

        Args:
            value: Number that fills up every feature without an entry in `values`. It has to fit
                the dtype: 300 in a uint8 or 0.5 in an int64 is an error. With None only the
                features in `values` are padded.
            values: Numbers by the name of the feature.
            side: The end of the axis at which the filling goes.
            sides: Ends of the axis by the name of the feature.
            dims: The padded axes of a row, without the batch axis; a feature may lack some.
            mask: Name under which every row, which has to be a mapping, gets an int64 mask: 1 where
                the data is, 0 where the filling is. Its axes are the padded ones.
            mask_of: The feature that the mask describes. Not needed where all padded features of a
                row have the same lengths.
            batch_dim: See `stack`.
            unequal: See `stack`.
            outputs: See `stack`.
            allowed_batch_sizes: See `stack`.
            allowed_lengths: The lengths of padded axes that a compiled model takes. A batch is
                filled up to the next one, or to its longest row if that is longer than all of them.
                The warm-up computes each of them with each allowed batch size, from the length of
                the shortest of `warmup_inputs` on: give a short input there. Of several padded axes
                it computes all combinations of lengths, or the equal lengths alone if there are
                more than 64 shapes. Empty: the longest row of the batch.

        Raises:
            ConfigurationError: An argument is wrong.
        """
        remedy = "give the number of an axis of a row, or several as a tuple"
        padding = Padding(
            value=None if value is None else _check_pad_value("value", value),
            values={
                name: _check_pad_value(f"values[{name!r}]", number)
                for name, number in _check_names("values", values).items()
            },
            side=_check_choice("side", side, get_args(Side)),
            sides={
                name: _check_choice(f"sides[{name!r}]", end, get_args(Side))
                for name, end in _check_names("sides", sides).items()
            },
            dims=_check_axes("dims", dims, MOST_DIMS, remedy),
            mask=_check_name("mask", mask),
            mask_of=_check_name("mask_of", mask_of),
            lengths=check_sizes(allowed_lengths, "allowed_lengths"),
        )
        _check_padding(padding)
        stacked = cls.stack(
            batch_dim=batch_dim,
            unequal=unequal,
            outputs=outputs,
            allowed_batch_sizes=allowed_batch_sizes,
        )
        return replace(stacked, padding=padding)

    @classmethod
    def concatenate(
        cls,
        *,
        lengths: str = "cu_seqlens",
        unequal: Unequal = "error",
        outputs: Outputs = "auto",
    ) -> "Collation":
        """Join rows of unequal lengths one behind the other along their first axis, unpadded.

        All arrays of a row have one length. Numbers, texts and arrays without axes are stacked as
        `stack` does. The offsets are int32, of shape (rows + 1,), and begin with 0: row i is
        `values[offsets[i] : offsets[i + 1]]`. Attention kernels for such batches call them
        `cu_seqlens`.

        The model's outputs are arrays with one entry for each row, or with one for each position
        of the joined rows, which are split by the offsets. A batch in which these numbers are equal
        gets one more row, of the first position of another row twice, whose output is dropped.

        The default `cost` of an input is its length, and that of a batch the sum of the lengths, if
        the batcher is given the class of the model.

        Args:
            lengths: Name of the offsets. A batch of mappings gets them under this name; of other
                rows `infer` gets a tuple of the joined rows and the offsets.
            unequal: See `stack`.
            outputs: See `stack`.

        Raises:
            ConfigurationError: An argument is wrong.
        """
        name = _check_name("lengths", lengths)
        if name is None:
            raise ConfigurationError("lengths=None: give a name for the offsets")
        return replace(cls.stack(unequal=unequal, outputs=outputs), lengths=name)


def _check_axes(name: str, axes: object, most: int, remedy: str) -> tuple[int, ...]:
    several = axes if isinstance(axes, tuple | list) else (axes,)
    try:
        for axis in several:
            _AXIS.check(name, axis)
    except ConfigurationError:
        several = ()
    if not 0 < len(several) <= most:
        raise ConfigurationError(f"{name}={axes!r:.100}: {remedy}")
    return tuple(several)


def _check_choice(name: str, value: Any, choices: tuple[str, ...]) -> Any:
    choice(choices).check(name, value)
    return value


def check_sizes(sizes: object, name: str = "allowed_batch_sizes") -> tuple[int, ...]:
    """Check the sizes that a model allows, and return them in their order."""
    if not isinstance(sizes, Sequence) or isinstance(sizes, str | bytes):
        raise ConfigurationError(
            f"{name}={sizes!r:.200}: give whole numbers of 1 or more, as in (1, 8, 32)"
        )
    for size in sizes:
        COUNT.check(name, size)
    return tuple(sorted(set(sizes)))


def _check_pad_value(name: str, value: Any) -> PadValue:
    number = value.item() if hasattr(value, "item") else value  # one of NumPy's
    if not isinstance(number, bool | int | float | complex):
        raise ConfigurationError(f"{name}={value!r:.100}: give a number to pad with")
    return number


def _check_names(name: str, by_feature: object) -> Mapping[str, Any]:
    if by_feature is None:
        return {}
    if not isinstance(by_feature, Mapping) or not all(isinstance(key, str) for key in by_feature):
        raise ConfigurationError(
            f"{name}={by_feature!r:.200}: give a dict with names of features as keys"
        )
    return by_feature


def _check_name(name: str, value: object) -> str | None:
    if value is not None and (not isinstance(value, str) or not value):
        raise ConfigurationError(f"{name}={value!r:.100}: give a name, or omit it")
    return value


def _check_padding(padding: Padding) -> None:
    if padding.value is None and not padding.values:
        raise ConfigurationError(
            "value=None: nothing would be padded; give a number, or values by feature, or use "
            "Collation.stack"
        )
    if padding.mask_of is not None and padding.mask is None:
        raise ConfigurationError(
            f"mask_of={padding.mask_of!r}: there is no mask; name it too, as in "
            "mask='attention_mask'"
        )
    if padding.mask in {*padding.values, *padding.sides}:
        raise ConfigurationError(
            f"mask={padding.mask!r}: it is padded with 0, on the side of the feature that it "
            "describes; leave it out of values and sides"
        )
    if padding.mask is not None and padding.mask_of is None and padding.sides:
        raise ConfigurationError(
            f"mask={padding.mask!r}: features are padded on different sides; name the one that the "
            "mask describes with mask_of"
        )
    if padding.mask_of is not None and padding.value_of(padding.mask_of) is None:
        raise ConfigurationError(
            f"mask_of={padding.mask_of!r}: this feature is not padded; name one that is"
        )
