// Between nodes: calls, and rows of A on their way. A rank sends to its gateway on each other node. A gateway has what came to
// it as if it had brought it itself, and passes the news on to its node: it alone waits for the network.
#pragma once

#include "channel.cuh"
#include "landing.cuh"

namespace mk {

// What precedes data and follows them: letters, by which ranks learn of the others' calls, and receipts.
class Mail {
public:
    MK_DEVICE Mail(Launch& launch)
        : launch_(launch), network_(*launch.world().network), channel_(launch, network_.queue) {}

    MK_DEVICE Channel& channel() { return channel_; }

    // Tells the other nodes what this rank calls; `writes`: in how many each of the chunks comes that it gets.
    MK_DEVICE Completed announce(const CallMessage& message, const u64* writes, u64 chunks) {
        if (launch_.agent().lane() == 0) network_.letters[0] = {launch_.generation(), message, {}};
        const Completed written = Writes().complete(launch_.agent());
        channel_.enter(writes, chunks);
        for (u64 i = 0; i < network_.gateway_count; ++i)
            post(network_.gateways[i], launch_.rank(), 0, letter_of(launch_.rank()), written);
        return written;
    }

    // The call of a rank of another node, which `message` makes of its letter, as if it had told this node itself.
    template <class Change>
    MK_DEVICE bool pass_on_call(u64 source, u64 digest, Change change) {
        if (!launch_.await_letter(source, digest)) return false;
        CallMessage message = network_.letters[letter_of(source)].message;
        change(message);
        launch_.announce_for(source, message);
        return launch_.await_call(source, digest);
    }

    // Lets a rank go that has sent something here.
    MK_DEVICE void send_receipt(u64 to, Completed here) { notify(to, launch_.size() + launch_.rank(), here); }

    // Raises a signal at a rank, with no more than room that nobody reads.
    MK_DEVICE void notify(u64 to, u64 number, Completed here) {
        const u64 unread = 1 + 2 * launch_.size(), blank = unread + 1;
        if (launch_.live()) post(to, number, blank, unread, here);
    }

    // All that was sent to a rank has been read here, then, and may be overwritten.
    MK_DEVICE bool await_receipt(u64 from) {
        const Subject receipt{Awaited::receipt, from, 0};
        return launch_.wait(launch_.agent(), &network_.arrived[launch_.size() + from], 1, receipt);
    }

private:
    // In what a rank has for letters: its own, two of each rank, room for receipts, which nobody reads, and a blank one.
    MK_DEVICE u64 letter_of(u64 rank) const { return 1 + launch_.generation() % 2 * launch_.size() + rank; }

    // A letter; as a receipt it only has to arrive.
    MK_DEVICE void post(u64 to, u64 number, u64 from, u64 place, Completed written) {
        const u64 size = sizeof(Letter), region = network_.region;
        channel_.post({to, number, {region, from * size}, {region, place * size}, size, size, 1, size}, written);
    }

    Launch& launch_;
    const Network& network_;
    Channel channel_;
};

template <class T>
class Internode {
public:
    // `together`: rows, as for Landing::pull.
    MK_DEVICE Internode(Launch& launch, const LandingPlan& plan, i64 together)
        : launch_(launch), network_(*launch.world().network), plan_(plan), landing_(launch, plan), mail_(launch),
          together_(together) {}

    // For inter-send: tells the other nodes what this rank calls, and sends its rows to its gateways once they make the same
    // call, so that nothing of an earlier one is in use there any more.
    MK_DEVICE void send(const CallMessage& message) {
        const Completed written = mail_.announce(message, plan_.writes, plan_.chunks);
        for (u64 i = 0; i < network_.gateway_count; ++i) {
            const u64 gateway = network_.gateways[i];
            if (launch_.await_call(gateway, message.digest)) send_rows(gateway, message, written);
        }
        mail_.channel().flush();  // a card may read again what has arrived already, until it says that it was sent
        for (u64 i = 0; i < network_.gateway_count; ++i) mail_.await_receipt(network_.gateways[i]);
        for (u64 i = 1; i < launch_.node().size; ++i) launch_.have_read(launch_.neighbour(i), launch_.readers());
    }

    // For inter-receive. Only when its node knows all that came from a rank, that rank is let go.
    MK_DEVICE void receive(u64 digest) {
        for (u64 i = 0; i < network_.source_count; ++i) {
            const u64 source = network_.sources[i];
            mail_.pass_on_call(source, digest, [&](CallMessage& message) {  // its rows are here
                message.operand = {plan_.zone.segment, plan_.zone.offset + offset_in_zone(source)};
                message.operand_pitch = u64(landing_.lines_of(source).pitch);
            });
        }
        for (Range phase : landing_.phases())
            for (u64 i = 0; i < network_.source_count; ++i) pass_on_rows(network_.sources[i], phase);
        for (u64 i = 0; i < network_.source_count; ++i) mail_.send_receipt(network_.sources[i], Completed());
        mail_.channel().flush();
    }

    // For movers: waits until a chunk has come to its gateway.
    MK_DEVICE bool await(u64 source, i64 chunk) {
        const Subject arrival{Awaited::network, source, u64(chunk)};
        return launch_.wait(launch_.agent(), relayed(launch_.rank(), chunk), 1, arrival);
    }

private:
    MK_DEVICE void send_rows(u64 gateway, const CallMessage& message, Completed written) {
        const Place from = message.operand, to = plan_.zone;
        const Lines here{nullptr, i64(message.operand_pitch)}, there{nullptr, landing_.lines_of(launch_.rank()).pitch};
        const u64 start = to.offset + offset_in_zone(launch_.rank());
        for (Range phase : landing_.phases())
            landing_.each_of(landing_.share_of(launch_.rank(), phase, together_, 0, 1), [&](const Chunk& chunk) {
                const u64 source = from.offset + u64(landing_.part(here, chunk).data - here.data);
                const u64 target = start + u64(landing_.part(there, chunk).data - there.data);
                const u64 number = 2 * launch_.size() + u64(chunk.index);
                return mail_.channel().post({gateway, number, {from.segment, source}, {to.segment, target}, u64(here.pitch),
                                             u64(there.pitch), u64(chunk.lines.size()), u64(chunk.run.size()) * sizeof(T)},
                                            written);
            });
    }

    // Where the rows of a rank land, at any gateway.
    MK_DEVICE u64 offset_in_zone(u64 source) const {
        return u64(landing_.lines_of(source).data - static_cast<u8*>(launch_.at(launch_.rank(), plan_.zone)));
    }

    MK_DEVICE void pass_on_rows(u64 source, Range phase) {
        landing_.each_of(landing_.share_of(source, phase, together_, 0, 1), [&](const Chunk& chunk) {
            const u64* arrived = &network_.arrived[2 * launch_.size() + u64(chunk.index)];
            if (!launch_.wait(launch_.agent(), arrived, 1, {Awaited::network, source, u64(chunk.index)})) return false;
            launch_.template raise<Scope::device>(&plan_.arrived[chunk.index], 1, Completed());
            for (u64 i = 1; i < launch_.node().size; ++i)
                launch_.template raise<Scope::system>(relayed(launch_.neighbour(i), chunk.index), 1, Completed());
            return true;
        });
    }

    MK_DEVICE u64* relayed(u64 rank, i64 chunk) const {
        return static_cast<u64*>(launch_.at(rank, plan_.relayed)) + chunk;
    }

    Launch& launch_;
    const Network& network_;
    const LandingPlan& plan_;
    Landing<T> landing_;
    Mail mail_;
    i64 together_;
};

}  // namespace mk
