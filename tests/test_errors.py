"""Errors: what else each one is, and that they survive the way from one process to another."""

import builtins
import pickle

import pytest

from mkernel_cp import errors

BUILTINS = {
    errors.ArgumentMismatchError: ValueError,
    errors.CapacityError: ValueError,
    errors.TimeoutError: builtins.TimeoutError,
    errors.PeerLostError: ConnectionError,
    errors.PeerError: RuntimeError,
    errors.NetworkError: OSError,
    errors.OutOfMemoryError: MemoryError,
    errors.CompileError: RuntimeError,
    errors.ConfigurationError: RuntimeError,
    errors.ConcurrentCallError: RuntimeError,
}


@pytest.mark.parametrize(("error", "builtin"), BUILTINS.items())
def test_is_an_error_and_the_builtin(error, builtin):
    assert issubclass(error, errors.Error)
    assert issubclass(error, builtin)


@pytest.mark.parametrize("error", [errors.Error, *BUILTINS])
def test_text_is_the_message_also_after_pickling(error):
    message = "rank 3, generation 7: (2, 'x')\nsecond line"
    raised = error(message)
    assert str(raised) == message
    received = pickle.loads(pickle.dumps(raised))
    assert type(received) is error
    assert str(received) == message


def test_every_public_name_is_covered():
    assert {error.__name__ for error in (errors.Error, *BUILTINS)} == set(errors.__all__)
