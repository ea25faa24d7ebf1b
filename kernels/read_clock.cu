// What the clock of a target's kernels shows: mkernel_cp/trace.py compares it with the host's.
#include "mkernel/types.cuh"

namespace mk {

struct ReadClockParams {
    u64* now;
};

MK_KERNEL(read_clock, ReadClockParams, p) {
    if (Agent::current().lane() == 0) *p.now = now_ns();
}

}  // namespace mk
