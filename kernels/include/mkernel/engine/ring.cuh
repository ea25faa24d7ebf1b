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
};

}  // namespace engine
}  // namespace mk
