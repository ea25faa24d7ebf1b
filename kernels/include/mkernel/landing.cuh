// Landing zones: where rows of other ranks, and own ones among them if all are gathered, are pulled to, in chunks, and which
// chunks have arrived.
#pragma once

#include "roles.cuh"

namespace mk {

struct Chunk {
    Range lines;
    Range run;  // of each line
    i64 index;  // in Landing's signals
};

template <class T>
class Landing {
public:
    // What the plan says is read once, not anew behind each signal.
    MK_DEVICE Landing(Launch& launch, const LandingPlan& plan)
        : launch_(launch), plan_(plan), arrived_(plan.arrived), k_(u32(plan.k)), chunk_rows_(u32(plan.chunk_rows)),
          chunk_k_(u32(plan.chunk_k)), by_columns_(plan.by_columns), gathered_(plan.gathered),
          here_(gathered_ ? ~u32(0) : u32(launch.rank())) {}

    // The rows of a rank, and where they lie here.
    MK_DEVICE i64 rows_of(u64 source) const { return plan_.row_start[source + 1] - plan_.row_start[source]; }
    MK_DEVICE const Matrix& operator[](u64 source) const { return plan_.rows[source]; }

    // One agent's chunks of a rank's rows. Share{} has none.
    struct Share {
        u32 rows, first_chunk;     // of the rank
        u32 panels, first, depth;  // in chunks: all of k, and what of it the share is of
        u32 blocks, group;         // of rows, and those that come together
        u32 begin, step;           // numbers of chunks
        MK_DEVICE bool empty() const { return begin >= blocks * depth; }
    };

    // That of a phase. Rows that are multiplied together, `together` at a time, come together: all of them with some of k
    // before any with the next. Chunks are dealt on from where the last time ended, so that all agents are busy however few
    // there are at a time.
    MK_DEVICE Share share_of(u64 source, Range phase, i64 together, u64 agent, u64 agents) {
        const u32 rows = u32(rows_of(source)), panels = ceil_div(k_, chunk_k_), first = u32(phase.begin) / chunk_k_;
        const u32 last = ceil_div(u32(phase.end), chunk_k_), depth = (last < panels ? last : panels) - first;
        const u32 blocks = ceil_div(rows, chunk_rows_), members = u32(agents);
        const u32 begin = (u32(agent) + members - next_) % members;
        next_ = (next_ + blocks * depth) % members;
        return {rows, u32(plan_.first_chunk[source]), panels, first, depth, blocks, ceil_div(u32(together), chunk_rows_),
                begin, members};
    }

    // Has an agent's share of a rank's chunks brought here from where(some), which is asked when all else is looked up, and
    // whether there are some or not. Each raises its signal. ready(index) waits for a chunk that comes there only now, and
    // returns false to end it all.
    template <bool aligned, class Where, class Ready>
    MK_DEVICE void pull(Courier<aligned>& courier, u64 source, const Share& share, Where where, Ready ready) {
        const Lines to = lines_of(source), from = where(!share.empty());
        const bool leads = launch_.agent().lane() == 0;
        each_of(share, [&](const Chunk& chunk) {
            if (!launch_.live() || !ready(chunk.index)) return false;
            const i64 bytes = chunk.run.size() * i64(sizeof(T));
            const Span span(launch_, leads, Traced::copy, source, u64(chunk.lines.size() * bytes), u64(chunk.index));
            courier.send(part(to, chunk), part(from, chunk), chunk.lines.size(), bytes, &arrived_[chunk.index]);
            if (source != launch_.rank()) pulled_ += u64(chunk.lines.size() * bytes);
            return true;
        });
        if (share.empty()) courier.go_on();
    }

    // visit(chunk) for all of a share, until it returns false.
    template <class Visit>
    MK_DEVICE void each_of(const Share& share, Visit visit) const {
        for (u32 i = share.begin; i < share.blocks * share.depth; i += share.step) {
            const u32 begin = i / (share.group * share.depth) * share.group, left = share.blocks - begin;
            const u32 height = left < share.group ? left : share.group, rest = i - begin * share.depth;
            const u32 row = begin + rest % height, panel = share.first + rest / height;
            const Range rows = block(row, chunk_rows_, share.rows), k = block(panel, chunk_k_, k_);
            const i64 index = share.first_chunk + row * share.panels + panel;
            if (!visit(Chunk{by_columns_ ? k : rows, by_columns_ ? rows : k, index})) return;
        }
    }

