"""Why a call failed: the record that a kernel or a watcher left, as an exception.

The rank that sees a failure first writes a record into its page and its number into the abort word
of every rank. All ranks read that one record, so all raise the same.
"""

import enum
import re
from collections.abc import Sequence
from typing import Any

from . import errors


class Reason(enum.IntEnum):
    """Why a wait ended without its signal; as in signal.cuh."""

    ENTRY_TIMEOUT = 1
    PROGRESS_TIMEOUT = 2
    MISMATCH = 3
    REFUSED = 4
    CLOSED = 5
    CONCURRENT = 6
    LOST = 7
    NETWORK = 8
    NO_OPERAND = 9


class Role(enum.IntEnum):
    """Roles of agents, as in roles.cuh, and the host itself."""

    MOVER = 0
    COMPUTE = 1
    INTER_SEND = 2
    INTER_RECEIVE = 3
    INTER_REDUCE = 4
    STAGE_OUT = 5
    STAGE_IN = 6
    NONE = 7
    HOST = 15


class Awaited(enum.IntEnum):
    """Subjects of a wait, as in signal.cuh, and agreements of the hosts."""

    CALL = 1
    ARRIVAL = 2
    READ = 3
    TURN = 4
    AGREEMENT = 5
    PARTIAL = 6
    SUM = 7
    ROOM = 8
    ROUTES = 9
    ROWS = 10
    QUEUE = 11
    SENT = 12
    NETWORK = 13
    RECEIPT = 14
    CREDIT = 15
    SLOT = 16


class Problem(enum.IntEnum):
    """What may be wrong with the data of a call; as in experts.cuh."""

    ID = 1
    TOKENS = 2
    CAPACITY = 3


_AWAITED = {
    Awaited.CALL: "the call of {peer}",
    Awaited.ARRIVAL: "the arrival of chunk {index}",
    Awaited.READ: "{peer} to have read this rank's operand",
    Awaited.AGREEMENT: "{peer} to agree",
    Awaited.PARTIAL: "the partial sums of {peer} for tile {index}",
    Awaited.SUM: "tile {index}, which {peer} adds",
    Awaited.ROUTES: "the routes of tokens (part {index})",
    Awaited.ROWS: "the rows of compute agent {index}",
    Awaited.ROOM: "room in the window, which compute agent {index} uses",
    Awaited.QUEUE: "room for command {index} in the queue to the network",
    Awaited.SENT: "the network to have sent command {index}",
    Awaited.NETWORK: "chunk {index}, which {peer} sends over the network",
    Awaited.RECEIPT: "the receipt of {peer} for what was sent to it",
    Awaited.CREDIT: "{peer} to need unit {index} no more",
    Awaited.SLOT: "room for what is sent to {peer}, which has yet to take out more",
}


def _differs(name: str, *texts: str) -> bool:
    """Return whether calls that both have an argument differ in it."""
    found = [re.search(rf"\b{name}=(\[[^]]*\]|\w+)", text) for text in texts]
    return all(found) and len({match[1] for match in found if match}) > 1


