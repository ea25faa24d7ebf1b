"""The command line, as a user sees it: output, messages, exit codes and files."""

import dataclasses
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
import worlds
from launcher import ROOT, mpirun

import mkernel_cp as mk
from mkernel_cp import arguments, cli, compiler, plan, reference, tiles
from mkernel_cp.attention_plan import Attention, choose_attention_tile
from mkernel_cp.commands import compile, doctor, job
from mkernel_cp.commands import run as run_files_of
from mkernel_cp.targets import cuda
from mkernel_cp.transport import check

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def alone(*args, env=None):
    """Run the command line without a launcher."""
    environ = {**os.environ, **(env or {})}
    environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [(env or {}).get("PYTHONPATH"), str(ROOT)])
    )
    command = [sys.executable, "-m", "mkernel_cp", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environ)


def run(ranks, a, b, c, *options, operator="allgather-gemm"):
    args = ("run", operator, a, b, "-o", c, *options)
    return mpirun(ranks, "-m", "mkernel_cp", *args)


def run_files(ranks, operator, inputs, output, *options):
    args = ("run", operator, *inputs, "-o", output, *options)
    return mpirun(ranks, "-m", "mkernel_cp", *args)


def refusal(ranks, *args):
    """Return what `run` tells of its arguments, on ranks that are threads; the same on each."""
    arguments = cli._parser().parse_args(["run", *map(str, args)])

    def program(comm):
        with pytest.raises(job.CommandError) as raised:
            arguments.program(comm, arguments)
        return str(raised.value)

    reading, read_header = threading.Lock(), run_files_of._read_header

    def read_alone(file):  # NumPy parses a header; Python 3.11 counts depths over all threads
        with reading:
            return read_header(file)

    with mock.patch.object(run_files_of, "_read_header", read_alone):
        (text,) = set(worlds.run(ranks, program))
    return text


def on_ranks(ranks, body, **options):
    """Run the body of a function of ``comm`` as a command."""
    program = (
        "import os, signal, sys, time\nimport numpy as np\nimport mkernel_cp as mk\n"
        "from mkernel_cp.commands import demo, job, run\n"
        f"def program(comm):\n    {body}\n    return 0\n"
        "sys.exit(job.on_ranks(program))\n"
    )
    return mpirun(ranks, "-c", program, **options)


def message(done):
    """Return the one message of a command that failed."""
    assert done.returncode == 1, (done.returncode, done.stdout, done.stderr)
    prefix, text = done.stderr.split("mkernel_cp: ")
    assert prefix == ""
    return text.rstrip("\n")


# --- parsing --------------------------------------------------------------------------------------


def test_version():
    done = alone("--version")
    assert (done.returncode, done.stdout) == (0, f"mkernel_cp {mk.__version__}\n")


@pytest.mark.parametrize("command", ["run", "bench", "tune"])
def test_operators_are_spelled_with_dashes_or_underscores(command):
    dashes, underscores = (
        alone(command, name, "--help") for name in ("allgather-gemm", "allgather_gemm")
    )
    assert (underscores.returncode, underscores.stdout) == (0, dashes.stdout)
    assert f"mkernel-cp {command} allgather-gemm" in dashes.stdout


@pytest.mark.mpi
def test_all_ranks_answer_a_wrong_command_line_with_one_voice():
    done = mpirun(3, "-m", "mkernel_cp", "run", "allgather-gemm", "A.npy", "B.npy")
    assert done.returncode == 2
    assert done.stderr.count("usage:") == 1
    assert "-o/--output" in done.stderr


