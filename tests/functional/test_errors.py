import pickle

import pytest

from composite_losses import errors

BASES = {
    "MissingKeyError": KeyError,
    "ShapeError": ValueError,
    "NonFiniteError": ValueError,
    "ConfigError": ValueError,
    "GraphError": RuntimeError,
}
MESSAGE = "head 'move':\n  expected [3]"


@pytest.mark.parametrize(("name", "base"), BASES.items())
def test_is_ours_and_the_fitting_builtin(name, base):
    with pytest.raises(base) as caught:
        raise getattr(errors, name)(MESSAGE)
    assert isinstance(caught.value, errors.CompositeLossError)


@pytest.mark.parametrize("name", BASES)
def test_message_is_shown_as_written(name):
    # str(KeyError("a\nb")) would be "'a\\nb'".
    assert str(getattr(errors, name)(MESSAGE)) == MESSAGE


@pytest.mark.parametrize("name", BASES)
def test_pickles(name):
    copy = pickle.loads(pickle.dumps(getattr(errors, name)(MESSAGE)))
    assert type(copy) is getattr(errors, name)
    assert copy.args == (MESSAGE,)


def test_every_class_has_a_row():
    classes = {n for n, c in vars(errors).items() if isinstance(c, type)}
    assert classes == {*BASES, "CompositeLossError"}
