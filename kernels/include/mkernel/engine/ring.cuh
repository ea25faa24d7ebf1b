// Slots that are filled and emptied in turn, by threads that tell each other so with barriers.
#pragma once

#include "../types.cuh"

namespace mk {
namespace engine {

// A ring of slots as one of its users sees it. It runs on from tile to tile; `parity` is that of the phase in hand.
template <u32 slots>
struct Turn {
    u32 slot = 0, parity = 0;
    MK_DEVICE void advance() {
        if (++slot == slots) slot = 0, parity ^= 1;
    }

    // visit(slot) for the next so many. It is compiled once for each slot: what lies there is at a constant, and instructions
    // that take addresses from uniform registers do not wait until it has been computed and brought there.
    template <class Visit>
    MK_DEVICE void go_on(u32 count, Visit visit) {
        while (count > 0)
            MK_UNROLL
            for (u32 i = 0; i < slots; ++i) {
                if (i != slot || count == 0) continue;
                visit(i);
                --count;
                slot = i;
                advance();
            }
    }
};

}  // namespace engine
}  // namespace mk
