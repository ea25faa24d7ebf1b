// Mixture of experts: how tokens find the rank of their expert, where they land there, and the order of work on them.
#pragma once

#include "shown.cuh"
#include "sink.cuh"

namespace mk {

// Which rank has which experts: as evenly as numpy.array_split deals them out.
class ExpertSplit {
public:
    MK_DEVICE ExpertSplit(u64 experts, u64 ranks) : size_(u32(experts) / u32(ranks)), larger_(u32(experts) % u32(ranks)) {}

    MK_DEVICE u32 first(u32 rank) const { return rank * size_ + (rank < larger_ ? rank : larger_); }
    MK_DEVICE u32 count(u32 rank) const { return size_ + (rank < larger_); }
    MK_DEVICE u32 rank_of(u32 expert) const {
        const u32 before = larger_ * (size_ + 1);
        return expert < before ? expert / (size_ + 1) : larger_ + (expert - before) / size_;
    }

private:
    u32 size_, larger_;
};

MK_DEVICE ExpertShare operator+(const ExpertShare& a, const ExpertShare& b) {
    return {a.rows + b.rows, a.tokens + b.tokens};
}

// Turns each value into the sum of all up to it, with the help of as much memory; returns which of both they are in.
template <class Value>
MK_DEVICE Value* add_up(const Agent& agent, Value* values, Value* other, u32 count) {
    agent.sync();
    for (u32 step = 1; step < count; step *= 2) {
        for (u32 i = agent.lane(); i < count; i += agent.lanes())
            other[i] = i < step ? values[i] : values[i - step] + values[i];
        agent.sync();
        Value* const sums = other;
        other = values;
        values = sums;
    }
    return values;
}

// Every rank sorts its own tokens by (expert, token, slot) into tables in its segment, and shows them with its call. Of
// these, each works out what it gets: all know all totals, so all see alike whether somebody gets too much.
class Routing {
public:
    MK_DEVICE Routing(Launch& launch, const RoutingPlan& plan)
        : launch_(launch), plan_(plan), shown_(launch, plan.mirror), split_(plan.experts, launch.size()),
          experts_(u32(plan.experts)) {}

    // Fills in this rank's tables: all workers of the launch sort a part of its tokens. First each counts; from all counts it
    // knows where its rows of each expert begin; then it lists them. The first agent returns when all have. As long as
    // nothing is agreed, there are no rows.
    MK_DEVICE void sort(const TokenChoice& choice, i64 tokens, Scratch scratch, i64* expert_offsets) {
        const Agent& agent = launch_.agent();
        const u32 lane = agent.lane(), lanes = agent.lanes(), none = experts_;
        const i64 member = agent.index(), members = i64(launch_.workers());
        if (member >= members) return;
        const bool first = member == 0;
        const i64 sorted = tokens <= plan_.max_tokens ? tokens : 0;  // more than that is refused
        const Range own = block(member, ceil_div(sorted, members), sorted);
        const Desk desk = clear_desk(scratch);
        const Span span(launch_, lane == 0, Traced::sort, Tile{launch_.rank(), own, {0, plan_.slots}});
        if (first)
            for (u32 i = lane; i <= split_.count(u32(launch_.rank())); i += lanes) expert_offsets[i] = 0;

        for (u32 expert = lane; expert <= none; expert += lanes) desk.next[expert] = {0, 0};
        each_row(choice, own, desk, [&](i64 at, u32 expert, u32 i) {
            ExpertShare& share = desk.next[expert];
            if (expert < none) share.tokens += desk.rows[i].leader == i;
            else if (share.rows == 0) share.tokens = at + i;  // the first that is no expert's
            ++share.rows;
        });
        ExpertShare* counts = plan_.counts + member * (none + 1);
        for (u32 expert = lane; expert <= none; expert += lanes) counts[expert] = desk.next[expert];
        tell(1);
        if (!await_others(1)) return;

        for (u32 expert = lane; expert <= none; expert += lanes) {
            ExpertShare sum{0, 0}, before{0, 0}, fault{0, -1};
            constexpr i64 batch = 8;  // loads that do not wait for each other
            for (i64 begin = 0; begin < members; begin += batch) {
                ExpertShare shares[batch];
                MK_UNROLL
                for (i64 i = 0; i < batch; ++i)
                    shares[i] = begin + i < members ? plan_.counts[(begin + i) * (none + 1) + expert] : ExpertShare{0, 0};
                MK_UNROLL
                for (i64 i = 0; i < batch; ++i) {
                    if (begin + i < member) before = before + shares[i];
                    if (shares[i].rows > 0 && fault.rows == 0) fault = shares[i];
                    sum = sum + shares[i];
                }
            }
            desk.next[expert] = before;
            desk.sums[expert] = sum;
            if (first && expert == none) {
                const i64 at = fault.tokens;
                const i64 id = at < 0 ? 0 : id_of(choice, at / plan_.slots, at % plan_.slots);
                *table<RoutingSummary>(launch_.rank(), plan_.summary) = {tokens, at, id};
            }
        }
        const ExpertShare* sums = add_up(agent, desk.sums, desk.others, none);
        auto start = [&](u32 expert) { return expert > 0 ? sums[expert - 1] : ExpertShare{0, 0}; };
        ExpertShare* starts = table<ExpertShare>(launch_.rank(), plan_.starts);
        for (u32 expert = lane; expert <= none; expert += lanes) {
            desk.next[expert] = start(expert) + desk.next[expert];
            if (first) starts[expert] = start(expert);
        }
        list(choice, own, desk, start);
        tell(2);
        if (first) await_sorted();
    }

