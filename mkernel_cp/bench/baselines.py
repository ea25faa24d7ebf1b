"""The same work by other means: libraries that a user would otherwise call."""

import contextlib
import ctypes
import importlib
import math
import os
import socket
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from .. import reference
from ..communicator import Communicator, runtime_of
from ..errors import ConfigurationError, Error
from ..targets import cuda
from .data import Operands
from .timing import Call

# Libraries may use NVLink multicast, which this package does not: compared is what does without.
_NO_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}


@dataclass(frozen=True, eq=False, kw_only=True)
class GemmOperands(Operands):
    """One set of what an operator takes that multiplies two matrices, A and B.

    Attributes
    ----------
    row_counts : tuple of int
        Rows of A, or of the sum, on every rank.
    """

    row_counts: tuple[int, ...]


def without_multicast() -> None:
    """Tell libraries that are not loaded yet to do without NVLink multicast."""
    os.environ.update(_NO_MULTICAST)


def attempt(comm: Communicator, work: Callable[[], Any]) -> Any:
    """Return `work()`, or if it failed on any rank, why it did on the first of them. Collective."""
    result, problem = None, None
    try:
        result = work()
    except Exception as error:
        name = "" if isinstance(error, Error) else f"{type(error).__name__}: "
        problem = name + str(error).strip().partition("\n")[0]
    problems = runtime_of(comm).agree("whether that worked", lambda: problem)
    return next(filter(None, problems), result)


def available(found: Any) -> Any:
    """Return what `attempt` has; Error where that is why it failed."""
    if isinstance(found, str):
        raise Error(found)
    return found


# --- one GPU --------------------------------------------------------------------------------------

Gemm = Callable[[Any, Any, Any], Any]
"""Writes the product of two C-contiguous matrices into a third, and returns that."""


def gemm_for(comm: Communicator) -> Gemm:
    """Return the GEMM of cuBLAS, or of NumPy on the host target."""
    return _numpy_gemm if comm.target == "host" else CublasGemm()


