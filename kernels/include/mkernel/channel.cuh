// The queue from kernels to the proxy, the thread of the host that has a network card do what they ask for. Any agent may
// put commands in; a ticket says which slot is whose, and the proxy takes them in the order of the tickets.
#pragma once

#include "copy.cuh"

namespace mk {

enum class Ask : u64 {
    enter = 1,  // a call begins, in which `line_bytes` chunks come here: from `from` on, how many writes make up each
    write = 2,
};

// Where bytes lie in what a rank has registered with its network card.
struct Registered {
    u64 region;
    u64 offset;
};

// Packs what is small, so that a command is one cache line: 16 bits of a region before 48 of an offset, 32 of a peer before
// 32 of a chunk, 32 of either pitch.
struct Write {
    u64 peer;
    u64 chunk;  // of those that arrive at the peer
    Registered from, to;
    u64 from_pitch, to_pitch;
    u64 lines, line_bytes;
};

MK_DEVICE u64 packed(Registered place) { return place.region << 48 | place.offset; }
MK_DEVICE Registered unpacked(u64 place) { return {place >> 48, place & 0xffffffffffff}; }

MK_DEVICE Write unpacked(const Command& command) {
    return {command.peer_and_chunk >> 32, command.peer_and_chunk & 0xffffffff, unpacked(command.from), unpacked(command.to),
            command.pitches >> 32, command.pitches & 0xffffffff, command.kind_and_lines & 0xffffffff, command.line_bytes};
}
MK_DEVICE Ask kind_of(const Command& command) { return Ask(command.kind_and_lines >> 32); }

class Channel {
public:
    MK_DEVICE Channel(Context& launch, const CommandQueue& queue) : launch_(launch), queue_(queue) {}

    // Tells this rank's proxy which chunks a call is made of, before anything of it can arrive. `writes`: per chunk.
    MK_DEVICE bool enter(const u64* writes, u64 chunks) {
        return post({0, u64(Ask::enter) << 32, 0, launch_.generation(), reinterpret_cast<u64>(writes), 0, 0, chunks});
    }

    // All lanes call it. Of what Completed stands for the network may read from now on, until flush().
    MK_DEVICE bool post(const Write& write, Completed) {
        return post({0, u64(Ask::write) << 32 | write.lines, write.peer << 32 | write.chunk, launch_.generation(),
                     packed(write.from), packed(write.to), write.from_pitch << 32 | write.to_pitch, write.line_bytes});
    }

    // Waits until all bytes that this agent has posted have been read: they may be overwritten.
    MK_DEVICE bool flush() { return flush(last_); }

    // Only up to a command, of which the first lane knows what last() was then.
    MK_DEVICE bool flush(u64 last) { return kept(await_sent(launch_, queue_, last)); }

    MK_DEVICE bool is_sent(u64 last) const { return load_acquire(queue_.sent) >= last; }
    MK_DEVICE u64 last() const { return last_; }

    // As another agent has put it into another queue.
    MK_DEVICE bool post(const Command& command) {
        const bool leads = launch_.agent().lane() == 0;
        if (leads && launch_.live()) last_ = 1 + fetch_add(queue_.tickets, 1);
        return kept(put(launch_, queue_, command, last_));
    }

private:
    MK_DEVICE bool kept(bool verdict) {
        if (!verdict) launch_.drop();
        return verdict;
    }

    // These are functions of their own, with a launch of their own: the kernel's own one stays in registers, and what waits
    // for the network does so in one place.
    static MK_DEVICE_APART bool await_sent(Context launch, const CommandQueue& queue, u64 last) {
        const Subject sent{Awaited::sent, launch.rank(), last};
        return launch.poll(
            launch.agent(), sent, last, queue.sent, [&](u64 seen) { return seen >= last ? Poll::done : Poll::pending; },
            [] { return Poll::pending; });
    }

    static MK_DEVICE_APART bool put(Context launch, const CommandQueue& queue, Command command, u64 ticket) {
        if (!await_slot(launch, queue, ticket)) return false;
        interleave();
        if (launch.agent().lane() == 0) {
            Command& slot = queue.slots[(ticket - 1) % queue.capacity];
            slot.kind_and_lines = command.kind_and_lines;
            slot.peer_and_chunk = command.peer_and_chunk;
            slot.generation = command.generation;
            slot.from = command.from;
            slot.to = command.to;
            slot.pitches = command.pitches;
            slot.line_bytes = command.line_bytes;
            store_release<Scope::system>(&slot.number, ticket);
        }
        return true;
    }

    // Back-pressure: the slot is free when the proxy has taken what was in it a lap ago. It counts in host memory, which is
    // far away: so one agent's look serves all until the queue is full again.
    static MK_DEVICE bool await_slot(Context& launch, const CommandQueue& queue, u64 ticket) {
        const Agent& agent = launch.agent();
        auto free = [&](u64 taken) { return taken + queue.capacity >= ticket; };
        if (agent.broadcast(agent.lane() == 0 && launch.live() && free(load_acquire(queue.taken_seen)))) return true;
        const Subject slot{Awaited::queue, launch.rank(), ticket};
        u64 taken = 0;
        const bool arrived = launch.poll(
            agent, slot, ticket, queue.taken,
            [&](u64 seen) { return free(taken = seen) ? Poll::done : Poll::pending; }, [] { return Poll::pending; });
        if (arrived && agent.lane() == 0) store_release<Scope::device>(queue.taken_seen, taken);
        return arrived;
    }

    Context& launch_;
    const CommandQueue& queue_;
    u64 last_ = 0;  // 1 + the ticket of this agent's last command, in its first lane
};

}  // namespace mk
