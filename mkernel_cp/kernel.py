"""Kernels of a user's own, written with the same headers as the operators."""

import os
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Kernel:
    """A kernel of a `Module`, for `Communicator.launch`, which compiles it for its target.

    Attributes
    ----------
    source : str
        Path of the file that has it.
    name : str
    defines : tuple of (str, str)
        Preprocessor definitions.
    """

    source: str
    name: str
    defines: tuple[tuple[str, str], ...] = ()


class Module:
    """A source file with kernels.

    Parameters
    ----------
    source : path
        A ``.cu`` file; it finds the package's headers as ``#include <mkernel/...>``.
    defines : mapping of str to str or int, optional
        Preprocessor definitions.

    Examples
    --------
    >>> kernel = mk.Module("heat.cu").kernel("heat")
    >>> comm.launch(kernel, 3, (field, following, halo, arrived, rows, 0.1), operand=field)
    """

    def __init__(
        self, source: str | os.PathLike[str], *, defines: Mapping[str, str | int] | None = None
    ):
        self._source = os.path.abspath(source)
        self._defines = tuple((name, str(value)) for name, value in (defines or {}).items())

    def kernel(self, name: str) -> Kernel:
        """Return the kernel that ``MK_KERNEL(name, ...)`` defines."""
        return Kernel(self._source, name, self._defines)
