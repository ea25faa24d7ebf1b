"""The benchmark: what its records hold, what it refuses, and its arithmetic. Not speed."""

import copy
import importlib.util
import itertools
import json
import re
import sys
import types

import numpy as np
import pytest
from launcher import mpirun

import mkernel_cp as mk
from mkernel_cp import cli, reference
from mkernel_cp.arguments import Options
from mkernel_cp.bench import baselines, records, routes, timing
from mkernel_cp.bench.ring_attention import merge
from mkernel_cp.commands import spelled
from mkernel_cp.commands.bench import BENCHES
from mkernel_cp.communicator import Communicator
from mkernel_cp.errors import ConfigurationError, Error
from mkernel_cp.plan import AllGatherGemmPlan, plan_allgather_gemm


def bench(*options, ranks=2, operator="allgather-gemm", **more):
    arguments = ("bench", operator, *options)
    return mpirun(ranks, "-m", "mkernel_cp", *arguments, **more)


def patched(patch, *options, operator="allgather-gemm"):
    """Run the benchmark on two ranks after some lines of Python."""
    program = (
        "import sys\nimport numpy as np\nfrom mpi4py import MPI\n"
        "from mkernel_cp.bench import baselines\n"
        "from mkernel_cp.commands.bench import BENCHES\n"
        "from mkernel_cp.cli import main\n"
        f"rank = MPI.COMM_WORLD.Get_rank()\n{patch}\n"
        f"sys.exit(main({['bench', operator, '--quick', '--repeat', '1', *options]!r}))\n"
    )
    return mpirun(2, "-c", program)


def wrong(operator, who, what):
    """Return lines that do something to the result of an operator on rank 1."""
    return f"""kind = BENCHES[{operator!r}]
class Wrong(kind.step_type):
    def __call__(self, *own, out):
        super().__call__(*own, out=out)
        comm = self._runtime
        if rank == 1 and {who}: {what}
        return out
kind.step_type = Wrong"""


# --- a run ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """What a run says, and the records that it writes."""
    path = tmp_path_factory.mktemp("bench") / "records.json"
    shapes = "--shape=70,33,20", "--shape=1,5,3"
    done = bench(*shapes, "--dtype=float16", "--repeat=2", f"--json={path}")
    assert done.returncode == 0, done.stderr
    return done, records.read(path)


@pytest.mark.mpi
def test_a_run_writes_a_record_of_every_case(run):
    _, written = run
    assert [record["shape"] for record in written] == [
        {"M": 70, "K": 33, "N": 20},
        {"M": 1, "K": 5, "N": 3},
    ]
    for record in written:
        assert tuple(record) == records.KEYS
        assert record["operator"] == "allgather_gemm"
        assert (record["world"], record["nodes"], record["dtype"]) == (2, 1, "float16")
        assert (record["target"], record["engine"], record["card"]) == ("host", "host", "cpu")
        assert record["floor_ms"] == max(record["compute_ms"], record["transfer_ms"])
        assert record["network_ms"] == 0
        assert record["efficiency"] == record["floor_ms"] / record["fused_ms"]
        assert isinstance(record["unfused_ms"], float)
        assert record["rivals"] == {"PyTorch async-TP": "needs GPUs", "cuBLASMp": "needs GPUs"}
        assert record["plan"]["dtype"] == "float16"
        assert record["versions"]["numpy"] == np.__version__
    assert written[0]["plan"]["row_counts"] == [35, 35]
    assert written[0]["transfer_ms"] == pytest.approx(35 * written[1]["transfer_ms"] * 33 / 5)


@pytest.mark.mpi
def test_a_run_prints_a_table_and_what_its_dashes_mean(run):
    done, written = run
    title, headings, *rows = done.stdout.splitlines()
    assert "2 ranks on cpu" in title
    assert "GB/s into each" in title
    assert "not a measure of speed" in title
    assert headings.split()[-3:] == ["PyTorch", "async-TP", "cuBLASMp"]
    titles = [f"allgather_gemm {shape} float16" for shape in ("70 x 33 x 20", "1 x 5 x 3")]
    table = records.Table(titles, list(written[0]["rivals"]))
    assert headings == table.headings
    assert rows[:2] == [table.line(record) for record in written]
    notes = "PyTorch async-TP: needs GPUs", "cuBLASMp: needs GPUs"
    assert rows[2:-1] == list(notes)
    assert rows[-1].startswith("records: ")
    assert done.stderr == ""


