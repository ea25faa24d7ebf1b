"""Fused kernels for HPC and ML-systems programs that run under mpirun on NumPy-style arrays.

One kernel launch per call moves the data between ranks and computes, overlapped tile by tile.
"""

from .arguments import Options
from .communicator import Communicator
from .compiler import include_dir
from .errors import (
    ArgumentMismatchError,
    CapacityError,
    CompileError,
    ConcurrentCallError,
    ConfigurationError,
    Error,
    NetworkError,
    OutOfMemoryError,
    PeerError,
    PeerLostError,
    TimeoutError,
)
from .kernel import Kernel, Module
from .local_world import LocalWorld
from .operators.allgather_gemm import AllGatherGemm, allgather_gemm
from .operators.gemm_allreduce import GemmAllReduce, gemm_allreduce
from .operators.gemm_reduce_scatter import GemmReduceScatter, gemm_reduce_scatter
from .operators.moe_combine import MoeCombine, moe_combine
from .operators.moe_dispatch_gemm import DispatchLayout, MoeDispatchGemm, moe_dispatch_gemm
from .operators.moe_layer import MoeLayer, moe_layer
from .operators.ring_attention import RingAttention, ring_attention, zigzag_join, zigzag_split
from .trace import trace

__version__ = "0.1.0"

__all__ = [
    "AllGatherGemm",
    "ArgumentMismatchError",
    "CapacityError",
    "Communicator",
    "CompileError",
    "ConcurrentCallError",
    "ConfigurationError",
    "DispatchLayout",
    "Error",
    "GemmAllReduce",
    "GemmReduceScatter",
    "Kernel",
    "LocalWorld",
    "Module",
    "MoeCombine",
    "MoeDispatchGemm",
    "MoeLayer",
    "NetworkError",
    "Options",
    "OutOfMemoryError",
    "PeerError",
    "PeerLostError",
    "RingAttention",
    "TimeoutError",
    "__version__",
    "allgather_gemm",
    "gemm_allreduce",
    "gemm_reduce_scatter",
    "include_dir",
    "moe_combine",
    "moe_dispatch_gemm",
    "moe_layer",
    "ring_attention",
    "trace",
    "zigzag_join",
    "zigzag_split",
]
