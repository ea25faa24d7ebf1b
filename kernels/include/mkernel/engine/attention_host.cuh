// Attention on the host target: plain loops over any number of lanes.
#pragma once

#include <cmath>
#include <limits>

#include "../attention.cuh"
#include "host.cuh"

namespace mk {
namespace engine {

// Online softmax (Milakov and Gimelshein 2018) over some more keys that a query sees: their scores become weights
// relative to the highest score so far, and what was summed before is scaled to that.
template <class Acc>
MK_NO_THREAD_SANITIZER void weigh(Acc* scores, i64 seen, Acc scale, Acc& highest, Acc& total, Acc* sums, i64 columns) {
    const Acc before = highest;
    for (i64 j = 0; j < seen; ++j) {
        scores[j] *= scale;
        if (scores[j] > highest) highest = scores[j];  // not NaN, which reaches the row by its weight
    }
    const Acc base = highest == -std::numeric_limits<Acc>::infinity() ? Acc(0) : highest;
    const Acc kept = std::exp(before - base);
    total *= kept;
    for (i64 d = 0; d < columns; ++d) sums[d] *= kept;
    for (i64 j = 0; j < seen; ++j) {
        scores[j] = std::exp(scores[j] - base);
        total += scores[j];
    }
}

// What an agent keeps of a tile of queries while it walks over the keys. Lanes share out the rows of the tile, and the
// lines of a panel that they all read. Needs _host_shared_bytes() of mkernel_cp/attention_plan.py.
template <class T>
class QueryRows {
public:
    using Acc = Accumulator<T>;

    MK_DEVICE QueryRows(const Agent& agent, const RingAttentionPlan& plan)
        : agent_(agent), keys_(plan.tile.columns), columns_(plan.tile.k), scale_(Acc(plan.scale)),
          queries_(reinterpret_cast<Acc*>(agent.scratch().data)), sums_(queries_ + plan.tile.rows * columns_),
          scores_(sums_ + plan.tile.rows * columns_), panel_(scores_ + plan.tile.rows * keys_),
          highest_(panel_ + keys_ * columns_), total_(highest_ + plan.tile.rows),
          staged_(reinterpret_cast<T*>(total_ + plan.tile.rows)) {}

    MK_DEVICE void begin(Panel queries, i64 rows) {
        rows_ = rows;
        const Block from = announced(queries, {0, rows});
        widen_block<T>(queries_, columns_, from, rows, columns_, agent_.lane(), agent_.lanes());
        each_row([&](i64 i) {
            highest_[i] = -std::numeric_limits<Acc>::infinity(), total_[i] = 0;
            for (i64 d = 0; d < columns_; ++d) sums_[i * columns_ + d] = 0;
        });
    }

    // Some keys of a panel, of which row i sees the first seen(i).
    template <class Seen>
    MK_DEVICE void meet(Panel keys, Range some, Seen seen) {
        const Block from = announced(keys, some), turned{from.data, from.column_stride, from.row_stride};
        widen_block<T>(panel_, keys_, turned, columns_, some.size(), agent_.lane(), agent_.lanes());
        agent_.sync();
        each_row([&](i64 i) {
            for (i64 j = 0; j < some.size(); ++j) scores_[i * keys_ + j] = 0;
        });
        multiply_add(scores_, queries_, panel_, rows_, some.size(), columns_, columns_, keys_, agent_.lane(),
                     agent_.lanes());
        each_row([&](i64 i) {
            if (seen(i) > 0)
                weigh(scores_ + i * keys_, seen(i), scale_, highest_[i], total_[i], sums_ + i * columns_, columns_);
        });
        agent_.sync();  // all have used the panel
    }

    // Their values. Those that a row does not see are not touched: they may be NaN.
    template <class Seen>
    MK_DEVICE void add(Panel values, Range some, Seen seen) {
        widen_block<T>(panel_, columns_, announced(values, some), some.size(), columns_, agent_.lane(), agent_.lanes());
        agent_.sync();
        each_row([&](i64 i) {
            multiply_add(sums_ + i * columns_, scores_ + i * keys_, panel_, 1, columns_, seen(i), keys_, columns_, 0,
                         1);
        });
        agent_.sync();
    }

