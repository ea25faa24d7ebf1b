// Sums of few rows, where a message more costs more than its bytes. A rank tells its product to the owners of the rows; they
// add it up, and of gemm_allreduce tell the sums to all. Words of data are their own signals: 0 is in memory where nothing has
// come, and no word of data is. Whoever sees another one has the bits, without a fence or a second word, and makes it 0 again.
// They lie where no other kernel writes; and who tells has seen the receiver enter this call, by its message or by a word of
// its own: so the launches are over in which it made them 0.
#pragma once

#include "roles.cuh"
#include "sink.cuh"

namespace mk {

// Neighbours of a row, which are told together: two words at a time.
constexpr u32 told_together = 8;

template <class T>
struct alignas(8) Told {
    static constexpr u32 pairs = told_together * sizeof(T) / (2 * sizeof(u64));
    T values[told_together];

    MK_DEVICE void tell(u64* words) const {
        u64 data[2 * pairs];
        memcpy(data, values, sizeof values);
        MK_UNROLL
        for (u32 i = 0; i < pairs; ++i) store_pair(words + 2 * i, word_of(data[2 * i]), word_of(data[2 * i + 1]));
    }

private:
    // The complement. All bits set are values that are no numbers, as others are.
    static MK_DEVICE u64 word_of(u64 data) { return ~data ? ~data : u64(1) << 63; }
};

// The same on its way: what has been asked for need not have come.
template <class T>
class Asked {
public:
    MK_DEVICE void ask(const u64* words) {
        MK_UNROLL
        for (u32 i = 0; i < pairs; ++i) load_pair(words + 2 * i, words_[2 * i], words_[2 * i + 1]);
    }

    // The first of these words that has not come, or null.
    MK_DEVICE const u64* missing(const u64* words) const {
        const u64* first = nullptr;
        MK_UNROLL
        for (u32 i = 2 * pairs; i-- > 0;)
            if (!words_[i]) first = words + i;
        return first;
    }

    // Nothing has come there, for the next call.
    MK_DEVICE void forget(u64* words) const {
        MK_UNROLL
        for (u32 i = 0; i < pairs; ++i) store_pair(words + 2 * i, 0, 0);
    }

    MK_DEVICE Told<T> told() const {
        u64 data[2 * pairs];
        MK_UNROLL
        for (u32 i = 0; i < 2 * pairs; ++i) data[i] = ~words_[i];
        Told<T> told;
        memcpy(told.values, data, sizeof data);
        return told;
    }

private:
    static constexpr u32 pairs = Told<T>::pairs;
    u64 words_[2 * pairs];
};

// Stores rows of all ranks into a matrix that may have only some of them.
template <class T>
class StoreKept : public Store<T> {
public:
    MK_DEVICE StoreKept(const LowLatencyPlan& plan, const Matrix& to)
        : Store<T>(to, plan.kept_end - plan.kept_begin, &plan.first_row), plan_(&plan) {}

    // Boxes begin in the matrix: of one that is stored in front of it an H200 makes no end.
    MK_DEVICE const TensorMap* map(const Tile& tile, u32 box_rows) const {
        const bool begins = plan_->kept_begin <= tile.rows.begin && tile.rows.begin < plan_->kept_end;
        return begins ? Store<T>::map(tile, box_rows) : nullptr;
    }

    template <class View>
    MK_DEVICE Completed deliver(Launch& launch, const Tile& tile, View staged) const {
        Tile kept = tile;
        if (kept.rows.begin < plan_->kept_begin) kept.rows.begin = plan_->kept_begin;
        if (kept.rows.end > plan_->kept_end) kept.rows.end = plan_->kept_end;
        if (kept.rows.size() <= 0) return Writes().complete(launch.agent());
        return Store<T>::deliver(launch, kept, Lower<View>{staged, kept.rows.begin - tile.rows.begin});
    }

    // Some neighbours of a row that is kept.
    template <class Acc, u32 size>
    MK_DEVICE void put(const Tile& tile, u32 row, u32 column, u32 count, const Acc (&sums)[size]) const {
        T* at = this->place_of(tile) + row * this->to_->row_stride + column * this->to_->column_stride;
        MK_UNROLL
        for (u32 i = 0; i < size; ++i)
            if (i < count) at[i * this->to_->column_stride] = narrow<T>(sums[i]);
    }

private:
    // A part of a view, from some row on.
    template <class View>
    struct Lower {
        View view;
        i64 first;
        MK_DEVICE auto operator()(i64 row, i64 column) const { return view(first + row, column); }
        MK_DEVICE bool in_words() const { return view.in_words(); }
    };

    const LowLatencyPlan* plan_;
};

// Hands the sums of a tile over to those who add them, and keeps what becomes of them. All ranks do so tile by tile in the
// same order: whoever waits for a tile has told those before, and this one.
template <class Acc, class Partial, class Sum>
class Exchange {
public:
    using Type = Acc;
    using Result = Sum;
    static constexpr u32 together = told_together, partial_bytes = sizeof(Partial);
    MK_DEVICE Exchange(const LowLatencyPlan& plan, const Matrix& to) : plan_(&plan), kept_(plan, to) {}