def _numpy_gemm(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> np.ndarray:
    if a.dtype.itemsize == 2:  # NumPy would add in 16 bits
        a, b = a.astype(np.float32), b.astype(np.float32)
    out[...] = a @ b
    return out


class CublasGemm:
    """cublasGemmEx with sums in float32, or float64 for float64."""

    def __init__(self) -> None:
        cupy = importlib.import_module("cupy")
        self._cublas, runtime = cupy.cuda.cublas, cupy.cuda.runtime
        self._handle = cupy.cuda.device.get_cublas_handle()
        no_reduced_precision_sums = 16
        self._cublas.setMathMode(self._handle, no_reduced_precision_sums)
        self._types = {
            np.dtype(ml_dtypes.bfloat16): runtime.CUDA_R_16BF,
            np.dtype(np.float16): runtime.CUDA_R_16F,
            np.dtype(np.float32): runtime.CUDA_R_32F,
            np.dtype(np.float64): runtime.CUDA_R_64F,
        }

    def __call__(self, a: Any, b: Any, out: Any) -> Any:
        cublas, (m, k), n, kind = self._cublas, a.shape, b.shape[1], self._types[a.dtype]
        double = a.dtype == np.float64
        scalar = ctypes.c_double if double else ctypes.c_float
        one, zero = scalar(1), scalar(0)
        # To cuBLAS, which has columns where we have rows, these are the transposes.
        cublas.gemmEx(
            *(self._handle, cublas.CUBLAS_OP_N, cublas.CUBLAS_OP_N, n, m, k),
            *(ctypes.addressof(one), b.data.ptr, kind, n, a.data.ptr, kind, k),
            *(ctypes.addressof(zero), out.data.ptr, kind, n),
            cublas.CUBLAS_COMPUTE_64F if double else cublas.CUBLAS_COMPUTE_32F,
            cublas.CUBLAS_GEMM_DEFAULT,
        )
        return out


class Torch:
    """PyTorch on the arrays and streams of CuPy.

    Attributes
    ----------
    module : module
    device : torch.device
    """

    def __init__(self) -> None:
        self.module = importlib.import_module("torch")
        self._cuda = importlib.import_module("cupy").cuda
        self.device = self.module.device("cuda", self._cuda.runtime.getDevice())

    def on_current_stream(self) -> Any:
        """Return a context in which work is queued on CuPy's current stream."""
        cuda, current = self.module.cuda, self._cuda.get_current_stream().ptr
        if current:
            return cuda.stream(cuda.ExternalStream(current, device=self.device))
        return cuda.stream(cuda.default_stream(self.device))  # ExternalStream(0) is some other one

    def tensor(self, array: Any) -> Any:
        """Return a tensor in the place of an array."""
        bits = self.module.as_tensor(array.view(f"i{array.itemsize}"), device=self.device)
        return bits.view(getattr(self.module, array.dtype.name))


class NumpyExperts:
    """What lies between the products of a layer of experts; it also says what such a library does.

    16-bit elements are multiplied and added in float32.
    """

    def gate(self, both: Any, hidden: Any) -> None:
        """Write silu(gate) * up, which lie side by side."""
        gate, up = (x.astype(np.float32) for x in np.split(both, 2, axis=1))
        hidden[...] = gate / (1 + np.exp(-gate)) * up

    def add(self, rows: Any, weights: Any, out: Any) -> None:
        """Write the weighted sums of the rows of each token, which follow each other."""
        wide = rows.reshape(*weights.shape, out.shape[1]).astype(weights.dtype)
        out[...] = (wide * weights[..., None]).sum(axis=1)


class TorchExperts:
    """PyTorch, which also multiplies in groups."""

    def __init__(self) -> None:
        self._torch = Torch()

    def grouped(self, a: Any, b: Any, offsets: np.ndarray) -> Callable[[], Any]:
        """Return what multiplies groups of rows; its result is an array of integers."""
        torch, a, b = self._torch.module, self._torch.tensor(a), self._torch.tensor(b)
        ends = torch.as_tensor(offsets[1:].astype(np.int32), device=self._torch.device)

        def call() -> Any:
            with self._torch.on_current_stream():
                return torch._grouped_mm(a, b, offs=ends).view(torch.int16)

        return call

    def gate(self, both: Any, hidden: Any) -> None:
        torch, to = self._torch.module, self._torch.tensor(hidden)
        gate, up = self._torch.tensor(both).chunk(2, 1)
        with self._torch.on_current_stream():
            torch.mul(torch.nn.functional.silu(gate), up, out=to)

    def add(self, rows: Any, weights: Any, out: Any) -> None:
        torch, to = self._torch.module, self._torch.tensor(out)
        with self._torch.on_current_stream():
            factors = torch.as_tensor(weights, device=self._torch.device)
            groups = self._torch.tensor(rows).view(*factors.shape, to.shape[1])
            torch.bmm(factors.to(groups.dtype)[:, None], groups, out=to[:, None])


class NumpyAttention:
    """Attention of NumPy; it also says what the members of such a library are."""

    numpy: Any = np

    def queued(self) -> contextlib.AbstractContextManager:
        """Return a context in which all its work is done in the order of the caller's."""
        return contextlib.nullcontext()

    def __call__(self, q: Any, k: Any, v: Any, causal: bool) -> tuple[Any, Any]:
        """Return (B, Hq, Sq, D) and the log-sum-exp; if causal, the last query sees all keys."""
        wide = reference.accumulator_dtype(q.dtype)
        group = q.shape[2] // k.shape[2]
        q, k, v = (x.astype(wide).transpose(0, 2, 1, 3) for x in (q, k, v))
        k, v = (x.repeat(group, axis=1) for x in (k, v))
        scores = q @ k.swapaxes(-1, -2) / wide.type(math.sqrt(q.shape[-1]))
        if causal:
            rows, columns = scores.shape[-2:]
            scores[..., ~np.tri(rows, columns, columns - rows, dtype=bool)] = -np.inf
        lse = np.logaddexp.reduce(scores, axis=-1)
        return np.exp(scores - lse[..., None]) @ v, lse

    def store(self, result: Any, to: Any) -> None:
        """Write a result into an array (B, Sq, Hq, D)."""
        to[...] = result.transpose(0, 2, 1, 3)


class TorchAttention:
    """Attention of PyTorch: cuDNN's, and for causal masks FlashAttention's."""

    def __init__(self) -> None:
        self._torch = Torch()
        self.numpy, self.queued = self._torch.module, self._torch.on_current_stream

    def __call__(self, q: Any, k: Any, v: Any, causal: bool) -> tuple[Any, Any]:
        group = q.shape[2] // k.shape[2]
        q, k, v = (self._torch.tensor(x).transpose(1, 2) for x in (q, k, v))
        if group > 1:
            k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        aten = self._torch.module.ops.aten
        if causal:
            found = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)
        else:
            found = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True)
        out, lse = found[:2]
        return out, lse.reshape(out.shape[:-1])

    def store(self, result: Any, to: Any) -> None:
        self._torch.tensor(to).copy_(result.transpose(1, 2))


