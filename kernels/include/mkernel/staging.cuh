// Where network cards do not reach the memory of kernels, what crosses the network goes through slots in host memory. Two
// agents stand between those that ask and the proxy, and nobody else knows of it: one copies what leaves into slots that the
// cards read, the other one copies what has arrived in slots from there to where it belongs.
//
// A slot of this rank is free again when the cards have sent it, one at a peer when that has told so by a credit. Slots are
// counted as long as the communicator lives, and all are free between calls: so nothing is reset. Nobody waits in a circle,
// since what has arrived is always taken out: who sends knows that the peer has entered the call.
#pragma once

#include "channel.cuh"

namespace mk {

class Stager {
public:
    // The last ones of a launch.
    static MK_DEVICE u64 agents_in(const World& world) { return world.network->staging ? 2 : 0; }

    // All that such an agent does, with a launch of its own. False if it has failed.
    static MK_DEVICE_APART bool serve(Peers launch, bool out) {
        Stager stager(launch);
        if (out) stager.send();
        else stager.receive();
        return launch.live();
    }

private:
    MK_DEVICE Stager(Peers& launch)
        : launch_(launch), network_(*launch.world().network), staging_(*network_.staging), proxy_(launch, staging_.queue) {}

    // Does what the others ask for, one after the other, until they have finished.
    MK_DEVICE void send() {
        const CommandQueue& asked = network_.queue;
        u64 taken = load_relaxed(asked.taken), told = taken;
        for (;;) {
            const Command& slot = asked.slots[taken % asked.capacity];
            auto ready = [&] { return load_acquire(&slot.number) == taken + 1; };
            const bool goes_on = launch_.stand_by([&] {
                if (told < taken && proxy_.is_sent(direct_)) store_release<Scope::device>(asked.sent, told = taken);
                return ready() || launch_.finished_but(agents_in(launch_.world()));
            });
            if (!goes_on) return;
            if (!launch_.agent().broadcast(leads() && ready())) break;
            const Command command = slot;
            launch_.agent().sync();
            if (leads()) store_release<Scope::device>(asked.taken, taken + 1);
            ++taken;
            if (!hand_on(command)) return;
        }
        for (u64 i = 0; i < staging_.link_count; ++i)
            if (!await_credits(i, staging_.links[i].sent)) return;
        proxy_.flush();
    }

    // Takes out what arrives, until the others have finished: then no more does.
    MK_DEVICE void receive() {
        auto some = [&] {
            for (u64 i = 0; i < staging_.link_count; ++i)
                if (has_arrived(i)) return true;
            return launch_.finished_but(agents_in(launch_.world()));
        };
        for (bool idle = false; !idle;) {
            if (!launch_.stand_by(some)) return;
            idle = true;
            for (u64 i = 0; i < staging_.link_count; ++i)
                if (launch_.agent().broadcast(leads() && has_arrived(i))) take_out(i), idle = false;
        }
        proxy_.flush();
    }

    MK_DEVICE bool leads() const { return launch_.agent().lane() == 0; }

    // --- out ----------------------------------------------------------------------------------------------------------

    // Letters and receipts are in host memory anyway.
    MK_DEVICE bool hand_on(const Command& command) {
        if (kind_of(command) == Ask::enter) return proxy_.enter(nullptr, 0);  // chunks do not arrive at the proxy
        const Write write = unpacked(command);
        if (write.chunk >= 2 * launch_.size()) return send_in_parcels(write);
        const bool posted = proxy_.post(command);
        direct_ = proxy_.last();
        return posted;
    }

    MK_DEVICE bool send_in_parcels(const Write& write) {
        u64 run = write.line_bytes, lines = write.lines;
        if (write.from_pitch == run && write.to_pitch == run) run *= lines, lines = 1;
        const bool empty = run * lines == 0;  // it has to arrive, too
        const u64 width = run < staging_.room ? run : staging_.room, height = width == 0 ? lines : staging_.room / width;
        const u64 across = empty ? 1 : u64(ceil_div(i64(run), i64(width)));
        const u64 parcels = empty ? 1 : across * u64(ceil_div(i64(lines), i64(height)));
        const u8* from = memory_of(write.from);
        for (u64 i = 0; i < parcels; ++i) {
            const u64 line = i / across * height, begin = i % across * width;
            const Parcel parcel{write.chunk,
                                i + 1 == parcels,
                                {write.to.region, write.to.offset + line * write.to_pitch + begin},
                                write.to_pitch,
                                lines - line < height ? lines - line : height,
                                run - begin < width ? run - begin : width,
                                0};
            if (!send(write.peer, parcel, {const_cast<u8*>(from) + line * write.from_pitch + begin, i64(write.from_pitch)}))
                return false;
        }
        return true;
    }

