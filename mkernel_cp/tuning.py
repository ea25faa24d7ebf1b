"""Choices of plans that have been measured: they come before those of the cost model.

`python -m mkernel_cp tune` measures them and keeps them in a table beside the cache of compiled
code; what the package ships was measured in the same way. Nothing is measured by itself.
"""

import json
import math
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from . import settings
from .arguments import Options
from .errors import ConfigurationError

SHIPPED = Path(__file__).parent / "tuned.json"


@dataclass(frozen=True)
class Entry:
    """What was fastest for one shape.

    Attributes
    ----------
    operator, card, dtype : str
    ranks : int
    shape : tuple of int
        M, K and N: rows of all ranks, K, and columns of each rank; for sums over ranks K of each
        rank. Of the operators on experts tokens, H, I, E and k, of all ranks; of `moe_combine`
        tokens, N, E and k.
    tile : tuple of int or None
    movers : int or None
    chunk_bytes : int or None
        As in `Options`; None where the choice of the cost model was the fastest.
    ms, model_ms : float
        Device time with these choices, and with those of the cost model.
    """

    operator: str
    card: str
    dtype: str
    ranks: int
    shape: tuple[int, ...]
    tile: tuple[int, int, int] | None
    movers: int | None
    chunk_bytes: int | None
    ms: float
    model_ms: float

    @property
    def options(self) -> Options:
        """The choices, for a call."""
        split = None if self.movers is None else (self.movers, None)
        return Options(split, self.tile, self.chunk_bytes)


# Which extents of a shape all ranks know, where those are not all.
_SHARED = {
    "allgather_gemm": (0, 1),
    "gemm_reduce_scatter": (0, 2),
    "gemm_allreduce": (0, 2),
    "moe_combine": (0, 1, 3),
}


class Table:
    """The entries that concern a communicator.

    Parameters
    ----------
    entries : iterable of Entry
        Of two for the same class of shapes, the later one counts.

    Notes
    -----
    Shapes are of one class if their extents have the same logarithm, rounded to halves of a power
    of two. Choices on which ranks have to agree are looked up by the extents that they share.
    """

    def __init__(self, entries: Iterable[Entry] = ()):
        self._by_shape: dict[Any, Entry] = {}
        self._by_shared: dict[Any, Entry] = {}
        for entry in entries:
            what = entry.operator, entry.dtype
            self._by_shape[what, _class(entry.shape)] = entry
            self._by_shared[what, _class(_shared(entry.operator, entry.shape))] = entry

    def fill(self, options: Options, operator: str, dtype: str, shape: tuple[int, ...]) -> Options:
        """Return options with the measured choices, unless they choose something themselves."""
        if options.split or options.tile or options.sm_budget or options.tf32:
            return options
        what = operator, dtype
        own = agreed = self._by_shared.get((what, _class(_shared(operator, shape))))
        if operator == "allgather_gemm":  # whose tiles and movers are a rank's own affair
            own = self._by_shape.get((what, _class(shape)))
        if own is not None:
            options = replace(options, split=own.options.split, tile=own.tile)
        if agreed is not None and options.chunk_bytes is None:
            options = replace(options, chunk_bytes=agreed.chunk_bytes)
        return options


def _shared(operator: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(shape[i] for i in _SHARED.get(operator, range(len(shape))))


def _class(extents: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(round(2 * math.log2(max(1, extent))) for extent in extents)


def own_path() -> Path:
    """Return where the table of this user's machine lies."""
    return settings.cache_dir() / "tuned.json"


def load(card: str, ranks: int) -> list[Entry]:
    """Return what was measured on a card with so many ranks: shipped entries, then own ones."""
    found = [*read(SHIPPED), *read(own_path())]
    return [entry for entry in found if (entry.card, entry.ranks) == (card, ranks)]


_TUPLES = "shape", "tile"  # of which JSON makes lists


def read(path: Path) -> list[Entry]:
    """Return the entries of a table; none if there is no such file.

    Raises
    ------
    ConfigurationError
        If the file holds something else.
    """
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        return [
            Entry(**{**entry, **{name: entry[name] and tuple(entry[name]) for name in _TUPLES}})
            for entry in entries
        ]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigurationError(
            f"{path} is no table of measured choices ({error}): delete it, or measure again with "
            "python -m mkernel_cp tune"
        ) from None


def keep(path: Path, new: Iterable[Entry]) -> None:
    """Add entries to a table, in place of those for the same shapes."""

    def case(entry: Entry) -> tuple[Any, ...]:
        return tuple(asdict(entry).values())[:5]

    entries = {case(entry): entry for entry in (*read(path), *new)}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    lines = ",\n ".join(json.dumps(asdict(entry)) for entry in entries.values())
    temporary.write_text(f"[{lines}]\n", encoding="utf-8")
    temporary.replace(path)


def card_of(device: str) -> str:
    """Return the model of a communicator's `device`: the name of its GPU, or 'cpu'."""
    return device.partition("(")[2].removesuffix(")") or device