# --- one after the other --------------------------------------------------------------------------


@dataclass(frozen=True)
class Nccl:
    """NCCL, as nccl4py has it, on CuPy's arrays.

    Attributes
    ----------
    comm
        Its methods queue; they take arrays, ranks and ``stream=``, a handle.
    group : callable
        Returns a context whose calls are one.
    sum
        The addition.
    """

    comm: Any
    group: Callable[[], contextlib.AbstractContextManager]
    sum: Any


def nccl_for(comm: Communicator) -> Nccl:
    """Return NCCL through CuPy, or through nccl4py for a CuPy that was built without. Collective.

    Raises
    ------
    ConfigurationError
        If neither gives it.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CuPy tells that NCCL is missing, as is done below
        through_cupy = importlib.import_module("cupy.cuda.nccl")
    if through_cupy.available:
        identity = _of_first_rank(comm, through_cupy.get_unique_id)
        made = CupyNccl(through_cupy, comm.size, identity, comm.rank)
        return Nccl(made, made.group, _NCCL_SUM)
    try:
        core = importlib.import_module("nccl.core")
    except ImportError as error:
        raise ConfigurationError(
            f"no NCCL ({error}): pip install nvidia-nccl-cu{cuda.driver_series()}"
        ) from None
    identity = _of_first_rank(comm, core.get_unique_id)
    return Nccl(core.Communicator.init(comm.size, comm.rank, identity), core.group, core.SUM)


def _of_first_rank(comm: Communicator, make: Callable[[], Any]) -> Any:
    return runtime_of(comm).agree("to start NCCL", lambda: make() if comm.rank == 0 else None)[0]


# What nccl.h calls a type, and the addition.
_NCCL_TYPES = {"uint8": 1, "float16": 6, "float32": 7, "float64": 8, "bfloat16": 9}
_NCCL_SUM = 0


class CupyNccl:
    """A communicator of NCCL through CuPy, with the methods of nccl4py's."""

    def __init__(self, module: Any, size: int, identity: Any, rank: int):
        self._nccl, self._comm = module, module.NcclCommunicator(size, identity, rank)

    @contextlib.contextmanager
    def group(self) -> Any:
        """Give a context whose calls are one."""
        self._nccl.groupStart()
        yield
        self._nccl.groupEnd()

    def allgather(self, own: Any, whole: Any, *, stream: int) -> None:
        self._comm.allGather(own.data.ptr, whole.data.ptr, own.size, _type(own), stream)

    def broadcast(self, own: Any, to: Any, root: int, *, stream: int) -> None:
        self._comm.broadcast(own.data.ptr, to.data.ptr, to.size, _type(to), root, stream)

    def allreduce(self, own: Any, out: Any, how: int, *, stream: int) -> None:
        self._comm.allReduce(own.data.ptr, out.data.ptr, own.size, _type(own), how, stream)

    def reduce_scatter(self, own: Any, out: Any, how: int, *, stream: int) -> None:
        self._comm.reduceScatter(own.data.ptr, out.data.ptr, out.size, _type(own), how, stream)

    def reduce(self, own: Any, out: Any, how: int, root: int, *, stream: int) -> None:
        self._comm.reduce(own.data.ptr, out.data.ptr, own.size, _type(own), how, root, stream)

    def send(self, own: Any, peer: int, *, stream: int) -> None:
        self._comm.send(own.data.ptr, own.size, _type(own), peer, stream)

    def recv(self, to: Any, peer: int, *, stream: int) -> None:
        self._comm.recv(to.data.ptr, to.size, _type(to), peer, stream)


