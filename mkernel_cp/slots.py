"""Slots of host memory, through which data pass between nodes: how many, and their bytes."""

from collections.abc import Sequence

# Where data pass through slots of host memory: in a slot, before them, and of a word that tells
# that it is free.
SLOT_BYTES, PARCEL_BYTES, CREDIT_BYTES = 1 << 16, 64, 8


def network_bytes(staged: bool, sent: Sequence[int], received: Sequence[int]) -> int:
    """Return what a rank sends: messages of so many bytes, and what slots cost for all of them."""
    slots = [sum(parcels(1, nbytes) for nbytes in messages) for messages in (sent, received)]
    return sum(sent) + staged * slot_bytes(*slots)


def slot_bytes(sent: int, received: int) -> int:
    """Return the bytes that a rank sends for slots that leave it, and for those that it gets."""
    return PARCEL_BYTES * sent + CREDIT_BYTES * received


def parcels(lines: int, nbytes: int) -> int:
    """Return in how many slots so many lines go, of so many bytes each."""
    if lines * nbytes == 0:
        return 1
    width = min(nbytes, SLOT_BYTES)
    return -(-lines // (SLOT_BYTES // width)) * -(-nbytes // width)
