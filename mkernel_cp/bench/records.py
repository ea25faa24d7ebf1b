"""Records of the benchmark, one per case: what they hold, as JSON, as a table and as a chart."""

import contextlib
import importlib
import json
import math
import os
import platform
import statistics
import sys
from collections.abc import Mapping, Sequence
from datetime import date, datetime, timezone
from pathlib import Path
from typing import Any

from .. import __version__
from ..arguments import DTYPES
from ..communicator import Communicator
from ..errors import ConfigurationError, Error
from ..tuning import card_of

RESULTS = Path(__file__).parent / "results"
"""Where the package's own results lie, one file per operator."""

KEYS = (
    *("operator", "shape", "dtype", "variant", "world", "nodes", "target", "engine", "card"),
    *("date", "repeats"),
    *("compute_ms", "transfer_ms", "network_ms", "engine_ms", "unfused_ms", "fused_ms", "floor_ms"),
    *("efficiency", "host_us", "rivals", "plan", "versions"),
)
SHAPE_KEYS = {
    **dict.fromkeys(("allgather_gemm", "gemm_reduce_scatter", "gemm_allreduce"), ("M", "K", "N")),
    **dict.fromkeys(("moe_dispatch_gemm", "moe_layer"), ("tokens", "H", "I", "E", "k")),
    "moe_combine": ("tokens", "N", "E", "k"),
    "ring_attention": ("S", "B", "Hq", "Hkv", "D"),
}
"""What records call the extents of a shape."""

VARIANT_KEYS = {
    **dict.fromkeys(SHAPE_KEYS, ()),
    **dict.fromkeys(("moe_dispatch_gemm", "moe_combine", "moe_layer"), ("routing",)),
    "ring_attention": ("causal", "layout"),
}
"""What else is asked for: arguments of the command line, by their names there."""

_HOST_KEYS = ("class", "function")
_ALWAYS_MEASURED = ("compute_ms", "engine_ms", "fused_ms")
_FLOOR = ("compute_ms", "transfer_ms", "network_ms")
_MEASURED = (*_ALWAYS_MEASURED, *_FLOOR[1:], "unfused_ms", "host_us", "rivals")