    // Waits until all ranks have made the same call, and their shares are here.
    MK_DEVICE void await_shares(u64 digest) {
        for (u64 peer : RingOrder(launch_.rank(), launch_.size(), launch_.node()))
            if (!launch_.await_call(peer, digest) || !shown_.await(peer, Crossing::heads)) return;
    }

    // Waits until all agents have sorted their part.
    MK_DEVICE bool await_sorted() { return await_others(2); }

    // Shows the tables to the peers with the call; and when all have called, it is known who gets what. The first member of
    // those who bring tokens does it.
    MK_DEVICE void meet(const CallMessage& message, i64* expert_offsets) {
        if (launch_.member() > 0) return;
        launch_.announce(message);
        await_shares(message.digest);
        agree(expert_offsets, launch_.agent().scratch());
    }

    // When all peers have called: works out what each of them sends to each expert here, and where its rows begin. If one
    // has wrong ids or too many tokens, or will get too many rows, nobody gets anything, and the host is told why.
    MK_DEVICE void agree(i64* expert_offsets, Scratch scratch) {
        if (!launch_.live()) return;
        const Agent& agent = launch_.agent();
        const u32 lane = agent.lane(), lanes = agent.lanes(), ranks = u32(launch_.size()), rank = u32(launch_.rank());
        const u32 width = experts_ + 1;
        const Span span(launch_, lane == 0, Traced::agree, rank);
        for (u32 i = lane; i < ranks * width; i += lanes)
            plan_.known[i] = table<ExpertShare>(i / width, plan_.starts)[i % width];
        for (u32 i = lane; i < ranks; i += lanes) plan_.said[i] = *table<RoutingSummary>(i, plan_.summary);
        agent.sync();
        for (u32 i = lane; i < ranks; i += lanes) plan_.totals[i] = rows_for(i);
        agent.sync();
        const bool fine = agent.broadcast(lane == 0 && all_fit());
        if (fine) {
            const u32 experts = split_.count(rank), first = split_.first(rank);
            i64* rows = reinterpret_cast<i64*>(scratch.data);
            for (u32 i = lane; i < experts * ranks; i += lanes) {
                const ExpertShare *starts = plan_.known + i % ranks * width, *own = starts + first + i / ranks;
                const i64 count = rows[i] = own[1].rows - own->rows;
                plan_.deliveries[i] = {0, count, own->rows, own->tokens, own[1].tokens - own->tokens,
                                       own->tokens - starts[first].tokens};
            }
            rows = add_up(agent, rows, rows + experts * ranks, experts * ranks);
            auto before = [&](u32 i) { return i > 0 ? rows[i - 1] : 0; };
            for (u32 i = lane; i < experts * ranks; i += lanes)
                plan_.deliveries[i].row = before(i) - before(i / ranks * ranks);
            for (u32 expert = lane; expert <= experts; expert += lanes) expert_offsets[expert] = before(expert * ranks);
        }
        launch_.raise<Scope::device>(plan_.routed, fine ? 1 : 2, Writes().complete(agent));
    }