@pytest.mark.mpi
def test_a_run_on_several_nodes_has_what_the_network_takes(tmp_path):
    path = tmp_path / "records.json"
    environment = {"MKERNEL_NODES": "2", "MKERNEL_FABRIC": "soft:rate=0.02"}
    shape = "--shape=70,330,1"
    done = bench(shape, "--repeat=1", "--dtype=float32", f"--json={path}", env=environment)
    assert done.returncode == 0, done.stderr
    (record,) = records.read(path)
    assert record["nodes"] == 2
    assert record["transfer_ms"] == 0
    assert record["network_ms"] >= 0.9e3 * 35 * 330 * 4 / 0.02e9  # no link exceeds its rate
    assert record["floor_ms"] == max(record["compute_ms"], record["network_ms"])
    assert "GB/s out of each network card" in done.stdout


@pytest.mark.mpi
def test_a_run_alone_transfers_nothing(tmp_path):
    path = tmp_path / "records.json"
    done = bench("--quick", "--repeat=1", f"--json={path}", ranks=1)
    assert done.returncode == 0, done.stderr
    (record,) = records.read(path)
    assert record["transfer_ms"] == 0
    assert record["floor_ms"] == record["compute_ms"]


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("who", "field"), [("comm.size == 2", "fused_ms"), ("comm.size == 1", "engine_ms")]
)
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("out[-1, -1] *= 2", "wrong result: an error is"),
        ("out[0, 0] = np.nan", "wrong result: some of it is not written"),
    ],
)
def test_a_wrong_result_gets_no_time(tmp_path, who, field, what, words):
    path = tmp_path / "records.json"
    done = patched(wrong("allgather-gemm", who, what), f"--json={path}")
    assert done.returncode == 1
    assert f"has no {field}: {words}" in done.stderr
    assert done.stderr.count("\n") == 1
    assert "allgather_gemm 96" not in done.stdout
    assert not path.read_text()


@pytest.mark.mpi
def test_a_baseline_that_fails_is_words(tmp_path):
    path = tmp_path / "records.json"
    patch = """def fail(comm):
    if rank == 1: raise OSError('no library')
    return baselines.MpiGather(comm)
baselines.gather_for = fail"""
    done = patched(patch, f"--json={path}")
    assert done.returncode == 0, done.stderr
    (record,) = records.read(path)
    assert record["unfused_ms"] == "OSError: no library"
    assert "unfused: OSError: no library" in done.stdout


@pytest.mark.mpi
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
@pytest.mark.parametrize("operator", ["gemm_reduce_scatter", "gemm_allreduce"])
def test_sums_are_measured_beside_their_like(tmp_path, operator, dtype):
    path = tmp_path / "records.json"
    options = "--shape=70,33,20", "--shape=1,5,3", f"--dtype={dtype}", "--repeat=1"
    name = operator.replace("_", "-")
    done = bench(*options, f"--json={path}", ranks=3, operator=name)
    assert done.returncode == 0, done.stderr
    first, second = records.read(path)
    assert first["shape"] == {"M": 70, "K": 33, "N": 20}
    assert first["plan"]["row_counts"] == [24, 23, 23]
    for record in (first, second):
        assert record["operator"] == operator
        assert isinstance(record["unfused_ms"], float)
    # Of 70 rows: two terms for its own, and for an all-reduce the sums of the others.
    rows = {"gemm_reduce_scatter": (48, 2), "gemm_allreduce": (48 + 46, 2 + 0)}[operator]
    ratio = rows[0] * 20 / (rows[1] * 3)
    assert first["transfer_ms"] == pytest.approx(ratio * second["transfer_ms"])


