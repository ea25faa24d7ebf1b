// Mixture of experts: how tokens find the rank of their expert, where they land there, and the order of work on them.
#pragma once

#include "sink.cuh"

namespace mk {

// Which rank has which experts: as evenly as numpy.array_split deals them out.
class ExpertSplit {
public:
    MK_DEVICE ExpertSplit(u64 experts, u64 ranks) : size_(experts / ranks), larger_(experts % ranks) {}

    MK_DEVICE u64 first(u64 rank) const { return rank * size_ + (rank < larger_ ? rank : larger_); }
    MK_DEVICE u64 count(u64 rank) const { return size_ + (rank < larger_); }
    MK_DEVICE u64 rank_of(u64 expert) const {
        const u64 before = larger_ * (size_ + 1);
        return expert < before ? expert / (size_ + 1) : larger_ + (expert - before) / size_;
    }

private:
    u64 size_, larger_;
};

// Every rank sorts its own tokens by (expert, token, slot) into tables in its segment, and shows them with its call. Of
// these, each works out what it gets: all know all totals, so all see alike whether somebody gets too much.
class Routing {
public:
    MK_DEVICE Routing(Launch& launch, const RoutingPlan& plan)
        : launch_(launch), plan_(plan), split_(plan.experts, launch.size()) {}

    // Fills in this rank's tables. A counting sort: lanes count parts of the tokens side by side, and then know where
    // each part's rows of each expert begin.
    MK_DEVICE void sort(const TokenChoice& choice, i64 tokens) {
        const Agent& agent = launch_.agent();
        const i64 lane = agent.lane(), lanes = agent.lanes(), experts = i64(plan_.experts);
        const i64 sorted = tokens <= plan_.max_tokens ? tokens : 0;  // more than that is refused
        for (i64 part = lane; part < plan_.parts; part += lanes) count(choice, part, tokens_of(part, sorted));
        agent.sync();
        ExpertShare* shares = table<ExpertShare>(launch_.rank(), plan_.shares);
        for (i64 expert = lane; expert < experts; expert += lanes) {
            ExpertShare sum{0, 0};
            for (i64 part = 0; part < plan_.parts; ++part) {
                ExpertShare& share = plan_.sorted[part * experts + expert];
                const ExpertShare before = sum;
                sum = {sum.rows + share.rows, sum.tokens + share.tokens};
                share = before;
            }
            shares[expert] = sum;
        }
        agent.sync();
        if (lane == 0) {
            ExpertShare sum{0, 0};
            for (i64 expert = 0; expert < experts; ++expert) {
                plan_.starts[expert] = sum;
                sum = {sum.rows + shares[expert].rows, sum.tokens + shares[expert].tokens};
            }
            i64 fault = -1;
            for (i64 part = 0; part < plan_.parts && fault < 0; ++part) fault = plan_.faults[part];
            const i64 id = fault < 0 ? 0 : id_of(choice, fault / plan_.slots, fault % plan_.slots);
            *table<RoutingSummary>(launch_.rank(), plan_.summary) = {tokens, fault, id};
        }
        agent.sync();
        for (i64 part = lane; part < plan_.parts; part += lanes) list(choice, part, tokens_of(part, sorted));
        agent.sync();
    }

    // When all peers have called: works out what each of them sends to each expert here, and where its rows begin. If one
    // has wrong ids or too many tokens, or will get too many rows, nobody gets anything, and the verdict says why.
    MK_DEVICE void agree(i64* expert_offsets, RoutingVerdict* verdict) {
        if (!launch_.live()) return;
        const Agent& agent = launch_.agent();
        const u64 lane = agent.lane(), lanes = agent.lanes(), ranks = launch_.size();
        for (u64 rank = lane; rank < ranks; rank += lanes) plan_.totals[rank] = rows_for(rank);
        agent.sync();
        if (lane == 0) *verdict = judge();
        const bool fine = agent.broadcast(lane == 0 && verdict->problem == u64(Problem::none));
        if (fine) {
            for (u64 source = lane; source < ranks; source += lanes) take_in(source);
            agent.sync();
            const u64 experts = split_.count(launch_.rank());
            for (u64 expert = lane; expert < experts; expert += lanes) {
                i64 row = 0;
                for (u64 source = 0; source < ranks; ++source) {
                    Delivery& delivery = plan_.deliveries[expert * ranks + source];
                    delivery.row = row;
                    row += delivery.rows;
                }
                expert_offsets[expert + 1] = row;
            }
            agent.sync();
            if (lane == 0) {
                expert_offsets[0] = 0;
                for (u64 expert = 0; expert < experts; ++expert)
                    expert_offsets[expert + 1] += expert_offsets[expert];
            }
        }
        launch_.raise<Scope::device>(plan_.routed, fine ? 1 : 2, Writes().complete(agent));
    }