    // Waits until that is known.
    MK_DEVICE bool await() {
        return launch_.wait(launch_.agent(), plan_.routed, 1, {Awaited::routes, everyone, 0});
    }

    // Whether nobody gets anything; of an agent that knows.
    MK_DEVICE bool refused() const { return launch_.sees(plan_.routed, 2); }

    static MK_DEVICE i64 id_of(const TokenChoice& choice, i64 token, i64 slot) {
        const i64 at = token * choice.row_stride + slot * choice.column_stride;
        return choice.wide ? static_cast<const i64*>(choice.ids)[at] : static_cast<const i32*>(choice.ids)[at];
    }

private:
    // The codes are those of mkernel_cp/failure.py.
    enum class Problem : u64 { id = 1, tokens = 2, capacity = 3 };

    // A row to be: one slot of a token.
    struct Row {
        u32 leader;  // of the token's slots at this rank: with it the token travels
        u32 first;   // expert of that rank
        i32 row;     // in the table of routes; -1: there is none
        i32 place;   // of a leader, in the list of tokens
    };

    // What an agent sorts with, in its scratch memory; so many bits for each expert as there are rows at a time. One more
    // than the experts stands for ids that are none.
    struct Desk {
        ExpertShare *next, *sums, *others;  // [expert]
        Row* rows;
        u32* bits;  // [word][expert]
    };

    MK_DEVICE Desk clear_desk(Scratch scratch) const {
        ExpertShare* shares = reinterpret_cast<ExpertShare*>(scratch.data);
        const u32 each = experts_ + 1;
        Row* rows = reinterpret_cast<Row*>(shares + 3 * each);
        return {shares, shares + each, shares + 2 * each, rows, reinterpret_cast<u32*>(rows + plan_.sorted * plan_.slots)};
    }

    MK_DEVICE void tell(u64 progress) {
        const Agent& agent = launch_.agent();
        launch_.raise<Scope::device>(&plan_.told[agent.index()], progress, Writes().complete(agent));
    }
    MK_DEVICE bool await_others(u64 progress) {
        return launch_.wait_all(launch_.workers(), progress, [&](u64 i) { return &plan_.told[i]; },
                                [](u64 i) { return Subject{Awaited::routes, everyone, i}; });
    }

    template <class Entry>
    MK_DEVICE Entry* table(u64 rank, Place place) const { return shown_.table<Entry>(rank, place); }

    MK_DEVICE bool names_expert(i64 id) const { return id >= 0 && id < i64(plan_.experts); }

    // Which of a token's slots with an expert at the same rank comes first.
    MK_DEVICE u32 leader_of(const TokenChoice& choice, i64 token, u32 slot, i64 id, i64 first, i64 end) const {
        u32 leader = slot;
        i64 least = id;
        for (u32 other = 0; other < u32(plan_.slots); ++other) {
            const i64 its = id_of(choice, token, other);
            if (its >= first && its < end && (its < least || (its == least && other < leader)))
                leader = other, least = its;
        }
        return leader;
    }

    // visit(number of the first row, expert, i) for all rows of some tokens, those of an expert in their order by one lane,
    // some tokens at a time; then done(first token, rows) for these.
    template <class Visit, class Done>
    MK_DEVICE void each_row(const TokenChoice& choice, Range tokens, const Desk& desk, Visit visit, Done done) const {
        const Agent& agent = launch_.agent();
        const u32 lane = agent.lane(), lanes = agent.lanes(), slots = u32(plan_.slots), all = experts_ + 1;
        for (i64 first = tokens.begin; first < tokens.end; first += plan_.sorted) {
            const i64 left = tokens.end - first;
            const u32 count = u32(left < plan_.sorted ? left : plan_.sorted) * slots, words = u32(ceil_div(count, 32));
            for (u32 i = lane; i < words * all; i += lanes) desk.bits[i] = 0;
            agent.sync();
            for (u32 i = lane; i < count; i += lanes) {
                const u32 slot = i % slots;
                const i64 token = first + i / slots, id = id_of(choice, token, slot);
                u32 expert = experts_;
                desk.rows[i] = {i, 0, -1, 0};
                if (names_expert(id)) {
                    expert = u32(id);
                    const u32 rank = split_.rank_of(expert), begin = split_.first(rank);
                    desk.rows[i].leader = i - slot + leader_of(choice, token, slot, id, begin, begin + split_.count(rank));
                    desk.rows[i].first = begin;
                }
                if (id != -1) set_bits(&desk.bits[i / 32 * all + expert], 1u << i % 32);
            }
            agent.sync();
            for (u32 expert = lane; expert < all; expert += lanes)
                for (u32 word = 0; word < words; ++word)
                    for (u32 bits = desk.bits[word * all + expert]; bits; bits &= bits - 1)
                        visit(first * slots, expert, word * 32 + lowest_bit(bits));
            agent.sync();
            done(first, count);
        }
    }
    template <class Visit>
    MK_DEVICE void each_row(const TokenChoice& choice, Range tokens, const Desk& desk, Visit visit) const {
        each_row(choice, tokens, desk, visit, [](i64, u32) {});
    }

