// The proxy's end of the queue of channel.cuh.
#pragma once

#include "mkernel/channel.cuh"

namespace mk {

class CommandReader {
public:
    explicit CommandReader(const CommandQueue& queue) : queue_(queue) {}

    // The oldest command that has not been taken; null if it has not been written yet.
    const Command* next() const {
        const Command& slot = queue_.slots[taken_ % queue_.capacity];
        return load_acquire(&slot.number) == taken_ + 1 ? &slot : nullptr;
    }

    // Its slot is free for the next lap.
    void take() { store_release<Scope::system>(queue_.taken, ++taken_); }

    // Of all that were taken, the first `count` have been sent.
    void publish(u64 count) { store_release<Scope::system>(queue_.sent, count); }

    u64 taken() const { return taken_; }

private:
    const CommandQueue& queue_;
    u64 taken_ = 0;
};

}  // namespace mk
