// Tokens between nodes. A rank sends to its gateway on each other node first what all agree by, and then the tokens that
// somebody there needs, each once, and the tables that say who. The gateway's node reads all of it there.
#pragma once

#include "experts.cuh"
#include "internode.cuh"

namespace mk {

class NodeDispatch {
public:
    MK_DEVICE NodeDispatch(Launch& launch, const RoutingPlan& routing, const TokenLandingPlan& landing,
                           const NodeDispatchPlan& plan)
        : launch_(launch), network_(*launch.world().network), routing_(routing), landing_(landing), plan_(plan),
          shown_(launch, routing.mirror), mail_(launch) {}

    // For inter-send; `own`: this rank's tokens.
    MK_DEVICE void send(const CallMessage& message, const TokenChoice& choice, Lines own) {
        mail_.announce(message, plan_.writes, plan_.chunks);
        Routing routing(launch_, routing_);
        if (routing.await_sorted(launch_.readers() - 1))
            for (u64 i = 0; i < network_.gateway_count; ++i) list_crossing(i, choice);
        const Completed listed = Writes().complete(launch_.agent());
        for (u64 i = 0; i < network_.gateway_count; ++i)
            if (launch_.await_call(network_.gateways[i], message.digest))
                send_table(i, Crossing::heads, routing_.summary, routing_.summary, u64(plan_.head_bytes), listed);
        if (routing.await() && !routing.refused()) send_tokens(own, listed);
        mail_.channel().flush();
        for (u64 i = 0; i < network_.gateway_count; ++i) mail_.await_receipt(network_.gateways[i]);
    }

