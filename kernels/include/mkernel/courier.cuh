// A stream of copies to this rank, several under way at a time: each raises a signal when its bytes are there.
#pragma once

#include "copy.cuh"
#if MK_BULK_COPIES
#include "ptx.cuh"
#endif

namespace mk {

#if MK_BULK_COPIES
// A ring of pieces that the multiprocessor's copy engine brings through shared memory. One thread drives it.
class Belt {
public:
    MK_DEVICE Belt(Scratch scratch, bool drives) : piece_bytes_(most_bytes), data_(scratch.data) {
        auto fit = [&] { return u32(scratch.bytes / (piece_bytes_ + sizeof(Slot))); };
        while (fit() <= least_slots && piece_bytes_ > least_bytes) piece_bytes_ /= 2;
        slots_ = fit() < most_slots ? fit() : most_slots;
        controls_ = reinterpret_cast<Slot*>(data_ + slots_ * piece_bytes_);
        if (!drives) return;
        for (u32 i = 0; i < slots_; ++i) ptx::barrier_init(&controls_[i].loaded, 1);
        ptx::fence_barrier_init();
    }

    // The copy engine moves what is aligned to 16 bytes.
    MK_DEVICE bool takes(Lines to, Lines from, i64 bytes) const {
        return slots_ >= least_slots && (u64(to.data) | u64(from.data) | u64(to.pitch | from.pitch | bytes)) % 16 == 0;
    }

    // Puts a copy on the belt; `landed(signal)` for it, or for one before it, when all its bytes are there.
    template <class Landed>
    MK_DEVICE void put(Lines to, Lines from, i64 lines, i64 bytes, u64* signal, Landed landed) {
        if (to.pitch == bytes && from.pitch == bytes) bytes *= lines, lines = 1;
        const i64 length = bytes < piece_bytes_ ? bytes : piece_bytes_, together = length > 0 ? piece_bytes_ / length : 1;
        for (i64 line = 0; line < lines; line += together)
            for (i64 at = 0; at < bytes; at += length) {
                const u32 count = u32(lines - line < together ? lines - line : together);
                const u32 run = u32(bytes - at < length ? bytes - at : length);
                const bool last = line + together >= lines && at + length >= bytes;
                if (under_way_ == slots_ - 1) unload(landed);
                load({to.data + line * to.pitch + at, to.pitch}, {from.data + line * from.pitch + at, from.pitch}, count,
                     run, last ? signal : nullptr);
            }
    }

    template <class Landed>
    MK_DEVICE void drain(Landed landed) {
        while (under_way_ > 0) unload(landed);
    }

private:
    static constexpr u32 least_slots = 3;  // one is loaded, one is stored, one is read by its store
    static constexpr u32 most_slots = 8, least_bytes = 1024, most_bytes = 16384;  // of a piece

    struct Slot {
        u64 loaded;  // an mbarrier
        Lines to;
        u32 lines, bytes;
        u64* signal;  // of the copy that ends with this piece
    };
    struct Cursor {
        u32 slot = 0, parity = 0;
        MK_DEVICE void advance(u32 slots) {
            if (++slot == slots) slot = 0, parity ^= 1;
        }
    };

    MK_DEVICE void load(Lines to, Lines from, u32 lines, u32 bytes, u64* signal) {
        ptx::wait_stores_read<1>();  // the store before the last one was of this slot
        Slot& slot = controls_[in_.slot];
        slot.to = to, slot.lines = lines, slot.bytes = bytes, slot.signal = signal;
        ptx::arrive_expect(&slot.loaded, lines * bytes);
        for (u32 i = 0; i < lines; ++i)
            ptx::load_bulk(data_ + in_.slot * piece_bytes_ + i * bytes, from.data + i * from.pitch, bytes, &slot.loaded);
        in_.advance(slots_);
        ++under_way_;
    }

    // Stores the oldest piece.
    template <class Landed>
    MK_DEVICE void unload(Landed landed) {
        const Slot& slot = controls_[out_.slot];
        ptx::wait(&controls_[out_.slot].loaded, out_.parity);
        for (u32 i = 0; i < slot.lines; ++i)
            ptx::store_bulk(slot.to.data + i * slot.to.pitch, data_ + out_.slot * piece_bytes_ + i * slot.bytes,
                            slot.bytes);
        ptx::commit_stores();
        if (slot.signal) {
            ptx::wait_stores<0>();
            landed(slot.signal);
        }
        out_.advance(slots_);
        --under_way_;
    }

    u32 piece_bytes_, slots_;
    u8* data_;
    Slot* controls_;
    Cursor in_, out_;
    u32 under_way_ = 0;
};
#endif

// All lanes of the launch's agent call its members. `aligned`: all lines start at multiples of 16 bytes, and up to the
// next one behind their end they may be copied too.
template <bool aligned = false>
class Courier {
public:
    // What is under way lies in the scratch memory; where that is small, or none, copies go one by one.
    MK_DEVICE Courier(Context& launch, [[maybe_unused]] Scratch scratch)
        : launch_(launch)
#if MK_BULK_COPIES
          ,
          belt_(scratch, launch.agent().lane() == 0)
#endif
    {
    }

    // Starts a copy of `lines` runs of `bytes`; the signal is raised at the latest when finish() returns.
    MK_DEVICE void send(Lines to, Lines from, i64 lines, i64 bytes, u64* signal) {
#if MK_BULK_COPIES
        if (aligned) bytes = (bytes + 15) / 16 * 16;
        if (aligned || (lines > 0 && bytes > 0 && belt_.takes(to, from, bytes))) {
            if (launch_.agent().lane() == 0)
                belt_.put(to, from, lines, bytes, signal, [&](u64* of) { raise(of, Completed()); });
            return;
        }
#endif
        raise(signal, copy(launch_.agent(), to, from, lines, bytes).complete());
    }

    // When it returns, all copies are complete.
    MK_DEVICE void finish() {
#if MK_BULK_COPIES
        if (launch_.agent().lane() == 0) belt_.drain([&](u64* of) { raise(of, Completed()); });
#endif
        launch_.agent().sync();
    }

private:
    MK_DEVICE void raise(u64* signal, Completed completed) { launch_.raise<Scope::device>(signal, 1, completed); }

    Context& launch_;
#if MK_BULK_COPIES
    Belt belt_;
#endif
};

}  // namespace mk