def _type(array: Any) -> int:
    return _NCCL_TYPES[array.dtype.name]


def _current_stream() -> int:
    return importlib.import_module("cupy").cuda.get_current_stream().ptr


Gather = Callable[[Any, Any, Sequence[int]], None]
"""Puts the rows of all ranks into one matrix: own rows, that matrix, rows of every rank."""


def gather_for(comm: Communicator) -> Gather:
    """Return the all-gather of NCCL, or of MPI on the host target. Collective."""
    return MpiGather(comm) if comm.target == "host" else NcclGather(nccl_for(comm))


class MpiGather:
    """MPI_Allgatherv."""

    def __init__(self, comm: Communicator):
        self._mpi = comm.mpi

    def __call__(self, own: np.ndarray, whole: np.ndarray, row_counts: Sequence[int]) -> None:
        row = whole.strides[0]
        counts = [rows * row for rows in row_counts]
        self._mpi.Allgatherv(own.view(np.uint8), [whole.view(np.uint8), counts])


class NcclGather:
    """ncclAllGather, or for uneven rows a group of ncclBroadcast."""

    def __init__(self, nccl: Nccl):
        self._nccl = nccl

    def __call__(self, own: Any, whole: Any, row_counts: Sequence[int]) -> None:
        own, whole, stream = own.view(np.uint8), whole.view(np.uint8), _current_stream()
        if len(set(row_counts)) == 1:
            self._nccl.comm.allgather(own, whole, stream=stream)
            return
        start = 0
        with self._nccl.group():
            for root, rows in enumerate(row_counts):
                self._nccl.comm.broadcast(own, whole[start : start + rows], root, stream=stream)
                start += rows


Reduction = Callable[[Any, Any, Sequence[int]], None]
"""Adds the matrices of all ranks: own matrix, result, rows of it that every rank owns."""


def reduction_for(comm: Communicator, whole: bool) -> Reduction:
    """Return the all-reduce, or if not `whole` the reduce-scatter, of NCCL or MPI. Collective."""
    if comm.target == "host":
        return MpiReduction(comm, whole)
    return NcclReduction(nccl_for(comm), whole)


class MpiReduction:
    """MPI_Allreduce or MPI_Reduce_scatter; of 16-bit elements in float32, as MPI has none."""

    def __init__(self, comm: Communicator, whole: bool):
        self._mpi, self._whole = comm.mpi, whole

    def __call__(self, own: np.ndarray, out: np.ndarray, row_counts: Sequence[int]) -> None:
        wide = own.astype(np.float32) if own.itemsize == 2 else own
        sums = np.empty(out.shape, wide.dtype)
        if self._whole:
            self._mpi.Allreduce(wide, sums)
        else:
            self._mpi.Reduce_scatter(wide, sums, [rows * out.shape[1] for rows in row_counts])
        out[...] = sums


class NcclReduction:
    """ncclAllReduce or ncclReduceScatter, for uneven rows a group of ncclReduce."""

    def __init__(self, nccl: Nccl, whole: bool):
        self._nccl, self._whole = nccl, whole

    def __call__(self, own: Any, out: Any, row_counts: Sequence[int]) -> None:
        nccl, how, stream = self._nccl.comm, self._nccl.sum, _current_stream()
        if self._whole:
            nccl.allreduce(own, out, how, stream=stream)
            return
        if len(set(row_counts)) == 1:
            nccl.reduce_scatter(own, out, how, stream=stream)
            return
        start = 0
        with self._nccl.group():
            for root, rows in enumerate(row_counts):
                nccl.reduce(own[start : start + rows], out, how, root, stream=stream)
                start += rows


Exchange = Callable[[Any, Sequence[int], Any, Sequence[int]], None]
"""Sends rows to all ranks, as many as it says to each, and puts what comes from them together."""


def exchange_for(comm: Communicator) -> Exchange:
    """Return the all-to-all of NCCL, or of MPI on the host target. Collective."""
    return MpiExchange(comm) if comm.target == "host" else NcclExchange(nccl_for(comm))


