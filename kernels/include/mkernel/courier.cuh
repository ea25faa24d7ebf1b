// A stream of copies to this rank, several under way at a time: each raises a signal when its bytes are there.
#pragma once

#include "copy.cuh"
#if MK_BULK_COPIES
#include "ptx.cuh"
#endif

namespace mk {

#if MK_BULK_COPIES
// A ring of pieces that the multiprocessor's copy engine brings through shared memory. Lane 0 of a warp drives it, and
// keeps its account there too: registers are scarce where others multiply. Short lines a warp loads, all lanes at once.
class Belt {
public:
    MK_DEVICE Belt(Scratch scratch, bool drives) : state_(*reinterpret_cast<State*>(scratch.data)) {
        if (!drives || !fits(scratch)) return;
        const u32 room = u32(scratch.bytes - sizeof(State));
        state_ = {};
        state_.piece_bytes = most_bytes;
        // A link is as fast as what is under way allows: rather more pieces, as long as they are not short.
        while (room / state_.piece_bytes < (state_.piece_bytes > short_bytes ? most_slots : 1 + least_slots) &&
               state_.piece_bytes > least_bytes)
            state_.piece_bytes /= 2;
        state_.slots = room / state_.piece_bytes < most_slots ? room / state_.piece_bytes : most_slots;
        for (Slot& slot : state_.slot) ptx::barrier_init(&slot.loaded, 1);
        ptx::fence_barrier_init();
        ptx::fence_shared_to_async();  // what threads wrote here before
    }

    static MK_DEVICE bool fits(Scratch scratch) { return scratch.bytes >= sizeof(State) + least_slots * least_bytes; }

    // The copy engine moves what is aligned to 16 bytes; short lines take it as long as longer ones.
    static MK_DEVICE bool takes(Lines to, Lines from, i64 bytes) { return bytes >= least_line && aligned(to, from, bytes); }
    // Of those it stores many at a time, if they lie together, that a warp has loaded.
    MK_DEVICE bool takes_short(const Agent& agent, Lines to, Lines from, i64 bytes) const {
        return agent.lanes() == 32 && bytes < least_line && to.pitch == bytes && aligned(to, from, bytes) &&
               state_.slots == most_slots;
    }

    // Puts a copy on the belt; `landed(signal)` for it, or for one before it, when all its bytes are there.
    template <class Landed>
    MK_DEVICE void put(Lines to, Lines from, i64 lines, i64 bytes, u64* signal, Landed landed) {
        if (to.pitch == bytes && from.pitch == bytes) bytes *= lines, lines = 1;
        const u32 length = bytes < state_.piece_bytes ? u32(bytes) : state_.piece_bytes;
        const u32 together = bytes < state_.piece_bytes ? state_.piece_bytes / length : 1;
        for (i64 line = 0; line < lines; line += together)
            for (i64 at = 0; at < bytes; at += length) {
                const u32 count = lines - line < together ? u32(lines - line) : together;
                const u32 run = bytes - at < length ? u32(bytes - at) : length;
                const bool last = line + together >= lines && at + length >= bytes;
                make_room(1, landed);
                load({to.data + line * to.pitch + at, to.pitch}, {from.data + line * from.pitch + at, from.pitch}, count,
                     run, last ? signal : nullptr);
            }
    }

    // The same of short lines, by all lanes of a warp. Before put() and drain() it is to settle().
    template <class Landed>
    MK_DEVICE void put_short(const Agent& warp, Lines to, Lines from, i64 lines, i64 bytes, u64* signal, Landed landed) {
        const bool leads = warp.lane() == 0;
        const u32 words = u32(bytes) / 16, together = state_.piece_bytes / u32(bytes), all = u32(lines);
        warp.sync();  // one lane has kept the account so far
        u32 in = state_.in, under_way = state_.under_way;
        warp.sync();
        for (u32 line = 0; line < all; line += together) {
            const u32 count = all - line < together ? all - line : together;
            if (under_way + 1 == most_slots) {
                settle<most_slots - 2>(warp);  // all but the oldest may still be loaded
                if (leads) make_room(1, landed);
                --under_way;
            }
            if (leads)
                enter({to.data + line * bytes, bytes}, 1, count * u32(bytes), line + together >= all ? signal : nullptr,
                      false);
            warp.sync();
            u8* there = piece(in);
            for (u32 i = warp.lane(); i < count * words; i += 32)
                ptx::copy_async(there + i * 16, from.data + (line + i / words) * from.pitch + i % words * 16);
            ptx::commit_copies();
            if (++in == most_slots) in = 0;
            ++under_way;
        }
    }

