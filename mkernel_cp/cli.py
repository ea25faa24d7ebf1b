"""The command line: ``python -m mkernel_cp`` and ``mkernel-cp``."""

import argparse
import contextlib
import functools
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from . import __version__
from .arguments import DTYPES
from .attention_plan import LAYOUTS
from .bench.records import RESULTS, SHAPE_KEYS
from .bench.routes import ROUTINGS
from .commands import bench, compile, demo, doctor, job, run, spelled, tune
from .moe_plan import ACTIVATIONS

# What `bench` measures, and `tune` if it has choices.
_MEASURED = {
    "allgather-gemm": "C = A @ B",
    "gemm-reduce-scatter": "each rank's rows of the sum over ranks of A @ B",
    "gemm-allreduce": "the sum over ranks of A @ B",
    "ring-attention": "attention of queries over keys and values",
    "moe-dispatch-gemm": "tokens times the weights of the experts that they chose",
    "moe-combine": "the weighted sums of what experts have made of tokens",
    "moe-layer": "what a layer of experts, with swiglu, makes of tokens",
}
# A library that does the same alone, where that is not cuBLAS.
_ALONE = dict.fromkeys(("ring-attention", "moe-combine"), "PyTorch")
_CHOICES_OF_PLANS = {"tile": "tiles", "movers": "movers", "chunk_bytes": "chunks"}
_OF_OPERATORS = "run", "bench", "tune"

# Files of `run`.
_TOKENS = "tokens (T, H)"
_CHOICES = "ids (T, k) of the experts of each token; -1: none"
_WEIGHTS = "weights (T, k) of the choices, float32, or float64 for float64"

_SHAPES = {
    ("M", "K", "N"): "M rows of all ranks, K, N columns of each rank (of a sum: K of each rank, "
    "all N columns)",
    ("tokens", "H", "I", "E", "k"): "tokens of all ranks, H columns of a token, I columns that an "
    "expert makes of them (moe-layer: between its two products), E experts of all ranks, k experts "
    "that a token chooses",
    ("tokens", "N", "E", "k"): "tokens of all ranks, N columns of what is made of them, E experts "
    "of all ranks, k experts that a token chooses",
    ("S", "B", "Hq", "Hkv", "D"): "S positions of all ranks, B batch entries, Hq heads of queries, "
    "Hkv heads of keys and values, D columns of a head",
}

_DESCRIPTION = """\
Fused kernels for programs that run under mpirun. `demo`, `run`, `bench` and `tune` are started as
every MPI program: mpirun -n 4 mkernel-cp demo. `doctor` names the launcher that fits, and what is
missing."""


