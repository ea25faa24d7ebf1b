// What experts have made of tokens, weighted and added up: first at each rank over the rows of a token there, then at the
// rank that has the token over the ranks.
#pragma once

#include "sink.cuh"

namespace mk {

// Neighbouring elements, which are loaded and stored at once.
template <class T, u32 width>
struct alignas(width * sizeof(T) < 16 ? width * sizeof(T) : 16) Pack { T elements[width]; };

// T: of the rows and of the result; Partial: of sums on their way. A sum crosses the link once per token and rank.
template <class T, class Partial>
class Combination {
public:
    using Acc = Accumulator<T>;

    // `rows`: those of the experts here, and how many there are.
    MK_DEVICE Combination(Launch& launch, const CombinePlan& plan, const Matrix& rows, i64 row_count)
        : launch_(launch), plan_(plan), rows_(rows), row_count_(row_count) {}

    // A row is made of a token of `source`, which has called, because of one of its slots. One lane says so.
    MK_DEVICE void note(i64 row, u64 source, i64 token, i64 slot) const {
        const Acc* weights = static_cast<const Acc*>(launch_.at(source, plan_.weights));
        factors_of(source, token)[slot] = weights[token * plan_.slots + slot];
        words_of(source, token)[slot] = launch_.target(u64(row));
    }

    // This compute agent has made and noted all its rows.
    MK_DEVICE void computed() {
        launch_.raise<Scope::device>(&plan_.computed[launch_.member()], 1, Writes().complete(launch_.agent()));
    }

    // Forms this agent's share of the sums for a peer that has called.
    MK_DEVICE void sum_for(u64 peer) {
        if (!await_rows()) return;
        if (in_packs(rows_)) sum_for<whole_packs>(peer);
        else sum_for<1>(peer);
    }

    // Adds up this agent's share of this rank's tokens, rank by rank, and stores them. All agents of the launch have one.
    MK_DEVICE void collect(i64 tokens, const Matrix& out) {
        const bool fine = await_rows();
        if (in_packs(rows_) && in_packs(out)) collect<whole_packs>(tokens, out, fine);
        else collect<1>(tokens, out, fine);
        const Agent& agent = launch_.agent();
        agent.sync();  // all lanes have read what the peers may now overwrite
        if (agent.lane() == 0) fetch_add(launch_.world().bytes_from_peers, brought_);
    }

private:
    static constexpr u32 whole_packs = u32(16 / sizeof(T));
    template <u32 width>
    using Sums = Acc[width];

    // Whether packs of a matrix of these columns are contiguous and aligned.
    MK_DEVICE bool in_packs(const Matrix& m) const {
        const u64 places = u64(m.data) | u64(m.row_stride * i64(sizeof(T))) | u64(plan_.n * i64(sizeof(T)));
        return m.column_stride == 1 && places % 16 == 0;
    }

    template <u32 width>
    MK_DEVICE void sum_for(u64 peer) {
        const Agent& agent = launch_.agent();
        for (i64 chunk = i64(launch_.member()); chunk < plan_.chunks; chunk += i64(launch_.members())) {
            const Range tokens = block(chunk, plan_.chunk_tokens, plan_.max_tokens);
            for (i64 token = tokens.begin; token < tokens.end; ++token) {
                if (!has_rows(peer, token)) continue;
                Partial* to = sums_at(launch_.rank(), peer, token);
                each_column<width>([&](i64 column) {
                    Sums<width> sums;
                    add_rows<width>(sums, peer, token, column);
                    Pack<Partial, width> partial;
                    MK_UNROLL
                    for (u32 i = 0; i < width; ++i) partial.elements[i] = narrow<Partial>(sums[i]);
                    *reinterpret_cast<Pack<Partial, width>*>(to + column) = partial;
                });
                if (agent.lane() == 0) sent_at(peer, launch_.rank())[token] = launch_.target(1);
            }
            launch_.raise<Scope::system>(&summed_at(peer, launch_.rank())[chunk], 1, Writes().complete(agent));
        }
    }

    template <u32 width>
    MK_DEVICE void collect(i64 tokens, const Matrix& out, bool fine) {
        const Agent& agent = launch_.agent();
        const u64 rank = launch_.rank(), size = launch_.size();
        for (i64 chunk = agent.index(); chunk * plan_.chunk_tokens < tokens; chunk += agent.count()) {
            auto peer = [&](u64 i) { return around(rank, 1 + i, size); };
            fine = fine && launch_.wait_all(
                               size - 1, 1, [&](u64 i) { return &summed_at(rank, peer(i))[chunk]; },
                               [&](u64 i) { return Subject{Awaited::partial, peer(i), u64(chunk)}; });
            const Range part = block(chunk, plan_.chunk_tokens, tokens);
            for (i64 token = part.begin; token < part.end; ++token) {
                T* to = static_cast<T*>(out.data) + token * out.row_stride;
                each_column<width>([&](i64 column) {
                    Sums<width> total = {};
                    if (fine) add_ranks<width>(total, token, column);
                    Pack<T, width> result;
                    MK_UNROLL
                    for (u32 i = 0; i < width; ++i)
                        result.elements[i] = fine ? narrow<T>(total[i]) : not_a_number<T>();
                    *reinterpret_cast<Pack<T, width>*>(to + column * out.column_stride) = result;
                });
                for (u64 source = 0; fine && source < size; ++source)
                    if (source != rank && has_sum(source, token)) brought_ += u64(plan_.n) * sizeof(Partial);
            }
        }
    }

