"""How a worker makes the model's instance, from a class or from a string."""

from typing import Any

import pytest
from sample_models import Echo, EchoWithArguments, NeedsArguments, RaisesOnLoad

from fast_batcher._transport import codec
from fast_batcher._worker.model_loading import load_model
from fast_batcher.errors import WorkerStartupError


def load(model: Any, *args: Any, **kwargs: Any) -> Any:
    return load_model(codec.dumps((model, args, kwargs)))


def test_a_class_is_made_with_its_arguments() -> None:
    model = load(EchoWithArguments, "weights.bin", second=2)
    assert model.infer([0]) == [("weights.bin", 2)]


def test_a_string_is_imported() -> None:
    assert isinstance(load("sample_models:Echo"), Echo)
    assert load("sample_models:Namespace.Inner").infer([1]) == [1]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("os:system", "it is not a class"),
        ("json:nothing", "module 'json' has no 'nothing'"),
        ("nowhere:Model", "there is no module 'nowhere'"),
        ("os.nowhere:Model", "there is no module 'os.nowhere'"),
        ("sample_models:AsyncInfer", "infer is async"),
    ],
)
def test_a_string_that_names_no_model_is_told(name: str, text: str) -> None:
    with pytest.raises(WorkerStartupError, match=text) as caught:
        load(name)
    assert name in str(caught.value)


def test_a_module_that_misses_another_raises_what_it_raises(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name that is wrong is not the user's string."""
    (tmp_path / "needs_another.py").write_text("import no_such_dependency\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        load("needs_another:Model")


def test_what_the_constructor_raises_is_left_as_it_is() -> None:
    with pytest.raises(FileNotFoundError, match="no weights"):
        load(RaisesOnLoad)


def test_a_wrong_call_of_the_constructor_says_what_was_called() -> None:
    with pytest.raises(TypeError, match="path") as caught:
        load(NeedsArguments)
    assert caught.value.__notes__ == [
        "while calling sample_models:NeedsArguments with model_args of types () and model_kwargs "
        "of types {}"
    ]