    // The tile as it is to be stored: NaN if not all that it sees has arrived.
    template <class Sink>
    MK_DEVICE void end(const Sink& sink, bool arrived) {
        each_row([&](i64 i) {
            for (i64 d = 0; d < columns_; ++d)
                staged_[i * columns_ + d] =
                    arrived ? sink.transform(sums_[i * columns_ + d] / total_[i]) : not_a_number<T>();
            total_[i] = arrived ? highest_[i] + std::log(total_[i]) : not_a_number<Acc>();
        });
        agent_.sync();
    }
    MK_DEVICE Staged<T> staged() const { return {staged_, columns_}; }
    MK_DEVICE const Acc* log_sum_exp() const { return total_; }

private:
    template <class Visit>
    MK_DEVICE void each_row(Visit visit) const {
        for (i64 i = agent_.lane(); i < rows_; i += agent_.lanes()) visit(i);
    }

    MK_DEVICE Block announced(Panel from, Range lines) const {
        const Block block{static_cast<T*>(from.data) + lines.begin * from.position_stride, from.position_stride,
                          from.column_stride};
        if (agent_.lane() == 0) announce_reads<T>(block, lines.size(), columns_);
        return block;
    }

    const Agent& agent_;
    i64 rows_ = 0, keys_, columns_;
    Acc scale_;
    Acc *queries_, *sums_;     // [row][column]; sums of weighted values
    Acc* scores_;              // [row][key], then weights
    Acc* panel_;               // keys [column][key], then values [key][column]
    Acc *highest_, *total_;    // [row]: score; sum of weights, in the end its logarithm
    T* staged_;                // [row][column]
};

// Works through this agent's query tiles, unit after unit, each over the whole walk.
//   source(unit, run, part)                  Panel: where the run's keys or values lie
//   gate(agent, unit, run, positions, part)  i64: how many positions of the run have arrived, these with them; fewer: the
//                                            launch is to end
//   sink                                     transform(mean) -> T
//                                            deliver(agent, unit, tile, staged, log_sum_exp, columns)
//   leave(agent, unit)                       nothing of this unit is read any more
// After a failure every tile that is left is delivered as NaN.
template <class T, class Source, class Gate, class Sink, class Leave>
MK_DEVICE void attention(Launch& launch, const RingAttentionPlan& plan, const Heads& q, Source source, Gate gate,
                         Sink sink, Leave leave) {
    const Agent& agent = launch.agent();
    const bool leads = agent.lane() == 0;
    const Mask mask(plan);
    QueryRows<T> rows(agent, plan);

    for (Unit unit : Units(plan)) {
        for (QueryTile tile : QueryTiles(plan, unit, launch.member(), launch.members())) {
            const i64 last = tile.position + tile.rows.size() - 1;
            const Tile traced{launch.rank(), tile.rows, {tile.head, tile.head + 1}};
            Span computed(launch, leads, Traced::compute, traced);
            rows.begin(panel_of<T>(q, unit.batch, tile.head, tile.rows.begin), tile.rows.size());
            bool arrived = launch.live();
            for (const Run& run : Walk(plan)) {
                i64 keys = 0, values = 0;  // that have arrived
                for (Range some : Blocks(mask.visible(last, run), plan.tile.columns)) {
                    auto seen = [&](i64 row) {
                        const i64 end = mask.visible(tile.position + row, run);
                        return (end < some.end ? end : some.end) - some.begin;
                    };
                    if (keys < some.end) keys = gate(agent, unit, run, some, Part::keys);
                    if (!(arrived = arrived && keys >= some.end)) break;
                    rows.meet(source(unit, run, Part::keys), some, seen);
                    if (values < some.end) values = gate(agent, unit, run, some, Part::values);
                    if (!(arrived = values >= some.end)) break;
                    rows.add(source(unit, run, Part::values), some, seen);
                }
            }
            rows.end(sink, arrived);
            computed.end();
            const Span stored(launch, leads, Traced::store, traced);
            sink.deliver(agent, unit, tile, rows.staged(), rows.log_sum_exp(), plan.tile.k);
            agent.sync();  // the staged tile is stored
        }
        leave(agent, unit);
    }
}

}  // namespace engine
}  // namespace mk