class MpiExchange:
    """MPI_Alltoallv."""

    def __init__(self, comm: Communicator):
        self._mpi = comm.mpi

    def __call__(
        self, own: np.ndarray, sent: Sequence[int], theirs: np.ndarray, received: Sequence[int]
    ) -> None:
        row = own.shape[1] * own.itemsize
        sizes = ([count * row for count in counts] for counts in (sent, received))
        to, source = zip((own.view(np.uint8), theirs.view(np.uint8)), sizes, strict=True)
        self._mpi.Alltoallv(list(to), list(source))


class NcclExchange:
    """A group of ncclSend and ncclRecv."""

    def __init__(self, nccl: Nccl):
        self._nccl = nccl

    def __call__(self, own: Any, sent: Sequence[int], theirs: Any, received: Sequence[int]) -> None:
        own, theirs, stream = own.view(np.uint8), theirs.view(np.uint8), _current_stream()
        source = to = 0
        with self._nccl.group():
            for peer, (out, back) in enumerate(zip(sent, received, strict=True)):
                if out:
                    self._nccl.comm.send(own[source : source + out], peer, stream=stream)
                if back:
                    self._nccl.comm.recv(theirs[to : to + back], peer, stream=stream)
                source, to = source + out, to + back


class Ring:
    """Sends an array to the next rank while another comes from the one before. Collective to make.

    On GPUs that goes on beside what the current stream has to do until `wait`.
    """

    def __init__(self, comm: Communicator):
        self._exchange, self._size = exchange_for(comm), comm.size
        self._next, self._last = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        self._cuda = None if comm.target == "host" else importlib.import_module("cupy").cuda
        self._stream = self._cuda and self._cuda.Stream(non_blocking=True)

    def start(self, own: Any, theirs: Any) -> None:
        """Start it, behind what was queued before."""
        own, theirs = own.reshape(-1, 1), theirs.reshape(-1, 1)
        sent, received = [0] * self._size, [0] * self._size
        sent[self._next], received[self._last] = len(own), len(theirs)
        if self._cuda:
            self._stream.wait_event(self._cuda.get_current_stream().record())
        with self._stream or contextlib.nullcontext():
            self._exchange(own, sent, theirs, received)

    def wait(self) -> None:
        """Let what is queued from now on wait for the end."""
        if self._cuda:
            self._cuda.get_current_stream().wait_event(self._stream.record())


# --- rivals: fused, too ---------------------------------------------------------------------------


class AsyncTensorParallel:
    """PyTorch's async-TP, in these same processes. Making one is collective.

    Parameters
    ----------
    comm : Communicator
    """

    name = "PyTorch async-TP"
    operators = ("allgather_gemm", "gemm_reduce_scatter")
    module = "torch.distributed._symmetric_memory"

    def __init__(self, comm: Communicator):
        self._torch = Torch()
        self._distributed = importlib.import_module("torch.distributed")
        self._torch.module.cuda.set_device(self._torch.device)
        port = runtime_of(comm).agree("to start PyTorch", _free_port)[0]
        self._distributed.init_process_group(
            "nccl",
            init_method=f"tcp://127.0.0.1:{port}",
            rank=comm.rank,
            world_size=comm.size,
            device_id=self._torch.device,
        )
        self._group = self._distributed.group.WORLD.group_name
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # newer versions do it by themselves, and say so
            importlib.import_module(self.module).enable_symm_mem_for_group(self._group)

    def prepare(self, operator: str, sets: Sequence[GemmOperands]) -> Call:
        """Return the call for these operands; its result is an array of integers, bit by bit."""
        if len(set(sets[0].row_counts)) > 1:
            raise ValueError("needs the same number of rows on every rank")
        torch, tensor = self._torch.module, self._torch.tensor
        operands = [tuple(map(tensor, one.own)) for one in sets]
        bits = getattr(torch, f"int{8 * sets[0].out.itemsize}")

        def call(number: int) -> Any:
            a, b = operands[number % len(operands)]
            with self._torch.on_current_stream():
                if operator == "allgather_gemm":
                    _, (out,) = torch.ops.symm_mem.fused_all_gather_matmul(a, [b], 0, self._group)
                else:
                    fused = torch.ops.symm_mem.fused_matmul_reduce_scatter
                    out = fused(a, b, "sum", 0, self._group)
            return out.view(bits)

        return call

    def close(self) -> None:
        """Leave PyTorch's process group."""
        self._distributed.destroy_process_group()