    MK_DEVICE Acc transform(Acc sum) const { return sum; }

    // Owners of rows are told products; who is told sums has told products before. Others may have ended this call.
    MK_DEVICE bool begin(Launch& launch, const Tile& part) const {
        for (u64 peer : RingOrder(launch.rank(), launch.size()))
            if (has_some(peer, part.rows) && !launch.await_call(peer, plan_->reduction.digest)) return false;
        return launch.live();
    }

    template <class View>
    MK_DEVICE Completed deliver(Launch& launch, const Tile& piece, View staged) const {
        const u64 first = place_of(piece);
        const u32 across = u32(ceil_div(piece.columns.size(), told_together));
        auto place = [&](u32 i, u32 j) { return first + i * u64(plan_->reduction.tile.columns) + j * told_together; };
        auto left = [&](u32 j) { return u32(piece.columns.size()) - j * told_together; };
        auto some = [&](u32 i, u32 j, Acc(&sums)[told_together]) {
            const Acc* const from = staged(i, j * told_together);
            MK_UNROLL
            for (u32 c = 0; c < told_together; ++c) sums[c] = c < left(j) ? from[c] : Acc(0);
        };
        launch.apart([&](Launch& self) {
            spread(self.agent(), piece.rows.size(), across, [&](u32 i, u32 j) {
                Acc sums[told_together];
                some(i, j, sums);
                give<together>(self, owner(self, piece.rows.begin + i), place(i, j), 1, sums);
            });
            spread(self.agent(), piece.rows.size(), across, [&](u32 i, u32 j) {
                Acc sums[told_together];
                some(i, j, sums);
                if (add<together>(self, owner(self, piece.rows.begin + i), place(i, j), 1, sums))
                    kept_.put(piece, i, j * told_together, left(j), sums);
            });
            spread(self.agent(), piece.rows.size(), across, [&](u32 i, u32 j) {
                Acc sums[told_together];
                if (take<together>(self, owner(self, piece.rows.begin + i), place(i, j), 1, sums))
                    kept_.put(piece, i, j * told_together, left(j), sums);
            });
        });
        if (launch.agent().any(!launch.live())) launch.drop();
        return Writes().complete(launch.agent());
    }

    MK_DEVICE void end(Launch&, const Tile&, Completed) const {}

    // For an engine whose threads hand over what they have multiplied: each calls give() for all that it has of a tile, then
    // add(), then take(), and what its sums then are goes to results().
    MK_DEVICE const StoreKept<Result>& results() const { return kept_; }

    // Whose rows these are. The loads do not wait for each other.
    MK_DEVICE u64 owner(const Launch& launch, i64 row) const {
        u64 rank = 0;
        for (u64 other = 1; other < launch.size(); ++other) rank += row >= plan_->reduction.row_start[other];
        return rank;
    }

    // Where the elements of a part, or piece, begin among those of all tiles; the columns of a tile follow each other.
    MK_DEVICE u64 place_of(const Tile& part) const {
        const TileShape& tile = plan_->reduction.tile;
        const u32 rows = u32(tile.rows), columns = u32(tile.columns), row = u32(part.rows.begin), column = u32(part.columns.begin);
        const u32 number = row / rows * ceil_div(u32(plan_->reduction.n), columns) + column / columns;
        return (u64(number) * rows + row % rows) * columns + column % columns;
    }

    // Some of a row's sums, in groups of neighbours, each `apart` elements after the one before; of `count` there is something.
    template <u32 apart, u32 size>
    MK_DEVICE void give(const Launch& launch, u64 owner, u64 place, u32 count, const Acc (&sums)[size]) const {
        if (owner == launch.rank() || !launch.live()) return;
        const u64 distance = around(launch.rank(), launch.size() - owner, launch.size());
        tell<Partial, apart>(words_of(launch, owner) + partials(distance) + words<Partial>(place), count, sums);
    }

    // To an owner's sums those of the next rank are added, and so on around the ring. Returns whether they are this rank's.
    template <u32 apart, u32 size>
    MK_DEVICE bool add(Launch& launch, u64 owner, u64 place, u32 count, Acc (&sums)[size]) const {
        if (owner != launch.rank()) return false;
        Batch<Partial, apart, size / told_together> now, next;
        auto from = [&](u64 distance) {
            return words_of(launch, launch.rank()) + partials(distance) + words<Partial>(place);
        };
        if (launch.size() > 1) next.ask(from(1), count);
        MK_NO_UNROLL
        for (u64 distance = 1; distance < launch.size(); ++distance) {
            now = next;
            if (distance + 1 < launch.size()) next.ask(from(distance + 1), count);
            const u64 peer = around(launch.rank(), distance, launch.size());
            now.hear(launch, from(distance), count, {Awaited::partial, peer, place});
            MK_UNROLL
            for (u32 i = 0; i < size; i += told_together) {
                const Told<Partial> terms = now.told(i / told_together);
                MK_UNROLL
                for (u32 c = 0; c < told_together; ++c) sums[i + c] += widen(terms.values[c]);
            }
        }
        if (launch.live() && !plan_->scattered) {  // what has not come is no number, and so is the sum
            MK_UNROLL
            for (u32 i = 0; i < size; ++i)  // all ranks get the same bits
                if (sums[i] != sums[i]) sums[i] = not_a_number<Acc>();
            for (u64 peer : RingOrder(launch.rank(), launch.size()))
                tell<Result, apart>(words_of(launch, peer) + totals(launch) + words<Result>(place), count, sums);
        }
        return true;
    }

