// Agents that put commands into the queue to the proxy, as fast as they can.
#include <mkernel/channel.cuh>
#include <mkernel/roles.cuh>

namespace mk {

struct CommandsParams {
    World* world;
    CallMessage message;
    CommandQueue* queue;
    u64* written;  // [agent * count + i]: there before the command that names it
    u64 count;     // of each agent
};

MK_KERNEL(post_commands, CommandsParams, p) {
    Launch launch(p.world, {0, Agent::current().count()});
    Channel channel(launch, *p.queue);
    const u64 first = launch.member() * p.count;
    for (u64 i = first; i < first + p.count; ++i) {
        if (launch.agent().lane() == 0) p.written[i] = i + 1;
        const Write write{launch.member(), i, {3, i * 8}, {4, u64(1) << 47 | i}, 16, 24, 2, 8};
        if (!channel.post(write, Writes().complete(launch.agent()))) break;
    }
    channel.flush();
    launch.finish();
}

}  // namespace mk