# --- run ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with matrices, right and wrong ones."""
    folder = tmp_path_factory.mktemp("matrices")
    random = np.random.default_rng(0)
    a, b = random.standard_normal((1000, 333)), random.standard_normal((333, 70))
    good = {
        "A": a,
        "B": b,
        "A_fortran": np.asfortranarray(a),
        "B_fortran": np.asfortranarray(b),
        "A_bfloat16": a[:99].astype(BFLOAT16),
        "B_bfloat16": b.astype(BFLOAT16),
        "A_float16": a[:99].astype(np.float16),
        "B_float16": b.astype(np.float16),
        "A_no_rows": a[:0],
        "A_two_rows": a[:2],
        "A_no_columns": a[:, :0],
        "B_no_rows": b[:0],
        "B_no_columns": b[:, :0],
        "B_one_column": b[:, :1],
    }
    wrong = {
        "vector": a[0],
        "integers": a.astype(np.int64),
        "big_endian": a.astype(">f8"),
        "records": np.zeros((2, 3), "i4,f8"),
    }
    for name, matrix in {**good, **wrong}.items():
        np.save(folder / f"{name}.npy", matrix)
    np.save(folder / "objects.npy", np.array([[None]]), allow_pickle=True)
    whole = (folder / "A.npy").read_bytes()
    (folder / "truncated.npy").write_bytes(whole[:-1])
    (folder / "half_a_header.npy").write_bytes(whole[:50])
    (folder / "empty.npy").write_bytes(b"")
    (folder / "text.npy").write_bytes(b"1 2 3\n" * 100)
    (folder / "folder.npy").mkdir()
    return folder


@pytest.mark.mpi
def test_run_as_numpy(files, tmp_path):
    a, b = np.load(files / "A.npy"), np.load(files / "B.npy")
    done = run(3, files / "A.npy", files / "B.npy", tmp_path / "C.npy")
    assert done.returncode == 0, done.stderr
    assert "(1000, 70) float64" in done.stdout
    c = np.load(tmp_path / "C.npy")
    expected = a @ b
    assert c.dtype == np.float64
    assert np.max(abs(c - expected)) <= 1e-13 * np.max(abs(expected))
    reference.allgather_gemm([a], b).assert_close(c)
    assert os.listdir(tmp_path) == ["C.npy"]


@pytest.mark.mpi
@pytest.mark.parametrize("operator", ["gemm-reduce-scatter", "gemm-allreduce"])
def test_run_of_sums_as_numpy(files, tmp_path, operator):
    a, b = np.load(files / "A.npy"), np.load(files / "B.npy")
    names = files / "A.npy", files / "B.npy", tmp_path / "C.npy"
    done = run(3, *names, operator=operator)
    assert done.returncode == 0, done.stderr
    parts = [np.array_split(a, 3, axis=1), np.array_split(b, 3)]
    reference.gemm_allreduce(*parts).assert_close(np.load(tmp_path / "C.npy"))
    assert os.listdir(tmp_path) == ["C.npy"]


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    """Files of tokens, their choices and experts, and what is made of them."""
    folder, random = tmp_path_factory.mktemp("experts"), np.random.default_rng(1)
    ids = random.integers(-1, 5, (19, 3))
    arrays = {
        "x": random.standard_normal((19, 8)),
        "ids": ids,
        "weights": random.random((19, 3)),
        "w1": random.standard_normal((5, 8, 6)),
        "w2": random.standard_normal((5, 6, 4)),
        "wrong": np.where(ids == ids[2, 1], 5, ids),
        "far": np.where(ids == ids[2, 1], 10**7, ids),
    }
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    return folder, arrays