    // Waits until that is known.
    MK_DEVICE bool await() {
        return launch_.wait(launch_.agent(), plan_.routed, 1, {Awaited::routes, everyone, 0});
    }

    // Whether nobody gets anything.
    MK_DEVICE bool refused() const { return launch_.sees(plan_.routed, 2); }

private:
    enum class Problem : u64 { none = 0, id = 1, tokens = 2, capacity = 3 };

    template <class Entry>
    MK_DEVICE Entry* table(u64 rank, Place place) const {
        return static_cast<Entry*>(launch_.at(rank, place));
    }

    MK_DEVICE Range tokens_of(i64 part, i64 tokens) const {
        return block(part, ceil_div(tokens, plan_.parts), tokens);
    }

    static MK_DEVICE i64 id_of(const TokenChoice& choice, i64 token, i64 slot) {
        const i64 at = token * choice.row_stride + slot * choice.column_stride;
        return choice.wide ? static_cast<const i64*>(choice.ids)[at] : static_cast<const i32*>(choice.ids)[at];
    }
    MK_DEVICE bool names_expert(i64 id) const { return id >= 0 && id < i64(plan_.experts); }

    // Whether of a token's slots with an expert at the same rank this one's comes first: with it, the token travels.
    MK_DEVICE bool leads(const TokenChoice& choice, i64 token, i64 slot, i64 id) const {
        const u64 rank = split_.rank_of(u64(id));
        for (i64 other = 0; other < plan_.slots; ++other) {
            const i64 its = id_of(choice, token, other);
            if (names_expert(its) && split_.rank_of(u64(its)) == rank && (its < id || (its == id && other < slot)))
                return false;
        }
        return true;
    }

    MK_DEVICE void count(const TokenChoice& choice, i64 part, Range tokens) const {
        ExpertShare* share = plan_.sorted + part * i64(plan_.experts);
        for (u64 expert = 0; expert < plan_.experts; ++expert) share[expert] = {0, 0};
        i64 fault = -1;
        for (i64 token = tokens.begin; token < tokens.end; ++token)
            for (i64 slot = 0; slot < plan_.slots; ++slot) {
                const i64 id = id_of(choice, token, slot);
                if (names_expert(id)) {
                    ++share[id].rows;
                    share[id].tokens += leads(choice, token, slot, id);
                } else if (id != -1 && fault < 0) {
                    fault = token * plan_.slots + slot;
                }
            }
        plan_.faults[part] = fault;
    }

    MK_DEVICE void list(const TokenChoice& choice, i64 part, Range tokens) const {
        const i64 ranks = i64(launch_.size());
        ExpertShare* share = plan_.sorted + part * i64(plan_.experts);
        u32* travelling = table<u32>(launch_.rank(), plan_.tokens);
        Route* routes = table<Route>(launch_.rank(), plan_.routes);
        for (i64 token = tokens.begin; token < tokens.end; ++token) {
            i64* landed = plan_.landed + token * ranks;
            for (i64 slot = 0; slot < plan_.slots; ++slot) {
                const i64 id = id_of(choice, token, slot);
                if (!names_expert(id) || !leads(choice, token, slot, id)) continue;
                const u64 rank = split_.rank_of(u64(id));
                const i64 place = plan_.starts[id].tokens + share[id].tokens++;
                travelling[place] = u32(token);
                landed[rank] = place - plan_.starts[split_.first(rank)].tokens;
            }
            for (i64 slot = 0; slot < plan_.slots; ++slot) {
                const i64 id = id_of(choice, token, slot);
                if (names_expert(id))
                    routes[plan_.starts[id].rows + share[id].rows++] = {token, slot, landed[split_.rank_of(u64(id))]};
            }
        }
    }

