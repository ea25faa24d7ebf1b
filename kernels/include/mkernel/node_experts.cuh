// Tokens between nodes. A rank sends to its gateway on each other node first what all agree by, and then the tokens that
// somebody there needs, each once, and the tables that say who. The gateway's node reads all of it there. The gateway adds
// up what its node has made of the rank's tokens, and sends that back.
#pragma once

#include "combine.cuh"
#include "experts.cuh"
#include "internode.cuh"

namespace mk {

// What goes from ranks to gateways, part by part.
class NodeMirrors {
public:
    MK_DEVICE NodeMirrors(Launch& launch, const MirrorPlan& plan)
        : launch_(launch), network_(*launch.world().network), plan_(plan), shown_(launch, plan), mail_(launch) {}

    MK_DEVICE const Network& network() const { return network_; }
    MK_DEVICE const Shown& shown() const { return shown_; }
    MK_DEVICE Mail& mail() { return mail_; }
    MK_DEVICE u64 node_of(u64 gateway) const { return gateway + (gateway >= network_.node ? 1 : 0); }

    // Sends a part, one write, to a gateway.
    MK_DEVICE void send(u64 gateway, u64 part, Place from, Place to, u64 bytes, Completed written) {
        post(network_.gateways[gateway], launch_.rank() * plan_.parts + part, from, to, bytes, written);
    }
    // What is part of a table, to where the gateway has this rank's.
    MK_DEVICE void send(u64 gateway, Crossing part, Place from, Place to, u64 bytes, Completed written) {
        send(gateway, u64(part), from, shown_.mirrored(launch_.rank(), to), bytes, written);
    }
    MK_DEVICE void post(u64 peer, u64 chunk, Place from, Place to, u64 bytes, Completed written) {
        mail_.channel().post({peer, 2 * launch_.size() + chunk, {from.segment, from.offset}, {to.segment, to.offset}, bytes,
                              bytes, 1, bytes},
                             written);
    }

    // Waits for a part of what a source sends, and tells this node.
    MK_DEVICE void pass_on(u64 source, Crossing part, u64 further = 0) {
        const u64 number = u64(part) + further;
        const u64* arrived = &network_.arrived[2 * launch_.size() + source * plan_.parts + number];
        if (!launch_.wait(launch_.agent(), arrived, 1, {Awaited::network, source, number})) return;
        for (u64 i = 0; i < launch_.node().size; ++i)
            launch_.raise<Scope::system>(shown_.heard(launch_.neighbour(i), source, number), 1, Completed());
    }

    // The end of inter-send: what it has sent may be overwritten. And that of inter-receive: its sources are let go.
    MK_DEVICE void await_receipts() {
        mail_.channel().flush();
        for (u64 i = 0; i < network_.gateway_count; ++i) mail_.await_receipt(network_.gateways[i]);
    }
    MK_DEVICE void send_receipts() {
        for (u64 i = 0; i < network_.source_count; ++i) mail_.send_receipt(network_.sources[i], Completed());
        mail_.channel().flush();
    }

private:
    Launch& launch_;
    const Network& network_;
    const MirrorPlan& plan_;
    Shown shown_;
    Mail mail_;
};

class NodeDispatch {
public:
    MK_DEVICE NodeDispatch(Launch& launch, const RoutingPlan& routing, const TokenLandingPlan& landing,
                           const NodeDispatchPlan& plan)
        : launch_(launch), routing_(routing), landing_(landing), plan_(plan), mirrors_(launch, routing.mirror),
          network_(mirrors_.network()), shown_(mirrors_.shown()) {}

    // For inter-send; `own`: this rank's tokens.
    MK_DEVICE void send(const CallMessage& message, const TokenChoice& choice, Lines own) {
        mirrors_.mail().announce(message, plan_.writes, plan_.chunks);
        Routing routing(launch_, routing_);
        if (routing.await_sorted())
            for (u64 i = 0; i < network_.gateway_count; ++i) list_crossing(i, choice);
        const Completed listed = Writes().complete(launch_.agent());
        for (u64 i = 0; i < network_.gateway_count; ++i)
            if (launch_.await_call(network_.gateways[i], message.digest))
                mirrors_.send(i, Crossing::heads, routing_.summary, routing_.summary, u64(plan_.head_bytes), listed);
        if (routing.await() && !routing.refused()) send_tokens(own, listed);
        mirrors_.await_receipts();
    }

    // For inter-receive; more() waits for what else comes.
    template <class More>
    MK_DEVICE void receive(u64 digest, More more) {
        for (u64 i = 0; i < network_.source_count; ++i) {
            const u64 source = network_.sources[i];
            mirrors_.mail().pass_on_call(source, digest, [&](CallMessage& message) {  // its tokens will be here
                message.operand = {plan_.landed.segment, plan_.landed.offset + source * room()};
                message.operand_pitch = u64(landing_.bytes);
            });
        }
        for (u64 i = 0; i < network_.source_count; ++i) mirrors_.pass_on(network_.sources[i], Crossing::heads);
        Routing routing(launch_, routing_);
        if (routing.await() && !routing.refused()) pass_on_tokens(), more();
        mirrors_.send_receipts();
    }

private:
    MK_DEVICE u64 room() const { return u64(routing_.max_tokens * landing_.bytes); }

