// What experts have made of tokens, weighted and added up: first at each rank over the rows of a token there, then at the
// rank that has the token over the ranks.
#pragma once

#include "sink.cuh"

namespace mk {

// T: of the rows and of the result; Partial: of sums on their way. A sum crosses the link once per token and rank.
template <class T, class Partial>
class Combination {
public:
    using Acc = Accumulator<T>;

    // `rows`: those of the experts here.
    MK_DEVICE Combination(Launch& launch, const CombinePlan& plan, const Matrix& rows)
        : launch_(launch), plan_(plan), rows_(rows) {}

    // A row is made of a token of `source`, because of one of its slots. One lane says so.
    MK_DEVICE void note(i64 row, u64 source, i64 token, i64 slot) const {
        row_words(launch_.rank(), source, token)[slot] = launch_.target(u64(row));
    }

    // This compute agent has made and noted all its rows.
    MK_DEVICE void computed() {
        launch_.raise<Scope::device>(&plan_.computed[launch_.member()], 1, Writes().complete(launch_.agent()));
    }

    // Forms this agent's share of the sums for a peer that has called.
    MK_DEVICE void sum_for(u64 peer) {
        if (!await_rows()) return;
        const Agent& agent = launch_.agent();
        for (i64 chunk = i64(launch_.member()); chunk < plan_.chunks; chunk += i64(launch_.members())) {
            const Range tokens = block(chunk, plan_.chunk_tokens, plan_.max_tokens);
            for (i64 token = tokens.begin; token < tokens.end; ++token) {
                if (!sends(launch_.rank(), peer, token)) continue;
                Acc* sums = line(0);
                add_rows(sums, peer, token);
                Partial* to = sums_at(launch_.rank(), peer, token);
                for (i64 i = agent.lane(); i < plan_.n; i += agent.lanes()) to[i] = narrow<Partial>(sums[i]);
            }
            launch_.raise<Scope::system>(&summed_at(peer, launch_.rank())[chunk], 1, Writes().complete(agent));
        }
    }

    // Adds this agent's share of this rank's tokens up, rank by rank, and stores them.
    MK_DEVICE void collect(i64 tokens, const Matrix& out) {
        const Agent& agent = launch_.agent();
        const u64 rank = launch_.rank();
        u64 brought = 0;
        for (i64 chunk = i64(launch_.member()); chunk * plan_.chunk_tokens < tokens; chunk += i64(launch_.members())) {
            bool here = await_rows();
            for (u64 peer : RingOrder(rank, launch_.size()))
                here = here && launch_.wait(agent, &summed_at(rank, peer)[chunk], 1,
                                            {Awaited::partial, peer, u64(chunk)});
            const Range part = block(chunk, plan_.chunk_tokens, tokens);
            for (i64 token = part.begin; token < part.end; ++token) {
                Acc *total = line(0), *own = line(1);
                each_column([&](i64 i) { total[i] = 0; });
                for (u64 source = 0; here && source < launch_.size(); ++source) {
                    if (!sends(source, rank, token)) continue;
                    if (source == rank) {
                        add_rows(own, rank, token);
                        each_column([&](i64 i) { total[i] += own[i]; });
                    } else {
                        const Partial* from = sums_at(source, rank, token);
                        each_column([&](i64 i) { total[i] += widen(from[i]); });
                        brought += u64(plan_.n) * sizeof(Partial);
                    }
                }
                T* to = static_cast<T*>(out.data) + token * out.row_stride;
                each_column([&](i64 i) {
                    to[i * out.column_stride] = here ? narrow<T>(total[i]) : not_a_number<T>();
                });
            }
        }
        agent.sync();  // all lanes have read what the peers may now overwrite
        if (agent.lane() == 0) fetch_add(launch_.world().bytes_from_peers, brought);
    }

private:
    // Of the agent's scratch memory: each lane uses only its own columns of it.
    MK_DEVICE Acc* line(i64 number) const {
        return reinterpret_cast<Acc*>(launch_.agent().scratch().data) + number * plan_.n;
    }
    template <class Visit>
    MK_DEVICE void each_column(Visit visit) const {
        for (i64 i = launch_.agent().lane(); i < plan_.n; i += launch_.agent().lanes()) visit(i);
    }

    MK_DEVICE u64* row_words(u64 at, u64 source, i64 token) const {
        return static_cast<u64*>(launch_.at(at, plan_.rows)) + (i64(source) * plan_.max_tokens + token) * plan_.slots;
    }
    MK_DEVICE Partial* sums_at(u64 at, u64 source, i64 token) const {
        u8* first = static_cast<u8*>(launch_.at(at, plan_.sums));
        return reinterpret_cast<Partial*>(first + (i64(source) * plan_.max_tokens + token) * plan_.pitch);
    }
    MK_DEVICE u64* summed_at(u64 at, u64 by) const {
        return static_cast<u64*>(launch_.at(at, plan_.summed)) + by * u64(plan_.chunks);
    }

    MK_DEVICE bool await_rows() {
        for (u64 agent = 0; agent < plan_.computing; ++agent)
            if (!launch_.wait(launch_.agent(), &plan_.computed[agent], 1, {Awaited::rows, everyone, agent}))
                return false;
        return launch_.live();
    }

    // Whether a rank has a row of a token of `source`.
    MK_DEVICE bool sends(u64 at, u64 source, i64 token) const {
        const u64* words = row_words(at, source, token);
        for (i64 slot = 0; slot < plan_.slots; ++slot)
            if (words[slot] >= launch_.target(0)) return true;
        return false;
    }

    // The sum over the slots of a token that have a row here, in their order.
    MK_DEVICE void add_rows(Acc* sums, u64 source, i64 token) const {
        const Acc* weights = static_cast<const Acc*>(launch_.at(source, plan_.weights)) + token * plan_.slots;
        const u64* words = row_words(launch_.rank(), source, token);
        each_column([&](i64 i) { sums[i] = 0; });
        for (i64 slot = 0; slot < plan_.slots; ++slot) {
            if (words[slot] < launch_.target(0)) continue;
            const T* row = static_cast<const T*>(rows_.data) + i64(words[slot] - launch_.target(0)) * rows_.row_stride;
            const Acc weight = weights[slot];
            each_column([&](i64 i) { sums[i] += weight * Acc(widen(row[i * rows_.column_stride])); });
        }
    }

    Launch& launch_;
    const CombinePlan& plan_;
    const Matrix& rows_;
};

}  // namespace mk
