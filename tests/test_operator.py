"""Calls that have been prepared: the same arrays again, with other data in them."""

from functools import partial

import numpy as np
import pytest
import worlds

import mkernel_cp as mk
from mkernel_cp.host_kernel import HostKernel
from mkernel_cp.operators.operator import Operator
from mkernel_cp.targets.host import HostTarget


@pytest.fixture
def prepared(monkeypatch):
    """Have the host target tell calls by their arrays, as GPUs do; a list of those prepared."""
    calls, structs = [], []
    ask, prepare = HostKernel.request, Operator._prepare_and_run

    def key(machine, *arrays):
        return tuple((x.ctypes.data, x.shape, x.strides, x.dtype) for x in arrays)

    def request(params, *more):
        structs.append(type(params).from_buffer_copy(params))
        return ask(structs[-1], *more)

    def prepare_and_run(self, given, out, key):
        calls.append(key)
        return prepare(self, given, out, key)

    monkeypatch.setattr(HostTarget, "key", key)
    monkeypatch.setattr(HostKernel, "request", staticmethod(request))
    monkeypatch.setattr(Operator, "_prepare_and_run", prepare_and_run)
    return calls


OPERANDS = {
    mk.AllGatherGemm: ((9, 5), (5, 7)),
    mk.GemmReduceScatter: ((9, 5), (5, 7)),
    mk.GemmAllReduce: ((9, 5), (5, 7)),
    mk.RingAttention: ((1, 6, 2, 8),) * 3,
    mk.MoeDispatchGemm: ((6, 4), (6, 2), (2, 4, 3)),
    mk.MoeCombine: ((24, 3), (6, 2)),
    mk.MoeLayer: ((6, 4), (6, 2), (6, 2), (2, 4, 6), (2, 3, 5)),
}


@pytest.mark.parametrize("form", ["function", "class"])
@pytest.mark.parametrize("kind", OPERANDS, ids=lambda kind: kind.function)
def test_a_call_with_the_same_arrays_is_prepared_once(prepared, kind, form):
    function = getattr(mk, kind.function)

    def filled(arrays, random):
        for name, array in zip(kind.names, arrays, strict=True):
            ids = name == "topk_idx"
            array[...] = random.integers(-1, 4, array.shape) if ids else random.random(array.shape)
        return arrays

    def empty():
        dtypes = (np.int64 if name == "topk_idx" else np.float64 for name in kind.names)
        return [np.empty(*pair) for pair in zip(OPERANDS[kind], dtypes, strict=True)]

    def program(comm):
        random = np.random.default_rng(comm.rank)
        more = []
        if kind is mk.MoeCombine:
            x, w = np.ones((6, 4)), np.ones((2, 4, 3))
            more = [mk.moe_dispatch_gemm(x, random.integers(-1, 4, (6, 2)), w, comm=comm)[1]]
        sets = [filled(empty(), random) for _ in range(2)]
        asked = {"comm": comm} | ({"return_lse": True} if kind is mk.RingAttention else {})
        call = partial(function, **asked)
        if form == "class":
            call = kind(*sets[0], *more, **asked)
        outs = [call(*own, *more) for own in sets]
        for i in (0, 1, 0, 0, 1):
            own = filled(sets[i], random)
            out = call(*own, *more, out=outs[i])
            right = function(*(x.copy() for x in own), *more, **asked)
            if kind is mk.MoeDispatchGemm:
                (out, layout), (right, other) = out, right
                assert layout is outs[i][1]
                out, right = layout.trim(out), other.trim(right)
            pairs = zip(out, right, strict=True) if isinstance(out, tuple) else [(out, right)]
            for pair in pairs:
                np.testing.assert_array_equal(*pair)

    worlds.run(2, program)
    again = [key for key in prepared if key is not None]
    assert len(again) == len(set(again)) == 4  # two of each rank