    // For inter-receive; more() waits for what else comes.
    template <class More>
    MK_DEVICE void receive(u64 digest, More more) {
        for (u64 i = 0; i < network_.source_count; ++i) {
            const u64 source = network_.sources[i];
            mail_.pass_on_call(source, digest, [&](CallMessage& message) {  // its tokens will be here
                message.operand = {plan_.landed.segment, plan_.landed.offset + source * room()};
                message.operand_pitch = u64(landing_.bytes);
            });
        }
        for (u64 i = 0; i < network_.source_count; ++i) pass_on(network_.sources[i], Crossing::heads);
        Routing routing(launch_, routing_);
        if (routing.await() && !routing.refused()) pass_on_tokens(), more();
        for (u64 i = 0; i < network_.source_count; ++i) mail_.send_receipt(network_.sources[i], Completed());
        mail_.channel().flush();
    }

private:
    MK_DEVICE u64 room() const { return u64(routing_.max_tokens * landing_.bytes); }
    MK_DEVICE u64 node_of(u64 gateway) const { return gateway + (gateway >= network_.node ? 1 : 0); }

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
        const u64 rank = launch_.rank(), node = node_of(gateway);
        const Share share = share_of(rank, node);
        const u32* tokens = shown_.table<u32>(rank, routing_.tokens);
        u32* list = static_cast<u32*>(launch_.at(rank, plan_.list));
        u32* order = plan_.order + gateway * u64(routing_.max_tokens);
        const i64 lanes = i64(agent.lanes()), length = ceil_div(share.with.tokens - share.before.tokens, lanes);
        const Range own = block(i64(agent.lane()), length, share.with.tokens - share.before.tokens);
        auto each_first = [&](auto visit) {
            for (i64 i = share.before.tokens + own.begin; i < share.before.tokens + own.end; ++i)
                if (is_first(choice, tokens[i], i, node)) visit(tokens[i]);
        };
        i64* counts = reinterpret_cast<i64*>(agent.scratch().data);
        i64& count = counts[agent.lane()];
        count = 0;
        each_first([&](u32) { ++count; });
        const i64* sums = add_up(agent, counts, counts + lanes, u32(lanes));
        i64 place = agent.lane() > 0 ? sums[agent.lane() - 1] : 0;
        if (agent.lane() == 0) crossing(rank, node) = sums[lanes - 1];
        each_first([&](u32 token) {
            order[place] = token;
            plan_.place_of[token] = u32(place++);
        });
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
            const Share share = share_of(rank, node_of(i));
            if (share.rows() == 0) continue;
            auto part = [](Place table, i64 first, u64 size) -> Place {
                return {table.segment, table.offset + u64(first) * size};
            };
            const Place routes = part(routing_.routes, share.before.rows, sizeof(Route));
            send_table(i, Crossing::routes, routes, routes, u64(share.rows()) * sizeof(Route), listed);
            const i64 first = share.before.tokens;
            send_table(i, Crossing::list, part(plan_.list, first, sizeof(u32)), part(routing_.tokens, first, sizeof(u32)),
                       u64(share.with.tokens - first) * sizeof(u32), listed);
        }
        for (i64 chunk = 0; chunk < landing_.chunks; ++chunk)
            for (u64 i = 0; i < network_.gateway_count; ++i) send_chunk(i, chunk, own);
    }

    MK_DEVICE void send_chunk(u64 gateway, i64 chunk, Lines own) {
        const Range tokens = block(chunk, landing_.chunk_tokens, crossing(launch_.rank(), node_of(gateway)));
        if (tokens.size() <= 0) return;
        const u64 bytes = u64(tokens.size() * landing_.bytes), first = u64(tokens.begin * landing_.bytes);
        const Place from{plan_.leaving.segment, plan_.leaving.offset + gateway * room() + first};
        const Place to{plan_.landed.segment, plan_.landed.offset + launch_.rank() * room() + first};
        const u32* order = plan_.order + gateway * u64(routing_.max_tokens) + tokens.begin;
        const Lines packed{static_cast<u8*>(launch_.at(launch_.rank(), from)), landing_.bytes};
        post(gateway, u64(Crossing::tokens) + u64(chunk), from, to, bytes,
             copy(launch_.agent(), packed, own, order, tokens.size(), landing_.bytes).complete());
    }

    // Sends a part of a table to where the gateway has this rank's.
    MK_DEVICE void send_table(u64 gateway, Crossing part, Place from, Place to, u64 bytes, Completed written) {
        post(gateway, u64(part), from, shown_.mirrored(launch_.rank(), to), bytes, written);
    }

    MK_DEVICE void post(u64 gateway, u64 part, Place from, Place to, u64 bytes, Completed written) {
        mail_.channel().post({network_.gateways[gateway], number_of(launch_.rank(), part), {from.segment, from.offset},
                              {to.segment, to.offset}, bytes, bytes, 1, bytes},
                             written);
    }

    MK_DEVICE u64 number_of(u64 rank, u64 part) const { return 2 * launch_.size() + rank * routing_.mirror.parts + part; }

    MK_DEVICE void pass_on_tokens() {
        for (u64 i = 0; i < network_.source_count; ++i)
            if (share_of(network_.sources[i], network_.node).rows() > 0) {
                pass_on(network_.sources[i], Crossing::routes);
                pass_on(network_.sources[i], Crossing::list);
            }
        for (i64 chunk = 0; chunk < landing_.chunks; ++chunk)
            for (u64 i = 0; i < network_.source_count; ++i)
                if (chunk * landing_.chunk_tokens < crossing(network_.sources[i], network_.node))
                    pass_on(network_.sources[i], Crossing::tokens, u64(chunk));
    }

    // Waits for a part of what a source sends, and tells this node.
    MK_DEVICE void pass_on(u64 source, Crossing part, u64 further = 0) {
        const u64 number = u64(part) + further;
        const u64* arrived = &network_.arrived[number_of(source, number)];
        if (!launch_.wait(launch_.agent(), arrived, 1, {Awaited::network, source, number})) return;
        for (u64 i = 0; i < launch_.node().size; ++i)
            launch_.raise<Scope::system>(shown_.heard(launch_.neighbour(i), source, number), 1, Completed());
    }

    Launch& launch_;
    const Network& network_;
    const RoutingPlan& routing_;
    const TokenLandingPlan& landing_;
    const NodeDispatchPlan& plan_;
    Shown shown_;
    Mail mail_;
};

}  // namespace mk