    // The copy engine may store what the lanes have loaded, but for the last pieces.
    template <u32 left>
    static MK_DEVICE void settle(const Agent& warp) {
        ptx::wait_copies<left>();
        ptx::fence_shared_to_async();
        warp.sync();
    }

    // Stores pieces, the oldest first, until `free` more can be loaded; all of them for so many as there are slots.
    template <class Landed>
    MK_DEVICE void make_room(u32 free, Landed landed) {
        for (; state_.under_way > 0 && state_.under_way + free >= state_.slots; --state_.under_way) {
            Slot& slot = state_.slot[state_.out];
            if (slot.by_engine) {
                ptx::wait(&slot.loaded, slot.parity);
                slot.parity ^= 1;
            }
            const Lines to = slot.to;
            const u32 bytes = slot.bytes, lines = slot.lines;
            const u8* from = piece(state_.out);
            MK_NO_UNROLL
            for (u32 i = 0; i < lines; ++i)
                if (ptx::elect<driver>()) ptx::store_bulk(to.data + i * to.pitch, from + i * bytes, bytes);
            ptx::commit_stores();
            if (state_.unsaid) {
                ptx::wait_stores<1>();
                say(landed);
            }
            state_.unsaid = slot.signal;
            if (++state_.out == state_.slots) state_.out = 0;
        }
    }

    template <class Landed>
    MK_DEVICE void drain(Landed landed) {
        make_room(most_slots, landed);
        ptx::wait_stores<0>();
        if (state_.unsaid) say(landed);
    }

private:
    static constexpr u32 least_slots = 3;  // one is loaded, one is stored, one is read by its store
    static constexpr u32 most_slots = 8;
    static constexpr u32 least_bytes = 1024, short_bytes = 2048, most_bytes = 32768;  // of a piece
    static constexpr i64 least_line = 512;
    static constexpr u32 driver = 1;  // as a set of lanes: lane 0, which compilers are told

    struct Slot {
        u64 loaded;  // an mbarrier
        Lines to;
        u32 lines, bytes, parity;
        bool by_engine;  // loaded
        u64* signal;     // of the copy that ends with this piece
    };
    struct alignas(16) State {
        u32 piece_bytes, slots, in, out, under_way;
        u64* unsaid;  // the signal of the last store, if it has one: it is said when the next is on its way
        Slot slot[most_slots];
    };

    template <class Landed>
    MK_DEVICE void say(Landed landed) {
        landed(state_.unsaid);
        state_.unsaid = nullptr;
    }

    static MK_DEVICE bool aligned(Lines to, Lines from, i64 bytes) {
        return (u64(to.data) | u64(from.data) | u64(to.pitch | from.pitch | bytes)) % 16 == 0;
    }

    MK_DEVICE u8* piece(u32 slot) const { return reinterpret_cast<u8*>(&state_ + 1) + slot * state_.piece_bytes; }

    MK_DEVICE void load(Lines to, Lines from, u32 lines, u32 bytes, u64* signal) {
        u8* there = piece(state_.in);
        const bool dense = to.pitch == bytes;  // where lines follow each other, one store does for all
        u64* loaded = enter(to, dense ? 1 : lines, dense ? lines * bytes : bytes, signal, true);
        ptx::arrive_expect(loaded, lines * bytes);
        MK_NO_UNROLL
        for (u32 i = 0; i < lines; ++i)
            if (ptx::elect<driver>()) ptx::load_bulk(there + i * bytes, from.data + i * from.pitch, bytes, loaded);
    }