def test_arguments_of_another_type_are_refused_as_by_a_first_call(prepared):
    """Though they are equal to those of an earlier call."""

    def program(comm):
        a, b = np.ones((4, 3)), np.ones((3, 2))
        x, ids, w = np.ones((4, 3)), np.zeros((4, 1), np.int64), np.ones((1, 3, 2))
        gather = partial(mk.allgather_gemm, a, b, comm=comm)
        dispatch = partial(mk.moe_dispatch_gemm, x, ids, w, comm=comm)
        for call, name, right, wrong in (
            (gather, "row_counts", (4,), (4.0,)),
            (dispatch, "capacity", 8, 8.0),
            (dispatch, "max_tokens", 4, 4.0),
            (dispatch, "num_experts", 1, True),
        ):
            out = call(**{name: right})
            for value in (right, np.array(right)[()] if name != "row_counts" else (np.int64(4),)):
                call(**{name: value}, out=out)
            with pytest.raises(TypeError, match=name):
                call(**{name: wrong}, out=out)

    worlds.run(1, program)


def test_a_call_is_prepared_anew_when_segments_have_changed(prepared):
    """What has the address of one that is gone need not be where peers look for it."""

    def program(comm):
        out, a = np.empty((2 * comm.size, 4)), comm.empty((2, 4), np.float64)
        for more in (0, 0, 1 << 22, 0):
            a[...] = comm.rank + more
            kept = comm.empty(more, np.uint8)
            mk.allgather_gemm(a, b, comm=comm, out=out)
            np.testing.assert_array_equal(out[:, 0], np.repeat(np.arange(comm.size), 2) + more)
            del kept

    b = np.eye(4)
    worlds.run(2, program)
    again = [key for key in prepared if key is not None and key[1][0] == b.ctypes.data]
    assert len(again) > len(set(again)) == 2


def test_an_operator_says_in_one_line_what_it_is_for():
    def program(comm):
        x, ids, w = np.ones((6, 4)), np.zeros((6, 2), np.int64), np.ones((2, 4, 3))
        layout = mk.moe_dispatch_gemm(x, ids, w, comm=comm)[1]
        texts = {}
        for kind, shapes in OPERANDS.items():
            types = (np.int64 if name == "topk_idx" else np.float64 for name in kind.names)
            arrays = [np.zeros(*pair) for pair in zip(shapes, types, strict=True)]
            step = kind(*arrays, *[layout] * (kind is mk.MoeCombine), comm=comm)
            texts[kind] = repr(step)
            step.close()
            assert repr(step) == f"{texts[kind][:-1]}, closed>"
        return texts

    for rank, texts in enumerate(worlds.run(2, program)):
        assert texts[mk.AllGatherGemm] == (
            f"<AllGatherGemm: (18, 5) @ (5, 7) float64 -> float64, rank {rank} of 2, rows [9, 9], "
            "target host, engine host>"
        )
        for kind, text in texts.items():
            assert text.startswith(f"<{kind.__name__}: ")
            assert "\n" not in text
            for part in ("float64", f"rank {rank} of 2", "target host", "engine host"):
                assert part in text


def test_a_capture_hears_of_an_arena_that_another_plan_has_replaced(monkeypatch):
    def refuse(machine, what):
        raise mk.ConfigurationError(f"{what} while ...: warm up first")

    def program(comm):
        a, b = np.ones((4, 4)), np.eye(4)
        with mk.GemmReduceScatter(a, b, comm=comm) as step:
            out = step(a, b)
            mk.gemm_allreduce(np.ones((400, 4)), b, comm=comm)
            with monkeypatch.context() as patch:
                machine = comm._runtime.machine
                patch.setattr(machine, "refuse_capture", partial(refuse, machine))
                with pytest.raises(mk.ConfigurationError, match=r"arena a later plan has .* warm"):
                    step(a, b, out=out)
            step(a, b, out=out)

    worlds.run(2, program)