    // What another owner has made of its sums. Returns whether this rank keeps them.
    template <u32 apart, u32 size>
    MK_DEVICE bool take(Launch& launch, u64 owner, u64 place, u32 count, Acc (&sums)[size]) const {
        if (owner == launch.rank() || plan_->scattered) return false;
        Batch<Result, apart, size / told_together> totals_there;
        u64* const from = words_of(launch, launch.rank()) + totals(launch) + words<Result>(place);
        totals_there.ask(from, count);
        totals_there.hear(launch, from, count, {Awaited::sum, owner, place});
        MK_UNROLL
        for (u32 i = 0; i < size; i += told_together) {
            const Told<Result> terms = totals_there.told(i / told_together);
            MK_UNROLL
            for (u32 c = 0; c < told_together; ++c) sums[i + c] = launch.live() ? widen(terms.values[c]) : not_a_number<Acc>();
        }
        return true;
    }

private:
    static constexpr u32 quick_looks = 4;  // before one that waits, which takes a call

    // Groups that are asked for together.
    template <class T, u32 apart, u32 groups>
    struct Batch {
        static constexpr u32 step = apart * sizeof(T) / sizeof(u64);  // words
        Asked<T> asked[groups];

        MK_DEVICE void ask(const u64* from, u32 count) {
            MK_UNROLL
            for (u32 i = 0; i < groups; ++i)
                if (i < count) asked[i].ask(from + i * step);
        }
        // Waits until all have come, or that is in vain. What follows what has come mostly has, too: one look is for all.
        MK_DEVICE void hear(Launch& launch, u64* from, u32 count, Subject subject) {
            for (u32 looks = 0;; ++looks) {
                const u64* missing = nullptr;
                MK_UNROLL
                for (u32 i = groups; i-- > 0;)
                    if (i < count) {
                        const u64* const first = asked[i].missing(from + i * step);
                        missing = first ? first : missing;
                    }
                if (!missing || !launch.live()) break;
                if (looks >= quick_looks)
                    launch.apart([missing, subject](Launch& self) { self.wait_word(missing, subject); });
                ask(from, count);
            }
            MK_UNROLL
            for (u32 i = 0; i < groups; ++i)
                if (i < count) asked[i].forget(from + i * step);
        }
        MK_DEVICE Told<T> told(u32 i) const { return asked[i].told(); }
    };

    MK_DEVICE bool has_some(u64 rank, const Range& rows) const {
        const i64* const start = plan_->reduction.row_start + rank;
        return start[0] < start[1] && start[0] < rows.end && rows.begin < start[1];
    }

    // Words of a rank, and where among them are those of who is so far from the owner, and those of sums.
    MK_DEVICE u64* words_of(const Launch& launch, u64 rank) const {
        return static_cast<u64*>(launch.at(rank, plan_->words));
    }
    template <class T>
    static MK_DEVICE u64 words(u64 elements) { return elements * sizeof(T) / sizeof(u64); }
    MK_DEVICE u64 partials(u64 distance) const { return (distance - 1) * words<Partial>(plan_->elements); }
    MK_DEVICE u64 totals(const Launch& launch) const { return partials(launch.size()); }

    template <class T, u32 apart, u32 size>
    MK_DEVICE void tell(u64* to, u32 count, const Acc (&sums)[size]) const {
        MK_UNROLL
        for (u32 i = 0; i < size; i += told_together) {
            Told<T> told;
            MK_UNROLL
            for (u32 c = 0; c < told_together; ++c) told.values[c] = narrow<T>(sums[i + c]);
            if (i / told_together < count) told.tell(to + i / told_together * Batch<T, apart, 1>::step);
        }
    }

    const LowLatencyPlan* plan_;
    StoreKept<Result> kept_;
};
template <class Acc, class Partial, class Sum> constexpr bool exchanges_sums<Exchange<Acc, Partial, Sum>> = true;

// What comes in such words in one call; `together`: columns that are told together.
template <class Partial, class Sum>
MK_DEVICE void count_told(const Launch& launch, const LowLatencyPlan& plan, u32 together) {
    if (launch.member() > 0 || launch.agent().lane() > 0) return;
    const u64 rank = launch.rank(), columns = u64(ceil_div(plan.reduction.n, together)) * together;
    const u64 own = u64(plan.reduction.row_start[rank + 1] - plan.reduction.row_start[rank]);
    const u64 others = plan.scattered ? 0 : u64(plan.kept_end) - own;
    const u64 bytes = ((launch.size() - 1) * own * sizeof(Partial) + others * sizeof(Sum)) * columns;
    fetch_add(launch.world().bytes_from_peers, bytes);
}

}  // namespace mk