    template <class Start>
    MK_DEVICE void list(const TokenChoice& choice, Range tokens, const Desk& desk, Start start) const {
        const Agent& agent = launch_.agent();
        const u32 slots = u32(plan_.slots);
        u32* travelling = table<u32>(launch_.rank(), plan_.tokens);
        Route* routes = table<Route>(launch_.rank(), plan_.routes);
        each_row(
            choice, tokens, desk,
            [&](i64, u32 expert, u32 i) {
                if (expert == experts_) return;
                Row& row = desk.rows[i];
                row.row = i32(desk.next[expert].rows++);
                if (row.leader == i) row.place = i32(desk.next[expert].tokens++);
            },
            [&](i64 first, u32 count) {
                for (u32 i = agent.lane(); i < count; i += agent.lanes()) {
                    const Row& row = desk.rows[i];
                    if (row.row < 0) continue;
                    const i64 token = first + i / slots, place = desk.rows[row.leader].place;
                    routes[row.row] = {token, i % slots, place - start(row.first).tokens};
                    if (row.leader == i) travelling[place] = u32(token);
                }
                agent.sync();
            });
    }

    MK_DEVICE i64 rows_for(u32 rank) const {
        i64 rows = 0;
        for (u32 source = 0; source < u32(launch_.size()); ++source) {
            const ExpertShare* starts = plan_.known + source * (experts_ + 1) + split_.first(rank);
            rows += starts[split_.count(rank)].rows - starts->rows;
        }
        return rows;
    }

    // All ranks come to the same verdict.
    MK_DEVICE bool all_fit() const {
        for (u64 rank = 0; rank < launch_.size(); ++rank) {
            const RoutingSummary& said = plan_.said[rank];
            if (said.tokens > plan_.max_tokens) return refuse(Problem::tokens, rank, said.tokens, plan_.max_tokens);
            if (said.fault >= 0)
                return refuse(Problem::id, rank, said.faulty_id, said.fault / plan_.slots, said.fault % plan_.slots);
        }
        for (u64 rank = 0; rank < launch_.size(); ++rank)
            if (plan_.totals[rank] > plan_.capacity[rank])
                return refuse(Problem::capacity, rank, plan_.totals[rank], plan_.capacity[rank]);
        return true;
    }
    MK_DEVICE bool refuse(Problem problem, u64 rank, i64 first, i64 second, i64 third = 0) const {
        launch_.report({u64(problem), launch_.generation(), rank, {first, second, third}});
        return false;
    }

    Launch& launch_;
    const RoutingPlan& plan_;
    Shown shown_;
    ExpertSplit split_;
    u32 experts_;
};

// Tokens that come here: those of each rank land together, each once, in the order in which the experts need them. They
// cannot be too many.
class TokenLanding {
public:
    MK_DEVICE TokenLanding(Launch& launch, const RoutingPlan& routing, const TokenLandingPlan& plan,
                           const i64* expert_offsets)
        : launch_(launch), shown_(launch, routing.mirror), routing_(routing), plan_(plan), offsets_(expert_offsets),
          experts_(ExpertSplit(routing.experts, launch.size()).count(u32(launch.rank()))) {}