    template <u32 width, class Visit>
    MK_DEVICE void each_column(Visit visit) const {
        const i64 step = i64(launch_.agent().lanes()) * width;
        for (i64 column = i64(launch_.agent().lane()) * width; column < plan_.n; column += step) visit(column);
    }

    MK_DEVICE i64 index(u64 source, i64 token) const { return i64(source) * plan_.max_tokens + token; }
    MK_DEVICE u64* words_of(u64 source, i64 token) const { return plan_.rows + index(source, token) * plan_.slots; }
    MK_DEVICE Acc* factors_of(u64 source, i64 token) const {
        return static_cast<Acc*>(plan_.factors) + index(source, token) * plan_.slots;
    }
    MK_DEVICE Partial* sums_at(u64 at, u64 source, i64 token) const {
        u8* first = static_cast<u8*>(launch_.at(at, plan_.sums));
        return reinterpret_cast<Partial*>(first + index(source, token) * plan_.pitch);
    }
    MK_DEVICE u64* sent_at(u64 at, u64 by) const {
        return static_cast<u64*>(launch_.at(at, plan_.sent)) + index(by, 0);
    }
    MK_DEVICE u64* summed_at(u64 at, u64 by) const {
        return static_cast<u64*>(launch_.at(at, plan_.summed)) + by * u64(plan_.chunks);
    }

    MK_DEVICE bool await_rows() {
        return launch_.wait_all(
            plan_.computing, 1, [&](u64 i) { return &plan_.computed[i]; },
            [](u64 i) { return Subject{Awaited::rows, everyone, i}; });
    }

    // Whether there is a row of a token of `source` here; and whether another rank has a sum for one of this rank's.
    MK_DEVICE bool has_rows(u64 source, i64 token) const {
        const u64* words = words_of(source, token);
        for (i64 slot = 0; slot < plan_.slots; ++slot)
            if (words[slot] >= launch_.target(0)) return true;
        return false;
    }
    MK_DEVICE bool has_sum(u64 source, i64 token) const {
        return sent_at(launch_.rank(), source)[token] >= launch_.target(0);
    }

    // From a column on, the sum over the slots of a token that have a row here, in their order.
    template <u32 width>
    MK_DEVICE void add_rows(Sums<width>& sums, u64 source, i64 token, i64 column) const {
        const Acc* weights = factors_of(source, token);
        const u64* words = words_of(source, token);
        MK_UNROLL
        for (u32 i = 0; i < width; ++i) sums[i] = 0;
        for (i64 slot = 0; slot < plan_.slots; ++slot) {
            if (words[slot] < launch_.target(0)) continue;
            const i64 row = i64(words[slot] - launch_.target(0));
            // A caller may have kept fewer rows than there are: what they were is not known.
            const Acc weight = row < row_count_ ? weights[slot] : not_a_number<Acc>();
            const T* from = static_cast<const T*>(rows_.data) + (row < row_count_ ? row * rows_.row_stride : 0);
            Pack<T, width> pack = {};
            if (row < row_count_) pack = *reinterpret_cast<const Pack<T, width>*>(from + column * rows_.column_stride);
            MK_UNROLL
            for (u32 i = 0; i < width; ++i) sums[i] += weight * Acc(widen(pack.elements[i]));
        }
    }

    // From a column on, the sum over the ranks, in their order, for one of this rank's tokens.
    template <u32 width>
    MK_DEVICE void add_ranks(Sums<width>& total, i64 token, i64 column) const {
        const u64 rank = launch_.rank();
        MK_UNROLL
        for (u32 i = 0; i < width; ++i) total[i] = 0;
        for (u64 source = 0; source < launch_.size(); ++source) {
            Sums<width> sums;
            if (source == rank) {
                if (!has_rows(rank, token)) continue;
                add_rows<width>(sums, rank, token, column);
            } else {
                if (!has_sum(source, token)) continue;
                const Partial* from = sums_at(source, rank, token) + column;
                const Pack<Partial, width> partial = *reinterpret_cast<const Pack<Partial, width>*>(from);
                MK_UNROLL
                for (u32 i = 0; i < width; ++i) sums[i] = widen(partial.elements[i]);
            }
            MK_UNROLL
            for (u32 i = 0; i < width; ++i) total[i] += sums[i];
        }
    }

    Launch& launch_;
    const CombinePlan& plan_;
    const Matrix& rows_;
    i64 row_count_;
    u64 brought_ = 0;  // bytes
};

}  // namespace mk
