"""The software network card as the PyPI package ibverbs, written by others, sees it.

Run with libibverbs.so.1 of our own in LD_LIBRARY_PATH. Arguments: what to do.
"""

import ctypes
import errno
import subprocess
import sys
import time

import ibverbs as ib
import numpy as np
from ibverbs import AccessFlags, QPAttrMask, QPState, SendFlags, WROpcode

REMOTE = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE
RELAXED = 1 << 20
soft = ctypes.CDLL("libibverbs.so.1")


class Side:
    """A queue pair with memory."""

    def __init__(self, context, *, access=REMOTE, nbytes=1 << 17, depth=16, cqe=64, receives=8):
        self.context, self.pd = context, context.alloc_pd()
        self.cq = context.create_cq(cqe)
        self.data = np.zeros(nbytes, np.uint8)
        self.mr = self.pd.reg_mr(self.data.ctypes.data, nbytes, int(access))
        self.qp = self.pd.create_qp(
            ib.QPInitAttr(send_cq=self.cq, recv_cq=self.cq, max_send_wr=depth, max_recv_wr=receives)
        )
        self.psn = 77

    def info(self):
        port, gid = self.context.query_port(1), self.context.query_gid(1, 1)
        return ib.local_qp_info(self.qp, port, gid, port=1, psn=self.psn)

    def connect(self, theirs, **rts):
        ib.connect_rc(
            self.qp, theirs, port=1, sgid_index=1, access=int(REMOTE), local_psn=self.psn, **rts
        )

    def write(self, to, nbytes, *, start=0, imm=None, at=None, rkey=None, flags=True, target=None):
        self.qp.post_send(
            ib.SendWR(
                wr_id=nbytes,
                sg_list=[ib.SGE(target or self.mr, nbytes, offset=start)] if nbytes else [],
                opcode=WROpcode.RDMA_WRITE if imm is None else WROpcode.RDMA_WRITE_WITH_IMM,
                send_flags=SendFlags.SIGNALED if flags else 0,
                remote_addr=to.data.ctypes.data + start if at is None else at,
                rkey=to.mr.rkey if rkey is None else rkey,
                imm_data=imm or 0,
            )
        )

    def poll(self, count=1, seconds=10):
        found, end = [], time.monotonic() + seconds
        while len(found) < count and time.monotonic() < end:
            found += self.cq.poll(16)
        return [(done.wr_id, int(done.status)) for done in found]


def pair(**options):
    context = next(d for d in ib.get_device_list() if d.name == "soft0").open()
    one, other = Side(context, **options), Side(context, **options)
    one.connect(other.info()), other.connect(one.info())
    return one, other


def refused(reason, call, *args, **options):
    found = None
    try:
        call(*args, **options)
    except OSError as error:
        found = error.errno
    assert found == reason, (call, found, reason)


def states():
    """Nothing is skipped, and each step wants its attributes, no more and no less."""
    context = ib.get_device_list()[0].open()
    side, other = Side(context), Side(context)
    refused(errno.EINVAL, side.write, other, 8)
    refused(errno.EINVAL, side.qp.post_recv, [ib.RecvWR()])
    step = side.qp.modify
    state = int(QPAttrMask.STATE)
    refused(errno.EINVAL, step, state, qp_state=int(QPState.RTR))
    refused(
        errno.EINVAL, step, state | int(QPAttrMask.PORT), qp_state=int(QPState.INIT), port_num=1
    )
    refused(errno.EINVAL, side.qp.to_init, 2, int(REMOTE))
    side.qp.to_init(1, int(REMOTE))
    side.qp.post_recv([ib.RecvWR()])
    refused(errno.EINVAL, side.qp.to_rts, 0)
    refused(errno.EINVAL, side.qp.to_rtr, other.info(), sgid_index=0, mtu=5)  # RoCE v1 to v2
    refused(errno.EINVAL, side.qp.to_rtr, other.info(), sgid_index=1, mtu=9)
    stranger = other.info()
    stranger.gid = stranger.gid[:8] + bytes(8)
    refused(errno.EHOSTUNREACH, side.qp.to_rtr, stranger, sgid_index=1, mtu=5)
    side.qp.to_rtr(other.info(), sgid_index=1, mtu=5)
    refused(errno.EINVAL, side.write, other, 8)
    refused(errno.EINVAL, side.qp.to_rts, 0, retry_cnt=9)
    side.qp.to_rts(side.psn)
    refused(errno.EINVAL, side.pd.reg_mr, side.data.ctypes.data, 8, int(AccessFlags.REMOTE_WRITE))
    refused(errno.EFAULT, side.pd.reg_mr, 4096, 8, int(REMOTE))
    refused(errno.EBUSY, side.cq.close)


def depths():
    """What is full refuses, or fails; slots are free when a completion has been polled."""
    one, other = pair(depth=4, receives=2)
    for _ in range(4):
        one.write(other, 8)
    refused(errno.ENOMEM, one.write, other, 8)
    assert one.poll(4) == [(8, 0)] * 4
    for _ in range(3):
        one.write(other, 8, flags=False)
    one.write(other, 16)
    assert one.poll() == [(16, 0)]
    for _ in range(4):
        one.write(other, 8)
    assert one.poll(4) == [(8, 0)] * 4
    other.qp.post_recv([ib.RecvWR(), ib.RecvWR()])
    refused(errno.ENOMEM, other.qp.post_recv, [ib.RecvWR()])
    one, other = pair(depth=8, cqe=2)
    for _ in range(4):
        one.write(other, 8)
    time.sleep(0.2)
    try:
        one.cq.poll(16)
    except OSError:
        return
    raise AssertionError("a completion queue that ran over says nothing")


