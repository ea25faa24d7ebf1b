"""`gemm_reduce_scatter`: add the products of all ranks, and leave each some rows of the sum."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import plan as plans
from ..arguments import Options
from ..communicator import Communicator
from .reductions import ReductionOperator, ReductionSpec


def gemm_reduce_scatter(
    a: np.ndarray,
    b: np.ndarray,
    *,
    comm: Communicator,
    row_counts: Sequence[int] | None = None,
    out: np.ndarray | None = None,
    dtype: Any = None,
    stream: Any = None,
    options: Options | None = None,
) -> np.ndarray:
    """Return this rank's rows of the sum over ranks of a @ b.

    Collective. Each rank multiplies what it has; a tile of the product goes to the rank that owns
    its rows as soon as it is finished, while the next is multiplied. Where multiplying takes longer
    than the links, the owner fetches it. Small sums go there, within one node, with low latency: in
    words that are their own signals, whose owner adds before the next tile is multiplied.

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
    row_counts : sequence of int, optional
        Rows of the sum for every rank, the same sequence on all ranks; they add up to M. Default:
        as `numpy.array_split` divides M, which is `Communicator.row_counts`.
    out : (row_counts[rank], N) array, optional
        Where to put the result, in any strides; must not overlap `a` or `b`.
    dtype : data-type, optional
        Of the result: that of the operands (default), or float32 for 16-bit operands.
    stream : cupy.cuda.Stream, int, or object with ``__cuda_stream__``, optional
        Where the call is queued on the cuda target. Default: the current CuPy stream.
    options : Options, optional
        Choices that the plan would make otherwise.

    Returns
    -------
    (row_counts[rank], N) array
        `out`, or a new array. Sums are in float32 (float64 for float64): a rank's own in the order
        of K, and to those of the owner the next rank's are added, then those of the rank after it,
        around the ring. Between nodes, every node adds so, starting with the rank that stands for
        the owner, and then come the nodes in their order. Equal inputs give equal bits.

    Notes
    -----
    Partial sums are rounded to the dtype of the operands on their way (``Options(transfer_dtype=
    "float32")`` keeps those of 16-bit operands exact). They land in slots of their own, which take
    (R - 1) / R times the size of the largest share of the result times R on every rank; twice that,
    if owners fetch them. What a node has of a row crosses the network once, as one sum, rounded
    once more. For that a rank has slots for what it adds of other nodes' rows, as it is added and
    as it is sent, and for what comes. Small sums take, of whole tiles, twice the product of every
    peer as it travels; the result has the same bits either way.

    As every operator, a call on the cuda target returns at once, and can be captured; see
    `allgather_gemm`.

    Raises
    ------
    TypeError, ValueError
        If this rank's arguments are wrong; its peers raise `PeerError`.
    ArgumentMismatchError
        On all ranks, if they do not agree on M, N, row_counts, dtypes or options.
    TimeoutError, PeerLostError
        On all ranks, if one does not take part. What was not finished of the result is NaN.
    ConcurrentCallError
        If another thread is in a call of the communicator; on all ranks, if graphs that hold fused
        calls were replayed at once.

    Examples
    --------
    >>> with mk.Communicator() as comm:
    ...     own_rows = mk.gemm_reduce_scatter(a[:, comm.rows(k)], b[comm.rows(k)], comm=comm)
    """
    return GemmReduceScatter.call(
        (a, b), comm, out, stream, row_counts=row_counts, dtype=dtype, options=options
    )


class GemmReduceScatter(ReductionOperator):
    """`gemm_reduce_scatter`, planned once for shapes and dtypes, and called often.

    Takes the arguments of the function; making one is collective. A context manager.

    Attributes
    ----------
    plan : GemmReduceScatterPlan

    Examples
    --------
    >>> step = mk.GemmReduceScatter(a, b, comm=comm)
    >>> for _ in range(1000):
    ...     step(a, b, out=own_rows)
    """

    function = "gemm_reduce_scatter"
    params_struct = "GemmReduceScatterParams"
    plan_type = plans.GemmReduceScatterPlan

    class spec_type(ReductionSpec):
        """The rows of one rank."""

        def __init__(self, a, b, runtime, row_counts, dtype, options):
            super().__init__(a, b, runtime, dtype, options, row_counts)
            self.out_shape = (self.row_counts[runtime.rank], self.n)
            self._take_measured(runtime, "gemm_reduce_scatter")

    def __init__(
        self,
        a: np.ndarray,
        b: np.ndarray,
        *,
        comm: Communicator,
        row_counts: Sequence[int] | None = None,
        out: np.ndarray | None = None,
        dtype: Any = None,
        stream: Any = None,
        options: Options | None = None,
    ):
        self._plan((a, b), comm, out, stream, row_counts=row_counts, dtype=dtype, options=options)