def build(origin: int, record: Any, texts: Sequence[str]) -> errors.Error:
    """Return the exception for a record.

    Parameters
    ----------
    origin : int
        The rank whose record it is.
    record : ctypes.Structure
        A ``Record`` of types.cuh.
    texts : sequence of str
        Per rank, what it calls (or, for a refusal, why not).

    Returns
    -------
    errors.Error
    """
    reason, peer = Reason(record.reason), record.peer
    if reason is Reason.MISMATCH:
        hint = "".join(
            f"; where ranks have different numbers of {what}, each passes {those} in {name}="
            for name, what, those in (
                ("row_counts", "rows", "all"),
                ("seq_counts", "positions", "all"),
                ("num_experts", "experts", "their sum"),
            )
            if _differs(name, texts[origin], texts[peer])
        )
        if texts[origin] == texts[peer]:
            hint += (
                "; what differs is the call of moe_dispatch_gemm that their layouts are of: pass "
                "what the same call has returned"
            )
        return errors.ArgumentMismatchError(
            f"ranks disagree: rank {origin} calls {texts[origin]}; rank {peer} calls {texts[peer]}."
            " All ranks must make the same calls in the same order, with the same agreed arguments"
            f"{hint}"
        )
    if reason is Reason.NO_OPERAND:
        return errors.ArgumentMismatchError(
            f"{texts[peer]}: rank {peer} passes no operand=, and the kernel of rank {origin} reads "
            "it: pass one on all ranks"
        )
    if reason is Reason.REFUSED:
        return errors.PeerError(f"rank {peer} raised instead of calling: {texts[peer]}")
    if reason is Reason.CONCURRENT:
        return errors.ConcurrentCallError(
            f"rank {origin} ran two launches of this communicator at once, one of them in "
            f"{texts[origin]}: replay CUDA graphs that hold fused calls one after the other"
        )
    if reason is Reason.LOST:
        return errors.PeerLostError(f"lost rank {peer}: its process has ended or is unreachable")
    if reason is Reason.CLOSED:
        return errors.PeerLostError(
            f"rank {peer} has closed its communicator while rank {origin} calls {texts[origin]}"
        )
    what = _AWAITED[Awaited(record.awaited)].format(peer=f"rank {peer}", index=record.index)
    entry = reason is Reason.ENTRY_TIMEOUT
    remedy = (
        f"Rank {peer} has not made this call: do all ranks make the same calls? entry_timeout= "
        "sets how long to wait for it"
        if entry
        else f"Rank {peer} has made this call, and does not go on; progress_timeout= sets how long "
        "to wait for that"
    )
    if not record.expected:
        signals = "nothing has come"
    elif Awaited(record.awaited) is Awaited.CALL:  # its words are of a generation, half a message
        signals = f"seen that of generation {record.seen >> 32}"
    else:
        signals = f"signal expected {_signal(record.expected)}, seen {_signal(record.seen)}"
    return errors.TimeoutError(
        f"rank {origin} waited {record.waited_ns * 1e-9:.3g} s in {texts[origin]} for {what} "
        f"({Role(record.role).name.lower()}, generation {record.generation}, {signals}). {remedy}"
    )


# What verbs call the status of a completion (ibv_wc_status), as far as proxies report it.
_STATUS = {
    1: "local length error",
    2: "local operation error",
    4: "local protection error",
    5: "its queue pair was given up: the card has failed, or the other side refused something",
    7: "an arrival that does not belong to this call",
    8: "local access error",
    9: "invalid request at the remote side",
    10: "remote access error",
    11: "remote operation error",
    12: "no answer, after all retries",
    13: "the receiver was not ready, after all retries",
    20: "no answer in time",
    21: "its driver refused a request",
}


def of_network(origin: int, record: Any, card: bytes) -> errors.NetworkError:
    """Return the exception for what a proxy met; `card` is the network card's name, with zeros."""
    name = card.rstrip(b"\0").decode(errors="replace")
    status = _STATUS.get(record.index, "general error")
    whom = f" in an exchange with rank {record.peer}," if record.peer != origin else ""
    return errors.NetworkError(
        f"network card {name} of rank {origin}: {status} (status {record.index}, detail "
        f"{record.seen}),{whom} generation {record.generation}. "
        "Is the link up, and the other rank alive?"
    )


def of_data(fault: Any, what: str) -> ValueError:
    """Return the exception for a ``DataFault`` of types.cuh, the same on all ranks."""
    first, second, third = fault.values
    problem = Problem(fault.problem)
    text = {
        Problem.ID: (
            f"{what}: rank {fault.rank} passes topk_idx[{second}, {third}] = {first}, which is no "
            "expert: use ids from 0 to num_experts - 1, or -1 for none"
        ),
        Problem.TOKENS: (
            f"{what}: rank {fault.rank} passes {first} tokens, and the plan is for at most "
            f"{second}: pass a larger max_tokens= on all ranks"
        ),
        Problem.CAPACITY: (
            f"{what}: rank {fault.rank} would get {first} rows, and has room for {second}: pass a "
            "larger capacity= on all ranks"
        ),
    }[problem]
    kind = ValueError if problem is Problem.ID else errors.CapacityError
    return kind(f"{text}; nothing was written, on no rank")


def _signal(value: int) -> str:
    return f"{value >> 32}:{value & 0xFFFFFFFF}"