ZIPF = {"routing": "zipf"}
ATTENTION = {"S": 25, "B": 1, "Hq": 6, "Hkv": 2, "D": 5}


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("operator", "shape", "variant"),
    [
        ("moe_dispatch_gemm", {"tokens": 50, "H": 24, "I": 9, "E": 2, "k": 2}, ZIPF),
        ("moe_combine", {"tokens": 50, "N": 24, "E": 7, "k": 3}, ZIPF),
        ("moe_layer", {"tokens": 50, "H": 24, "I": 9, "E": 7, "k": 3}, ZIPF),
        ("ring_attention", ATTENTION, {"causal": True, "layout": "zigzag"}),
        ("ring_attention", ATTENTION, {"causal": False, "layout": "contiguous"}),
    ],
)
def test_variants_are_measured_beside_their_like(tmp_path, operator, shape, variant):
    path = tmp_path / "records.json"
    options = [
        f"--shape={','.join(map(str, shape.values()))}",
        "--dtype=float32",
        *(
            f"--{name}" if value is True else f"--{name}={value}"
            for name, value in variant.items()
            if value
        ),
        "--repeat=1",
        f"--json={path}",
    ]
    done = bench(*options, ranks=3, operator=spelled(operator))
    assert done.returncode == 0, done.stderr
    (record,) = records.read(path)
    assert (record["shape"], record["variant"]) == (shape, variant)
    assert variant.items() - {("routing", "zipf")} <= record["plan"].items()
    assert record["rivals"] == {}
    assert isinstance(record["unfused_ms"], float)
    saved = tmp_path / "plan.json"
    saved.write_text(json.dumps({"operator": operator, **record["plan"]}))
    step_type = BENCHES[spelled(operator)].step_type
    assert step_type.__annotations__["plan"].load(saved).to_json() == record["plan"]
    assert records.title(operator, shape, "float32", variant) in done.stdout


@pytest.mark.mpi
def test_tokens_are_measured_within_one_node():
    done = bench("--quick", operator="moe-combine", env={"MKERNEL_NODES": "2"})
    assert done.returncode == 1
    assert "the bench of moe_combine works within one node only so far" in done.stderr


def test_a_route_says_who_sends_what():
    """Of two ranks with two experts each, the second one."""
    ids = np.array([[0, 2], [3, 2], [1, 0], [2, 3]])
    route = routes.Route(ids, (3, 1), 4, 1)
    assert route.offsets.tolist() == [0, 3, 5]
    assert route.row_slots.tolist() == [1, 3, 6, 2, 7]
    assert (route.capacity, route.landing) == (5, [0, 2])
    assert route.returning == [2, 0]
    assert (route.sent_counts, route.received_counts) == ([0, 2], [3, 2])
    assert route.sent.tolist() == [0, 0]
    # Tokens 0 and 1 for the first expert, 1 for the second, then those of this rank.
    arrived = np.array([0, 1, 1, 3, 3])
    assert arrived[route.order].tolist() == [0, 1, 3, 1, 3]
    chosen = routes.choose(1000, 8, 2, "zipf")
    assert (chosen[:, 0] != chosen[:, 1]).all()
    counts = np.bincount(chosen.ravel(), minlength=8)
    assert counts[0] > 2 * counts[3] > 2 * counts[7]


@pytest.mark.mpi
@pytest.mark.parametrize("operator", ["gemm-reduce-scatter", "ring-attention"])
@pytest.mark.parametrize(
    ("who", "field"), [("comm.size == 2", "fused_ms"), ("comm.size == 1", "engine_ms")]
)
def test_a_wrong_sum_gets_no_time(operator, who, field):
    done = patched(wrong(operator, who, "out.reshape(-1)[-1] *= 2"), operator=operator)
    assert done.returncode == 1
    assert f"has no {field}: wrong result: an error is" in done.stderr