class _Parser(argparse.ArgumentParser):
    """A parser that takes no part of a name for it, nor do those of commands."""

    def __init__(self, **keywords: Any):
        super().__init__(**keywords, allow_abbrev=False)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code: 0, 1 if it failed, 2 for a wrong command line."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] and argv[0] in _OF_OPERATORS:
        argv[1:2] = map(spelled, argv[1:2])  # underscores will do
    with contextlib.ExitStack() as stack:
        if not job.speaks():
            # All ranks get the same words: one of them answers.
            nowhere = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(contextlib.redirect_stdout(nowhere))
            stack.enter_context(contextlib.redirect_stderr(nowhere))
        arguments = _parser().parse_args(argv)
    if arguments.command == "doctor":
        return doctor.doctor()
    if arguments.command == "compile":
        return compile.compile_kernels(arguments)
    return job.on_ranks(
        functools.partial(arguments.program, arguments=arguments),
        oversubscribe=arguments.command == "demo",
    )


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="mkernel-cp", description=_DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"mkernel_cp {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    command = commands.add_parser("demo", help="run every operator and compare with the reference")
    command.add_argument(
        "--ranks", type=int, metavar="N", help="fail unless the world has so many ranks"
    )
    command.add_argument("--json", action="store_true", help="print JSON in place of the table")
    command.set_defaults(program=demo.demo)

    command = commands.add_parser("run", help="run one operator on files")
    operators = command.add_subparsers(dest="operator", required=True, metavar="OPERATOR")
    for program, how in (
        (
            run.allgather_gemm,
            "Each rank reads some rows of A and some columns of B, and writes those columns of C.",
        ),
        (
            run.gemm_reduce_scatter,
            "Each rank reads some columns of A and those rows of B, and writes some rows of C.",
        ),
        (
            run.gemm_allreduce,
            "Each rank reads some columns of A and those rows of B, gets all of C, and writes some "
            "rows of it.",
        ),
    ):
        files = {"a": "matrix (M, K)", "b": "matrix (K, N) of the same dtype"}
        operator = _add_run(operators, program, "C = A @ B", how, files, "C.npy")
        _add_out_dtype(operator, "C: that of A (default), or float32 where A has 16 bits")

    operator = _add_run(
        operators,
        run.ring_attention,
        _MEASURED["ring-attention"],
        "Each rank reads some positions, and writes those of the result.",
        {
            "q": "queries (B, S, Hq, D)",
            "k": "keys (B, S, Hkv, D)",
            "v": "values (B, S, Hkv, D)",
        },
        "O.npy",
    )
    operator.add_argument(
        "--lse", metavar="LSE.npy", help="where to put the log-sum-exp (B, Hq, S)"
    )
    _add_mask(operator)
    operator.add_argument("--scale", type=run.finite, help="of the scores (default: 1 / sqrt(D))")
    operator.add_argument(
        "--seq-counts",
        type=run.counts,
        metavar="S0,S1,...",
        help="positions of each rank (default: as equal as can be)",
    )

    split = "Each rank reads some of the tokens and some of the experts."
    operator = _add_run(
        operators,
        run.moe_dispatch_gemm,
        _MEASURED["moe-dispatch-gemm"],
        split,
        {"x": _TOKENS, "topk_idx": _CHOICES, "w": "weights (E, H, I) of all experts"},
        "Y.npy",
    )
    _add_out_dtype(
        operator, "the rows: that of the tokens (default), or float32 where they have 16 bits"
    )
    _add_run(
        operators,
        run.moe_combine,
        _MEASURED["moe-combine"],
        split,
        {
            "rows": "rows (R, N), one for each choice, in the order that moe-dispatch-gemm writes",
            "topk_idx": _CHOICES,
            "topk_weight": _WEIGHTS,
        },
        "Y.npy",
    )
    _add_run(
        operators,
        run.moe_layer,
        "what a layer of experts makes of tokens",
        split,
        {
            "x": _TOKENS,
            "topk_idx": _CHOICES,
            "topk_weight": _WEIGHTS,
            "w1": "first weights (E, H, I) of all experts; for swiglu (E, H, 2 I)",
            "w2": "second weights (E, I, N)",
        },
        "Y.npy",
    ).add_argument(
        "--activation",
        choices=[name or "none" for name in ACTIVATIONS],
        default="swiglu",
        help="between the two products (default: swiglu)",
    )

    command = commands.add_parser("bench", help="measure an operator beside its alternatives")
    operators = command.add_subparsers(dest="operator", required=True, metavar="OPERATOR")
    for name, what in _MEASURED.items():
        alone = _ALONE.get(name, "cuBLAS")
        rivals = [rival.name for rival in bench.BENCHES[name].rivals()]
        ways = f"{alone} alone", f"{alone} and NCCL one after the other", *rivals
        operator = operators.add_parser(
            name,
            help=f"beside {_listed((alone, 'NCCL', *rivals))}",
            description=f"Measure {what} beside {', '.join(ways)}, as far as they are installed. "
            "efficiency = floor / fused, and floor is the longest of compute, transfer and "
            "network; the README explains the columns.",
        )
        _add_measured(operator, name)
        if name.startswith("moe"):
            operator.add_argument(
                "--routing",
                choices=ROUTINGS,
                default=ROUTINGS[0],
                help="whether some experts are more popular than others (default: uniform)",
            )
        elif name == "ring-attention":
            _add_mask(operator)
        operator.add_argument(
            "--repeat",
            type=bench.repeats,
            default=3,
            metavar="R",
            help="median of so many, each with new operands (default: 3)",
        )
        operator.add_argument(
            "--json",
            nargs="?",
            const=str(RESULTS / f"{bench.BENCHES[name].operator}.json"),
            metavar="PATH",
            help="write the records, in place of those of the same work that the file holds; "
            "without PATH among those of the package",
        )
        operator.add_argument("--plot", metavar="PATH", help="draw a chart; needs matplotlib")
        operator.set_defaults(program=bench.bench)

    command = commands.add_parser("tune", help="measure a plan's choices, and keep the fastest")
    operators = command.add_subparsers(dest="operator", required=True, metavar="OPERATOR")
    for name, what in _MEASURED.items():
        choices = [_CHOICES_OF_PLANS[choice] for choice in bench.BENCHES[name].choices]
        if not choices:
            continue
        operator = operators.add_parser(
            name,
            help=f"its {_listed(choices)}",
            description=f"Measure plans of {what} that differ in {_listed(choices, 'or')}. What is "
            "faster than the cost model's choices is kept for later calls on such GPUs with as "
            "many ranks.",
        )
        _add_measured(operator, name)
        operator.add_argument(
            "--output",
            metavar="PATH",
            help="the table (default: beside the cache of compiled code)",
        )
        operator.set_defaults(program=tune.tune)

    command = commands.add_parser(
        "compile", help="compile the kernels for a GPU ahead of a job; needs no GPU"
    )
    command.add_argument(
        "--arch", default="sm_90a", help="compute capability of the GPU (default: sm_90a)"
    )
    command.add_argument(
        "--operator",
        type=spelled,
        choices=[spelled(operator) for operator in compile.OPERATORS],
        metavar="OPERATOR",
        help="only of this one: %(choices)s",
    )

    commands.add_parser("doctor", help="tell what this machine has and lacks, and what mends it")
    return parser