    // Where a rank's rows land.
    MK_DEVICE Lines lines_of(u64 source) const {
        const Matrix& rows = plan_.rows[source];
        const i64 stride = by_columns_ ? rows.column_stride : rows.row_stride;
        return {static_cast<u8*>(rows.data), stride * i64(sizeof(T))};
    }

    static MK_DEVICE Lines part(Lines lines, const Chunk& chunk) {
        return {lines.data + chunk.lines.begin * lines.pitch + chunk.run.begin * i64(sizeof(T)), lines.pitch};
    }

    // The end of all pulling of this agent.
    template <bool aligned>
    MK_DEVICE void finish(Courier<aligned>& courier) {
        courier.finish();
        if (launch_.agent().lane() == 0) fetch_add(launch_.world().bytes_from_peers, pulled_);
    }

    // Of k: what is pulled of all ranks before more is. One at least, in which there may be nothing to pull.
    MK_DEVICE Blocks phases() const { return Blocks(k_ > 0 ? k_ : 1, plan_.phase_k); }

    // Waits until a tile's rows are here for this part of k; if all are gathered, until all are. A panel is not loaded before:
    // for what is known to be here, a few comparisons say so.
    MK_DEVICE bool wait(const Agent& who, const Tile& tile, Range k, const Matrix& own) {
        if (tile.source == here_ || is_known(tile, k)) return true;
        for (u64 source = gathered_ ? 0 : tile.source, end = gathered_ ? launch_.size() : source + 1; source < end; ++source) {
            const Range rows = gathered_ ? Range{0, rows_of(source)} : tile.rows;
            if (rows.size() == 0 || (source == launch_.rank() && !takes_own(own))) continue;
            if (!await(who, source, rows, gathered_ ? Range{0, i64(k_)} : k)) return false;
        }
        if (gathered_) here_ = u32(tile.source);
        return true;
    }

    // Whether own rows are brought here, too, from where they lie.
    MK_DEVICE bool takes_own(const Matrix& own) const {
        return gathered_ && own.data != plan_.rows[launch_.rank()].data;
    }

private:
    // Waits until the chunks that hold these rows and this part of k are here. A look takes as long as a panel is multiplied:
    // it is at what comes behind, too, and most panels lie in chunks that are known to be here.
    MK_DEVICE bool await(const Agent& who, u64 source, Range rows, Range k) {
        const Signals all = signals_of(source, rows, {k.begin, i64(k_)}), some = signals_of(source, rows, k);
        u64 here = launch_.there(who, all.count(), 1, all);
        if (here < some.count()) {
            if (!launch_.wait_all(who, some.count(), 1, some, [&](u64 i) {
                    return Subject{Awaited::arrival, everyone, u64(some(i) - arrived_)};
                }))
                return false;
            here = some.count();
        }
        const u32 first = u32(k.begin) / chunk_k_, panels = u32(here) / all.rows;
        known_ = {u32(source), u32(rows.begin), u32(rows.end), u32(k.begin), (first + panels) * chunk_k_};
        return launch_.live();
    }
    MK_DEVICE bool is_known(const Tile& tile, Range k) const {
        return tile.source == known_.source && tile.rows.begin == known_.first_row && tile.rows.end <= known_.last_row &&
               k.begin >= known_.first_k && k.end <= known_.last_k;
    }

    // Of a block of chunks.
    struct Signals {
        u64* first;
        u32 rows, depth, panels;  // in chunks; and how many panels there are in all
        MK_DEVICE u64 count() const { return u64(rows) * depth; }
        MK_DEVICE u64* operator()(u64 i) const { return first + u32(i) % rows * panels + u32(i) / rows; }
    };

    // Of the chunks that hold these rows and this part of k.
    MK_DEVICE Signals signals_of(u64 source, Range rows, Range k) const {
        const u32 panels = ceil_div(k_, chunk_k_), panel = u32(k.begin) / chunk_k_, row = u32(rows.begin) / chunk_rows_;
        return {arrived_ + plan_.first_chunk[source] + row * panels + panel,
                ceil_div(u32(rows.end), chunk_rows_) - row, ceil_div(u32(k.end), chunk_k_) - panel, panels};
    }

    Launch& launch_;
    const LandingPlan& plan_;
    u64* const arrived_;
    const u32 k_, chunk_rows_, chunk_k_;
    const bool by_columns_, gathered_;
    u32 here_;        // the source of tiles for which nobody has to wait
    u64 pulled_ = 0;  // bytes
    u32 next_ = 0;    // the member that gets the first chunk of the next pull
    struct {
        u32 source, first_row, last_row, first_k, last_k;
    } known_ = {~u32(0), 0, 0, 0, 0};
};

}  // namespace mk