    // Brings this mover's share of the tokens that the experts here want, in the order in which they need them: says where
    // the rows of each expert are, and fetches the tokens that have not come for an earlier one. `own`: this rank's, which
    // stay where they are. note(row, source, route) keeps what a row is.
    template <bool aligned, class Note>
    MK_DEVICE void bring(Courier<aligned>& courier, Lines own, Note note) {
        for (u64 peer : RingOrder(launch_.rank(), launch_.size(), launch_.node()))
            look_up(peer, own_chunk(peer, plan_.first_chunks), i64(launch_.members()));
        launch_.agent().sync();
        for (u64 expert = 0; expert < experts_; ++expert) {
            if (is_mine(expert, launch_.rank())) place(expert, launch_.rank(), own, note);
            for (u64 peer : RingOrder(launch_.rank(), launch_.size(), launch_.node())) {
                if (is_mine(expert, peer)) place(expert, peer, own, note);
                fetch(courier, expert, peer);
            }
        }
    }

    // Brings the one of the first chunks that is this compute agent's, if there is one.
    template <bool aligned>
    MK_DEVICE void bring_first(Courier<aligned>& courier) {
        i64 chunk = i64(launch_.member());
        for (u64 peer : RingOrder(launch_.rank(), launch_.size(), launch_.node())) {
            if (chunk < plan_.first_chunks) {
                const i64 all = coming(peer);
                if (chunk * plan_.chunk_tokens >= all) return;
                look_up(peer, chunk, plan_.chunks);
                launch_.agent().sync();
                if (launch_.live()) fetch_chunk(courier, peer, chunk, all);
                return;
            }
            chunk -= plan_.first_chunks;
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
            if (delivery.row >= tile.rows.end || delivery.row + delivery.rows <= tile.rows.begin) continue;
            const u64 unit = unit_of(tile.source, source);
            if (!launch_.wait(who, &plan_.placed[unit], 1, {Awaited::routes, everyone, unit})) return false;
            // None of the first rows brings more than one token that has not come for an earlier expert.
            const i64 rows = tile.rows.end - delivery.row, most = rows < delivery.tokens ? rows : delivery.tokens;
            if (source != launch_.rank() && !await_tokens(who, source, delivery.landed + most)) return false;
        }
        known_ = {tile.source, tile.rows.begin};
        return launch_.live();
    }

private:
    MK_DEVICE const Delivery& delivery_of(u64 expert, u64 source) const {
        return routing_.deliveries[unit_of(expert, source)];
    }
    MK_DEVICE i64 first_row(const Tile& tile) const { return offsets_[tile.source] + tile.rows.begin; }
    MK_DEVICE u64 chunk_of(u64 source, i64 number) const { return source * u64(plan_.chunks) + u64(number); }
    MK_DEVICE u8* token_at(u64 source, i64 landed) const {
        return static_cast<u8*>(plan_.tokens) + (i64(source) * routing_.max_tokens + landed) * plan_.pitch;
    }
    MK_DEVICE u32* list_of(u64 source) const { return plan_.list + i64(source) * routing_.max_tokens; }

    MK_DEVICE bool is_mine(u64 expert, u64 source) const {
        return u32(unit_of(expert, source)) % u32(launch_.members()) == launch_.member();
    }
    MK_DEVICE u64 unit_of(u64 expert, u64 source) const { return expert * launch_.size() + source; }

    // From a chunk of a source on, the first that is this mover's: neighbouring chunks are different movers'.
    MK_DEVICE i64 own_chunk(u64 source, i64 chunk) const {
        const u32 members = u32(launch_.members()), turn = u32(u64(chunk) + source) % members;
        return chunk + (u32(launch_.member()) + members - turn) % members;
    }

    // How many tokens of a source land here.
    MK_DEVICE i64 coming(u64 source) const {
        if (experts_ == 0) return 0;
        const Delivery& last = delivery_of(experts_ - 1, source);
        return last.landed + last.tokens;
    }

    // Waits for the first tokens of a source. Each mover brings its chunks in order, so its last one tells of all.
    MK_DEVICE bool await_tokens(const Agent& who, u64 source, i64 count) {
        const i64 end = ceil_div(count, plan_.chunk_tokens), movers = i64(launch_.readers());
        const i64 apart = plan_.first_chunks < end ? plan_.first_chunks : end;  // each from another agent
        const i64 begin = end - apart > movers ? end - movers : apart;
        const u64 all = u64(apart + end - begin);
        auto chunk = [&](u64 i) { return chunk_of(source, i64(i) < apart ? i64(i) : begin + i64(i) - apart); };
        auto signal = [&](u64 i) { return &plan_.arrived[chunk(i)]; };
        return launch_.all_there(who, all, 1, signal) ||
               launch_.wait_all(who, all, 1, signal, [&](u64 i) { return Subject{Awaited::arrival, everyone, chunk(i)}; });
    }