def make_record(
    comm: Communicator,
    operator: str,
    shape: Mapping[str, int],
    dtype: str,
    variant: Mapping[str, Any],
    repeats: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Return the record of a case that was measured several times: medians.

    Raises
    ------
    Error
        If something that every record has was not measured, as for a wrong result.
    """
    found = {field: _median([one[field] for one in repeats]) for field in _MEASURED}
    for field in _ALWAYS_MEASURED:
        if isinstance(found[field], str):
            case = title(operator, shape, dtype, variant)
            raise Error(f"{case} has no {field}: {found[field]}")
    plan = repeats[0]["plan"]
    floor = max(found[part] for part in _FLOOR)
    fields = {
        **found,
        "operator": operator,
        "shape": dict(shape),
        "dtype": dtype,
        "variant": dict(variant),
        "world": comm.size,
        "nodes": comm.num_nodes,
        "target": comm.target,
        "engine": plan["engine"],
        "card": card_of(comm.device),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "repeats": len(repeats),
        "floor_ms": floor,
        "efficiency": floor / found["fused_ms"],
        "plan": plan,
        "versions": versions(),
    }
    return check_record({key: fields[key] for key in KEYS})


def _median(values: Sequence[Any]) -> Any:
    """Return the median of numbers, key by key where they have keys; words, where there are any."""
    first = values[0]
    if isinstance(first, dict):
        return {key: _median([value[key] for value in values]) for key in first}
    words = [value for value in values if isinstance(value, str)]
    return words[0] if words else statistics.median(values)


def versions() -> dict[str, str]:
    """Return the versions of what has taken part in this process."""
    found = {"mkernel_cp": __version__, "python": platform.python_version()}
    for name in ("numpy", "mpi4py", "cupy", "torch", "nvmath"):
        if name in sys.modules:
            found[name] = str(sys.modules[name].__version__)
    if "cupy" in sys.modules:
        cuda = sys.modules["cupy"].cuda
        found["CUDA runtime"] = str(cuda.runtime.runtimeGetVersion())
        found["CUDA driver"] = str(cuda.runtime.driverGetVersion())
        with contextlib.suppress(ImportError, AttributeError):
            found["NCCL"] = str(cuda.nccl.get_version())
    return found


def check_record(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record that is as it should be.

    Raises
    ------
    ValueError
        If it lacks a key or has another one, or a value makes no sense; the text names it.
    """
    if tuple(record) != KEYS:
        raise ValueError(f"record has the keys {list(record)}, expected {list(KEYS)}")
    operator = record["operator"]
    checks = {
        "operator": lambda value: value in SHAPE_KEYS,
        "shape": lambda value: (
            tuple(value) == SHAPE_KEYS[operator] and all(_is_count(n) for n in value.values())
        ),
        "dtype": lambda value: value in [dtype.name for dtype in DTYPES],
        "variant": lambda value: (
            tuple(value) == VARIANT_KEYS[operator]
            and all(_is_text(one) or isinstance(one, bool) for one in value.values())
        ),
        "world": _is_count,
        "nodes": _is_count,
        "target": lambda value: value in ("cuda", "host"),
        "engine": _is_text,
        "card": _is_text,
        "date": _is_date,
        "repeats": lambda value: value is None or _is_count(value),  # of old ones it is not known
        "compute_ms": _is_time,
        "transfer_ms": lambda value: _is_time(value) or value == 0.0,
        "network_ms": lambda value: _is_time(value) or value == 0.0,
        "engine_ms": _is_time,
        "unfused_ms": lambda value: _is_time(value) or _is_text(value),
        "fused_ms": _is_time,
        "floor_ms": lambda value: value == max(record[part] for part in _FLOOR),
        "efficiency": lambda value: math.isclose(value, record["floor_ms"] / record["fused_ms"]),
        "host_us": lambda value: (
            tuple(value) == _HOST_KEYS and all(_is_time(us) for us in value.values())
        ),
        "rivals": lambda value: all(_is_time(one) or _is_text(one) for one in value.values()),
        "plan": lambda value: value["engine"] == record["engine"],
        "versions": lambda value: (
            "mkernel_cp" in value and all(_is_text(version) for version in value.values())
        ),
    }
    for key, is_right in checks.items():
        if not is_right(record[key]):
            raise ValueError(f"record of {operator}: {key} is {record[key]!r}")
    return record


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and value >= 1


def _is_time(value: Any) -> bool:
    return isinstance(value, float) and 0 < value < math.inf


def _is_date(value: Any) -> bool:
    try:
        return date.fromisoformat(value).isoformat() == value
    except (TypeError, ValueError):
        return False


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


# --- JSON -----------------------------------------------------------------------------------------


def write(path: str | Path, records: Sequence[dict[str, Any]]) -> None:
    """Write records as a JSON list, each in place of one of the same work that the file held."""
    fresh = {_work_of(record): record for record in records}
    kept = [fresh.pop(_work_of(record), record) for record in held(path)]
    temporary = f"{path}.tmp"
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump([*kept, *fresh.values()], file, indent=1, allow_nan=False)
        file.write("\n")
    os.replace(temporary, path)


def _work_of(record: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what was measured, and where."""
    keys = ("operator", "shape", "dtype", "variant", "world", "nodes", "target", "card")
    return tuple(json.dumps(record[key]) for key in keys)


def held(path: str | Path) -> list[dict[str, Any]]:
    """Return the records of a file, checked; none, if it is empty or not there."""
    exists = os.path.exists(path) and os.path.getsize(path) > 0
    return read(path) if exists else []


def read(path: str | Path) -> list[dict[str, Any]]:
    """Return the records of a file, checked."""
    return [check_record(record) for record in json.loads(Path(path).read_text(encoding="utf-8"))]


# --- a table --------------------------------------------------------------------------------------

_COLUMNS = ("compute", "transfer", "network", "floor", "engine", "unfused", "fused")


class Table:
    """Lines whose columns are in line; times are in ms, but the host's in microseconds.

    Parameters
    ----------
    titles : sequence of str
        Of all records that will come.
    rivals : sequence of str

    Attributes
    ----------
    headings : str
        The first line.
    """

    def __init__(self, titles: Sequence[str], rivals: Sequence[str]):
        first, *others = "operator, shape, dtype", *_COLUMNS, "efficiency", "host us", *rivals
        self._widths = [max(map(len, (first, *titles))), *(max(10, len(x)) for x in others)]
        self.headings = self._line(first, others)

    def line(self, record: Mapping[str, Any]) -> str:
        """Return the line of a record; a dash stands for words, and for what it leaves out."""
        host = record["host_us"]
        cells = [
            *(_cell(record[f"{name}_ms"], ".4g") for name in _COLUMNS),
            _cell(record["efficiency"], ".3f"),
            _cell(host and host["class"], ".1f"),
            *(_cell(found, ".4g") for found in record["rivals"].values()),
        ]
        return self._line(title(*(record[key] for key in KEYS[:4])), cells)

    def _line(self, first: str, others: Sequence[str]) -> str:
        width, *widths = self._widths
        cells = (f"{cell:>{width}}" for cell, width in zip(others, widths, strict=True))
        return "  ".join((f"{first:<{width}}", *cells))


def title(operator: str, shape: Mapping[str, int], dtype: str, variant: Mapping[str, Any]) -> str:
    """Return what a case is called."""
    words = [name if value is True else value for name, value in variant.items() if value]
    return " ".join((operator, _extents(shape), dtype, *words))


def notes(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what the dashes of a table stand for."""
    words = {
        f"{name}: {found}": None
        for record in records
        for name, found in (("unfused", record["unfused_ms"]), *record["rivals"].items())
        if isinstance(found, str)
    }
    return list(words)


def _extents(shape: Mapping[str, int]) -> str:
    return " x ".join(map(str, shape.values()))


def _cell(value: float | str | None, form: str) -> str:
    return format(value, form) if isinstance(value, float) else "-"


# --- a chart --------------------------------------------------------------------------------------


def check_chart(path: str) -> None:
    """Raise unless a chart can be drawn into such a file.

    Raises
    ------
    ConfigurationError
        If matplotlib is missing.
    ValueError
        If it does not know the type of the file.
    """
    types = _figure().canvas.get_supported_filetypes()
    if Path(path).suffix.removeprefix(".") not in types:
        raise ValueError(f"--plot {path}: use a name that ends in one of {', '.join(types)}")


def draw(path: str, records: Sequence[Mapping[str, Any]]) -> None:
    """Draw how near everything comes to the floor, a group of bars for each case."""
    ways = {
        "fused": [record["fused_ms"] for record in records],
        "unfused": [record["unfused_ms"] for record in records],
        **{name: [record["rivals"][name] for record in records] for name in records[0]["rivals"]},
    }
    ways = {
        name: times for name, times in ways.items() if not all(isinstance(ms, str) for ms in times)
    }
    figure = _figure()
    figure.set_size_inches(2 + 1.2 * len(records), 4.5)
    axes = figure.add_subplot()
    width = 0.8 / len(ways)
    for position, (name, times) in enumerate(ways.items()):
        heights = [
            0 if isinstance(ms, str) else record["floor_ms"] / ms
            for record, ms in zip(records, times, strict=True)
        ]
        places = [group + position * width for group in range(len(records))]
        axes.bar(places, heights, width, label=name)
    axes.set_xticks(
        [group + 0.4 - width / 2 for group in range(len(records))],
        [f"{_extents(record['shape'])}\n{record['dtype']}" for record in records],
        rotation=30,
        ha="right",
        fontsize="small",
    )
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_ylabel("floor / time")
    first = records[0]
    axes.set_title(f"{first['operator']}, {first['world']} x {first['card']}")
    axes.legend(fontsize="small")
    figure.savefig(path, bbox_inches="tight", dpi=150)


def _figure() -> Any:
    try:
        return importlib.import_module("matplotlib.figure").Figure()
    except ImportError as error:
        raise ConfigurationError(
            f"--plot needs matplotlib ({error}): install mkernel_cp with its extra plot"
        ) from None
