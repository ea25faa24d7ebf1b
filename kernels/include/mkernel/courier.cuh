// A stream of copies to this rank, several under way at a time: each raises a signal when its bytes are there.
#pragma once

#include "copy.cuh"
#if MK_BULK_COPIES
#include "ptx.cuh"
#endif

namespace mk {

#if MK_BULK_COPIES
// A ring of pieces that the multiprocessor's copy engine brings through shared memory. Lane 0 of a warp drives it and keeps
// the account; what is to become of a piece stands in its slot.
class Belt {
public:
    MK_DEVICE Belt(Scratch scratch, bool drives) : slot_(reinterpret_cast<Slot*>(scratch.data)) {
        if (!drives || !fits(scratch)) return;
        // The fewer pieces, the less time goes with them; but while some are stored, others have to come.
        const u32 bytes = u32(scratch.bytes), beside = sizeof(Slot);
        while (piece_bytes_ > least_bytes && most_slots * (piece_bytes_ + beside) > bytes) piece_bytes_ /= 2;
        slots_ = bytes / (piece_bytes_ + beside);
        if (slots_ > most_slots) slots_ = most_slots;
        for (u32 i = 0; i < slots_; ++i) ptx::barrier_init(&slot_[i].loaded, 1);
        ptx::fence_barrier_init();
        ptx::fence_shared_to_async();  // what threads wrote here before
    }

    static MK_DEVICE bool fits(Scratch scratch) { return scratch.bytes >= least_slots * (least_bytes + sizeof(Slot)); }

    // The copy engine moves what is aligned to 16 bytes; short lines take it as long as longer ones.
    static MK_DEVICE bool takes(Lines to, Lines from, i64 bytes) {
        const u64 all = u64(to.data) | u64(from.data) | u64(to.pitch | from.pitch | bytes);
        return bytes >= least_line && all % 16 == 0;
    }

    // Puts a copy on the belt; `landed(signal)` for it, or for one before it, when all its bytes are there.
    template <class Landed>
    MK_DEVICE void put(Lines to, Lines from, i64 lines, i64 bytes, u64* signal, Landed landed) {
        if (to.pitch == bytes && from.pitch == bytes) bytes *= lines, lines = 1;
        const u32 length = bytes < piece_bytes_ ? u32(bytes) : piece_bytes_;
        const u32 together = bytes < piece_bytes_ ? piece_bytes_ / length : 1;
        for (i64 line = 0; line < lines; line += together)
            for (i64 at = 0; at < bytes; at += length) {
                const u32 count = lines - line < together ? u32(lines - line) : together;
                const u32 run = bytes - at < length ? u32(bytes - at) : length;
                const bool last = line + together >= lines && at + length >= bytes;
                store_loaded(landed);
                make_room(1, landed);
                load({to.data + line * to.pitch + at, to.pitch}, {from.data + line * from.pitch + at, from.pitch}, count,
                     run, last ? signal : nullptr);
            }
    }

    // The memory may be used again.
    MK_DEVICE void retire() {
        for (u32 i = 0; i < slots_; ++i) ptx::barrier_invalidate(&slot_[i].loaded);
    }

    template <class Landed>
    MK_DEVICE void drain(Landed landed) {
        make_room(most_slots, landed);
        say(landed);
        ptx::wait_stores<0>();
    }

    // Stores what has been loaded, and says so. It does not wait for what is still to come.
    template <class Landed>
    MK_DEVICE void go_on(Landed landed) {
        store_loaded(landed);
        say(landed);
    }

private:
    static constexpr u32 least_slots = 3;  // one is loaded, one is stored, one is read by its store
    static constexpr u32 most_slots = 8;   // on two H200 links carry a sixth more than with 4
    static constexpr u32 least_bytes = 1024, most_bytes = 32768;  // of a piece
    static constexpr i64 least_line = 512;
    static constexpr u32 driver = 1;  // as a set of lanes: lane 0, which compilers are told

    struct alignas(16) Slot {
        u64 loaded;  // an mbarrier
        u64* signal;  // of the copy that ends with this piece
        Lines to;
        u32 lines, bytes;
    };

    template <class Landed>
    MK_DEVICE void store_loaded(Landed landed) {
        while (under_way_ > 0 && ptx::completed(&slot_[out_].loaded, out_parity_)) store_oldest(landed);
    }

    // Stores pieces, the oldest first, until `free` more can be loaded; all of them for so many as there are slots.
    template <class Landed>
    MK_DEVICE void make_room(u32 free, Landed landed) {
        while (under_way_ > 0 && under_way_ + free >= slots_) {
            if (!ptx::completed(&slot_[out_].loaded, out_parity_)) say(landed);  // it would be said late
            ptx::wait(&slot_[out_].loaded, out_parity_);
            store_oldest(landed);
        }
    }