@pytest.mark.mpi
def test_run_of_experts_as_numpy(experts, tmp_path):
    folder, arrays = experts
    x, ids, weights, w1, w2 = (arrays[name] for name in ("x", "ids", "weights", "w1", "w2"))
    names = [folder / f"{name}.npy" for name in ("x", "ids", "w1")]
    done = run_files(3, "moe-dispatch-gemm", names, tmp_path / "rows.npy")
    assert done.returncode == 0, done.stderr
    rows, _ = reference.moe_dispatch_gemm([x], [ids], w1, 0, 5)
    rows.assert_close(np.load(tmp_path / "rows.npy"))
    names = [tmp_path / "rows.npy", *(folder / f"{name}.npy" for name in ("ids", "weights"))]
    done = run_files(2, "moe-combine", names, tmp_path / "y.npy")
    assert done.returncode == 0, done.stderr
    sums = reference.moe_combine([np.load(tmp_path / "rows.npy")], [ids], weights, 0, 5)
    sums.assert_close(np.load(tmp_path / "y.npy"))
    names = [folder / f"{name}.npy" for name in ("x", "ids", "weights", "w1", "w2")]
    done = run_files(2, "moe-layer", names, tmp_path / "y.npy", "--activation", "gelu")
    assert done.returncode == 0, done.stderr
    layer = reference.moe_layer([x], [ids], weights, [w1], [w2], 0, 5, "gelu")
    layer.assert_close(np.load(tmp_path / "y.npy"))


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("dispatch-gemm x wrong w1", "wrong.npy has 5 at ("),
        ("dispatch-gemm x ids w2", "w2.npy has shape (5, 6, 4): with the other files it needs (5,"),
        ("layer x ids weights w1 w2", "with the other files and --activation swiglu it needs (5,"),
        ("combine x far weights", "use ids from 0 to 65535, or -1 for none"),
        ("combine x ids weights", "x.npy has shape (19, 8): with the other files it needs ("),
    ],
)
def test_run_of_experts_refuses(experts, tmp_path, words, text):
    operator, *names = words.split()
    paths = [experts[0] / f"{name}.npy" for name in names]
    assert text in refusal(2, f"moe-{operator}", *paths, "-o", tmp_path / "y.npy")
    assert os.listdir(tmp_path) == []


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    """Files of queries, keys and values, and what is in them."""
    folder, random = tmp_path_factory.mktemp("heads"), np.random.default_rng(2)
    shapes = {"q": (2, 21, 4, 12), "k": (2, 21, 2, 12), "v": (2, 21, 2, 12), "few": (2, 21, 3, 12)}
    arrays = {name: random.standard_normal(shape) for name, shape in shapes.items()}
    arrays |= {f"{name}16": arrays[name].astype(BFLOAT16) for name in "qkv"}
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    return folder, arrays


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("names", "options", "asked"),
    [
        ("qkv", ["--scale", "0.3", "--seq-counts", "4,0,17"], {"scale": 0.3}),
        (["q16", "k16", "v16"], ["--causal", "--layout", "zigzag"], {"causal": True}),
    ],
)
def test_run_of_attention_as_the_reference(heads, tmp_path, names, options, asked):
    folder, arrays = heads
    paths = [folder / f"{name}.npy" for name in names]
    to = tmp_path / "o.npy", tmp_path / "lse.npy"
    done = run_files(3, "ring-attention", paths, to[0], "--lse", to[1], *options)
    assert done.returncode == 0, done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == list(map(str, to))
    q, k, v = (arrays[name] for name in names)
    for expected, path in zip(reference.ring_attention(q, [k], [v], 0, **asked), to, strict=True):
        found = np.load(path)
        expected.assert_close(found.view(BFLOAT16) if found.dtype == np.dtype("V2") else found)
    assert sorted(os.listdir(tmp_path)) == ["lse.npy", "o.npy"]