def keys():
    """Keys, bounds and rights are checked before a byte is written."""
    for kind in range(6):
        one, other = pair()
        one.data[:], status = 9, 10
        if kind == 0:
            one.write(other, 64, rkey=other.mr.lkey)
        elif kind == 1:
            one.write(other, 64, at=other.data.ctypes.data + len(other.data) - 63)
        elif kind == 2:
            one.write(other, 64, at=other.data.ctypes.data - 1)
        elif kind == 3:
            mr = other.pd.reg_mr(other.data.ctypes.data, 64, int(AccessFlags.LOCAL_WRITE))
            one.write(other, 64, rkey=mr.rkey)
        elif kind == 4:  # of another protection domain
            one.write(other, 64, rkey=one.mr.rkey, at=one.data.ctypes.data)
        else:
            status = 4
            one.write(other, 64, target=other.mr)
        flushed = [(32, 5)]
        try:
            one.write(other, 32)
        except OSError as error:  # the first one has failed already
            if error.errno != errno.EINVAL:
                raise
            flushed = []
        assert one.poll(1 + len(flushed)) == [(64, status), *flushed], (kind, one.poll())
        assert not other.data.any()
        refused(errno.EINVAL, one.write, other, 8)


def retries():
    """Who is not there, or not ready, is tried again and then given up."""
    one, other = pair()
    one.psn += 1
    lost = Side(one.context)
    lost.connect(other.info(), timeout=8, retry_cnt=2)
    lost.write(other, 8)  # `other` is connected with `one`
    assert lost.poll() == [(8, 12)]
    context = one.context
    one, other = Side(context), Side(context)
    one.connect(other.info(), rnr_retry=1), other.connect(one.info())
    one.write(other, 8, imm=1)
    assert one.poll() == [(8, 13)]
    one, other = pair()
    one.write(other, 8, imm=0x01020304)
    assert one.poll(seconds=0.2) == []
    other.qp.post_recv([ib.RecvWR(wr_id=5)])
    assert one.poll() == [(8, 0)]
    (done,) = other.cq.poll(1)
    assert (done.wr_id, done.byte_len, done.imm_data) == (5, 8, 0x01020304), done.imm_data


def order():
    """A plain write may land before the data that went ahead of it; an immediate may not."""
    early = {"plain": 0, "imm": 0, "strict": 0}
    for seed in range(40):
        for kind in early:
            assert soft.soft_configure(ctypes.c_double(0), ctypes.c_uint64(seed), None) == 0
            one, other = pair(access=REMOTE if kind == "strict" else int(REMOTE) | RELAXED)
            other.qp.post_recv([ib.RecvWR()])
            word = slice(79_992, 80_000)  # of the data; whichever write lands last is seen there
            one.data[:80_000], one.data[100_000:] = 1, 2
            for start in range(0, 80_000, 20_000):
                one.write(other, 20_000, start=start, flags=False)
            if kind == "imm":
                one.write(other, 8, start=100_000, imm=7)
                assert [status for _, status in other.poll()] == [0]
                early[kind] += int(not other.data[:80_000].all())
            else:
                place = other.data.ctypes.data + word.start
                one.write(other, 8, start=100_000, at=place)
                assert one.poll() == [(8, 0)]
                early[kind] += int((other.data[word] == 1).all())
    assert early["plain"] > 0, early
    assert early["imm"] == early["strict"] == 0, early


def processes():
    """Two processes that exchange what they must know as bytes."""
    child = subprocess.Popen(
        [sys.executable, __file__, "child"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    side = Side(ib.get_device_list()[0].open())
    place = np.array([side.data.ctypes.data, side.mr.rkey], np.uint64).tobytes()
    child.stdin.write(side.info().to_bytes() + place)
    child.stdin.flush()
    side.qp.to_init(1, int(REMOTE))
    side.qp.post_recv([ib.RecvWR(wr_id=3)])
    theirs = ib.QPInfo.from_bytes(child.stdout.read(28))
    side.qp.to_rtr(theirs, sgid_index=1, mtu=5)
    side.qp.to_rts(side.psn)
    child.stdin.write(b"!")
    child.stdin.flush()
    assert side.poll() == [(3, 0)]
    assert np.array_equal(side.data[:100_000], np.arange(100_000) % 253)
    assert child.wait(10) == 0


def child():
    side = Side(ib.get_device_list()[0].open())
    said = sys.stdin.buffer.read(44)
    side.connect(ib.QPInfo.from_bytes(said[:28]))
    sys.stdout.buffer.write(side.info().to_bytes())
    sys.stdout.buffer.flush()
    assert sys.stdin.buffer.read(1) == b"!"
    address, key = np.frombuffer(said[28:], np.uint64)
    side.data[:100_000] = np.arange(100_000) % 253
    side.write(side, 100_000, at=int(address), rkey=int(key), imm=1)
    assert side.poll() == [(100_000, 0)]


if __name__ == "__main__":
    globals()[sys.argv[1]]()
    print("all right")