    template <class Landed>
    MK_DEVICE void store_oldest(Landed landed) {
        const Slot& slot = slot_[out_];
        const Lines to = slot.to;
        const u32 bytes = slot.bytes, lines = slot.lines;
        const u8* from = piece(out_);
        MK_NO_UNROLL
        for (u32 i = 0; i < lines; ++i)
            if (ptx::elect<driver>()) ptx::store_bulk(to.data + i * to.pitch, from + i * bytes, bytes);
        ptx::commit_stores();
        if (unsaid_) {
            ptx::wait_stores<1>();
            landed(unsaid_);
        }
        unsaid_ = slot.signal;
        if (++out_ == slots_) out_ = 0, out_parity_ ^= 1;
        --under_way_;
    }

    // Waits until all is stored, if there is something to say then.
    template <class Landed>
    MK_DEVICE void say(Landed landed) {
        if (!unsaid_) return;
        ptx::wait_stores<0>();
        landed(unsaid_);
        unsaid_ = nullptr;
    }

    MK_DEVICE u8* piece(u32 slot) const { return reinterpret_cast<u8*>(slot_ + slots_) + slot * piece_bytes_; }

    MK_DEVICE void load(Lines to, Lines from, u32 lines, u32 bytes, u64* signal) {
        ptx::wait_stores_read<1>();  // the store before the last one was of this slot
        const u32 in = out_ + under_way_, free = in < slots_ ? in : in - slots_;
        Slot& slot = slot_[free];
        u8* there = piece(free);
        const bool dense = to.pitch == bytes;  // where lines follow each other, one store does for all
        slot.to = to, slot.lines = dense ? 1 : lines, slot.bytes = dense ? lines * bytes : bytes, slot.signal = signal;
        ptx::arrive_expect(&slot.loaded, lines * bytes);
        MK_NO_UNROLL
        for (u32 i = 0; i < lines; ++i)
            if (ptx::elect<driver>()) ptx::load_bulk(there + i * bytes, from.data + i * from.pitch, bytes, &slot.loaded);
        ++under_way_;
    }

    Slot* slot_;
    u32 piece_bytes_ = most_bytes, slots_ = 0, out_ = 0, out_parity_ = 0, under_way_ = 0;
    u64* unsaid_ = nullptr;  // the signal of the last store, if it has one: it is said when the next is on its way
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
        if (aligned || (Belt::fits(scratch_) && lines > 0 && Belt::takes(to, from, bytes))) {
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
        if (Belt::fits(scratch_) && lines > 0 && Belt::takes(to, from, bytes)) {
            if (launch_.agent().lane() == 0) {
                ptx::fence_global_to_async();
                u32 next = list[0];  // loaded while the one before is on its way
                for (i64 i = 0; i < lines; ++i) {
                    u8* line = from.data + next * from.pitch;
                    const bool last = i + 1 == lines;
                    if (!last) next = list[i + 1];
                    belt_.put({to.data + i * to.pitch, to.pitch}, {line, from.pitch}, 1, bytes,
                              last ? signal : nullptr, [&](u64* of) { raise(of, Completed()); });
                }
            }
            return;
        }
#endif
        launch_.raise<Scope::device>(signal, 1, copy(launch_.agent(), to, from, list, lines, bytes).complete());
    }

    // For when there is nothing to send at the moment: says what has come, which else waits for the next.
    MK_DEVICE void go_on() {
#if MK_BULK_COPIES
        if (launch_.agent().lane() == 0 && Belt::fits(scratch_)) belt_.go_on([&](u64* of) { raise(of, Completed()); });
#endif
    }

    // When it returns, all copies are complete.
    MK_DEVICE void finish() {
#if MK_BULK_COPIES
        if (launch_.agent().lane() == 0 && Belt::fits(scratch_)) belt_.drain([&](u64* of) { raise(of, Completed()); });
#endif
        launch_.agent().sync();
    }

    // After finish(): the scratch memory may be used for something else.
    MK_DEVICE void retire() {
#if MK_BULK_COPIES
        belt_.retire();  // others have no slots
#endif
        launch_.agent().sync();
    }

private:
    MK_DEVICE void raise(u64* signal, Completed completed) { launch_.raise<Scope::device>(signal, 1, completed); }

    Context& launch_;
    Scratch scratch_;
#if MK_BULK_COPIES
    Belt belt_;
#endif
};

}  // namespace mk
