"""The queue from kernels to the proxy: nothing lost, nothing early, whatever the speeds are."""

import ctypes
import threading
from pathlib import Path

import numpy as np
import pytest
import worlds

import mkernel_cp as mk
from mkernel_cp import compiler
from mkernel_cp.transport.queue import CommandQueue

PROGRAMS = Path(__file__).parent / "programs"


def post(commands, agents, capacity, *, burst, rest_ns, lanes=1, seed=0, timeout=30.0):
    """Have agents post commands to a consumer that rests; return what it and the rank say."""
    consumer = compiler.host_library(
        PROGRAMS / "commands.cpp", extra_include=[compiler.native_dir()]
    )
    queue, found = CommandQueue(capacity), []
    written = np.zeros(commands, np.uint64)

    def take():
        address = ctypes.c_void_p(queue.address), ctypes.c_void_p(written.ctypes.data)
        numbers = map(ctypes.c_uint64, (agents, commands, burst, rest_ns))
        found.append(consumer.take_commands(*address, *numbers))

    def program(comm):
        worlds.chaos(comm, seed=seed, lanes=lanes)
        kernel = mk.Module(PROGRAMS / "commands.cu").kernel("post_commands")
        comm.launch(kernel, agents, (queue.address, written, commands // agents))
        return queue.tickets, queue.sent

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    counts = worlds.run(1, program, progress_timeout=timeout)[0]
    thread.join(3)
    return found, counts


def test_1e5_commands_reach_a_slow_consumer_once_and_in_order():
    found, counts = post(100_000, 4, 256, burst=256, rest_ns=200_000)
    assert found == [0]
    assert counts == (100_000, 100_000)


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("capacity", [1, 2, 7])
def test_a_queue_may_be_short(capacity, lanes):
    found, counts = post(600, 3, capacity, burst=5, rest_ns=1, lanes=lanes, seed=capacity)
    assert found == [0]
    assert counts == (600, 600)


def test_without_a_consumer_the_wait_for_room_ends():
    queue, written = CommandQueue(8), np.zeros(100, np.uint64)

    def program(comm):
        kernel = mk.Module(PROGRAMS / "commands.cu").kernel("post_commands")
        with pytest.raises(mk.TimeoutError, match="room for command 9 in the queue to the network"):
            comm.launch(kernel, 1, (queue.address, written, 100))

    with pytest.raises(mk.TimeoutError):
        worlds.run(1, program, progress_timeout=0.2)


@pytest.mark.nvrtc
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a"])
def test_it_is_device_code(architecture):
    options = ["-std=c++17", f"-I{compiler.include_dir()}", f"--gpu-architecture={architecture}"]
    cubin, log = compiler.nvrtc_compile(PROGRAMS / "commands.cu", options)
    assert cubin is not None, log
    assert "warning" not in log