    // Takes note of a piece, whose slot may then be loaded.
    MK_DEVICE u64* enter(Lines to, u32 lines, u32 bytes, u64* signal, bool by_engine) {
        ptx::wait_stores_read<1>();  // the store before the last one was of this slot
        Slot& slot = state_.slot[state_.in];
        slot.to = to, slot.lines = lines, slot.bytes = bytes, slot.signal = signal, slot.by_engine = by_engine;
        if (++state_.in == state_.slots) state_.in = 0;
        ++state_.under_way;
        return &slot.loaded;
    }

    State& state_;
};
#endif

// All lanes of the launch's agent call its members. `aligned`: all lines start at multiples of 16 bytes, and up to the
// next one behind their end they may be copied too.
template <bool aligned = false>
class Courier {
public:
    // What is under way lies in the scratch memory; where that is small, or none, copies go one by one.
    MK_DEVICE Courier(Context& launch, Scratch scratch)
        : launch_(launch), scratch_(scratch)
#if MK_BULK_COPIES
          ,
          belt_(scratch, launch.agent().lane() == 0)
#endif
    {
        launch.agent().sync();
    }

    // Starts a copy of `lines` runs of `bytes`; the signal is raised at the latest when finish() returns. Without one it
    // is part of what the next signal stands for: all copies up to that one are of one alignment.
    MK_DEVICE void send(Lines to, Lines from, i64 lines, i64 bytes, u64* signal) {
#if MK_BULK_COPIES
        if (aligned) bytes = (bytes + 15) / 16 * 16;
        const bool fits = Belt::fits(scratch_) && lines > 0 && bytes > 0;
        if (!aligned && fits && belt_.takes_short(launch_.agent(), to, from, bytes)) {
            belt_.put_short(launch_.agent(), to, from, lines, bytes, signal, [&](u64* of) { raise(of, Completed()); });
            loads_ = true;
            return;
        }
        if (aligned || (fits && Belt::takes(to, from, bytes))) {
            settle();
            if (launch_.agent().lane() == 0) {
                ptx::fence_global_to_async();  // this lane has acquired what the copy engine is to read
                belt_.put(to, from, lines, bytes, signal, [&](u64* of) { raise(of, Completed()); });
            }
            return;
        }
#endif
        const Completed copied = copy(launch_.agent(), to, from, lines, bytes).complete();
        if (signal) raise(signal, copied);
    }

    // The same of the lines that a list names.
    MK_DEVICE void send_listed(Lines to, Lines from, const u32* list, i64 lines, i64 bytes, u64* signal) {
#if MK_BULK_COPIES
        if (Belt::fits(scratch_) && lines > 0 && bytes > 0 && Belt::takes(to, from, bytes)) {
            settle();
            if (launch_.agent().lane() == 0) {
                ptx::fence_global_to_async();
                for (i64 i = 0; i < lines; ++i)
                    belt_.put({to.data + i * to.pitch, to.pitch}, {from.data + list[i] * from.pitch, from.pitch}, 1,
                              bytes, i + 1 < lines ? nullptr : signal, [&](u64* of) { raise(of, Completed()); });
            }
            return;
        }
#endif
        launch_.raise<Scope::device>(signal, 1, copy(launch_.agent(), to, from, list, lines, bytes).complete());
    }

    // When it returns, all copies are complete.
    MK_DEVICE void finish() {
#if MK_BULK_COPIES
        settle();
        if (launch_.agent().lane() == 0 && Belt::fits(scratch_)) belt_.drain([&](u64* of) { raise(of, Completed()); });
#endif
        launch_.agent().sync();
    }

private:
    MK_DEVICE void raise(u64* signal, Completed completed) { launch_.raise<Scope::device>(signal, 1, completed); }

    Context& launch_;
    Scratch scratch_;
#if MK_BULK_COPIES
    MK_DEVICE void settle() {
        if (!aligned && loads_) Belt::settle<0>(launch_.agent());
        loads_ = false;
    }

    Belt belt_;
    bool loads_ = false;  // pieces that a warp has loaded may be under way
#endif
};

}  // namespace mk
