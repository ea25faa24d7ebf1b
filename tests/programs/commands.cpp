// A slow proxy, that looks closely.
#include <sched.h>
#include <time.h>

#include <vector>

#include "command_reader.h"

using namespace mk;

// Takes `count` commands of `agents` agents, with a rest after every `burst`. Returns 0, or what is wrong with one.
MK_EXPORT int take_commands(const CommandQueue* queue, const u64* written, u64 agents, u64 count, u64 burst, u64 rest_ns) {
    CommandReader reader(*queue);
    std::vector<u64> next(agents);
    for (u64 agent = 0; agent < agents; ++agent) next[agent] = agent * (count / agents);
    u64 published = 0;
    while (reader.taken() < count) {
        const Command* command = reader.next();
        if (!command) {
            sched_yield();
            continue;
        }
        const u64 agent = command->peer_and_chunk >> 32, chunk = command->peer_and_chunk & 0xffffffff;
        if (agent >= agents || chunk != next[agent]++) return 1;  // lost, doubled or out of its writer's order
        if (load_relaxed(&written[chunk]) != chunk + 1) return 2;  // early
        if (reader.taken() % burst == 0) {
            const timespec rest{0, long(rest_ns)};
            nanosleep(&rest, nullptr);
        }
        // Still the same after a while: nobody writes a slot that has not been taken.
        if ((command->peer_and_chunk & 0xffffffff) != chunk || command->kind_and_lines != (u64(Ask::write) << 32 | 2))
            return 3;
        if (command->from != (u64(3) << 48 | chunk * 8) || command->to != (u64(4) << 48 | u64(1) << 47 | chunk)) return 4;
        if (command->pitches != (u64(16) << 32 | 24) || command->line_bytes != 8) return 5;
        if (load_relaxed(queue->tickets) > reader.taken() + queue->capacity + agents) return 6;  // no back-pressure
        reader.take();
        if (reader.taken() % 64 == 0) reader.publish(published = reader.taken());
    }
    if (published < count) reader.publish(count);
    return 0;
}