@pytest.mark.parametrize(
    ("names", "options", "words"),
    [
        (
            "q k few",
            [],
            "few.npy has shape (2, 21, 3, 12): with the other files it needs (2, 21, 2",
        ),
        ("q few few", [], "few.npy 3: use a multiple"),
        ("q k v", ["--seq-counts", "20"], "[20]: "),
        ("q k v", ["--lse", "{output}"], "o.npy: the result goes there; use another file"),
    ],
)
def test_run_of_attention_refuses(heads, tmp_path, names, options, words):
    paths, output = [heads[0] / f"{name}.npy" for name in names.split()], tmp_path / "o.npy"
    options = [option.format(output=output) for option in options]
    assert words in refusal(2, "ring-attention", *paths, "-o", output, *options)
    assert os.listdir(tmp_path) == []


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("ranks", "a", "b", "dtype"),
    [
        (2, "A_fortran", "B_fortran", None),
        (3, "A_bfloat16", "B_bfloat16", None),
        (2, "A_bfloat16", "B_bfloat16", "float32"),
        (2, "A_float16", "B_float16", "float32"),
        (1, "A", "B", "float64"),
        (2, "A_no_rows", "B", None),
        (2, "A_no_columns", "B_no_rows", None),
        (2, "A", "B_no_columns", None),
        (3, "A_two_rows", "B_one_column", None),
    ],
)
def test_run_on_any_shape_dtype_and_order(files, tmp_path, ranks, a, b, dtype):
    (tmp_path / "C.npy").write_text("an older file")
    options = ("--dtype", dtype) if dtype else ()
    done = run(ranks, files / f"{a}.npy", files / f"{b}.npy", tmp_path / "C.npy", *options)
    assert done.returncode == 0, done.stderr
    a, b, c = (np.load(p) for p in (files / f"{a}.npy", files / f"{b}.npy", tmp_path / "C.npy"))
    a, b, c = (m.view(BFLOAT16) if m.dtype == np.dtype("V2") else m for m in (a, b, c))
    reference.allgather_gemm([a], b, dtype).assert_close(c)
    assert os.listdir(tmp_path) == ["C.npy"]


@pytest.mark.parametrize(
    ("a", "b", "words"),
    [
        ("missing", "B", "missing.npy: No such file"),
        ("A", "missing", "missing.npy: No such file"),
        ("truncated", "B", "truncated.npy is truncated: it has 2664127 bytes"),
        ("half_a_header", "B", "half_a_header.npy is not a .npy file"),
        ("empty", "B", "empty.npy is not a .npy file"),
        ("text", "B", "text.npy is not a .npy file"),
        ("folder", "B", "folder.npy is not a regular file"),
        ("vector", "B", "vector.npy has shape (333,): use a matrix"),
        ("integers", "B", "integers.npy has dtype int64: not allowed"),
        ("big_endian", "B", "big_endian.npy has dtype >f8: not allowed"),
        ("records", "B", "records.npy has dtype"),
        ("objects", "B", "objects.npy has dtype object: not allowed"),
        ("B", "B", "A needs as many columns as B has rows"),
        ("A_float16", "B", "A_float16.npy has dtype float16"),
    ],
)
def test_run_refuses_inputs(files, tmp_path, a, b, words):
    names = files / f"{a}.npy", files / f"{b}.npy", "-o", tmp_path / "C.npy"
    assert words in refusal(2, "allgather-gemm", *names)
    assert os.listdir(tmp_path) == []


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("a", "b", "c", "words"),
    [
        ("missing", "B", "C.npy", "missing.npy: No such file"),
        ("A", "B", "missing/C.npy", "missing/C.npy: No such file"),
        ("A", "B", "file/C.npy", "file/C.npy: Not a directory"),
        ("A", "B", "folder", "folder is not a regular file"),
        ("A", "B", "/dev/null", "/dev/null is not a regular file"),
    ],
)
def test_run_refuses_with_one_message_and_leaves_no_file(files, tmp_path, a, b, c, words):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    done = run(2, files / f"{a}.npy", files / f"{b}.npy", tmp_path / c)
    text = message(done)
    assert words in text
    assert "\n" not in text
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]


@pytest.mark.mpi
def test_run_refuses_an_output_type_and_an_unwritable_folder(files, tmp_path):
    done = run(2, files / "A.npy", files / "B.npy", tmp_path / "C.npy", "--dtype", "float32")
    assert "dtype=float32: not allowed for float64 operands" in message(done)
    tmp_path.chmod(0o500)
    # Root writes everywhere but into the kernel's own file systems.
    folder = tmp_path if os.geteuid() else "/proc"
    done = run(2, files / "A.npy", files / "B.npy", f"{folder}/C.npy")
    assert f"cannot write {folder}/C.npy" in message(done)
    assert os.listdir(tmp_path) == []


