// The runtime of the host target: all kernels share it, so that each compiles in half the time.

#undef _FORTIFY_SOURCE  // with which, on some systems, a jump to another stack (fiber.cuh) counts as a fault

#include "mkernel/host_runtime.cuh"

#define MK_EXPORT extern "C" __attribute__((visibility("default")))

using namespace mk::host;

MK_EXPORT const Runtime* host_runtime() {
    static constexpr Runtime runtime{Service::here,       Service::now_ns,    Service::pause,
                                     Service::interleave, Service::stay_away, Service::meet};
    return &runtime;
}

MK_EXPORT int host_launch(Entry entry, const Launch* launch) { return run_on_threads(entry, *launch); }

MK_EXPORT int host_simulate(Entry entry, const Launch* launches, Simulation* simulation) {
    return Simulator(entry, launches, *simulation).run();
}
