"""Kernels of a user's own, written with the same headers as the operators."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from . import compiler, settings


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
    options : tuple of str
        More options of the compiler.
    target : str
        What it can be launched on: 'host', 'cuda', or 'auto', which is either.
    arch : str or None
        The GPUs that it is compiled for; None for the one that it is launched on.
    """

    source: str
    name: str
    defines: tuple[tuple[str, str], ...] = ()
    options: tuple[str, ...] = ()
    target: str = "auto"
    arch: str | None = None


class Module:
    """A source file with kernels.

    Parameters
    ----------
    source : path
        A ``.cu`` file; it finds the package's headers as ``#include <mkernel/...>``.
    target : {'auto', 'host', 'cuda'}, optional
        What its kernels are for. 'auto': for whatever launches them.
    arch : str, optional
        What NVRTC compiles for, as ``'sm_80'``. Default: the GPU that launches.
    options : sequence of str, optional
        More options of the compiler: NVRTC, or on the host target the C++ compiler.
    defines : mapping of str to str or int, optional
        Preprocessor definitions. ``MK_THREADS`` sets the threads of an agent on a GPU.

    Raises
    ------
    ValueError, TypeError
        If an argument is none of those.

    Notes
    -----
    A kernel is compiled by its first launch, and kept in the cache. Any other tool can compile a
    source too: `include_dir` is the only folder that it has to know, and C++17 the language.

    Examples
    --------
    >>> kernel = mk.Module("heat.cu").kernel("heat")
    >>> arguments = field, following, halo, arrived, rows, columns, rows_above, 0.1
    >>> comm.launch(kernel, 3, arguments, operand=field)
    """

    def __init__(
        self,
        source: str | os.PathLike[str],
        *,
        target: str = "auto",
        arch: str | None = None,
        options: Sequence[str] = (),
        defines: Mapping[str, str | int] | None = None,
    ):
        if target not in settings.TARGETS:
            allowed = ", ".join(settings.TARGETS)
            raise ValueError(f"target {target!r}: not allowed; use one of {allowed}")
        if arch is not None:
            compiler.check_arch(arch)
        if isinstance(options, str) or not all(isinstance(option, str) for option in options):
            raise TypeError(f"options={options!r}: use a sequence of strings")
        self._source = os.path.abspath(source)
        self._defines = tuple(compiler.macros(defines).items())
        self._options, self._target, self._arch = tuple(options), target, arch

    def __repr__(self) -> str:
        return (
            f"Module({self._source!r}, target={self._target!r}, arch={self._arch!r}, "
            f"options={self._options}, defines={dict(self._defines)})"
        )

    def kernel(self, name: str) -> Kernel:
        """Return the kernel that ``MK_KERNEL(name, ...)`` defines."""
        return Kernel(self._source, name, self._defines, self._options, self._target, self._arch)