INTERRUPTED = """import argparse
    def stop(*args, **options):
        there = comm.rank == 0 or any(name.endswith(".tmp") for name in os.listdir({folder!r}))
        assert there  # one that fails may have removed it by the time that another looks
        {what}
    def late(*args, inner=run._map):
        time.sleep(0.2 if comm.rank == 0 else 0)
        return inner(*args)
    def first(self, inner=run.Path.unlink):
        inner(self)
        time.sleep(0 if comm.rank == 0 else 1)
    run.gather.allgather_gemm, run._map, run.Path.unlink = stop, late, first
    names = [os.path.join({files!r}, name) for name in ("A.npy", "B.npy")]
    output = os.path.join({folder!r}, "C.npy")
    run.allgather_gemm(comm, argparse.Namespace(a=names[0], b=names[1], output=output, dtype=None))
"""


@pytest.mark.mpi
def test_run_leaves_no_file_when_a_rank_fails(files, tmp_path):
    what = "if comm.rank == 1: raise KeyError('in the middle')"
    body = INTERRUPTED.format(folder=str(tmp_path), files=str(files), what=what)
    done = on_ranks(2, body)
    assert "rank 1:\nTraceback" in message(done)
    assert os.listdir(tmp_path) == []


@pytest.mark.mpi
def test_run_leaves_no_file_when_its_launcher_is_asked_to_end(files, tmp_path):
    body = INTERRUPTED.format(folder=str(tmp_path), files=str(files), what="time.sleep(60)")
    with pytest.raises(subprocess.TimeoutExpired):
        on_ranks(2, body, timeout=4)
    assert os.listdir(tmp_path) == []


# --- demo -----------------------------------------------------------------------------------------


@pytest.mark.mpi
def test_demo_prints_a_table_that_names_its_target():
    done = mpirun(2, "-m", "mkernel_cp", "demo", "--ranks", "2")
    assert done.returncode == 0, done.stderr
    title, headings, *rows, last = done.stdout.splitlines()
    assert "2 ranks on 1 node, target host" in title
    assert "not a measure of speed" in title
    assert headings.split()[0] == "operator"
    names = ("allgather_gemm", "gemm_reduce_scatter", "gemm_allreduce", "ring_attention")
    names += ("moe_dispatch_gemm", "moe_combine", "moe_layer")
    assert sorted(names) == sorted({row.split()[0] for row in rows})
    assert last == f"all {len(rows)} rows agree with the reference"
    assert done.stderr == ""