class CublasMp:
    """cuBLASMp through nvmath-python. Making one is collective.

    Parameters
    ----------
    comm : Communicator
    """

    name = "cuBLASMp"
    operators = ("allgather_gemm", "gemm_reduce_scatter")
    module = "nvmath.distributed.linalg.advanced"

    def __init__(self, comm: Communicator):
        self._cupy = cupy = importlib.import_module("cupy")
        self._nvmath = importlib.import_module("nvmath.distributed")
        self._nvmath.initialize(cupy.cuda.runtime.getDevice(), comm.mpi, ["nvshmem", "nccl"])
        self._plans: list[Any] = []

    def prepare(self, operator: str, sets: Sequence[GemmOperands]) -> Call:
        """Return the call for these operands; it computes the transpose, which lies the same way.

        cuBLASMp has columns where we have rows, and wants `b` in the other order.
        """
        advanced = importlib.import_module(self.module)
        slab = importlib.import_module("nvmath.distributed.distribution").Slab
        qualifiers = np.zeros(3, advanced.matrix_qualifiers_dtype)
        qualifiers[0]["is_transpose"] = True
        # How the ranks hold b, the transpose of a, and that of the result.
        gathers = operator == "allgather_gemm"
        held = [slab.Y, slab.Y, slab.X] if gathers else [slab.X, slab.X, slab.Y]
        self._forget()
        for a, b in (one.own for one in sets):
            by_columns = self._cupy.empty(b.shape[::-1], f"u{b.itemsize}").T
            by_columns[...] = b.view(by_columns.dtype)
            plan = advanced.Matmul(
                by_columns.view(b.dtype),
                a.T,
                distributions=held,
                qualifiers=qualifiers,
            )
            self._plans.append(plan)
            plan.plan()
        stream = self._cupy.cuda.get_current_stream()
        return lambda number: self._plans[number % len(sets)].execute(stream=stream).T

    def _forget(self) -> None:
        while self._plans:
            self._plans.pop().free()

    def close(self) -> None:
        """Free the plans and leave nvmath's world."""
        self._forget()
        self._nvmath.finalize()


RIVALS = (AsyncTensorParallel, CublasMp)

# For where a rival does not run: what was measured of it with bfloat16 on 4 x NVIDIA H100 (torch
# 2.11, cuBLASMp 0.7 through nvmath-python 0.8; the slowest, and sums by cuBLASMp, with gaps between
# calls); ms by (M, K, N).
_FIGURES = {
    (AsyncTensorParallel.name, "allgather_gemm"): {
        (4096, 4096, 1024): 0.138,
        (8192, 8192, 2048): 0.446,
        (16384, 16384, 4096): 3.10,
        (32768, 32768, 8192): 26.0,
        (512, 8192, 7168): 0.203,
        (2048, 8192, 7168): 0.378,
        (8192, 8192, 7168): 1.53,
        (16384, 5120, 3456): 0.854,
    },
    (CublasMp.name, "allgather_gemm"): {
        (4096, 4096, 1024): 0.150,
        (8192, 8192, 2048): 0.442,
    },
    (AsyncTensorParallel.name, "gemm_reduce_scatter"): {
        (4096, 1024, 4096): 0.249,
        (8192, 2048, 8192): 0.588,
        (16384, 4096, 16384): 3.34,
        (32768, 8192, 32768): 26.6,
    },
    (CublasMp.name, "gemm_reduce_scatter"): {
        (4096, 1024, 4096): 0.551,
        (8192, 2048, 8192): 0.984,
    },
}


def figure(name: str, operator: str, world: int, shape: tuple[int, ...], dtype: np.dtype) -> str:
    """Return words for a rival's time in an earlier run, or none if there is no such time."""
    ms = _FIGURES.get((name, operator), {}).get(shape)
    if ms is None or world != 4 or dtype != ml_dtypes.bfloat16:
        return ""
    return f"; {ms} ms in an earlier run on 4 x NVIDIA H100"


def _free_port() -> int:
    with contextlib.closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
