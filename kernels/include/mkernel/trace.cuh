// What a traced launch records (mk.trace): spans of time, written by the thread that acts to slots of its own. Kernels
// have it where they are compiled with MK_TRACE; without, nothing of it is left.
#pragma once

#include "schedule.cuh"

namespace mk {

// What a span tells of; mkernel_cp/trace.py has the same codes.
enum class Traced : u64 {
    enter = 1,
    wait = 2,
    copy = 3,
    compute = 4,
    store = 5,
    finish = 6,
    sort = 7,   // tokens by their experts
    agree = 8,  // on who gets which of them
    note = 9,   // what rows of experts are made of
    sum = 10,   // over the rows of tokens
};

#if MK_TRACE
// From its construction, or begin(), to its end, or end(). Spans of one thread follow each other or nest.
class Span {
public:
    // `records`: of all lanes that come here, one. What the values say depends on the kind: trace.py reads them.
    template <class Launch>
    MK_DEVICE Span(const Launch& launch, bool records, Traced kind, u64 peer, u64 first = 0, u64 second = 0) {
        if (!records) return;
        const Trace& trace = *launch.world().trace;
        const u64 track = launch.agent().index() * trace.parts + launch.agent().part();
        const u64 place = trace.recorded[track]++;
        if (place >= trace.capacity) return;
        TraceEvent* event = &trace.events[track * trace.capacity + place];
        *event = {u64(kind), launch.role(), launch.generation(), now_ns(), 0, 0, peer, {first, second}};
        event_ = event;
    }
    template <class Launch>
    MK_DEVICE Span(const Launch& launch, bool records, Traced kind, const Tile& tile)
        : Span(launch, records, kind, tile.source, packed(tile.rows), packed(tile.columns)) {}
    Span(const Span&) = delete;
    MK_DEVICE ~Span() { end(); }

    MK_DEVICE void begin() {
        if (TraceEvent* event = event_) event->begin_ns = now_ns();
    }
    MK_DEVICE void end() {
        if (TraceEvent* event = event_) event->end_ns = now_ns();
        event_ = nullptr;
    }
    MK_DEVICE void succeeded(bool verdict) {
        if (TraceEvent* event = event_) event->failed = !verdict;
    }

private:
    static MK_DEVICE u64 packed(Range range) { return u64(range.begin) << 32 | u64(range.end); }

    TraceEvent* volatile event_ = nullptr;  // in memory: engines have no registers to spare
};
#else
class Span {
public:
    template <class... Any>
    MK_DEVICE Span(const Any&...) {}
    MK_DEVICE void begin() {}
    MK_DEVICE void end() {}
    MK_DEVICE void succeeded(bool) {}
};
#endif

}  // namespace mk