    MK_DEVICE i64 rows_for(u64 rank) const {
        i64 rows = 0;
        for (u64 source = 0; source < launch_.size(); ++source) {
            const ExpertShare* shares = table<ExpertShare>(source, plan_.shares) + split_.first(rank);
            for (u64 expert = 0; expert < split_.count(rank); ++expert) rows += shares[expert].rows;
        }
        return rows;
    }

    // All ranks come to the same verdict.
    MK_DEVICE RoutingVerdict judge() const {
        for (u64 rank = 0; rank < launch_.size(); ++rank) {
            const RoutingSummary& summary = *table<RoutingSummary>(rank, plan_.summary);
            if (summary.tokens > plan_.max_tokens)
                return {u64(Problem::tokens), rank, {summary.tokens, plan_.max_tokens, 0}};
            if (summary.fault >= 0)
                return {u64(Problem::id), rank,
                        {summary.faulty_id, summary.fault / plan_.slots, summary.fault % plan_.slots}};
        }
        for (u64 rank = 0; rank < launch_.size(); ++rank)
            if (plan_.totals[rank] > plan_.capacity[rank])
                return {u64(Problem::capacity), rank, {plan_.totals[rank], plan_.capacity[rank], 0}};
        return {u64(Problem::none), 0, {0, 0, 0}};
    }

    // What a rank sends to each expert here, as its tables say.
    MK_DEVICE void take_in(u64 source) const {
        const u64 first = split_.first(launch_.rank());
        const ExpertShare* shares = table<ExpertShare>(source, plan_.shares);
        ExpertShare before{0, 0};
        for (u64 expert = 0; expert < first; ++expert)
            before = {before.rows + shares[expert].rows, before.tokens + shares[expert].tokens};
        i64 landed = 0;
        for (u64 expert = 0; expert < split_.count(launch_.rank()); ++expert) {
            const ExpertShare share = shares[first + expert];
            plan_.deliveries[expert * launch_.size() + source] = {0, share.rows, before.rows, before.tokens,
                                                                  share.tokens, landed};
            before = {before.rows + share.rows, before.tokens + share.tokens};
            landed += share.tokens;
        }
    }

    Launch& launch_;
    const RoutingPlan& plan_;
    ExpertSplit split_;
};

// Tokens that come here: those of each rank land together, each once, in the order in which the experts need them. They
// cannot be too many.
class TokenLanding {
public:
    MK_DEVICE TokenLanding(Launch& launch, const RoutingPlan& routing, const TokenLandingPlan& plan,
                           const i64* expert_offsets)
        : launch_(launch), routing_(routing), plan_(plan), offsets_(expert_offsets),
          experts_(ExpertSplit(routing.experts, launch.size()).count(launch.rank())) {}

    // Brings this mover's share of the tokens that the experts here want, in the order in which they need them: says where
    // the rows of each expert are, and fetches the tokens that have not come for an earlier one. `own`: this rank's, which
    // stay where they are. note(row, source, route) keeps what a row is.
    template <bool aligned, class Note>
    MK_DEVICE void bring(Courier<aligned>& courier, Lines own, Note note) {
        for (u64 expert = 0; expert < experts_; ++expert) {
            if (is_mine(expert, launch_.rank())) place(expert, launch_.rank(), own, note);
            for (u64 peer : RingOrder(launch_.rank(), launch_.size())) {
                if (is_mine(expert, peer)) place(expert, peer, own, note);
                fetch(courier, expert, peer);
            }
        }
    }

    // The end of all bringing of this agent.
    template <bool aligned>
    MK_DEVICE void finish(Courier<aligned>& courier) {
        courier.finish();
        if (launch_.agent().lane() == 0) fetch_add(launch_.world().bytes_from_peers, pulled_);
    }

