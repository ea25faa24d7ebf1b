// Attention on the host target: plain loops over any number of lanes.
#pragma once

#include <cmath>
#include <limits>

#include "../attention.cuh"
#include "host.cuh"

namespace mk {
namespace engine {

// Online softmax (Milakov and Gimelshein 2018) over some more keys that a query sees: their scores become weights relative
// to the highest score so far, and what was summed before is scaled to that.
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

// Works through this agent's query tiles, unit after unit, each over the whole walk.
//   source(unit, run, part)                  Panel: where the run's keys or values lie
//   gate(agent, unit, run, positions, part)  bool: these have arrived; false: the launch is to end
//   sink                                     transform(sum, total) -> Type; deliver(agent, unit, tile, staged, lse, columns)
//   leave(unit)                              nothing of this unit is read any more
// After a failure every tile that is left is delivered as NaN. Needs shared_bytes() of mkernel_cp/attention_plan.py.
template <class T, class Source, class Gate, class Sink, class Leave>
MK_DEVICE void attention(Launch& launch, const RingAttentionPlan& plan, const Heads& q, Source source, Gate gate,
                         Sink sink, Leave leave) {
    using Acc = Accumulator<T>;
    using Out = typename Sink::Type;
    const Agent& agent = launch.agent();
    const i64 first = agent.lane(), step = agent.lanes(), keys = plan.tile.columns, columns = plan.tile.k;
    const Acc scale = Acc(plan.scale);
    const Mask mask(plan);
    Acc* queries = reinterpret_cast<Acc*>(agent.scratch().data);
    Acc* sums = queries + plan.tile.rows * columns;   // of weighted values
    Acc* scores = sums + plan.tile.rows * columns;    // then weights
    Acc* panel = scores + plan.tile.rows * keys;      // keys, a column of the head a line; then values, a position a line
    Acc* highest = panel + keys * columns;            // score of each query
    Acc* total = highest + plan.tile.rows;            // of its weights; in the end the log-sum-exp
    Out* staged = reinterpret_cast<Out*>(total + plan.tile.rows);

    for (Unit unit : Units(plan)) {
        for (QueryTile tile : QueryTiles(plan, unit, launch.member(), launch.members())) {
            const i64 rows = tile.rows.size(), last = tile.position + rows - 1;
            const Panel own = panel_of<T>(q, unit.batch, tile.head, tile.rows.begin);
            const Block from{own.data, own.position_stride, own.column_stride};
            if (agent.lane() == 0) announce_reads<T>(from, rows, columns);
            widen_block<T>(queries, columns, from, rows, columns, first, step);
            for (i64 i = first; i < rows; i += step) {
                highest[i] = -std::numeric_limits<Acc>::infinity(), total[i] = 0;
                for (i64 d = 0; d < columns; ++d) sums[i * columns + d] = 0;
            }

            bool arrived = launch.live();
            const Tile traced{launch.rank(), tile.rows, {tile.head, tile.head + 1}};
            Span computed(launch, agent.lane() == 0, Traced::compute, traced);
            for (const Run& run : Walk(plan))
                for (Range some : Blocks(run.count, keys)) {
                    if (mask.visible(last, run) <= some.begin) break;
                    auto bring = [&](Part part) {  // into the panel; whether it has arrived
                        if (!gate(agent, unit, run, some, part)) return false;
                        const Panel there = source(unit, run, part);
                        const Block lines{static_cast<T*>(there.data) + some.begin * there.position_stride,
                                          there.position_stride, there.column_stride};
                        if (agent.lane() == 0) announce_reads<T>(lines, some.size(), columns);
                        if (part == Part::keys)
                            widen_block<T>(panel, keys, {lines.data, lines.column_stride, lines.row_stride}, columns,
                                           some.size(), first, step);
                        else
                            widen_block<T>(panel, columns, lines, some.size(), columns, first, step);
                        agent.sync();
                        return true;
                    };
                    auto seen = [&](i64 row) {
                        const i64 end = mask.visible(tile.position + row, run);
                        return (end < some.end ? end : some.end) - some.begin;
                    };

                    arrived = arrived && bring(Part::keys);
                    if (!arrived) break;
                    for (i64 i = first; i < rows; i += step)
                        for (i64 j = 0; j < some.size(); ++j) scores[i * keys + j] = 0;
                    multiply_add(scores, queries, panel, rows, some.size(), columns, columns, keys, first, step);
                    for (i64 i = first; i < rows; i += step)
                        if (seen(i) > 0)
                            weigh(scores + i * keys, seen(i), scale, highest[i], total[i], sums + i * columns, columns);
                    agent.sync();  // all have used the keys

                    arrived = bring(Part::values);
                    if (!arrived) break;
                    for (i64 i = first; i < rows; i += step)  // no masked value is touched: it may be NaN
                        multiply_add(sums + i * columns, scores + i * keys, panel, 1, columns, seen(i), keys, columns, 0, 1);
                    agent.sync();  // all have used the values
                }

            for (i64 i = first; i < rows; i += step) {
                for (i64 d = 0; d < columns; ++d)
                    staged[i * columns + d] =
                        arrived ? sink.transform(sums[i * columns + d], total[i]) : not_a_number<Out>();
                total[i] = arrived ? highest[i] + std::log(total[i]) : not_a_number<Acc>();
            }
            agent.sync();
            computed.end();
            const Span stored(launch, agent.lane() == 0, Traced::store, traced);
            sink.deliver(agent, unit, tile, staged, total, columns);
            agent.sync();  // the staged tile is stored
        }
        leave(unit);
    }
}

}  // namespace engine
}  // namespace mk