@pytest.mark.mpi
def test_demo_prints_json():
    done = mpirun(3, "-m", "mkernel_cp", "demo", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["ok"] is True
    assert (report["world"], report["target"]) == (3, "host")
    types = {(row["dtype"], row["out_dtype"]) for row in report["rows"]}
    assert types >= {(name, name) for name in ("bfloat16", "float16", "float32", "float64")}
    assert ("bfloat16", "float32") in types
    for row in report["rows"]:
        assert row["ok"]
        assert 0 <= row["error_over_bound"] <= 1
        assert row["bytes_from_peers"] == row["bytes_planned"] > 0
        assert row["ms"] > 0
    assert len({tuple(row["row_counts"]) for row in report["rows"]}) >= 3


@pytest.mark.mpi
def test_demo_refuses_a_world_of_another_size():
    done = mpirun(2, "-m", "mkernel_cp", "demo", "--ranks", "3", "--json")
    assert "the world has 2 rank(s), --ranks asks for 3" in message(done)
    assert done.stdout == ""


def test_demo_without_a_launcher_is_a_world_of_one():
    assert "the world has 1 rank(s)" in message(alone("demo", "--ranks", "4"))


DEMO = """import argparse
    arguments = argparse.Namespace(ranks=None, json={json})
    {patch}
    return demo.demo(comm, arguments)
"""


@pytest.mark.mpi
def test_demo_notices_a_result_that_is_wrong_on_one_rank():
    patch = """step = demo.AllGatherGemm.__call__
    def wrong(self, a, b, *, out):
        step(self, a, b, out=out)
        if comm.rank == 1: out[-1, -1] = np.nan
    demo.AllGatherGemm.__call__ = wrong"""
    done = on_ranks(2, DEMO.format(json=True, patch=patch))
    assert "8 of 45 rows are wrong" in message(done)
    report = json.loads(done.stdout)
    assert report["ok"] is False
    wrong = {row["operator"] for row in report["rows"] if row["error_over_bound"] is None}
    assert wrong == {"allgather_gemm"}


@pytest.mark.mpi
def test_demo_notices_bytes_that_were_not_planned():
    patch = """import ctypes
    step = demo.AllGatherGemm.__call__
    def greedy(self, a, b, *, out):
        step(self, a, b, out=out)
        page = comm._runtime._signal_pages[comm.rank]
        ctypes.c_uint64.from_address(page.bytes_word).value += 0 if comm.rank else 1
    demo.AllGatherGemm.__call__ = greedy"""
    done = on_ranks(2, DEMO.format(json=False, patch=patch))
    assert "bytes that were not planned" in message(done)
    assert done.stdout.count("WRONG") == 8


# --- compile --------------------------------------------------------------------------------------


@pytest.mark.nvrtc
def test_compile_fills_the_cache_once(tmp_path):
    env = {"MKERNEL_CACHE_DIR": str(tmp_path)}
    for compiled, operator in ((7, "allgather-gemm"), (0, "allgather_gemm")):
        done = alone("compile", "--arch", "sm_80", "--operator", operator, env=env)
        assert (done.returncode, done.stderr) == (0, "")
        *kernels, headings, row, last = done.stdout.splitlines()
        assert [line.split()[:5] for line in kernels][::6] == [
            [str(number), "of", "7", "allgather_gemm", name]
            for number, name in ((1, "bfloat16"), (7, "tfloat32"))
        ]
        assert all(line.endswith(" s" if compiled else "was there") for line in kernels)
        assert headings.split() == ["kernel", "variants", "compiled", "seconds"]
        assert row.split()[:3] == ["allgather_gemm", "7", str(compiled)]
        assert last.startswith(f"7 kernels for sm_80: {compiled} compiled in ")
    assert len(list(tmp_path.glob("*.cubin"))) == 7
    done = alone("compile", "--arch", "gpu", env=env)
    assert done.returncode == 1
    assert "sm_80 or sm_90a" in done.stderr


@pytest.mark.parametrize(("arch", "kib"), [("sm_80", 163), ("sm_86", 99), ("sm_90a", 227)])
def test_compile_has_the_kernels_of_attention_that_plans_take(arch, kib):
    kernels = compile.kernels_for("ring_attention", arch)
    assert len(kernels) == len(arguments.DTYPES) * 3 + (8 if arch == "sm_90a" else 0)
    attention = Attention(1, (512,), 4, 4, 100, np.dtype("f2"), False, 1.0, "contiguous")
    gpu = tiles.Gpu(arch, 100, kib << 10)
    tile = choose_attention_tile(0, attention, mk.Options(), gpu)
    assert {"MK_TYPE": "float16", **tile.defines(attention.dtype)} in kernels
    columns_of_8 = dataclasses.replace(attention, columns=96)
    for version, engine in (((12, 6), "portable"), ((12, 8), "hopper"), ((13, 0), "hopper")):
        other = dataclasses.replace(gpu, nvrtc=version)
        chosen = choose_attention_tile(0, columns_of_8, mk.Options(), other)
        assert chosen.engine == (engine if arch == "sm_90a" else "portable")


@pytest.mark.parametrize(("dtype", "tf32"), [("f2", False), ("f4", False), ("f4", True)])
@pytest.mark.parametrize("columns", [64, 1000, 8192])
@pytest.mark.parametrize("split", [None, (tiles.MOVERS, None)])
def test_compile_has_the_kernels_that_plans_of_gemms_take(dtype, tf32, columns, split):
    dtype, gpu = np.dtype(dtype), tiles.Gpu("sm_90a", 132, 227 << 10)
    options, shape = mk.Options(split, tf32=tf32), ((999,) * 4, columns, 777)
    tile = tiles.choose_tile(*shape, dtype, options, gpu, gathers=True)
    types = tiles.type_defines(dtype, dtype, tf32=tf32)
    taken = tiles.kernel_defines(types, tile, dtype, b_by_columns=tf32)
    assert taken in compile.kernels_for("allgather_gemm", gpu.arch)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize(("dtype", "tf32"), [("f2", False), ("f4", False), ("f4", True)])
@pytest.mark.parametrize("columns", [64, 8192])
def test_compile_has_the_kernels_that_plans_of_few_rows_take(arch, dtype, tf32, columns):
    dtype, gpu = np.dtype(dtype), tiles.Gpu(arch, 132, {"sm_80": 163, "sm_90a": 227}[arch] << 10)
    options, shape = mk.Options(tf32=tf32), ((64,), columns, 777)
    tile = tiles.choose_tile(*shape, dtype, options, gpu, small=True)
    kind, types = plan.GemmAllReducePlan, tiles.type_defines(dtype, dtype, dtype, tf32=tf32)
    sums = kind, (32, 32), columns, dtype, dtype
    assert plan.has_low_latency(*sums, tile, gpu, 777, dtype)
    taken = tiles.kernel_defines(types, tile, dtype, b_by_columns=tf32)
    kernels = compile.kernels_for("gemm_allreduce", arch, small=True)
    assert taken in kernels
    assert all(defines.get("MK_TILE_COLUMNS", 256) <= 128 for defines in kernels)


# --- how a job ends -------------------------------------------------------------------------------

AGREED = "comm._runtime.agree('x', lambda: 1 // int(comm.rank != 1))"


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("if comm.rank == 1: raise KeyError('alone')\n    comm.barrier()", "rank 1:\nTraceback"),
        ("raise KeyError('everywhere')", "Traceback"),
        (AGREED, "ZeroDivisionError: rank 1:"),
        ("comm.empty(-3 if comm.rank == 2 else 3)", "rank 2:\nTraceback"),
        ("comm._runtime.agree(f'call {comm.rank // 2}', int)", "MismatchError: ranks disagree"),
    ],
)
def test_an_exception_ends_the_job_with_one_message(body, words):
    text = message(on_ranks(3, body))
    assert words in text
    assert text.count("Traceback") <= 1


