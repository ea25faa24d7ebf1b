// Copies. copy() starts one and returns a Pending; its complete() returns the proof that Context::raise asks for. So a
// signal before the bytes does not compile.
#pragma once

#include "world.cuh"

namespace mk {

// Lines of equal length, `pitch` bytes apart.
struct Lines {
    u8* data;
    i64 pitch;
};

class [[nodiscard]] Pending {
public:
    template <class... Order>
    MK_DEVICE Pending(const Agent& agent, Lines to, Lines from, i64 lines, i64 bytes, Order... order)
        : agent_(agent), transfer_(agent, to.data, to.pitch, from.data, from.pitch, lines, bytes, order...) {}

    MK_DEVICE Completed complete() {
        interleave();
        transfer_.finish(agent_);
        return Completed();
    }

private:
    const Agent& agent_;
    Transfer transfer_;
};

MK_DEVICE Pending copy(const Agent& agent, Lines to, Lines from, i64 lines, i64 bytes) {
    return Pending(agent, to, from, lines, bytes);
}
// Of the lines that a list names.
MK_DEVICE Pending copy(const Agent& agent, Lines to, Lines from, const u32* list, i64 lines, i64 bytes) {
    return Pending(agent, to, from, lines, bytes, list);
}

// What the lanes of an agent have written by themselves, here or at a peer.
class Writes {
public:
    MK_DEVICE Completed complete(const Agent& agent) const {
        interleave();
        agent.sync();
        return Completed();
    }
};

}  // namespace mk
