// What experts have made of tokens, weighted and added up: first at each rank over the rows of a token there, then at the
// rank that has the token over the ranks. Where there is more than one node: over the ranks of each, there, and then nodes.
#pragma once

#include "shown.cuh"
#include "sink.cuh"

namespace mk {

// Neighbouring elements, which are stored at once.
template <class T, u32 width>
struct alignas(width * sizeof(T) < 16 ? width * sizeof(T) : 16) Pack { T elements[width]; };

// The same as they are loaded. Those of 16 bits stay in words until they are used: a register for each would be filled when
// its load is complete, before the next load.
template <class T, u32 width, bool in_words = sizeof(T) == 2 && width % 2 == 0>
struct Loaded : Pack<T, width> {
    MK_DEVICE T operator[](u32 i) const { return this->elements[i]; }
};
template <class T, u32 width>
struct Loaded<T, width, true> : Pack<u32, width / 2> {
    MK_DEVICE T operator[](u32 i) const { return T{u16(this->elements[i / 2] >> i % 2 * 16)}; }
};

// T: of the rows and of the result; Partial: of sums on their way. A sum crosses the link once per token and rank.
template <class T, class Partial>
class Combination {
public:
    using Acc = Accumulator<T>;

    // `rows`: those of the experts here, and how many there are.
    MK_DEVICE Combination(Launch& launch, const CombinePlan& plan, const Matrix& rows, i64 row_count)
        : launch_(launch), plan_(plan), shown_(launch, plan.mirror), rows_(rows), row_count_(row_count) {}

    // A row is made of a token of `source`, which has called, because of one of its slots. One lane says so.
    MK_DEVICE void note(i64 row, u64 source, i64 token, i64 slot) const {
        const Acc* weights = shown_.table<Acc>(source, plan_.weights);
        factors_of(source, token)[slot] = weights[token * plan_.slots + slot];
        words_of(source, token)[slot] = launch_.target(u64(row));
    }

    // The same of this compute agent's share of `count` rows.
    MK_DEVICE void note(const RowOrigins& origins, i64 count) const {
        const Agent& agent = launch_.agent();
        const Span span(launch_, agent.lane() == 0, Traced::note, Tile{everyone, {0, count}, {0, 0}});
        const i64 lanes = i64(agent.lanes());
        for (i64 row = i64(launch_.member()) * lanes + agent.lane(); row < count; row += i64(launch_.members()) * lanes)
            note(row, u64(origins.source_rank[row]), origins.source_token[row], origins.source_slot[row]);
    }

    // This compute agent has made and noted all its rows.
    MK_DEVICE void computed() {
        launch_.raise<Scope::device>(&plan_.computed[launch_.member()], 1, Writes().complete(launch_.agent()));
    }

    // Forms this agent's share of the sums for a peer that has called. Its gateway here forms what it adds to them itself.
    MK_DEVICE void sum_for(u64 peer) {
        if (launch_.holder(peer) == launch_.rank() || !await_rows()) return;
        if (in_packs(rows_)) sum_for<whole_packs>(peer);
        else sum_for<1>(peer);
    }

    // Adds up this agent's share of this rank's tokens, rank by rank, and stores them. All workers of the launch have one.
    MK_DEVICE void collect(i64 tokens, const Matrix& out) {
        if (launch_.agent().index() >= launch_.workers()) return;
        const bool fine = await_rows();
        if (in_packs(rows_) && in_packs(out)) collect<whole_packs>(tokens, out, fine);
        else collect<1>(tokens, out, fine);
        const Agent& agent = launch_.agent();
        agent.sync();  // all lanes have read what the peers may now overwrite
        if (brought_ > 0) fetch_add(launch_.world().bytes_from_peers, brought_);
    }

    // Waits for the messages of other nodes for a chunk; gateways are in the order of nodes.
    MK_DEVICE bool await_other_nodes(i64 chunk) {
        const Network& network = *launch_.world().network;
        auto number = [&](u64 i) { return plan_.nodes.first_chunk + node_after(i) * u64(plan_.chunks) + u64(chunk); };
        return launch_.wait_all(
            network.gateway_count, 1, [&](u64 i) { return &network.arrived[2 * launch_.size() + number(i)]; },
            [&](u64 i) { return Subject{Awaited::network, network.gateways[i], number(i)}; });
    }

