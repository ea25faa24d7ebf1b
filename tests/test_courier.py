"""No signal comes before its bytes, whatever way they are copied."""

import textwrap

import numpy as np
import pytest
import worlds

import mkernel_cp as mk

SOURCE = """
    #include <mkernel/roles.cuh>

    namespace mk {

    struct PayloadParams {
        World* world;
        CallMessage message;
        u8* landing;   // chunks of `bytes`, `pitch` apart, here and at the peer
        u64* arrived;  // a signal per chunk
        u64* seen;     // [2]: chunks that have been looked at, bytes that were not there yet
        i64 chunks, bytes, pitch;
        u64 stamp;     // changes from launch to launch, as all bytes do
    };

    MK_KERNEL(payload, PayloadParams, p) {
        const u64 movers = 2;
        Launch launch(p.world, {movers, Agent::current().count() - movers});
        const Agent& agent = launch.agent();

        if (launch.is(Role::mover)) {
            Courier<> courier(launch, agent.scratch());
            if (launch.member() == 0) launch.announce(p.message);
            for (u64 peer : RingOrder(launch.rank(), launch.size())) {
                if (!launch.await_call(peer, p.message.digest)) break;
                u8* theirs = static_cast<u8*>(launch.operand_of(peer));
                if (peer == (launch.rank() + 1) % launch.size())
                    for (i64 i = i64(launch.member()); i < p.chunks; i += i64(movers)) {
                        Lines to{p.landing + i * p.pitch, p.pitch};
                        Lines from{theirs + i * p.pitch, p.pitch};
                        courier.send(to, from, 1, p.bytes, &p.arrived[i]);
                        if (i % 3 == 0) courier.go_on();
                    }
                courier.finish();
                launch.have_read(peer, movers);
            }
            // What it has not waited for need not be there while it is here: an early signal shows.
            const u64 all = (p.stamp + 1) * u64(p.chunks);
            launch.stand_by([&] { return load_acquire(&p.seen[0]) >= all; });
        }

        if (launch.is(Role::compute))
            for (i64 i = i64(launch.member()); i < p.chunks; i += i64(launch.members())) {
                Subject chunk{Awaited::arrival, everyone, u64(i)};
                if (!launch.wait(agent, &p.arrived[i], 1, chunk)) break;
                u64 wrong = 0;
                for (i64 at = agent.lane(); at < p.bytes; at += agent.lanes())
                    wrong += p.landing[i * p.pitch + at] != u8(31 * p.stamp + u64(i));
                if (wrong > 0) fetch_add(&p.seen[1], wrong);
                if (agent.lane() == 0) fetch_add(&p.seen[0], 1);
            }

        launch.finish();
    }

    }  // namespace mk
"""
SHARED_BYTES = (
    16_000  # room for fewer pieces than the longest chunk has: all places are used again and again
)
# Per kind: bytes of a chunk, bytes that it is off from 16, macros.
KINDS = {
    "copy engine": (272, 0, {}),
    "copy engine, several pieces": (40_000, 0, {}),
    "16 bytes a word": (272, 0, {"MK_BULK_COPIES": 0}),
    "4 bytes a word": (260, 4, {}),
    "2 bytes a word": (262, 2, {}),
    "1 byte a word": (261, 1, {}),
}


@pytest.mark.operator
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", worlds.SIZES[1:])
def test_no_signal_comes_before_its_bytes(size, kind, tmp_path):
    nbytes, offset, macros = KINDS[kind]
    pitch = nbytes + offset % 2  # as far apart as long: no gap hides a copy of too much
    on_gpus = worlds.gpu_world is not None
    launches = 2 if not on_gpus else 20 if nbytes > 1000 else 250
    chunks = (4096 if on_gpus else 512) if nbytes < 1000 else 128
    path = tmp_path / "payload.cu"
    path.write_text(textwrap.dedent(SOURCE))
    kernel = mk.Module(path, defines=macros).kernel("payload")

    def program(comm):
        worlds.chaos(comm, seed=size)
        whole = comm.zeros(chunks * pitch + 16, np.uint8)
        operand = whole[offset : offset + chunks * pitch]
        landing = comm.zeros(chunks * pitch + 16, np.uint8)[offset : offset + chunks * pitch]
        arrived, seen = comm.zeros(chunks, np.uint64), comm.zeros(2, np.uint64)
        place = np.arange(chunks, dtype=np.uint64)[:, None]
        for stamp in range(launches):
            pattern = np.broadcast_to(31 * stamp + place, (chunks, pitch)).astype(np.uint8)
            worlds.fill(comm, operand, pattern.reshape(-1))
            arguments = (landing, arrived, seen, chunks, nbytes, pitch, stamp)
            comm.launch(kernel, 4, arguments, operand=operand, shared_bytes=SHARED_BYTES)
        return worlds.get(comm, seen)

    for seen in worlds.run(size, program):
        assert seen.tolist() == [launches * chunks, 0]