    // What a rank has before its rows, or tokens, for the experts of a node, and with them.
    struct Share {
        ExpertShare before, with;
        MK_DEVICE i64 rows() const { return with.rows - before.rows; }
    };
    MK_DEVICE Share share_of(u64 rank, u64 node) const {
        const ExpertShare* starts = shown_.table<ExpertShare>(rank, routing_.starts);
        return {starts[plan_.first_expert[node]], starts[plan_.first_expert[node + 1]]};
    }
    MK_DEVICE i64& crossing(u64 rank, u64 node) const { return shown_.table<i64>(rank, plan_.crossing)[node]; }

    // Gives each token that goes to another node a place among them, and lists for the ranks there the places of theirs.
    MK_DEVICE void list_crossing(u64 gateway, const TokenChoice& choice) {
        const Agent& agent = launch_.agent();
        const u64 rank = launch_.rank(), node = mirrors_.node_of(gateway);
        const Share share = share_of(rank, node);
        const u32* tokens = shown_.table<u32>(rank, routing_.tokens);
        u32* list = static_cast<u32*>(launch_.at(rank, plan_.list));
        u32* order = plan_.order + gateway * u64(routing_.max_tokens);
        const i64 lanes = i64(agent.lanes()), length = ceil_div(share.with.tokens - share.before.tokens, lanes);
        const Range own = block(i64(agent.lane()), length, share.with.tokens - share.before.tokens);
        const Range listed{share.before.tokens + own.begin, share.before.tokens + own.end};
        i64* counts = reinterpret_cast<i64*>(agent.scratch().data);
        i64& count = counts[agent.lane()];
        count = 0;
        for (i64 i = listed.begin; i < listed.end; ++i) count += is_first(choice, tokens[i], i, node);
        const i64* sums = add_up(agent, counts, counts + lanes, u32(lanes));
        i64 place = agent.lane() > 0 ? sums[agent.lane() - 1] : 0;
        if (agent.lane() == 0) crossing(rank, node) = sums[lanes - 1];
        for (i64 i = listed.begin; i < listed.end; ++i) {
            if (!is_first(choice, tokens[i], i, node)) continue;
            order[place] = tokens[i];
            plan_.place_of[tokens[i]] = u32(place++);
        }
        agent.sync();
        for (i64 i = share.before.tokens + agent.lane(); i < share.with.tokens; i += lanes) list[i] = plan_.place_of[tokens[i]];
        agent.sync();
    }

    // Whether no rank of the node before the one for which a token is listed needs it.
    MK_DEVICE bool is_first(const TokenChoice& choice, u32 token, i64 listed, u64 node) const {
        const ExpertSplit split(routing_.experts, launch_.size());
        i64 least = plan_.first_expert[node + 1];
        for (i64 slot = 0; slot < routing_.slots; ++slot) {
            const i64 id = Routing::id_of(choice, token, slot);
            if (id >= plan_.first_expert[node] && id < least) least = id;
        }
        const u32 rank = split.rank_of(u32(least)), first = split.first(rank);
        const ExpertShare* starts = shown_.table<ExpertShare>(launch_.rank(), routing_.starts);
        return listed >= starts[first].tokens && listed < starts[first + split.count(rank)].tokens;
    }

    MK_DEVICE void send_tokens(Lines own, Completed listed) {
        const u64 rank = launch_.rank();
        for (u64 i = 0; i < network_.gateway_count; ++i) {
            const Share share = share_of(rank, mirrors_.node_of(i));
            if (share.rows() == 0) continue;
            auto part = [](Place table, i64 first, u64 size) -> Place {
                return {table.segment, table.offset + u64(first) * size};
            };
            const Place routes = part(routing_.routes, share.before.rows, sizeof(Route));
            mirrors_.send(i, Crossing::routes, routes, routes, u64(share.rows()) * sizeof(Route), listed);
            const i64 first = share.before.tokens;
            mirrors_.send(i, Crossing::list, part(plan_.list, first, sizeof(u32)),
                          part(routing_.tokens, first, sizeof(u32)), u64(share.with.tokens - first) * sizeof(u32), listed);
        }
        for (i64 chunk = 0; chunk < landing_.chunks; ++chunk)
            for (u64 i = 0; i < network_.gateway_count; ++i) send_chunk(i, chunk, own);
    }

