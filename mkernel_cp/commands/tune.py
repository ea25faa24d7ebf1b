"""`tune`: measure what plans could choose otherwise, and keep what is fastest."""

import argparse
from pathlib import Path

import numpy as np

from .. import tuning
from ..arguments import Options
from ..bench.tuner import Tuner
from ..communicator import Communicator
from .bench import BENCHES
from .job import together


def tune(comm: Communicator, arguments: argparse.Namespace) -> int:
    """Measure an operator, print what is fastest and keep it in a table."""
    kind = BENCHES[arguments.operator]
    path = Path(arguments.output or tuning.own_path())
    together(comm, "to look at the table", lambda: comm.rank == 0 and tuning.read(path))
    shapes = arguments.shape or (kind.quick_shapes if arguments.quick else kind.shapes)[comm.target]
    with Tuner.opened(comm, kind, np.dtype(arguments.dtype)) as tuner:
        for shape in shapes:
            entry = tuner.tune(*shape)
            together(comm, "to keep it", lambda e=entry: comm.rank == 0 and tuning.keep(path, [e]))
            if comm.rank == 0:
                print(_line(entry), flush=True)
    if comm.rank == 0:
        print(f"kept in {path}")
    return 0


def _line(entry: tuning.Entry) -> str:
    what = f"{entry.operator} {' x '.join(map(str, entry.shape))} {entry.dtype}"
    if entry.options == Options():
        return f"{what}: {entry.ms:.4g} ms with the cost model's choices"
    chosen = {"tile": entry.tile, "movers": entry.movers, "chunk_bytes": entry.chunk_bytes}
    words = ", ".join(f"{name} {value}" for name, value in chosen.items() if value is not None)
    return f"{what}: {entry.ms:.4g} ms with {words}; {entry.model_ms:.4g} ms without"
