// A function on a stack of its own, which takes turns with whoever resumes it, in one thread of the host.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

namespace mk {
namespace host {

class Fiber {
public:
    Fiber(std::function<void()> body, std::size_t stack_bytes)
        : body_(std::move(body)), stack_(new char[stack_bytes]) {
        getcontext(&start_);
        start_.uc_stack.ss_sp = stack_.get();
        start_.uc_stack.ss_size = stack_bytes;
        start_.uc_link = nullptr;
        const auto self = reinterpret_cast<std::uintptr_t>(this);
        makecontext(&start_, reinterpret_cast<void (*)()>(&Fiber::enter), 2, unsigned(self >> 32),
                    unsigned(self));
    }
    Fiber(const Fiber&) = delete;

    // Runs it until it yields or is done. Not by swapcontext, which asks the system for the signal mask at every turn.
    void resume() {
        if (_setjmp(resumed_)) return;
        if (begun_) _longjmp(place_, 1);
        begun_ = true;
        setcontext(&start_);
    }

    // By the function itself.
    void yield() {
        if (_setjmp(place_) == 0) _longjmp(resumed_, 1);
    }

    bool done() const { return done_; }

private:
    static void enter(unsigned high, unsigned low) {
        Fiber& self = *reinterpret_cast<Fiber*>(std::uintptr_t(high) << 32 | low);
        self.body_();
        self.done_ = true;
        for (;;) self.yield();
    }

    std::function<void()> body_;
    std::unique_ptr<char[]> stack_;
    ucontext_t start_;
    jmp_buf place_, resumed_;  // where either of them goes on
    bool begun_ = false, done_ = false;
};

}  // namespace host
}  // namespace mk
