"""Valid collations, and errors for invalid ones."""

import inspect
from typing import Any

import numpy as np
import pytest

from fast_batcher import Collation, ConfigurationError


def test_the_defaults_stack_along_the_first_axis() -> None:
    collation = Collation.stack()
    assert collation.batch_dim == (0, 0)
    assert (collation.unequal, collation.outputs) == ("error", "auto")
    assert collation.allowed_batch_sizes == ()
    assert collation.padding is None


def test_collation_arguments_are_normalized() -> None:
    assert Collation.stack(batch_dim=1).batch_dim == (1, 1)
    assert Collation.pad(value=0, batch_dim=(0, -1)).batch_dim == (0, -1)
    assert Collation.stack(allowed_batch_sizes=[8, 1, 8]).allowed_batch_sizes == (1, 8)
    number: Any = np.int64(3)
    assert Collation.pad(value=number) == Collation.pad(value=3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_dim": 0.0}, "batch_dim=0.0: give the number of an axis, or two"),
        ({"batch_dim": True}, "batch_dim=True"),
        ({"batch_dim": (0, 1, 2)}, "batch_dim="),
        ({"batch_dim": (0, None)}, "batch_dim="),
        ({"batch_dim": 64}, "batch_dim=64"),
        ({"unequal": "pad"}, "unequal='pad': choose one of 'error', 'group'"),
        ({"unequal": None}, "unequal=None"),
        ({"outputs": "row"}, "outputs='row': choose one of 'auto', 'rows', 'several'"),
        ({"allowed_batch_sizes": 8}, "allowed_batch_sizes=8: give whole numbers of 1 or more"),
        ({"allowed_batch_sizes": (0, 8)}, "allowed_batch_sizes="),
        ({"allowed_batch_sizes": (True,)}, "allowed_batch_sizes="),
        ({"allowed_batch_sizes": "8"}, "allowed_batch_sizes="),
        ({"value": "0"}, "value='0': give a number to pad with"),
        ({"value": None}, "value=None: nothing would be padded"),
        ({"values": [0]}, "values=[0]: give a dict with names of features as keys"),
        ({"values": {0: 0}}, "values={0: 0}"),
        ({"values": {"a": "x"}}, "values['a']='x': give a number"),
        ({"side": "both"}, "side='both': choose one of 'left', 'right'"),
        ({"sides": {"a": "up"}}, "sides['a']='up'"),
        ({"dims": ()}, "dims=(): give the number of an axis of a row"),
        ({"dims": "0"}, "dims='0'"),
        ({"dims": (0, 1.0)}, "dims=(0, 1.0)"),
        ({"mask": ""}, "mask='': give a name"),
        ({"mask": True}, "mask=True"),
        ({"mask_of": "a"}, "mask_of='a': there is no mask"),
        ({"mask": "m", "values": {"m": 1}}, "mask='m': it is padded with 0"),
        ({"mask": "m", "sides": {"a": "left"}}, "mask='m': features are padded on different sides"),
        (
            {"value": None, "values": {"a": 0}, "mask": "m", "mask_of": "b"},
            "mask_of='b': this feature is not padded",
        ),
    ],
)
def test_a_wrong_argument_is_named(arguments: dict[str, Any], message: str) -> None:
    makers: list[Any] = [lambda **given: Collation.pad(**{"value": 0, **given})]
    if arguments.keys() <= inspect.signature(Collation.stack).parameters.keys():
        makers.append(Collation.stack)
    for make in makers:
        with pytest.raises(ConfigurationError) as caught:
            make(**arguments)
        assert message in str(caught.value)