# --- arguments ------------------------------------------------------------------------------------


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("operator", "option", "words"),
    [
        ("allgather-gemm", "--shape=1,2", "argument --shape: '1,2': use M,K,N, whole numbers"),
        ("moe-combine", "--shape=9,9,2,3", "argument --shape: 9,9,2,3: a token chooses k of E"),
        ("ring-attention", "--shape=9,1,4,3,8", "9,1,4,3,8: Hq is not a multiple of Hkv"),
        ("ring-attention", "--shape=9,1,4,2,257", "9,1,4,2,257: D is at most 256"),
        ("allgather-gemm", "--repeat=0", "argument --repeat: '0': use a whole number"),
        ("allgather-gemm", "--dtype=int8", "argument --dtype: invalid choice: 'int8'"),
    ],
)
def test_a_wrong_command_line_is_told_once(operator, option, words):
    done = bench(option, operator=operator)
    assert done.returncode == 2
    assert done.stderr.count("usage:") == 1
    assert words in done.stderr


SHAPES_ARE = {
    "allgather-gemm": "M,K,N, whole numbers of at least 1: M rows of all ranks, K, N columns",
    "moe-dispatch-gemm": "tokens,H,I,E,k, whole numbers of at least 1: tokens of all ranks, ",
    "moe-combine": "tokens,N,E,k, whole numbers of at least 1: tokens of all ranks, N columns",
    "ring-attention": "S,B,Hq,Hkv,D, whole numbers of at least 1: S positions of all ranks, ",
}


@pytest.mark.parametrize(
    ("command", "operator"),
    [
        *(("bench", operator) for operator in SHAPES_ARE),
        *(("tune", operator) for operator in SHAPES_ARE if BENCHES[operator].choices),
    ],
)
@pytest.mark.parametrize("text", ["", ",", "1", "a,b,c,d,e", "1,2,3,4,0", "1.5,2,3,4,5,6", "1;2"])
def test_a_wrong_shape_is_answered_by_what_its_numbers_are(command, operator, text, capsys):
    with pytest.raises(SystemExit) as end:
        cli._parser().parse_args([command, operator, f"--shape={text}"])
    *_, last = capsys.readouterr().err.splitlines()
    assert end.value.code == 2
    assert f"error: argument --shape: {text!r}: use {SHAPES_ARE[operator]}" in last


@pytest.mark.parametrize("text", ["", "x", "-1", "1.5"])
@pytest.mark.parametrize(
    ("words", "option"),
    [
        (("bench", "allgather-gemm"), "--repeat"),
        (("run", "ring-attention", "q", "k", "v", "-o", "o"), "--seq-counts"),
    ],
)
def test_wrong_numbers_are_answered_by_what_they_can_be(words, option, text, capsys):
    with pytest.raises(SystemExit):
        cli._parser().parse_args([*words, f"{option}={text}"])
    answer = f"error: argument {option}: {text!r}: use "
    assert re.search(f"{re.escape(answer)}(a )?whole number", capsys.readouterr().err)


@pytest.mark.mpi
def test_what_cannot_be_written_is_told_before_anything_is_measured(tmp_path):
    done = bench(f"--json={tmp_path}/missing/records.json")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.endswith("missing/records.json: No such file or directory\n")


@pytest.mark.mpi
@pytest.mark.parametrize("text", ["notes", "[1]", '{"operator": 2}'])
def test_a_file_of_something_else_is_left_as_it_is(text, tmp_path):
    path = tmp_path / "notes.json"
    path.write_text(text)
    done = bench(f"--json={path}")
    assert (done.returncode, done.stdout) == (1, "")
    assert "notes.json holds something else than records" in done.stderr
    assert path.read_text() == text


@pytest.mark.mpi
def test_a_missing_matplotlib_is_told_before_anything_is_measured(tmp_path):
    (tmp_path / "matplotlib").mkdir()
    (tmp_path / "matplotlib" / "__init__.py").write_text("raise ImportError('it is not here')")
    done = bench("--plot=chart.png", env={"PYTHONPATH": str(tmp_path)})
    assert (done.returncode, done.stdout) == (1, "")
    assert "ConfigurationError: rank 0: --plot needs matplotlib (it is not here)" in done.stderr
    assert "install mkernel_cp with its extra plot" in done.stderr


