"""`Module`: kernels of one's own, written with the same headers as the operators."""

import os
from collections.abc import Mapping

from .host_kernel import HostKernel


class Module:
    """A source file with kernels, compiled at first use.

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
        self.source = os.fspath(source)
        self.defines = dict(defines or {})

    def kernel(self, name: str) -> HostKernel:
        """Return the kernel that ``MK_KERNEL(name, ...)`` defines, for `Communicator.launch`.

        Raises
        ------
        CompileError
            If the source does not compile, or has no such kernel.
        ConfigurationError
            If there is no compiler.
        """
        return HostKernel(self.source, name, self.defines)
