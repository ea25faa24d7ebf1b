"""Options and dtypes: what is allowed, and what the errors for anything else say."""

import re

import numpy as np
import pytest
from shapes import DTYPES

import mkernel_cp as mk
from mkernel_cp import arguments
from mkernel_cp.arguments import DTYPES as ALLOWED


@pytest.mark.parametrize(
    "keywords",
    [
        {"split": (1,)},
        {"split": (1, 2, 3, 4)},
        {"split": (1, 0)},
        {"split": (1, -1)},
        {"split": (1, 1025)},
        {"tile": ()},
        {"tile": (1, 2)},
        {"tile": (64, 64, 0)},
        {"tile": (64, 2000, 64)},
        {"chunk_bytes": 0},
        {"chunk_bytes": -5},
        {"sm_budget": 0},
    ],
    ids=str,
)
def test_wrong_options_are_named(keywords):
    (name,) = keywords
    roles = {
        "split": "2 or 3 numbers: movers from 0 to 1024, compute from 1 .*may be None",
        "tile": "3 numbers: rows from 1 ",
    }
    with pytest.raises(ValueError, match=rf"{name}=.*use {roles.get(name, '')}"):
        mk.Options(**keywords)


@pytest.mark.parametrize(
    "keywords",
    [
        {"split": 5},
        {"split": (1.5, 2)},
        {"tile": ("8", "8", "8")},
        {"tile": (8, 8, 8.5)},
        {"chunk_bytes": 1e5},
        {"chunk_bytes": 1.5},
        {"chunk_bytes": "1000"},
        {"chunk_bytes": True},
        {"tile": (8, 8, True)},
        {"sm_budget": 8.0},
        {"tf32": 1},
        {"tf32": None},
    ],
    ids=str,
)
def test_options_that_are_no_integers_are_refused(keywords):
    with pytest.raises(TypeError):
        mk.Options(**keywords)


def test_what_names_no_dtype_is_told_with_those_there_are():
    text = "is no dtype: use one of bfloat16, float16, float32, float64"
    with pytest.raises(TypeError, match=f"^dtype='bf16' {text}$"):
        arguments.output_dtype(np.dtype(np.float32), "bf16")
    with pytest.raises(TypeError, match=rf"^Options\(transfer_dtype='bf16'\) {text}$"):
        mk.Options(transfer_dtype="bf16")


@pytest.mark.parametrize(
    ("keywords", "text"),
    [
        ({"tf32": 1}, "Options(tf32=1): use True or False"),
        ({"chunk_bytes": 0}, "Options(chunk_bytes=0): use at least 1"),
        ({"sm_budget": 1.5}, "Options(sm_budget=1.5): use an integer"),
        ({"tile": (1, 2)}, "Options(tile=(1, 2)): use 3 numbers"),
        ({"split": 3}, "Options(split=3): use 2 or 3 integers"),
    ],
    ids=str,
)
def test_errors_of_options_say_what_was_given_alike(keywords, text):
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(text)}"):
        mk.Options(**keywords)


def test_options_may_be_any_integers_and_are_hashable():
    assert mk.Options(split=[1, None, np.int32(2)]).split == (1, None, 2)
    plain = mk.Options(split=(1, 2), tile=(8, 16, 1024), chunk_bytes=4096)
    other = mk.Options(
        split=[np.int64(1), 2], tile=np.array([8, 16, 1024]), chunk_bytes=np.int32(4096)
    )
    assert plain == other
    assert hash(plain) == hash(other)
    assert plain.tile == (8, 16, 1024)
    assert mk.Options() == mk.Options(None, None, None)
    assert mk.Options() != plain


def test_dtypes():
    assert [dtype.name for dtype in ALLOWED] == list(DTYPES)
    for dtype in ALLOWED:
        arguments.check_dtype("a", dtype)
        assert arguments.output_dtype(dtype, None) == dtype
        assert arguments.output_dtype(dtype, dtype) == dtype
        for wanted in ALLOWED:
            if wanted == dtype or (dtype.itemsize == 2 and wanted == np.float32):
                assert arguments.output_dtype(dtype, wanted) == wanted
                continue
            with pytest.raises(TypeError, match=f"{wanted}: not allowed for {dtype}.*{dtype}"):
                arguments.output_dtype(dtype, wanted)
    assert arguments.output_dtype(np.dtype(np.float16), "float32") == np.float32


@pytest.mark.parametrize(
    "dtype", ["int8", "int64", "uint16", "bool", "complex64", "complex128", ">f8", "O", "S4", "V2"]
)
def test_other_dtypes_are_refused_with_the_allowed_ones(dtype):
    with pytest.raises(TypeError, match=r"x has dtype .*bfloat16, float16, float32, float64"):
        arguments.check_dtype("x", np.dtype(dtype))