# --- records --------------------------------------------------------------------------------------

COMM = types.SimpleNamespace(
    size=4, num_nodes=1, target="cuda", device="cuda:0 (NVIDIA H100 80GB HBM3)"
)
SHAPE = {"M": 4096, "K": 4096, "N": 1024}


def measured(fused=0.25, **others):
    return {
        "compute_ms": 0.05,
        "transfer_ms": 0.07,
        "network_ms": 0.0,
        "engine_ms": 0.06,
        "unfused_ms": 0.2,
        "fused_ms": fused,
        "host_us": {"class": 10.0, "function": 12.0},
        "rivals": {"PyTorch async-TP": 0.18, "cuBLASMp": "ModuleNotFoundError: ..."},
        "plan": {"engine": "hopper"},
        **others,
    }


def record(*repeats):
    case = "allgather_gemm", SHAPE, "bfloat16", {}
    return records.make_record(COMM, *case, repeats or [measured()])


def test_a_record_is_the_median_of_its_repeats():
    made = record(measured(0.3), measured(0.14), measured(0.1, unfused_ms="it broke"))
    assert made["fused_ms"] == 0.14
    assert made["floor_ms"] == 0.07
    assert made["efficiency"] == 0.5
    assert made["unfused_ms"] == "it broke"
    assert made["rivals"] == measured()["rivals"]
    assert made["card"] == "NVIDIA H100 80GB HBM3"
    assert (made["variant"], made["engine"], made["repeats"]) == ({}, "hopper", 3)


def test_the_floor_is_the_longer_one():
    assert record(measured(compute_ms=0.2))["floor_ms"] == 0.2
    assert record(measured(compute_ms=0.2))["efficiency"] == 0.8


@pytest.mark.parametrize("field", ["compute_ms", "engine_ms", "fused_ms"])
def test_no_record_without_what_it_is_about(field):
    with pytest.raises(Error, match=f"bfloat16 has no {field}: wrong result"):
        record(measured(), measured(**{field: "wrong result"}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("operator", "gemm"),
        ("shape", {"M": 1, "K": 1}),
        ("shape", {"M": 1, "K": 1, "N": 0}),
        ("dtype", "int8"),
        ("variant", {"routing": "uniform"}),
        ("world", 0),
        ("target", "auto"),
        ("card", ""),
        ("date", "yesterday"),
        ("date", 20261129),
        ("repeats", 0),
        ("fused_ms", 0.0),
        ("fused_ms", float("nan")),
        ("compute_ms", "words"),
        ("unfused_ms", ""),
        ("floor_ms", 0.05),
        ("efficiency", 0.5),
        ("host_us", {"class": 1.0}),
        ("rivals", {"cuBLASMp": None}),
        ("plan", {"engine": "portable"}),
        ("versions", {}),
    ],
)
def test_a_record_that_makes_no_sense_is_refused(key, value):
    wrong = {**record(), key: value}
    with pytest.raises(ValueError, match=key):
        records.check_record(wrong)


def test_a_record_has_these_keys_and_no_others():
    for change in (lambda r: r.pop("plan"), lambda r: r.update(more=1)):
        wrong = copy.copy(record())
        change(wrong)
        with pytest.raises(ValueError, match="keys"):
            records.check_record(wrong)


def test_records_survive_a_file(tmp_path):
    path = tmp_path / "records.json"
    path.touch()  # as an interrupted run leaves it
    records.write(path, [record()])
    assert records.read(path) == [record()]
    assert [file.name for file in tmp_path.iterdir()] == ["records.json"]


def test_a_record_takes_the_place_of_one_of_the_same_work(tmp_path):
    path = tmp_path / "records.json"
    others = [{**record(), key: value} for key, value in (("world", 3), ("card", "another"))]
    records.write(path, [others[0], record(), others[1]])
    again = record(measured(0.1))
    records.write(path, [again])
    assert records.read(path) == [others[0], again, others[1]]
    more = {**record(), "shape": {"M": 1, "K": 1, "N": 1}}
    records.write(path, [more])
    assert records.read(path) == [others[0], again, others[1], more]


