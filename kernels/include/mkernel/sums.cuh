// Sums over ranks that peers have pushed to slots here, until they are stored.
#pragma once

#include "reduction.cuh"
#if MK_BULK_COPIES
#include "ptx.cuh"
#endif

namespace mk {

// As a slot holds them row by row. All lanes of the launch's agent call the members.
template <class T, bool by_strips>
class Sums {
public:
    MK_DEVICE Sums(Launch& launch, const GemmAllReducePlan& plan, Scratch)
        : launch_(launch), parts_(plan.reduction), zone_(launch, plan.sums) {}

    // Waits for a part of a peer's and starts to store it.
    MK_DEVICE void collect(const Tile& part, const Store<T>& store) {
        u8* landed = await(part);
        if (!landed) return store.fill(launch_.agent(), part, not_a_number<T>());
        parts_.each_piece(part, [&](const Tile& piece) {
            T* first = reinterpret_cast<T*>(landed) + parts_.place(piece);
            store.bring(launch_, piece, Staged<T>{first, piece.columns.size()});
        });
    }

    // When it returns, all have been stored.
    MK_DEVICE void finish() {}

protected:
    // Where a part is when it is here; null after a failure.
    MK_DEVICE u8* await(const Tile& part) {
        const i64 number = parts_.over_all(part);
        const Subject sum{Awaited::sum, part.source, u64(number)};
        if (!launch_.wait(launch_.agent(), zone_.signal(launch_.rank(), number), 1, sum)) return nullptr;
        const bool by_network = several_nodes && launch_.holder(part.source) == launch_.rank();
        if (!by_network && launch_.agent().lane() == 0) fetch_add(launch_.world().bytes_from_peers, bytes_of<T>(part));
        return zone_.slot(launch_.rank(), number);
    }

    Launch& launch_;
    Parts parts_;
    Zone zone_;
};

#if MK_BULK_COPIES
// As a slot holds them by strips, which the copy engine takes as they are: through shared memory into a matrix that has a
// map. Lane 0 of a warp drives it. Where there is no room for that, lanes store them.
template <class T>
class Sums<T, true> : Sums<T, false> {
public:
    MK_DEVICE Sums(Launch& launch, const GemmAllReducePlan& plan, Scratch scratch) : Sums<T, false>(launch, plan, scratch) {
        // Strips are swizzled by where they lie in so many bytes.
        constexpr u32 pattern = 8 * Strip<T>::line_bytes;
        const u64 begin = reinterpret_cast<u64>(scratch.data), first = (begin + pattern - 1) / pattern * pattern;
        const u64 room = begin + scratch.bytes;
        slots_ = room < first ? 0 : u32((room - first) / (Strip<T>::bytes + sizeof(Slot)));
        if (slots_ > most_slots) slots_ = most_slots;
        strips_ = reinterpret_cast<u8*>(first);
        slot_ = reinterpret_cast<Slot*>(strips_ + slots_ * Strip<T>::bytes);
        if (!drives()) return;
        for (u32 i = 0; i < slots_; ++i) ptx::barrier_init(&slot_[i].loaded, 1);
        ptx::fence_barrier_init();
        ptx::fence_shared_to_async();  // what threads wrote here before
    }

    MK_DEVICE void collect(const Tile& part, const Store<T>& store) {
        u8* landed = this->await(part);
        if (!landed) return store.fill(this->launch_.agent(), part, not_a_number<T>());
        const TensorMap* map = slots_ > 0 ? store.map(part, Strip<T>::rows) : nullptr;
        if (map && drives()) {
            ptx::acquire_map(map);
            ptx::fence_global_to_async();  // this lane has acquired what the copy engine is to read
        }
        const i64 shift = store.first_row(part) - part.rows.begin;
        this->parts_.template each_strip<T>(part, [&](const Tile& piece, u32 number) {
            u8* strip = landed + number * Strip<T>::bytes;
            if (!map) store.bring(this->launch_, piece, Strip<T>{strip});
            else if (drives()) send(strip, map, i32(piece.columns.begin), i32(piece.rows.begin + shift));
        });
    }

    MK_DEVICE void finish() {
        this->launch_.agent().sync();
        if (!drives()) return;
        while (stored_ < sent_) store_oldest();
        ptx::wait_stores<0>();
        for (u32 i = 0; i < slots_; ++i) ptx::barrier_invalidate(&slot_[i].loaded);
    }

private:
    static constexpr u32 most_slots = 4;
    struct Slot {
        u64 loaded;  // an mbarrier
        const TensorMap* map;
        i32 x, y;
    };

    MK_DEVICE bool drives() const { return this->launch_.agent().lane() == 0; }

    MK_DEVICE void send(const u8* strip, const TensorMap* map, i32 x, i32 y) {
        if (sent_ - stored_ == slots_) store_oldest();
        ptx::wait_stores_read<0>();  // the last one may have been of this slot
        const u32 place = sent_++ % slots_;
        Slot& slot = slot_[place];
        slot.map = map, slot.x = x, slot.y = y;
        ptx::arrive_expect(&slot.loaded, Strip<T>::bytes);
        ptx::load_bulk(strips_ + place * Strip<T>::bytes, strip, Strip<T>::bytes, &slot.loaded);
    }

    MK_DEVICE void store_oldest() {
        const u32 place = stored_ % slots_;
        Slot& slot = slot_[place];
        ptx::wait(&slot.loaded, stored_++ / slots_ % 2);
        ptx::store_box(slot.map, strips_ + place * Strip<T>::bytes, slot.x, slot.y);
        ptx::commit_stores();
    }

    u8* strips_;
    Slot* slot_;
    u32 slots_, sent_ = 0, stored_ = 0;
};
#endif

}  // namespace mk