    // Finds out which tokens of a peer are in a chunk and in each that comes `step` further. Lists come behind routes.
    MK_DEVICE void look_up(u64 source, i64 first, i64 step) {
        if (coming(source) == 0 || !shown_.await(source, Crossing::list)) return;
        const Agent& agent = launch_.agent();
        const u32* theirs = shown_.table<u32>(source, routing_.tokens) + delivery_of(0, source).token;
        const i64 all = coming(source);
        const u32 length = u32(plan_.chunk_tokens);
        for (u32 i = agent.lane();; i += agent.lanes()) {
            const i64 at = (first + i64(i / length) * step) * length + i % length;
            if (at - i % length >= all) break;
            if (at < all) list_of(source)[at] = theirs[at];
        }
    }

    template <bool aligned>
    MK_DEVICE void fetch(Courier<aligned>& courier, u64 expert, u64 source) {
        if (!launch_.live()) return;
        const Delivery& delivery = delivery_of(expert, source);
        const i64 end = delivery.landed + delivery.tokens, all = coming(source);
        const i64 begin = ceil_div(delivery.landed, plan_.chunk_tokens);
        i64 chunk = own_chunk(source, begin < plan_.first_chunks ? plan_.first_chunks : begin);
        for (; chunk * plan_.chunk_tokens < end; chunk += i64(launch_.members()))
            if (!fetch_chunk(courier, source, chunk, all)) return;
    }

    // `all`: tokens that come from there.
    template <bool aligned>
    MK_DEVICE bool fetch_chunk(Courier<aligned>& courier, u64 source, i64 chunk, i64 all) {
        const CallMessage& message = launch_.message_of(source);
        const u64 holder = launch_.holder(source);
        const Lines theirs{static_cast<u8*>(launch_.at(holder, message.operand)), i64(message.operand_pitch)};
        const Range landing = block(chunk, plan_.chunk_tokens, all);
        const u64 index = chunk_of(source, chunk), bytes = u64(landing.size() * plan_.bytes);
        const Span span(launch_, launch_.agent().lane() == 0, Traced::copy, source, bytes, index);
        const u32* list = list_of(source) + landing.begin;
        if (several_nodes && !shown_.in_node(source) && !await_at_gateway(source, list, landing.size())) return false;
        courier.send_listed({token_at(source, landing.begin), plan_.pitch}, theirs, list, landing.size(), plan_.bytes,
                            &plan_.arrived[index]);
        if (holder != launch_.rank()) pulled_ += bytes;
        return true;
    }

    // Waits until the gateway of another node's rank has the tokens of a list.
    MK_DEVICE bool await_at_gateway(u64 source, const u32* list, i64 count) {
        auto part = [&](u64 i) { return u64(Crossing::tokens) + list[i] / u64(plan_.chunk_tokens); };
        return launch_.wait_all(
            u64(count), 1, [&](u64 i) { return shown_.heard(launch_.rank(), source, part(i)); },
            [&](u64 i) { return Subject{Awaited::network, source, part(i)}; });
    }

    // Says where the rows that a rank sends to an expert are, and what they are.
    template <class Note>
    MK_DEVICE void place(u64 expert, u64 source, Lines own, Note note) {
        const Agent& agent = launch_.agent();
        if (!launch_.live()) return;
        const Delivery& delivery = delivery_of(expert, source);
        const Route* routes = shown_.table<Route>(source, routing_.routes) + delivery.route;
        const i64 first = offsets_[expert] + delivery.row;
        const Range rows{first, first + delivery.rows};
        const Span span(launch_, agent.lane() == 0 && rows.size() > 0, Traced::note, Tile{source, rows, {0, 0}});
        for (i64 i = agent.lane(); i < rows.size(); i += agent.lanes()) {
            const Route route = routes[i];
            note(first + i, source, route);
            plan_.places[first + i] =
                source == launch_.rank() ? own.data + route.token * own.pitch : token_at(source, route.landed);
        }
        launch_.raise<Scope::device>(&plan_.placed[unit_of(expert, source)], 1, Writes().complete(agent));
    }