@pytest.mark.parametrize("path", sorted(records.RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_the_results_of_the_package_can_be_read(path):
    for one in records.read(path):
        assert one["operator"] == path.stem
        title = records.title(*(one[key] for key in ("operator", "shape", "dtype", "variant")))
        assert records.Table([title], list(one["rivals"])).line(one).startswith(title)


def test_columns_of_a_table_are_in_line():
    long = {**record(), "shape": {"M": 131072, "K": 7168, "N": 2048}}
    lines = [records.title(*(one[key] for key in records.KEYS[:4])) for one in (record(), long)]
    table = records.Table(lines, list(record()["rivals"]))
    for line in (table.line(record()), table.line(long)):
        assert len(line) == len(table.headings)
        at = table.headings.index("PyTorch async-TP")
        assert line[at:].split() == ["0.18", "-"]
        assert line[: at - 2].endswith(" 10.0")


def test_a_plan_survives_json():
    bfloat16 = np.dtype("bfloat16")
    plan = plan_allgather_gemm(1, (3, 4), 5, 6, bfloat16, bfloat16, False, Options())
    fields = json.loads(json.dumps(plan.to_json()))
    assert fields == plan.to_json()
    restored = {
        name: np.dtype(value)
        if name.endswith("dtype")
        else tuple(value)
        if isinstance(value, list)
        else value
        for name, value in fields.items()
    }
    assert AllGatherGemmPlan(**restored) == plan


@pytest.mark.skipif(not importlib.util.find_spec("matplotlib"), reason="needs matplotlib")
def test_a_chart(tmp_path):
    path = tmp_path / "chart.svg"
    records.check_chart(str(path))
    records.draw(str(path), [record(), record(measured(unfused_ms="it broke"))])
    assert "<svg" in path.read_text()
    with pytest.raises(ValueError, match="use a name that ends in"):
        records.check_chart("chart.doc")


def test_an_earlier_time_is_told_where_there_is_one():
    bfloat16 = np.dtype("bfloat16")
    name = "cuBLASMp", "allgather_gemm"
    known = baselines.figure(*name, 4, (4096, 4096, 1024), bfloat16)
    assert "0.15 ms in an earlier run on 4 x NVIDIA H100" in known
    other = baselines.figure("cuBLASMp", "gemm_reduce_scatter", 4, (4096, 1024, 4096), bfloat16)
    assert "0.551 ms" in other
    for world, shape, dtype in (
        (2, (4096, 4096, 1024), bfloat16),
        (4, (4096, 4096, 1025), bfloat16),
        (4, (4096, 4096, 1024), np.dtype(np.float32)),
    ):
        assert baselines.figure(*name, world, shape, dtype) == ""


# --- libraries ------------------------------------------------------------------------------------


def test_results_over_parts_of_the_keys_make_the_whole():
    random = np.random.default_rng(1)
    q, k, v = (random.standard_normal((2, 9, heads, 4)) for heads in (4, 2, 2))
    attend = baselines.NumpyAttention()
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


class Array(np.ndarray):
    """An array of NumPy whose memory has the address that an array of CuPy would tell."""

    @property
    def data(self):
        return types.SimpleNamespace(ptr=self.ctypes.data)


class FakeNccl:
    """What CuPy has of NCCL, and a communicator of it: it keeps what it is asked for."""

    available = True

    def __init__(self):
        self.calls = []

    def get_unique_id(self):
        return 7

    def NcclCommunicator(self, size, identity, rank):
        assert (size, identity, rank) == (3, 7, 1)
        return self

    def __getattr__(self, name):
        return lambda *arguments: self.calls.append((name, *arguments))


class FakeStream:
    """A stream of CuPy; the current one is that of the innermost context."""

    current = None

    def __init__(self, ptr, calls):
        self.ptr, self.calls = ptr, calls

    def record(self):
        return f"event of {self.ptr}"

    def wait_event(self, event):
        self.calls.append((f"{self.ptr} waits", event))

    def __enter__(self):
        self.before, FakeStream.current = FakeStream.current, self

    def __exit__(self, *_):
        FakeStream.current = self.before


@pytest.fixture
def nccl(monkeypatch):
    """NCCL through a CuPy of ours, on rank 1 of 3, where calls are made on stream 5."""
    nccl = FakeNccl()
    cuda = types.SimpleNamespace(
        get_current_stream=lambda: FakeStream.current,
        Stream=lambda non_blocking: FakeStream(9, nccl.calls),
    )
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(cuda=cuda))
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    monkeypatch.setitem(sys.modules, "cupy.cuda.nccl", nccl)
    comm = types.SimpleNamespace(rank=1, size=3, target="cuda")
    runtime = types.SimpleNamespace(agree=lambda what, make: [nccl.get_unique_id()] * 3)
    monkeypatch.setattr(baselines, "runtime_of", lambda comm: runtime)
    with FakeStream(5, nccl.calls):
        yield comm, nccl.calls


def arrays(*shapes):
    return [np.zeros(shape, np.float32).view(Array) for shape in shapes]


def test_rows_are_gathered_through_cupy(nccl):
    comm, calls = nccl
    (own, whole), byte = arrays((2, 3), (6, 3)), 1
    gather = baselines.gather_for(comm)
    gather(own, whole, (2, 2, 2))
    gather(own, whole, (3, 2, 1))
    source, to = own.data.ptr, whole.data.ptr
    assert calls == [
        ("allGather", source, to, 24, byte, 5),
        ("groupStart",),
        ("broadcast", source, to, 36, byte, 0, 5),
        ("broadcast", source, to + 36, 24, byte, 1, 5),
        ("broadcast", source, to + 60, 12, byte, 2, 5),
        ("groupEnd",),
    ]


def test_sums_are_made_through_cupy(nccl):
    comm, calls = nccl
    (own, out), number, add = arrays((6, 3), (2, 3)), 7, 0
    baselines.reduction_for(comm, True)(own, own, (2, 2, 2))
    scatter = baselines.reduction_for(comm, False)
    scatter(own, out, (2, 2, 2))
    scatter(own, out, (3, 2, 1))
    source, to = own.data.ptr, out.data.ptr
    assert calls == [
        ("allReduce", source, source, 18, number, add, 5),
        ("reduceScatter", source, to, 6, number, add, 5),
        ("groupStart",),
        ("reduce", source, to, 9, number, add, 0, 5),
        ("reduce", source + 36, to, 6, number, add, 1, 5),
        ("reduce", source + 60, to, 3, number, add, 2, 5),
        ("groupEnd",),
    ]


def test_rows_are_exchanged_through_cupy(nccl):
    comm, calls = nccl
    (own, theirs), byte = arrays((3, 2), (2, 2)), 1
    baselines.exchange_for(comm)(own, (1, 0, 2), theirs, (0, 1, 1))
    assert calls == [
        ("groupStart",),
        ("send", own.data.ptr, 8, byte, 0, 5),
        ("recv", theirs.data.ptr, 8, byte, 1, 5),
        ("send", own.data.ptr + 8, 16, byte, 2, 5),
        ("recv", theirs.data.ptr + 8, 8, byte, 2, 5),
        ("groupEnd",),
    ]


def test_keys_go_around_a_ring_on_a_stream_of_their_own(nccl):
    comm, calls = nccl
    (own, theirs), byte = arrays((2, 1, 3), (2, 1, 2)), 1
    ring = baselines.Ring(comm)
    ring.start(own, theirs)
    calls.append("compute")
    ring.wait()
    assert calls == [
        ("9 waits", "event of 5"),
        ("groupStart",),
        ("recv", theirs.data.ptr, 16, byte, 0, 9),
        ("send", own.data.ptr, 24, byte, 2, 9),
        ("groupEnd",),
        "compute",
        ("5 waits", "event of 9"),
    ]


# --- timing ---------------------------------------------------------------------------------------


class FakeClock(timing.HostClock):
    """A device whose calls take what they say, and which at first runs ahead of the host."""

    rounds = 5

    def __init__(self, behind=0):
        self.now, self.behind, self.delays = 0.0, behind, []

    def delay(self, seconds):
        self.delays.append(seconds)

    def mark(self):
        return self.now

    def passed(self, mark):
        self.behind -= 1
        return self.behind >= 0


def interleaved(comm, behind, milliseconds):
    with Communicator(comm) as comm:
        clock = FakeClock(behind if comm.rank == 1 else 0)
        order = []

        def call(name, number):
            order.append((name, number))
            clock.now += 1e-3 * (milliseconds[name] + comm.rank + (10 if number < 2 else 0))

        calls = {name: lambda number, name=name: call(name, number) for name in milliseconds}
        gate = timing.Gate(comm)
        return timing.interleaved_ms(comm, clock, gate, calls), order, clock.delays


def test_calls_are_interleaved_in_turn_with_operands_that_change_and_the_slowest_rank_counts():
    for times, order, delays in mk.LocalWorld(3).run(interleaved, 0, {"a": 1, "b": 2}):
        assert times == pytest.approx({"a": 1 + 2, "b": 2 + 2})  # not the rounds that warm up
        rounds = range(timing._WARM_ROUNDS + FakeClock.rounds)
        assert order == [
            pair
            for n in rounds
            for pair in zip("ab" if n % 2 == 0 else "ba", (n, n + 1), strict=True)
        ]
        assert len(set(delays)) == 1


def test_a_round_in_which_a_host_was_late_is_repeated_on_all_ranks():
    for times, order, delays in mk.LocalWorld(2).run(interleaved, 3, {"a": 1}):
        assert times == pytest.approx({"a": 1 + 1})
        assert len(order) == 3 + timing._WARM_ROUNDS + FakeClock.rounds
        assert [delay / delays[0] for delay in delays[:5]] == [1, 2, 4, 8, 8]


def test_a_host_that_is_always_late_is_an_error():
    with pytest.raises(Error, match="to queue"):
        mk.LocalWorld(1).run(interleaved_always_late)


def interleaved_always_late(comm):
    with Communicator(comm) as comm:
        clock = FakeClock(1000)
        timing.interleaved_ms(comm, clock, timing.Gate(comm), {"a": lambda number: None})


def test_a_call_that_waits_for_the_device_is_found():
    assert timing.is_queued(FakeClock(0), lambda: None)
    assert not timing.is_queued(FakeClock(1), lambda: None)


def test_no_nccl_is_a_configuration_error(monkeypatch):
    missing = types.SimpleNamespace(available=False)

    def load(name):
        if name == "cupy.cuda.nccl":
            return missing
        raise ImportError(f"no {name}")

    monkeypatch.setattr(baselines.importlib, "import_module", load)
    with pytest.raises(ConfigurationError, match=r"no nccl\.core.*pip install nvidia-nccl-cu1"):
        baselines.gather_for(COMM)


class FakeCuda:
    """Streams of PyTorch by their handles; as there, that of the null stream is not wrapped."""

    class ExternalStream:
        def __init__(self, handle, device):
            self.handle = handle or 999

    @staticmethod
    def default_stream(device):
        return types.SimpleNamespace(handle=0)

    @staticmethod
    def stream(stream):
        return stream.handle


@pytest.mark.parametrize("handle", [0, 2, 4096])
def test_pytorch_works_on_the_current_stream_of_cupy(monkeypatch, handle):
    torch = types.SimpleNamespace(cuda=FakeCuda, device=lambda *words: words)
    cuda = types.SimpleNamespace(
        runtime=types.SimpleNamespace(getDevice=lambda: 1),
        get_current_stream=lambda: types.SimpleNamespace(ptr=handle),
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(cuda=cuda))
    assert baselines.Torch().on_current_stream() == handle
