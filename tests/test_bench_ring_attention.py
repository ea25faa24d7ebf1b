"""The benchmark of `ring_attention`: what it prints, what it refuses, its baselines. Not speed."""

import itertools
import json

import numpy as np
import pytest
from launcher import mpirun

from mkernel_cp import reference
from mkernel_cp.bench.ring_attention import NumpyAttention, merge

MODULE = "mkernel_cp.bench.ring_attention"
TIMES = ("compute", "transfer", "floor", "ring", "fused")


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("ranks", "options"),
    [(3, ("--causal", "--shape=24,1,6,2,5", "--dtype=float64")), (2, ("--shape=40,2,3,3,8",))],
)
def test_a_run_measures_what_is_right(tmp_path, ranks, options):
    path = tmp_path / "rows.json"
    done = mpirun(ranks, "-m", MODULE, *options, f"--json={path}")
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(path.read_text())
    assert row["causal"] == ("--causal" in options)
    assert row["world"] == ranks
    assert all(row[name] > 0 for name in TIMES)
    assert ranks == 3 or row["engine"] > 0  # of three ranks none has a share of one batch entry
    assert row["floor"] == max(row["compute"], row["transfer"])
    for name in (*TIMES, "efficiency"):
        assert f"{name} " in done.stdout
    assert done.stderr == ""


PATCH = """
import sys
import numpy as np
from mpi4py import MPI
from mkernel_cp.bench import ring_attention as bench
from mkernel_cp.commands.job import on_ranks
rank = MPI.COMM_WORLD.Get_rank()
asked = bench._parser().parse_args(['--shape=16,1,2,2,4', '--causal'])
{}
sys.exit(on_ranks(lambda comm: bench.run(comm, asked)))
"""


@pytest.mark.mpi
def test_a_wrong_result_gets_no_time():
    wrong = """class Wrong(bench.RingAttention):
    def __call__(self, *qkv, out):
        super().__call__(*qkv, out=out)
        if rank == 1: out[0, 3] *= 2
bench.RingAttention = Wrong"""
    done = mpirun(2, "-c", PATCH.format(wrong))
    assert done.returncode == 1
    assert "16 x 1 x 2 x 2 x 4 causal has no time: wrong result: an error is" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.mpi
def test_a_baseline_that_fails_is_words():
    broken = """class Broken:
    def __init__(self, comm):
        if rank == 1: raise OSError('no library')
bench.MpiExchange = Broken"""
    done = mpirun(2, "-c", PATCH.format(broken))
    assert done.returncode == 0, done.stderr
    assert "ring OSError: no library, fused" in done.stdout


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("shape", "code", "words"),
    [("18,1,2,2,4", 1, "S=18: use a multiple of 4"), ("16,1,2", 2, "invalid shape value")],
)
def test_other_shapes_are_refused(shape, code, words):
    done = mpirun(2, "-m", MODULE, f"--shape={shape}")
    assert done.returncode == code
    assert words in done.stderr


def test_results_over_parts_of_the_keys_make_the_whole():
    random = np.random.default_rng(1)
    q, k, v = (random.standard_normal((2, 9, heads, 4)) for heads in (4, 2, 2))
    attend = NumpyAttention()
    merged = None
    for begin, end in itertools.pairwise((0, 2, 3, 9)):
        merged = merge(np, merged, attend(q, k[:, begin:end], v[:, begin:end], False))
    for found, causal in ((merged, False), (attend(q, k, v, True), True)):
        out, lse = reference.ring_attention(q, [k], [v], 0, causal=causal)
        result = np.empty_like(q)
        attend.store(found[0], result)
        np.testing.assert_allclose(result, out.value.astype(float), rtol=0, atol=1e-13)
        np.testing.assert_allclose(found[1], lse.value.astype(float), rtol=0, atol=1e-13)
    last, _ = attend(q[:, -3:], k, v, True)
    np.testing.assert_allclose(last, attend(q, k, v, True)[0][:, :, -3:], rtol=0, atol=1e-13)