    // Writes the message for a chunk of another node's rank, when what it says is here; returns its bytes.
    MK_DEVICE u64 pack(u64 source, i64 chunk, u8* message) {
        launch_.wait_all(
            launch_.node().size - 1, 1,
            [&](u64 i) { return &summed_at(launch_.rank(), source, launch_.neighbour(1 + i))[chunk]; },
            [&](u64 i) { return Subject{Awaited::partial, launch_.neighbour(1 + i), u64(chunk)}; });
        if (!await_rows()) return 0;
        return in_packs(rows_) ? pack<whole_packs>(source, chunk, message) : pack<1>(source, chunk, message);
    }

private:
    static constexpr u32 no_sum = ~u32(0);
    static constexpr u32 whole_packs = u32(16 / sizeof(T));
    static constexpr u32 batch = 8;  // slots that are looked at together
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
            const Span span(launch_, agent.lane() == 0, Traced::sum, Tile{peer, tokens, {0, plan_.n}});
            each_place<width>(tokens, peer, [&](const Token& token, i64 column) {
                if (!token.any) return;
                Sums<width> sums;
                add_rows<width>(sums, token, column);
                put<width>(sums_at(launch_.rank(), peer, token.number) + column, sums);
                if (column == 0) *sent_by(launch_.rank(), peer, token.number) = launch_.target(1);
            });
            u64* summed = summed_at(launch_.holder(peer), peer, launch_.rank()) + chunk;
            launch_.raise<Scope::system>(summed, 1, Writes().complete(agent));
        }
    }

    template <u32 width>
    static MK_DEVICE void put(Partial* to, const Sums<width>& sums) {
        Pack<Partial, width> partial;
        MK_UNROLL
        for (u32 i = 0; i < width; ++i) partial.elements[i] = narrow<Partial>(sums[i]);
        *reinterpret_cast<Pack<Partial, width>*>(to) = partial;
    }

    template <u32 width>
    MK_DEVICE u64 pack(u64 source, i64 chunk, u8* message) {
        const Agent& agent = launch_.agent();
        u32* places = reinterpret_cast<u32*>(message);
        Partial* to = reinterpret_cast<Partial*>(message + plan_.nodes.head_bytes);
        u64 brought = 0;
        u32 count = 0;
        const Range part = block(chunk, plan_.chunk_tokens, plan_.max_tokens);
        const Span span(launch_, agent.lane() == 0, Traced::sum, Tile{source, part, {0, plan_.n}});
        for (i64 token = part.begin; token < part.end; ++token) {
            const bool any = node_has(source, token);
            if (agent.lane() == 0) places[token - part.begin] = any ? count : no_sum;
            if (!any) continue;
            ++count;
            brought += bytes_from_node(source, token);
        }
        agent.sync();
        each_place<width>(part, source, [&](const Token& token, i64 column) {
            const u32 place = places[token.number - part.begin];
            if (place == no_sum) return;
            Sums<width> sums;
            add_node<width>(sums, token, column);
            put<width>(to + i64(place) * plan_.n + column, sums);
        });
        agent.sync();  // all lanes have read what the peers may now overwrite
        if (agent.lane() == 0) fetch_add(launch_.world().bytes_from_peers, brought);
        return u64(plan_.nodes.head_bytes) + count * u64(plan_.n) * sizeof(Partial);
    }

    template <u32 width>
    MK_DEVICE void collect(i64 tokens, const Matrix& out, bool fine) {
        const Agent& agent = launch_.agent();
        const u64 rank = launch_.rank();
        for (i64 chunk = agent.index(); chunk * plan_.chunk_tokens < tokens; chunk += i64(launch_.workers())) {
            auto peer = [&](u64 i) { return launch_.neighbour(1 + i); };
            fine = fine && launch_.wait_all(
                               launch_.node().size - 1, 1, [&](u64 i) { return &summed_at(rank, rank, peer(i))[chunk]; },
                               [&](u64 i) { return Subject{Awaited::partial, peer(i), u64(chunk)}; });
            if (several_nodes) fine = fine && await_other_nodes(chunk);
            const Range part = block(chunk, plan_.chunk_tokens, tokens);
            const Span span(launch_, agent.lane() == 0, Traced::sum, Tile{rank, part, {0, plan_.n}});
            each_place<width>(part, rank, [&](const Token& token, i64 column) {
                Sums<width> total = {};
                if (fine) add_nodes<width>(total, chunk, token, column);
                Pack<T, width> result;
                MK_UNROLL
                for (u32 i = 0; i < width; ++i)
                    result.elements[i] = fine ? narrow<T>(total[i]) : not_a_number<T>();
                T* to = static_cast<T*>(out.data) + token.number * out.row_stride + column * out.column_stride;
                *reinterpret_cast<Pack<T, width>*>(to) = result;
            });
            if (fine)
                for (i64 token = part.begin + agent.lane(); token < part.end; token += agent.lanes())
                    brought_ += bytes_from_node(rank, token);
        }
    }

    // A token of a rank, and what its first slots have here: looked up once for all columns.
    struct Token {
        u64 source;
        i64 number;
        bool any;        // whether there is a row here
        u32 has, known;  // a bit for each slot: whether it has one; which one, if a caller has not kept fewer than there are
        u32 rows[batch];
        Acc weights[batch];
    };

    MK_DEVICE Token look_up(u64 source, i64 number) const {
        Token token{source, number};
        look_up(token, 0);
        token.any = plan_.slots > batch ? has_rows(source, number) : token.has != 0;
        return token;
    }
    // From a slot on.
    MK_DEVICE void look_up(Token& token, u32 first) const {
        const u64* words = words_of(token.source, token.number) + first;
        const Acc* weights = factors_of(token.source, token.number) + first;
        const u32 left = u32(plan_.slots) - first;
        const u64 none = launch_.target(0);
        u64 word[batch];
        MK_UNROLL
        for (u32 i = 0; i < batch; ++i) word[i] = i < left ? words[i] : 0;
        token.has = token.known = 0;
        MK_UNROLL
        for (u32 i = 0; i < batch; ++i) {
            const bool has = word[i] >= none, known = has && i64(word[i] - none) < row_count_;
            token.has |= u32(has) << i, token.known |= u32(known) << i;
            token.rows[i] = u32(word[i]);
            token.weights[i] = known ? weights[i] : not_a_number<Acc>();
        }
    }

    // visit(token, column) for all packs of all columns of some tokens: neighbouring ones are those of neighbouring lanes, and
    // each warp of the agent has its share of all, in their order.
    template <u32 width, class Visit>
    MK_DEVICE void each_place(Range tokens, u64 source, Visit visit) const {
        const Agent warp = Agent::warp();
        const i64 run = i64(warp.lanes()) * width, runs = ceil_div(plan_.n, run), all = tokens.size() * runs;
        const i64 part = launch_.agent().part(), parts = Agent::warps, end = all * (part + 1) / parts;
        i64 at = all * part / parts;
        while (at < end) {
            const i64 number = at / runs, first = at - number * runs, left = end - at, rest = runs - first;
            const Token token = look_up(source, tokens.begin + number);
            const i64 count = left < rest ? left : rest;
            for (i64 i = first; i < first + count; ++i)
                if (const i64 column = i * run + i64(warp.lane()) * width; column < plan_.n) visit(token, column);
            at += count;
        }
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
    // That a rank has a sum for a token of another: the owner is told, but if it is on another node, who sends it looks here.
    MK_DEVICE u64* sent_by(u64 by, u64 owner, i64 token) const {
        return launch_.holder(owner) == owner ? sent_at(owner, by) + token : sent_at(by, owner) + token;
    }
    // Signals of chunks of a rank's tokens, at it or at its gateway here.
    MK_DEVICE u64* summed_at(u64 at, u64 owner, u64 by) const {
        const bool far = launch_.holder(owner) != owner;
        const u64 line = far ? owner * launch_.size() + by : by;
        return static_cast<u64*>(launch_.at(at, far ? plan_.nodes.summed : plan_.summed)) + line * u64(plan_.chunks);
    }

    MK_DEVICE u64 node_after(u64 other) const { return other + (other >= launch_.world().network->node ? 1 : 0); }

    // What another node says of a token of this rank; null: nothing.
    MK_DEVICE const Partial* sum_of_node(u64 node, i64 chunk, i64 token) const {
        const u8* messages = static_cast<const u8*>(launch_.at(launch_.rank(), plan_.nodes.arriving));
        const u8* message = messages + (i64(node) * plan_.chunks + chunk) * plan_.nodes.message_bytes;
        const u32 place = reinterpret_cast<const u32*>(message)[token - chunk * plan_.chunk_tokens];
        if (place == no_sum) return nullptr;
        return reinterpret_cast<const Partial*>(message + plan_.nodes.head_bytes) + i64(place) * plan_.n;
    }

    MK_DEVICE bool await_rows() {
        return launch_.wait_all(
            plan_.computing, 1, [&](u64 i) { return &plan_.computed[i]; },
            [](u64 i) { return Subject{Awaited::rows, everyone, i}; });
    }

    // Whether there is a row of a token of `source` here; whether a peer, and whether anyone of this node, has a sum for it.
    MK_DEVICE bool has_rows(u64 source, i64 token) const {
        const u64* words = words_of(source, token);
        const u32 slots = u32(plan_.slots);
        bool any = false;
        for (u32 first = 0; first < slots && !any; first += batch)
            MK_UNROLL
            for (u32 i = 0; i < batch; ++i) any = (first + i < slots && words[first + i] >= launch_.target(0)) || any;
        return any;
    }
    MK_DEVICE bool has_sum(u64 peer, u64 owner, i64 token) const {
        if (peer == launch_.rank()) return has_rows(owner, token);
        return *sent_by(peer, owner, token) >= launch_.target(0);
    }
    MK_DEVICE bool node_has(u64 owner, i64 token) const {
        const Node node = launch_.node();
        for (u64 peer = node.begin; peer < node.begin + node.size; ++peer)
            if (has_sum(peer, owner, token)) return true;
        return false;
    }

    // Bytes of what peers of this node have for a token.
    MK_DEVICE u64 bytes_from_node(u64 owner, i64 token) const {
        u64 sums = 0;
        for (u64 i = 1; i < launch_.node().size; ++i) sums += has_sum(launch_.neighbour(i), owner, token);
        return sums * u64(plan_.n) * sizeof(Partial);
    }

    // From a column on, the sum over the slots of a token that have a row here, in their order. Loads of some slots are under
    // way together.
    template <u32 width>
    MK_DEVICE void add_rows(Sums<width>& sums, const Token& token, i64 column) const {
        MK_UNROLL
        for (u32 i = 0; i < width; ++i) sums[i] = 0;
        add_slots<width>(sums, token, column);
        if (plan_.slots <= batch) return;
        Token rest = token;
        for (u32 first = batch; first < u32(plan_.slots); first += batch) {
            look_up(rest, first);
            add_slots<width>(sums, rest, column);
        }
    }

    template <u32 width>
    MK_DEVICE void add_slots(Sums<width>& sums, const Token& token, i64 column) const {
        const T* rows = static_cast<const T*>(rows_.data) + column * rows_.column_stride;
        Loaded<T, width> pack[batch];
        MK_UNROLL
        for (u32 j = 0; j < batch; ++j) {
            pack[j] = {};
            if (token.known >> j & 1)
                pack[j] = *reinterpret_cast<const Loaded<T, width>*>(rows + i64(token.rows[j]) * rows_.row_stride);
        }
        MK_UNROLL
        for (u32 j = 0; j < batch; ++j) {
            if (!(token.has >> j & 1)) continue;
            MK_UNROLL
            for (u32 i = 0; i < width; ++i) sums[i] += token.weights[j] * Acc(widen(pack[j][i]));
        }
    }

    // From a column on, the sum over the ranks of this node, in their order, for a token.
    template <u32 width>
    MK_DEVICE void add_node(Sums<width>& total, const Token& token, i64 column) const {
        const Node node = launch_.node();
        MK_UNROLL
        for (u32 i = 0; i < width; ++i) total[i] = 0;
        for (u64 peer = node.begin; peer < node.begin + node.size; ++peer) {
            Sums<width> sums;
            if (peer == launch_.rank()) {
                if (!token.any) continue;
                add_rows<width>(sums, token, column);
            } else {
                if (!has_sum(peer, token.source, token.number)) continue;
                load<width>(sums, sums_at(peer, token.source, token.number) + column);
            }
            MK_UNROLL
            for (u32 i = 0; i < width; ++i) total[i] += sums[i];
        }
    }

    // The same over all nodes, in their order, for one of this rank's tokens.
    template <u32 width>
    MK_DEVICE void add_nodes(Sums<width>& total, i64 chunk, const Token& token, i64 column) const {
        if (!several_nodes) return add_node<width>(total, token, column);
        const Network& network = *launch_.world().network;
        MK_UNROLL
        for (u32 i = 0; i < width; ++i) total[i] = 0;
        for (u64 node = 0; node <= network.gateway_count; ++node) {
            Sums<width> sums;
            if (node == network.node) {
                if (!node_has(launch_.rank(), token.number)) continue;
                add_node<width>(sums, token, column);
            } else {
                const Partial* from = sum_of_node(node, chunk, token.number);
                if (from == nullptr) continue;
                load<width>(sums, from + column);
            }
            MK_UNROLL
            for (u32 i = 0; i < width; ++i) total[i] += sums[i];
        }
    }

    template <u32 width>
    static MK_DEVICE void load(Sums<width>& sums, const Partial* from) {
        const auto partial = *reinterpret_cast<const Loaded<Partial, width>*>(from);
        MK_UNROLL
        for (u32 i = 0; i < width; ++i) sums[i] = widen(partial[i]);
    }

    Launch& launch_;
    const CombinePlan& plan_;
    Shown shown_;
    const Matrix& rows_;
    i64 row_count_;
    u64 brought_ = 0;  // bytes
};

}  // namespace mk
