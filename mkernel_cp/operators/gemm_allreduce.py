"""`gemm_allreduce`: add the products of all ranks, and leave the whole sum to each."""

from typing import Any

import numpy as np

from .. import plan as plans
from .. import structs
from ..arguments import Options
from ..communicator import Communicator
from ..shared_memory import Arena
from .reductions import ReductionOperator, ReductionSpec


def gemm_allreduce(
    a: np.ndarray,
    b: np.ndarray,
    *,
    comm: Communicator,
    out: np.ndarray | None = None,
    dtype: Any = None,
    stream: Any = None,
    options: Options | None = None,
) -> np.ndarray:
    """Return the sum over ranks of a @ b: on every rank the whole of it, and the same bits.

    Collective. Each rank adds some rows, as in `gemm_reduce_scatter`, and sends the sums to all.
    The columns are taken in stripes, so that one is sent while the next is multiplied. Small sums
    go tile by tile, within one node, with low latency: in words that are their own signals.

    Parameters
    ----------
    a : (M, K_r) array
        This rank's columns of A; bfloat16, float16, float32 or float64, in any strides: a NumPy
        array on the host target; on the cuda target a CuPy array, or one that has
        ``__cuda_array_interface__`` or DLPack, on the communicator's GPU. K_r may differ between
        ranks, and be 0.
    b : (K_r, N) array
        Of the same dtype, in any strides: this rank's rows of B.
    comm : Communicator
    out : (M, N) array, optional
        Where to put the result, in any strides; must not overlap `a` or `b`.
    dtype : data-type, optional
        Of the result: that of the operands (default), or float32 for 16-bit operands.
    stream : cupy.cuda.Stream, int, or object with ``__cuda_stream__``, optional
        Where the call is queued on the cuda target. Default: the current CuPy stream.
    options : Options, optional
        Choices that the plan would make otherwise.

    Returns
    -------
    (M, N) array
        `out`, or a new array. Every row is added in float32 (float64 for float64), in the order
        that `gemm_reduce_scatter` has. Equal inputs give equal bits.

    Notes
    -----
    Partial sums travel as in `gemm_reduce_scatter`, and the sums in the dtype of the result, also
    once to every other node, where the rank to which they come sends them to the others. Every
    stripe has slots of its own: together they take about the size of the result once as partial
    sums and once as sums, on every rank. Small sums take, of whole tiles, twice the product of
    every peer as it travels, and twice the result; this has the same bits either way.

    As every operator, a call on the cuda target returns at once, and can be captured; see
    `allgather_gemm`.

    Raises
    ------
    TypeError, ValueError
        If this rank's arguments are wrong; its peers raise `PeerError`.
    ArgumentMismatchError
        On all ranks, if they do not agree on M, N, dtypes or options.
    TimeoutError, PeerLostError
        On all ranks, if one does not take part. What was not finished of the result is NaN.
    ConcurrentCallError
        If another thread is in a call of the communicator; on all ranks, if graphs that hold fused
        calls were replayed at once.

    Examples
    --------
    >>> with mk.Communicator() as comm:
    ...     gram = mk.gemm_allreduce(rows_of_a.T, rows_of_a, comm=comm)
    """
    return GemmAllReduce.call((a, b), comm, out, stream, dtype=dtype, options=options)


class GemmAllReduce(ReductionOperator):
    """`gemm_allreduce`, planned once for shapes and dtypes, and called often.

    Takes the arguments of the function; making one is collective. A context manager.

    Attributes
    ----------
    plan : GemmAllReducePlan

    Examples
    --------
    >>> step = mk.GemmAllReduce(a, b, comm=comm)
    >>> for _ in range(1000):
    ...     step(a, b, out=c)
    """

    function = "gemm_allreduce"
    params_struct = "GemmAllReduceParams"
    plan_type = plans.GemmAllReducePlan
    plan: plans.GemmAllReducePlan

    class spec_type(ReductionSpec):
        """All rows."""

        def __init__(self, a, b, runtime, dtype, options):
            super().__init__(a, b, runtime, dtype, options)
            self.out_shape = (self.a_rows, self.n)
            self._take_measured(runtime, "gemm_allreduce")

    def __init__(
        self,
        a: np.ndarray,
        b: np.ndarray,
        *,
        comm: Communicator,
        out: np.ndarray | None = None,
        dtype: Any = None,
        stream: Any = None,
        options: Options | None = None,
    ):
        self._plan((a, b), comm, out, stream, dtype=dtype, options=options)

    def _with_reduction(self, reduction: Any, arena: Arena) -> Any:
        return structs.shared().GemmAllReducePlan(reduction=reduction, sums=self._zone(arena, 1))