def _listed(words: Sequence[str], last: str = "and") -> str:
    """Return two words or more, as in "a, b and c"."""
    return f"{', '.join(words[:-1])} {last} {words[-1]}"


def _add_measured(operator: Any, name: str) -> None:
    """Add what says which shapes are measured."""
    keys = SHAPE_KEYS[bench.BENCHES[name].operator]
    operator.add_argument(
        "--shape",
        type=bench.shape_of(keys, _SHAPES[keys]),
        action="append",
        metavar=",".join(keys),
        help=f"{_SHAPES[keys]}; may be given several times",
    )
    operator.add_argument("--dtype", choices=[dtype.name for dtype in DTYPES], default="bfloat16")
    operator.add_argument("--quick", action="store_true", help="only a few shapes")


def _add_mask(operator: Any) -> None:
    """Add what says which keys a query sees, and which positions are whose."""
    operator.add_argument(
        "--causal", action="store_true", help="a position sees only itself and those before it"
    )
    operator.add_argument(
        "--layout",
        choices=LAYOUTS,
        default=LAYOUTS[0],
        help="which positions a rank works on (default: %(default)s); zigzag gives all ranks the "
        "same work with --causal",
    )


def _add_run(
    operators: Any,
    program: Callable[..., int],
    what: str,
    how: str,
    files: dict[str, str],
    output: str,
) -> Any:
    """Add an operator to `run`, which takes some files and makes one."""
    operator = operators.add_parser(
        spelled(program.__name__),
        help=f"{what}, of .npy files",
        description=f"{what[0].upper()}{what[1:]}. {how} A 2-byte void file is bfloat16.",
    )
    for name, words in files.items():
        operator.add_argument(name, metavar=f"{name.upper()}.npy", help=words)
    operator.add_argument("-o", "--output", required=True, metavar=output, help="where to put it")
    operator.set_defaults(program=program)
    return operator


def _add_out_dtype(operator: Any, whose: str) -> None:
    """Add the choice of the output's dtype."""
    operator.add_argument("--dtype", choices=[dtype.name for dtype in DTYPES], help=f"of {whose}")


if __name__ == "__main__":
    sys.exit(main())