    Launch& launch_;
    Shown shown_;
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

// What a compute agent brings before it computes.
MK_DEVICE void bring_first_tokens(Launch& launch, const RoutingPlan& routing, const TokenLandingPlan& plan,
                                  const i64* expert_offsets) {
    Courier<> courier(launch, launch.agent().scratch());
    TokenLanding landing(launch, routing, plan, expert_offsets);
    landing.bring_first(courier);
    landing.finish(courier);
    courier.retire();
}

// Rows of the tiles of an expert: as few tiles as may be, of equal height where that may be less, but for the last one.
MK_DEVICE u32 tile_height(u32 rows, u32 most, u32 step) {
    const u32 blocks = ceil_div(rows, most);
    if (step == 0 || blocks == 0) return most;
    return ceil_div(ceil_div(rows, blocks), step) * step;
}

// The tiles of one agent out of `agents`: expert by expert, so that the weights of each are read once; within it a group
// of row blocks, whose rows arrive together, with all columns before the next. Tile::source is the expert. Where products
// come in pairs, `columns` apart, the two tiles of a pair follow each other.
class ExpertTiles {
public:
    static constexpr bool halving = false;

    MK_DEVICE ExpertTiles(const i64* offsets, u64 experts, i64 columns, TileShape tile, u64 agent, u64 agents,
                          bool pairs = false)
        : offsets_(offsets), columns_(u32(columns)), tile_rows_(u32(tile.rows)), row_step_(u32(tile.row_step)),
          tile_columns_(u32(tile.columns)), across_(ceil_div(columns_, tile_columns_)), experts_(u32(experts)),
          agent_(u32(agent)), agents_(u32(agents)), pairs_(pairs) {}

    class Iterator {
    public:
        MK_DEVICE Iterator(const ExpertTiles& tiles, u32 expert, u32 index)
            : tiles_(tiles), expert_(expert), index_(index) {
            settle();
        }
        MK_DEVICE Tile operator*() const {
            const u32 group = RingTiles::group, across = tiles_.across_, blocks = ceil_div(rows_, tiles_.tile_rows_);
            const u32 first = index_ / (group * across) * group, rest = index_ - first * across;
            const u32 height = blocks - first < group ? blocks - first : group;
            const Range columns = block(rest / height, tiles_.tile_columns_, tiles_.columns_);
            const i64 shift = second_ ? tiles_.columns_ : 0;
            return {expert_, block(first + rest % height, height_, rows_),
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
        // Looks at some experts at a time, whose loads are under way together.
        MK_DEVICE void settle() {
            constexpr u32 ahead = 8;
            for (; expert_ < tiles_.experts_; expert_ += ahead) {
                u32 offsets[ahead + 1];  // what is more than 32 bits of them cancels out
                MK_UNROLL
                for (u32 i = 0; i <= ahead; ++i) {
                    const u32 expert = expert_ + i;
                    offsets[i] = u32(tiles_.offsets_[expert < tiles_.experts_ ? expert : tiles_.experts_]);
                }
                MK_UNROLL
                for (u32 i = 0; i < ahead; ++i) {
                    rows_ = offsets[i + 1] - offsets[i];
                    const u32 count = ceil_div(rows_, tiles_.tile_rows_) * tiles_.across_;
                    if (index_ < count) {
                        expert_ += i;
                        height_ = tile_height(rows_, tiles_.tile_rows_, tiles_.row_step_);
                        return;
                    }
                    index_ -= count;
                }
            }
            expert_ = tiles_.experts_;
        }
        const ExpertTiles& tiles_;
        u32 expert_, index_, rows_ = 0, height_ = 0;
        bool second_ = false;  // of a pair
    };
    MK_DEVICE Iterator begin() const { return {*this, 0, agent_}; }
    MK_DEVICE Iterator end() const { return {*this, experts_, 0}; }

private:
    const i64* offsets_;
    u32 columns_, tile_rows_, row_step_, tile_columns_, across_;
    u32 experts_, agent_, agents_;
    bool pairs_;
};

}  // namespace mk