    MK_DEVICE ListedRows rows(const Tile& tile) const { return {plan_.places + first_row(tile)}; }

    // Waits until the rows of a tile are here.
    MK_DEVICE bool wait(const Agent& who, const Tile& tile) {
        if (tile.source == known_.expert && tile.rows.begin == known_.row) return true;
        for (u64 source = 0; source < launch_.size(); ++source) {
            const Delivery& delivery = delivery_of(tile.source, source);
            const i64 own_end = delivery.row + delivery.rows;
            const i64 begin = tile.rows.begin > delivery.row ? tile.rows.begin : delivery.row;
            const i64 end = tile.rows.end < own_end ? tile.rows.end : own_end;
            if (begin >= end) continue;
            const u64 unit = unit_of(tile.source, source);
            if (!launch_.wait(who, &plan_.placed[unit], 1, {Awaited::routes, everyone, 1 + unit})) return false;
            u64 last = no_chunk;
            for (const RowPlace *place = rows(tile).places + (begin - tile.rows.begin), *behind = place + (end - begin);
                 place != behind; ++place) {
                if (place->chunk == last) continue;
                last = place->chunk;
                if (!launch_.wait(who, &plan_.arrived[last], 1, {Awaited::arrival, everyone, last})) return false;
            }
        }
        known_ = {tile.source, tile.rows.begin};
        return launch_.live();
    }

private:
    static constexpr u64 no_chunk = ~u64(0);

    MK_DEVICE const Delivery& delivery_of(u64 expert, u64 source) const {
        return routing_.deliveries[expert * launch_.size() + source];
    }
    MK_DEVICE i64 first_row(const Tile& tile) const { return offsets_[tile.source] + tile.rows.begin; }
    MK_DEVICE u64 chunk_of(u64 source, i64 landed) const {
        return source * u64(plan_.chunks) + u64(landed / plan_.chunk_tokens);
    }
    MK_DEVICE u8* token_at(u64 source, i64 landed) const {
        return static_cast<u8*>(plan_.tokens) + (i64(source) * routing_.max_tokens + landed) * plan_.pitch;
    }

    MK_DEVICE bool is_mine(u64 expert, u64 source) const {
        return unit_of(expert, source) % launch_.members() == launch_.member();
    }
    MK_DEVICE u64 unit_of(u64 expert, u64 source) const { return expert * launch_.size() + source; }

    template <bool aligned>
    MK_DEVICE void fetch(Courier<aligned>& courier, u64 expert, u64 source) {
        if (!launch_.live()) return;
        const CallMessage& message = launch_.message_of(source);
        const Lines theirs{static_cast<u8*>(launch_.at(source, message.operand)), i64(message.operand_pitch)};
        const Delivery &delivery = delivery_of(expert, source), &last = delivery_of(experts_ - 1, source);
        const u32* tokens = static_cast<const u32*>(launch_.at(source, routing_.tokens)) + delivery.token;
        const i64 end = delivery.landed + delivery.tokens, all = last.landed + last.tokens;
        const bool leads = launch_.agent().lane() == 0;
        for (i64 chunk = ceil_div(delivery.landed, plan_.chunk_tokens); chunk * plan_.chunk_tokens < end; ++chunk) {
            if ((u64(chunk) + source) % launch_.members() != launch_.member()) continue;
            const Range landing = block(chunk, plan_.chunk_tokens, all);
            const u64 index = chunk_of(source, landing.begin), bytes = u64(landing.size() * plan_.bytes);
            const Span span(launch_, leads, Traced::copy, source, bytes, index);
            for (i64 i = landing.begin; i < landing.end; ++i)
                courier.send({token_at(source, i), plan_.pitch},
                             {theirs.data + tokens[i - delivery.landed] * theirs.pitch, theirs.pitch}, 1, plan_.bytes,
                             i + 1 < landing.end ? nullptr : &plan_.arrived[index]);
            pulled_ += bytes;
        }
    }