@pytest.mark.mpi
def test_a_stopped_rank_does_not_keep_the_job_alive():
    body = """job._FINALIZE_SECONDS = 1
    if comm.rank == 1: os.kill(os.getpid(), signal.SIGSTOP)
    comm.barrier()"""
    done = on_ranks(3, body, env={"MKERNEL_TIMEOUT": "1,1"}, timeout=60)
    assert done.returncode != 0
    assert done.stderr.count("TimeoutError: ") == 1
    assert "Traceback" not in done.stderr


@pytest.mark.mpi
def test_an_interrupt_is_quiet():
    done = on_ranks(2, "if comm.rank == 1: raise KeyboardInterrupt\n    comm.barrier()")
    assert done.returncode != 0
    assert done.stderr == ""


@pytest.mark.mpi
def test_a_wrong_setting_and_an_unknown_one_are_told_once():
    env = {"MKERNEL_NODES": "3", "MKERNEL_NODE": "2"}
    done = mpirun(2, "-m", "mkernel_cp", "demo", env=env)
    assert done.returncode == 1
    unknown, refusal = done.stderr.splitlines()
    assert unknown.startswith("mkernel_cp: unknown environment variable MKERNEL_NODE:")
    assert "ConfigurationError: rank 0: MKERNEL_NODES: nodes=3: not allowed; use 1 to 2" in refusal


# --- doctor ---------------------------------------------------------------------------------------


def findings(done):
    """Return the state of each thing that doctor looked at."""
    assert done.stderr == ""
    lines = [line.split(maxsplit=2) for line in done.stdout.splitlines()[1:-1]]
    return {line[1]: line[0] for line in lines if line[0] != "->"}