    MK_DEVICE void send_chunk(u64 gateway, i64 chunk, Lines own) {
        const Range tokens = block(chunk, landing_.chunk_tokens, crossing(launch_.rank(), mirrors_.node_of(gateway)));
        if (tokens.size() <= 0) return;
        const u64 bytes = u64(tokens.size() * landing_.bytes), first = u64(tokens.begin * landing_.bytes);
        const Place from{plan_.leaving.segment, plan_.leaving.offset + gateway * room() + first};
        const Place to{plan_.landed.segment, plan_.landed.offset + launch_.rank() * room() + first};
        const u32* order = plan_.order + gateway * u64(routing_.max_tokens) + tokens.begin;
        const Lines packed{static_cast<u8*>(launch_.at(launch_.rank(), from)), landing_.bytes};
        mirrors_.send(gateway, u64(Crossing::tokens) + u64(chunk), from, to, bytes,
                      copy(launch_.agent(), packed, own, order, tokens.size(), landing_.bytes).complete());
    }

    MK_DEVICE void pass_on_tokens() {
        for (u64 i = 0; i < network_.source_count; ++i)
            if (share_of(network_.sources[i], network_.node).rows() > 0) {
                mirrors_.pass_on(network_.sources[i], Crossing::routes);
                mirrors_.pass_on(network_.sources[i], Crossing::list);
            }
        for (i64 chunk = 0; chunk < landing_.chunks; ++chunk)
            for (u64 i = 0; i < network_.source_count; ++i)
                if (chunk * landing_.chunk_tokens < crossing(network_.sources[i], network_.node))
                    mirrors_.pass_on(network_.sources[i], Crossing::tokens, u64(chunk));
    }

    Launch& launch_;
    const RoutingPlan& routing_;
    const TokenLandingPlan& landing_;
    const NodeDispatchPlan& plan_;
    NodeMirrors mirrors_;
    const Network& network_;
    const Shown& shown_;
};

template <class T, class Partial>
class NodeCombine {
public:
    MK_DEVICE NodeCombine(Launch& launch, const CombinePlan& plan)
        : launch_(launch), plan_(plan), mirrors_(launch, plan.mirror), network_(mirrors_.network()) {}

    // For inter-send of a call that does nothing else: shows other nodes the weights of this rank's tokens.
    MK_DEVICE void send(const CallMessage& message, i64 tokens) {
        const Completed written = mirrors_.mail().announce(message, plan_.nodes.writes, plan_.nodes.chunks);
        const u64 bytes = u64(tokens * plan_.slots) * sizeof(Accumulator<T>);
        for (u64 i = 0; i < network_.gateway_count; ++i)
            if (launch_.await_call(network_.gateways[i], message.digest))
                mirrors_.send(i, Crossing::heads, plan_.weights, plan_.weights, bytes, written);
        mirrors_.await_receipts();
    }

    // For its inter-receive.
    MK_DEVICE void receive(u64 digest, Combination<T, Partial> combination) {
        for (u64 i = 0; i < network_.source_count; ++i)
            mirrors_.mail().pass_on_call(network_.sources[i], digest, [](CallMessage&) {});
        for (u64 i = 0; i < network_.source_count; ++i) mirrors_.pass_on(network_.sources[i], Crossing::heads);
        await_sums(combination);
        mirrors_.send_receipts();
    }

    // Waits until all that other nodes send has come, also what nobody here waits for.
    MK_DEVICE void await_sums(Combination<T, Partial> combination) {
        for (i64 chunk = 0; chunk < plan_.chunks; ++chunk) combination.await_other_nodes(chunk);
    }

    // For inter-reduce: sends the sources what this node has for their tokens. When it has rows, all have called.
    MK_DEVICE void add_and_send(Combination<T, Partial> combination) {
        for (i64 chunk = i64(launch_.member()); chunk < plan_.chunks; chunk += i64(launch_.members()))
            for (u64 i = 0; i < network_.source_count; ++i) {
                const u64 source = network_.sources[i];
                const Place from = message(plan_.nodes.leaving, source, chunk);
                u8* packed = static_cast<u8*>(launch_.at(launch_.rank(), from));
                const u64 bytes = combination.pack(source, chunk, packed);
                const Completed added = Writes().complete(launch_.agent());
                if (!launch_.live()) return;
                mirrors_.post(source, plan_.nodes.first_chunk + network_.node * u64(plan_.chunks) + u64(chunk), from,
                              message(plan_.nodes.arriving, network_.node, chunk), bytes, added);
            }
        mirrors_.mail().channel().flush();  // a card may read again what has arrived already, until it says that it was sent
    }

private:
    MK_DEVICE Place message(Place first, u64 line, i64 chunk) const {
        const u64 number = line * u64(plan_.chunks) + u64(chunk);
        return {first.segment, first.offset + number * u64(plan_.nodes.message_bytes)};
    }

    Launch& launch_;
    const CombinePlan& plan_;
    NodeMirrors mirrors_;
    const Network& network_;
};

}  // namespace mk