    // Says where the rows that a rank sends to an expert are, and what they are.
    template <class Note>
    MK_DEVICE void place(u64 expert, u64 source, Lines own, Note note) {
        const Agent& agent = launch_.agent();
        if (!launch_.live()) return;
        const Delivery& delivery = delivery_of(expert, source);
        const Route* routes = static_cast<const Route*>(launch_.at(source, routing_.routes)) + delivery.route;
        const i64 first = offsets_[expert] + delivery.row;
        for (i64 i = agent.lane(); i < delivery.rows; i += agent.lanes()) {
            const Route route = routes[i];
            note(first + i, source, route);
            plan_.places[first + i] = source == launch_.rank()
                                          ? RowPlace{own.data + route.token * own.pitch, no_chunk}
                                          : RowPlace{token_at(source, route.landed), chunk_of(source, route.landed)};
        }
        launch_.raise<Scope::device>(&plan_.placed[unit_of(expert, source)], 1, Writes().complete(agent));
    }

    Launch& launch_;
    const RoutingPlan& routing_;
    const TokenLandingPlan& plan_;
    const i64* offsets_;
    u64 experts_;
    u64 pulled_ = 0;  // bytes
    struct {
        u64 expert;
        i64 row;
    } known_ = {~u64(0), 0};
};

// The tiles of one agent out of `agents`: expert by expert, so that the weights of each are read once; within it a group
// of row blocks, whose rows arrive together, with all columns before the next. Tile::source is the expert. Where products
// come in pairs, `columns` apart, the two tiles of a pair follow each other.
class ExpertTiles {
public:
    MK_DEVICE ExpertTiles(const i64* offsets, u64 experts, i64 columns, TileShape tile, u64 agent, u64 agents,
                          bool pairs = false)
        : offsets_(offsets), experts_(experts), columns_(columns), tile_(tile), agent_(agent), agents_(agents),
          pairs_(pairs) {}

    class Iterator {
    public:
        MK_DEVICE Iterator(const ExpertTiles& tiles, u64 expert, u64 index)
            : tiles_(tiles), expert_(expert), index_(index) {
            settle();
        }
        MK_DEVICE Tile operator*() const {
            const u64 group = RingTiles::group, across = tiles_.across(), blocks = tiles_.blocks(expert_);
            const u64 first = index_ / (group * across) * group, rest = index_ - first * across;
            const u64 height = blocks - first < group ? blocks - first : group;
            const Range columns = block(i64(rest / height), tiles_.tile_.columns, tiles_.columns_);
            const i64 shift = second_ ? tiles_.columns_ : 0;
            return {expert_, block(i64(first + rest % height), tiles_.tile_.rows, tiles_.rows(expert_)),
                    {columns.begin + shift, columns.end + shift}};
        }
        MK_DEVICE Iterator& operator++() {
            second_ = tiles_.pairs_ && !second_;
            if (second_) return *this;
            index_ += tiles_.agents_;
            settle();
            return *this;
        }
        MK_DEVICE bool operator!=(const Iterator& other) const { return expert_ != other.expert_; }

    private:
        MK_DEVICE void settle() {
            for (; expert_ < tiles_.experts_; ++expert_) {
                const u64 count = tiles_.blocks(expert_) * tiles_.across();
                if (index_ < count) return;
                index_ -= count;
            }
        }
        const ExpertTiles& tiles_;
        u64 expert_, index_;
        bool second_ = false;  // of a pair
    };
    MK_DEVICE Iterator begin() const { return {*this, 0, agent_}; }
    MK_DEVICE Iterator end() const { return {*this, experts_, 0}; }

private:
    MK_DEVICE i64 rows(u64 expert) const { return offsets_[expert + 1] - offsets_[expert]; }
    MK_DEVICE u64 blocks(u64 expert) const { return u64(ceil_div(rows(expert), tile_.rows)); }
    MK_DEVICE u64 across() const { return u64(ceil_div(columns_, tile_.columns)); }

    const i64* offsets_;
    u64 experts_;
    i64 columns_;
    TileShape tile_;
    u64 agent_, agents_;
    bool pairs_;
};

}  // namespace mk