@pytest.mark.mpi
def test_doctor_finds_all_that_is_needed(tmp_path):
    done = alone("doctor", env={"MKERNEL_CACHE_DIR": str(tmp_path / "cache")})
    assert done.returncode == 0, done.stdout
    states = findings(done)
    assert set(states.values()) == {"ok"}
    assert {"Python", "numpy", "mpi4py", "MPI", "target", "C++", "cache", "memfd"} <= set(states)
    assert {"UNIX", "pidfd", "/dev/shm", "NVRTC", "MKERNEL_TIMEOUT"} <= set(states)
    assert f"{tmp_path}/cache, 0 entries" in done.stdout


def test_doctor_on_ranks_looks_whether_they_reach_each_other(monkeypatch):
    def look(mpi):
        return list(doctor._pairs(mpi))

    (finding,) = mk.LocalWorld(2).run(look)[0]
    assert (finding.state, finding.what) == ("ok", "pairs of ranks")
    assert "each of 2 has written to each other one over verbs on soft0, made of" in finding.text
    monkeypatch.setattr(check, "_SECONDS", 0.5)
    monkeypatch.setenv("MKERNEL_FABRIC", "soft:fault=error@1")
    first, *_ = mk.LocalWorld(2, hosts=(1, 1)).run(look)[0]
    assert first.state == "MISSING"
    assert "gets nothing from" in first.text
    monkeypatch.setenv("MKERNEL_FABRIC", "soft:fault=denied")
    (finding,) = mk.LocalWorld(2).run(look)[0]
    assert finding.state == "warning"
    assert "may this user open /dev/infiniband?" in finding.text


@pytest.mark.nvrtc
def test_doctor_tells_which_nvrtc_there_is():
    (finding,) = doctor._nvrtc()
    version, path = finding.text.split(", ")
    assert finding.state == "ok"
    assert tuple(map(int, version.split("."))) == compiler.nvrtc_version()
    assert Path(path).is_file()


@pytest.mark.parametrize(("gpu", "state"), [(False, "ok"), (True, "MISSING")])
def test_doctor_tells_that_there_is_no_nvrtc(monkeypatch, gpu, state):
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", None)
    monkeypatch.setattr(cuda, "has_gpu", lambda: gpu)
    monkeypatch.setenv("MKERNEL_TARGET", "auto")
    (finding,) = doctor._nvrtc()
    assert (finding.state, finding.what) == (state, "NVRTC")
    assert "compiles kernels for GPUs" in finding.text
    assert "extra cu13" in finding.mend


def test_doctor_tells_what_is_missing_and_what_mends_it():
    env = {
        "CXX": "/nowhere/c++",
        "MKERNEL_NODES": "none",
        "MKERNEL_NODE": "2",
        "MKERNEL_CACHE_DIR": "/dev/null/cache",
        "PMI_RANK": "0",  # as if under a launcher: no other one is started
    }
    done = alone("doctor", env=env)
    assert done.returncode == 1
    states = findings(done)
    wrong = {name: state for name, state in states.items() if state != "ok"}
    assert wrong == {
        "C++": "MISSING",
        "MKERNEL_NODES": "WRONG",
        "MKERNEL_NODE": "warning",
        "cache": "warning",
    }
    assert "set CXX" in done.stdout
    assert "did you mean MKERNEL_NODES?" in done.stdout
    assert done.stdout.endswith("2 thing(s) to mend\n")


def test_a_broken_mpi4py_is_no_traceback(tmp_path):
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text("raise ImportError('libmpi.so is not there')")
    env = {"PYTHONPATH": str(tmp_path)}
    done = alone("doctor", env=env)
    assert done.returncode == 1
    assert findings(done)["MPI"] == "MISSING"
    assert "libmpi.so is not there" in done.stdout
    assert "pip install mpi4py mpich" in done.stdout
    text = message(alone("demo", env=env))
    assert "libmpi.so is not there" in text
    assert "doctor" in text