    MK_DEVICE bool send(u64 peer, const Parcel& parcel, Lines from) {
        const u64 number = staging_.link_of[peer], slots = staging_.slots;
        StagedLink& link = staging_.links[number];
        const u64 sent = link.sent, left = *staging_.left, bytes = sizeof(Parcel) + parcel.lines * parcel.line_bytes;
        u64* read_by = &staging_.read_by[left % slots];
        if (!proxy_.flush(leads() ? *read_by : 0)) return false;
        if (sent >= slots && !await_credits(number, sent - slots + 1)) return false;
        const u64 here = slot(left % slots), there = slot(slots + link.number_there * slots + sent % slots);
        if (leads()) {
            *reinterpret_cast<Parcel*>(staging_.memory + here) = parcel;
            link.sent = sent + 1, *staging_.left = left + 1;
        }
        const Lines to{staging_.memory + here + sizeof(Parcel), i64(parcel.line_bytes)};
        const Completed copied = copy(launch_.agent(), to, from, i64(parcel.lines), i64(parcel.line_bytes)).complete();
        const u64 place = arrival(link.number_there) + sent % slots;
        const bool posted = post(peer, place, here, there, bytes, copied);
        if (leads()) *read_by = proxy_.last();
        return posted;
    }

    // Waits until a peer has taken out so many slots.
    MK_DEVICE bool await_credits(u64 number, u64 count) {
        const u64* credits = &staging_.arrived[number * (staging_.slots + 1) + staging_.slots];
        return launch_.poll(
            launch_.agent(), {Awaited::slot, staging_.links[number].rank, 0}, count, credits,
            [&](u64 seen) { return seen >= count ? Poll::done : Poll::pending; }, [] { return Poll::pending; });
    }

    // --- in -----------------------------------------------------------------------------------------------------------

    MK_DEVICE bool has_arrived(u64 number) const {
        const u64 received = staging_.links[number].received, slots = staging_.slots;
        return load_acquire(&staging_.arrived[number * (slots + 1) + received % slots]) > received / slots;
    }

    MK_DEVICE void take_out(u64 number) {
        StagedLink& link = staging_.links[number];
        const u64 received = link.received, slots = staging_.slots;
        u8* here = staging_.memory + slot(slots + number * slots + received % slots);
        const Parcel parcel = *reinterpret_cast<const Parcel*>(here);
        const Lines from{here + sizeof(Parcel), i64(parcel.line_bytes)};
        const Lines to{memory_of({parcel.to.segment, parcel.to.offset}), i64(parcel.to_pitch)};
        const Completed copied = copy(launch_.agent(), to, from, i64(parcel.lines), i64(parcel.line_bytes)).complete();
        if (leads()) link.received = received + 1;
        if (parcel.last) launch_.template raise<Scope::device>(&network_.arrived[parcel.chunk], 1, copied);
        post(link.rank, arrival(link.number_there) + slots, 0, sizeof(Parcel), sizeof(u64), copied);  // a credit
    }

    // --- both ---------------------------------------------------------------------------------------------------------

    // Where a slot begins, behind two parcels that say nothing: credits are written from one to the other.
    MK_DEVICE u64 slot(u64 number) const { return 2 * sizeof(Parcel) + number * (sizeof(Parcel) + staging_.room); }

    // The number of what arrives at a peer first, of what this rank sends.
    MK_DEVICE u64 arrival(u64 number_there) const { return staging_.first + number_there * (staging_.slots + 1); }

    MK_DEVICE bool post(u64 peer, u64 place, u64 from, u64 to, u64 bytes, Completed written) {
        const u64 region = staging_.region;
        return proxy_.post({peer, place, {region, from}, {region, to}, bytes, bytes, 1, bytes}, written);
    }

    // What others name as if cards had registered it.
    MK_DEVICE u8* memory_of(Registered place) const {
        if (place.region == network_.region) return reinterpret_cast<u8*>(network_.letters) + place.offset;
        return static_cast<u8*>(launch_.at(launch_.rank(), {place.region, place.offset}));
    }

    Peers& launch_;
    const Network& network_;
    const Staging& staging_;
    Channel proxy_;
    u64 direct_ = 0;  // the last command that was handed on as it was
};

}  // namespace mk
