// A network card made of software: the queue pairs, keys and completions of one process, and the thread that works for them.
// It is strict where real ones are, and does late, out of order or not at all what a real one may do so.
#pragma once

#include <poll.h>
#include <sched.h>
#include <time.h>

#include <map>
#include <mutex>
#include <random>
#include <thread>
#include <unordered_map>

#include "soft_link.h"
#include "verbs.h"

namespace soft {

inline uint64_t now_ns() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return uint64_t(time.tv_sec) * 1000000000 + uint64_t(time.tv_nsec);
}

constexpr uint32_t number_mask = 0xffffff;

// What goes wrong, counted in messages that this process has begun to send: 1 is the first.
struct Fault {
    enum Kind { none, down, error, drop, dies, refuse, memlock, absent, denied } kind = none;
    uint64_t message = 0;
};

struct Counters {
    uint64_t bytes_sent, bytes_received, messages_sent, messages_received;
};

struct Context : ibv_context {
    Counters counters;
    uint64_t free_at;  // when the link has sent what was given to it
    bool is_efa;
    unsigned objects;
};

struct Completion {
    ibv_wc wc;
    bool of_send;
};

struct Cq : ibv_cq {
    std::deque<Completion> entries;
    std::atomic<uint32_t> ready;
    bool overrun;
    unsigned users;
};

struct Mr : ibv_mr {
    int access;
};

struct Ah : ibv_ah {
    Link* link;
};

struct SendRequest {
    uint64_t wr_id;
    bool with_imm, signaled;
    uint32_t imm, rkey;
    uint64_t address;
    std::vector<ibv_sge> from;
    std::vector<uint8_t> inlined;
    uint64_t bytes;
    Link* link;
    uint32_t to_qp, qkey;
    uint32_t number;
    // On its way.
    bool started, over, struck;
    uint64_t sent, deadline, not_before;
    uint32_t tries, not_ready;
    bool whole() const { return started && sent == bytes; }
};

struct Qp : ibv_qp_ex {
    ibv_qp_cap cap;
    bool is_srd, signals_all;
    uint64_t operations;
    std::deque<SendRequest> sends;
    std::deque<ibv_recv_wr> receives;
    uint32_t send_slots, receive_slots;  // taken, until their completion is polled
    ibv_qp_attr attr;
    Link* link;
    uint32_t next_number, expected;
    // Between wr_start and wr_complete.
    std::vector<SendRequest> batch;
    int batch_problem;
    bool batching;
};

// A message that is coming in.
struct Incoming {
    Qp* qp;
    uint64_t came, landed;
    bool has_receive;
    ibv_recv_wr receive;
};

class Nic {
public:
    // Never destroyed: its objects may outlive main().
    static Nic& instance() {
        static Nic* nic = new Nic;
        return *nic;
    }

    std::mutex turn;   // of who starts or stops it; taken first
    std::mutex mutex;  // of everything below
    Links links;
    std::unordered_map<uint32_t, Qp*> qps;
    std::unordered_map<uint32_t, Mr*> by_lkey, by_rkey;
    uint32_t next_qp = 0x11, next_key = 0x1001;
    uint64_t seed = 0;
    double bytes_per_ns = 0;
    Fault fault;
    bool dead = false;  // it takes and gives nothing any more
    uint64_t locked = 0;  // bytes of memory that is registered

    void configure(double bytes_per_second, uint64_t seed_, Fault fault_) {
        bytes_per_ns = bytes_per_second * 1e-9;
        seed = seed_, fault = fault_;
        random_.seed(seed);
        begun_ = 0;
        down_ = dead = false;
    }

    int start() {
        if (users_++ > 0) return 0;
        const int problem = links.open();
        if (problem) {
            --users_;
            return problem;
        }
        wake_ = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
        thread_ = std::thread(&Nic::run, this);
        return 0;
    }

    void stop(std::unique_lock<std::mutex>& lock) {
        if (--users_ > 0) return;
        lock.unlock();
        halt();
        lock.lock();
        links.close();
        incoming_.clear();
        held_.clear();
        close(wake_);
    }

    // Ends the thread; what there is to do waits for step_by_hand().
    void halt() {
        if (!thread_.joinable()) return;
        stop_ = true;
        wake();
        thread_.join();
        stop_ = false;
    }

    // Whether there was anything to do, or will be after some time.
    bool step_by_hand() {
        std::lock_guard<std::mutex> lock(mutex);
        return step() || waits_;
    }

    void wake() {
        const uint64_t one = 1;
        if (write(wake_, &one, sizeof one) < 0) return;  // it is awake
    }

    // A queue pair that failed: all that it still has to do is given back.
    void to_error(Qp& qp) {
        qp.qp_base.state = IBV_QPS_ERR;
        for (auto entry = incoming_.begin(); entry != incoming_.end();)
            if (entry->second.qp == &qp) {
                if (entry->second.has_receive) qp.receives.push_front(entry->second.receive);
                entry = incoming_.erase(entry);
            } else ++entry;
        for (SendRequest& send : qp.sends) complete(qp, send, IBV_WC_WR_FLUSH_ERR);
        qp.sends.clear();
        for (const ibv_recv_wr& receive : qp.receives) {
            ibv_wc wc{};
            wc.wr_id = receive.wr_id, wc.status = IBV_WC_WR_FLUSH_ERR;
            finish(qp, qp.qp_base.recv_cq, wc, false);
        }
        qp.receives.clear();
    }

    void reset(Qp& qp) {
        for (auto entry = incoming_.begin(); entry != incoming_.end();)
            entry = entry->second.qp == &qp ? incoming_.erase(entry) : std::next(entry);
        qp.sends.clear();
        qp.receives.clear();
        qp.send_slots = qp.receive_slots = 0;
        qp.link = nullptr;
    }

    // The region in which an access is allowed; null if there is none.
    Mr* find(const std::unordered_map<uint32_t, Mr*>& by_key, uint32_t key, const ibv_pd* pd, uint64_t address,
             uint64_t bytes, int access) const {
        const auto found = by_key.find(key);
        if (found == by_key.end()) return nullptr;
        Mr* mr = found->second;
        const uint64_t begin = reinterpret_cast<uint64_t>(mr->addr);
        const bool inside = address >= begin && bytes <= mr->length && address - begin <= mr->length - bytes;
        return mr->pd == pd && inside && (mr->access & access) == access ? mr : nullptr;
    }

private:
    static constexpr size_t rc_window = 8, srd_window = 32, most_held = 24;
    static constexpr int packets_at_a_time = 16;
    static constexpr uint32_t steps_per_question = 16;
    static constexpr uint64_t srd_timeout_ns = 2000000000;
    static constexpr uint64_t lost_timeout_ns = 20000000;  // of what a fault has swallowed: there is nothing to wait for
    static constexpr uint64_t longest_step_ns = 10000000;

    struct Held {
        Packet packet;
        Link* link;
        std::vector<uint8_t> payload;
    };
    using MessageKey = std::tuple<Link*, uint32_t, uint32_t>;

    Nic() {}

    void run() {
        uint32_t idle = 0;
        while (!stop_) {
            bool busy, waits;
            {
                std::lock_guard<std::mutex> lock(mutex);
                busy = step();
                waits = waits_;
            }
            idle = busy ? 0 : idle + 1;
            if (idle < 200) sched_yield();
            else if (waits) rest(50000);
            else sleep();
        }
    }

    static void rest(long ns) {
        const timespec time{0, ns};
        nanosleep(&time, nullptr);
    }

    // Until a peer or this process rings the bell.
    void sleep() {
        std::vector<pollfd> bells;
        {
            std::lock_guard<std::mutex> lock(mutex);
            bells = {{wake_, POLLIN, 0}, {links.listener(), POLLIN, 0}};
            for (int socket : links.strangers()) bells.push_back({socket, POLLIN, 0});
            for (auto& link : links.all()) {
                if (link->socket() >= 0) bells.push_back({link->socket(), POLLIN, 0});
                link->in().sleeps(true);
            }
            for (auto& link : links.all())
                if (!link->in().empty()) bells.clear();
        }
        if (!bells.empty()) poll(bells.data(), bells.size(), 5);
        std::lock_guard<std::mutex> lock(mutex);
        uint64_t count;
        while (read(wake_, &count, sizeof count) > 0) {}
        char rung[64];
        for (auto& link : links.all()) {
            link->in().sleeps(false);
            if (link->socket() >= 0) while (recv(link->socket(), rung, sizeof rung, MSG_DONTWAIT) > 0) {}
        }
    }

    bool step() {
        waits_ = false;
        // Asking the system takes longer than all that follows.
        bool busy = steps_++ % steps_per_question == 0 && links.accept();
        for (auto& link : links.all()) {
            link->flush();
            for (int i = 0; i < packets_at_a_time && !link->in().empty(); ++i, busy = true) receive(*link);
        }
        busy = land_some() || busy;
        const uint64_t now = now_ns();
        // A real card is never short of a processor: for how long this one was does not count.
        clock_ += std::min(now - last_step_, longest_step_ns);
        last_step_ = now;
        for (auto& entry : qps)
            if (entry.second->qp_base.state == IBV_QPS_RTS) {
                busy = transmit(*entry.second, now) || busy;
                look_at_clock(*entry.second);
            }
        return busy;
    }

    // --- sending ------------------------------------------------------------------------------------------------------

    // One fragment of the first message that may go on. Plain writes of a reliable connection are on their way together;
    // an immediate goes when all before it has landed, and nothing goes past it.
    bool transmit(Qp& qp, uint64_t now) {
        Context& context = *static_cast<Context*>(qp.qp_base.context);
        const size_t window = qp.is_srd ? srd_window : rc_window;
        for (size_t i = 0; i < qp.sends.size() && i < window; ++i) {
            SendRequest& send = qp.sends[i];
            if (send.over) continue;
            if (!qp.is_srd && i > 0 && send.with_imm) return false;
            if (send.whole()) {
                if (!qp.is_srd && send.with_imm) return false;
                continue;
            }
            const uint32_t bytes = uint32_t(std::min<uint64_t>(fragment_bytes, send.bytes - send.sent));
            if (now < send.not_before || now < context.free_at || !send.link->fits(bytes)) {
                waits_ = true;
                return false;
            }
            if (!send.started) begin(context, send);
            if (died(send)) return true;
            if (broken(qp, send)) return true;
            if (bytes_per_ns > 0) context.free_at = now + uint64_t(bytes / bytes_per_ns);
            if (!lost(send)) {
                const uint8_t* payload;
                if (!gather(qp, send, bytes, payload)) {
                    fail(qp, i, IBV_WC_LOC_PROT_ERR);
                    return true;
                }
                send.link->send(fragment(qp, send, bytes), payload);
            }
            send.started = true;
            send.sent += bytes;
            if (send.whole()) send.deadline = clock_ + (lost(send) ? lost_timeout_ns : timeout_of(qp));
            return true;
        }
        return false;
    }

    void begin(Context& context, SendRequest& send) {
        if (send.tries > 0 || send.not_ready > 0) return;
        ++begun_;
        context.counters.messages_sent += 1;
        context.counters.bytes_sent += send.bytes;
        if (fault.kind == Fault::down && begun_ >= fault.message) down_ = true;
        send.struck = begun_ == fault.message;
    }

    // Whether the card goes with this message; what it had to do is given back, and no completion says why.
    bool died(const SendRequest& send) {
        if (fault.kind != Fault::dies || !send.struck) return false;
        dead = true;
        for (auto& entry : qps) to_error(*entry.second);
        return true;
    }

    // Whether the message is the one that an injected error completion meets.
    bool broken(Qp& qp, SendRequest& send) {
        if (fault.kind != Fault::error || !send.struck) return false;
        for (size_t i = 0; i < qp.sends.size(); ++i)
            if (&qp.sends[i] == &send) fail(qp, i, IBV_WC_REM_OP_ERR);
        return true;
    }

    // Whether what is sent now never comes: the link is down, or the message is to be lost once.
    bool lost(const SendRequest& send) const {
        return down_ || (fault.kind == Fault::drop && send.struck && send.tries == 0);
    }

    static uint64_t timeout_of(const Qp& qp) {
        return qp.is_srd ? srd_timeout_ns : qp.attr.timeout ? uint64_t(4096) << qp.attr.timeout : ~uint64_t(0) / 2;
    }

    Packet fragment(const Qp& qp, const SendRequest& send, uint32_t bytes) const {
        Packet packet{};
        packet.kind = Packet::data;
        packet.to_qp = send.to_qp, packet.from_qp = qp.qp_base.qp_num;
        packet.number = send.number;
        if (send.with_imm) packet.flags = Packet::with_imm;
        packet.imm = send.imm, packet.rkey = send.rkey, packet.qkey = send.qkey;
        packet.address = send.address, packet.message_bytes = send.bytes;
        packet.offset = send.sent, packet.bytes = bytes;
        return packet;
    }

    // The next bytes of a message, read only now: a buffer that was overwritten too early shows.
    bool gather(const Qp& qp, const SendRequest& send, uint32_t bytes, const uint8_t*& payload) {
        payload = send.inlined.data() + send.sent;
        if (!send.inlined.empty()) return true;
        stage_.resize(fragment_bytes);
        payload = stage_.data();
        uint64_t skip = send.sent;
        uint32_t done = 0;
        for (const ibv_sge& sge : send.from) {
            if (!find(by_lkey, sge.lkey, qp.qp_base.pd, sge.addr, sge.length, 0)) return false;
            const uint64_t passed = std::min<uint64_t>(skip, sge.length);
            skip -= passed;
            const uint32_t run = uint32_t(std::min<uint64_t>(sge.length - passed, bytes - done));
            if (run) memcpy(stage_.data() + done, reinterpret_cast<const uint8_t*>(sge.addr) + passed, run);
            done += run;
        }
        return true;
    }

    void look_at_clock(Qp& qp) {
        const size_t window = qp.is_srd ? srd_window : rc_window;
        for (size_t i = 0; i < qp.sends.size() && i < window; ++i) {
            SendRequest& send = qp.sends[i];
            if (send.over || !send.whole() || clock_ < send.deadline) continue;
            const bool again = !qp.is_srd && send.tries < qp.attr.retry_cnt;
            if (!again) return fail(qp, i, qp.is_srd ? IBV_WC_RESP_TIMEOUT_ERR : IBV_WC_RETRY_EXC_ERR);
            for (size_t j = i; j < qp.sends.size() && j < window; ++j)
                if (qp.sends[j].started && !qp.sends[j].over) ++qp.sends[j].tries, qp.sends[j].sent = 0, qp.sends[j].started = false;
            return;
        }
    }

    void complete(Qp& qp, const SendRequest& send, ibv_wc_status status) {
        if (status == IBV_WC_SUCCESS && !send.signaled) {
            ++unsignaled_[qp.qp_base.qp_num];
            return;
        }
        ibv_wc wc{};
        wc.wr_id = send.wr_id, wc.status = status, wc.opcode = IBV_WC_RDMA_WRITE, wc.byte_len = uint32_t(send.bytes);
        finish(qp, qp.qp_base.send_cq, wc, true);
    }

    void fail(Qp& qp, size_t index, ibv_wc_status status) {
        complete(qp, qp.sends[index], status);
        qp.sends.erase(qp.sends.begin() + index);
        if (!qp.is_srd) to_error(qp);
    }

    void finish(Qp& qp, ibv_cq* to, ibv_wc wc, bool of_send) {
        Cq& cq = *static_cast<Cq*>(to);
        wc.qp_num = qp.qp_base.qp_num;
        if (int(cq.entries.size()) >= cq.cqe) cq.overrun = true;
        else cq.entries.push_back({wc, of_send});
        cq.ready.fetch_add(1, std::memory_order_release);
    }

    // --- receiving ----------------------------------------------------------------------------------------------------

    void receive(Link& link) {
        Packet packet;
        link.in().pop(packet, arriving_);
        const auto found = qps.find(packet.to_qp);
        if (down_ || found == qps.end()) return;
        Qp& qp = *found->second;
        if (packet.kind == Packet::reply) return replied(qp, packet);
        const ibv_qp_state state = qp.qp_base.state;
        if (state != IBV_QPS_RTR && state != IBV_QPS_RTS) return;
        if (qp.is_srd ? packet.qkey != qp.attr.qkey
                      : link.token != qp.link->token || packet.from_qp != qp.attr.dest_qp_num)
            return;
        const MessageKey key(&link, packet.from_qp, packet.number);
        if (packet.offset == 0 && !admit(qp, link, packet, key)) return;
        const auto entry = incoming_.find(key);
        if (entry == incoming_.end() || packet.offset != entry->second.came) return;  // it was refused, or is here
        entry->second.came += packet.bytes;
        const Mr* mr = find(by_rkey, packet.rkey, qp.qp_base.pd, packet.address, packet.message_bytes, 0);
        const bool in_order = !qp.is_srd && (!mr || !(mr->access & IBV_ACCESS_RELAXED_ORDERING));
        if (in_order) return land(link, packet, arriving_);
        held_.push_back({packet, &link, arriving_});
        if (held_.size() >= most_held) land_any();
    }

    // Before any byte of a message is placed.
    bool admit(Qp& qp, Link& link, const Packet& packet, const MessageKey& key) {
        if (!qp.is_srd && packet.number != qp.expected) {
            const bool behind = ((qp.expected - packet.number) & number_mask) < number_mask / 2;
            if (behind && !incoming_.count(key)) answer(link, packet, IBV_WC_SUCCESS);
            return false;
        }
        const bool allowed = qp.is_srd || (qp.attr.qp_access_flags & IBV_ACCESS_REMOTE_WRITE);
        if (packet.message_bytes > 0 &&
            (!allowed || !find(by_rkey, packet.rkey, qp.qp_base.pd, packet.address, packet.message_bytes,
                               IBV_ACCESS_REMOTE_WRITE))) {
            answer(link, packet, IBV_WC_REM_ACCESS_ERR);
            if (!qp.is_srd) to_error(qp);
            return false;
        }
        Incoming message{&qp, 0, 0, false, {}};
        if (packet.flags & Packet::with_imm) {
            if (qp.receives.empty()) {
                answer(link, packet, IBV_WC_RNR_RETRY_EXC_ERR);
                return false;
            }
            message.has_receive = true;
            message.receive = qp.receives.front();
            qp.receives.pop_front();
        }
        qp.expected = (qp.expected + 1) & number_mask;
        incoming_[key] = message;
        return true;
    }

    void answer(Link& link, const Packet& to, ibv_wc_status status) {
        Packet packet{};
        packet.kind = Packet::reply;
        packet.to_qp = to.from_qp, packet.from_qp = to.to_qp, packet.number = to.number, packet.status = status;
        link.reply(packet);
    }

    // Held fragments land now and then, in an order drawn from the seed.
    bool land_some() {
        if (held_.empty()) return false;
        if (random_() % 4 != 0) land_any();
        return true;
    }

    void land_any() {
        std::swap(held_[random_() % held_.size()], held_.back());
        Held held = std::move(held_.back());
        held_.pop_back();
        land(*held.link, held.packet, held.payload);
    }

    void land(Link& link, const Packet& packet, const std::vector<uint8_t>& payload) {
        const auto entry = incoming_.find(MessageKey(&link, packet.from_qp, packet.number));
        if (entry == incoming_.end()) return;
        Incoming& message = entry->second;
        Qp& qp = *message.qp;
        if (packet.bytes > 0) {
            // The region may be gone since.
            if (!find(by_rkey, packet.rkey, qp.qp_base.pd, packet.address, packet.message_bytes, 0)) {
                answer(link, packet, IBV_WC_REM_ACCESS_ERR);
                incoming_.erase(entry);
                return;
            }
            place(reinterpret_cast<uint8_t*>(packet.address + packet.offset), payload);
            message.landed += packet.bytes;
        }
        if (message.landed < packet.message_bytes) return;
        Context& context = *static_cast<Context*>(qp.qp_base.context);
        context.counters.messages_received += 1;
        context.counters.bytes_received += packet.message_bytes;
        if (message.has_receive) {
            ibv_wc wc{};
            wc.wr_id = message.receive.wr_id, wc.opcode = IBV_WC_RECV_RDMA_WITH_IMM;
            wc.byte_len = uint32_t(packet.message_bytes), wc.imm_data = packet.imm, wc.wc_flags = IBV_WC_WITH_IMM;
            wc.src_qp = packet.from_qp;
            finish(qp, qp.qp_base.recv_cq, wc, false);
        }
        incoming_.erase(entry);
        answer(link, packet, IBV_WC_SUCCESS);
    }

    // A word that lies as one arrives as one.
    static void place(uint8_t* to, const std::vector<uint8_t>& payload) {
        if (payload.size() == 8 && reinterpret_cast<uint64_t>(to) % 8 == 0) {
            uint64_t word;
            memcpy(&word, payload.data(), sizeof word);
            __atomic_store_n(reinterpret_cast<uint64_t*>(to), word, __ATOMIC_RELEASE);
        } else
            memcpy(to, payload.data(), payload.size());
    }

    void replied(Qp& qp, const Packet& packet) {
        if (qp.qp_base.state != IBV_QPS_RTS) return;
        for (size_t i = 0; i < qp.sends.size(); ++i) {
            SendRequest& send = qp.sends[i];
            if (send.number != packet.number || !send.started || send.over) continue;
            if (packet.status == IBV_WC_RNR_RETRY_EXC_ERR) {
                if (qp.attr.rnr_retry != 7 && send.not_ready >= qp.attr.rnr_retry)
                    return fail(qp, i, IBV_WC_RNR_RETRY_EXC_ERR);
                ++send.not_ready;
                send.started = false, send.sent = 0, send.not_before = now_ns() + 100000;
                return;
            }
            if (packet.status != IBV_WC_SUCCESS) return fail(qp, i, ibv_wc_status(packet.status));
            send.over = true;
            if (qp.is_srd) {
                complete(qp, send, IBV_WC_SUCCESS);
                qp.sends.erase(qp.sends.begin() + i);
            } else
                for (; !qp.sends.empty() && qp.sends.front().over; qp.sends.pop_front())
                    complete(qp, qp.sends.front(), IBV_WC_SUCCESS);
            return;
        }
    }

public:
    // What a polled completion frees: its own slot, and those of the requests before it that made none.
    void polled(const Completion& completion) {
        const auto found = qps.find(completion.wc.qp_num);
        if (found == qps.end()) return;
        Qp& qp = *found->second;
        if (!completion.of_send) {
            --qp.receive_slots;
            return;
        }
        uint32_t& silent = unsignaled_[completion.wc.qp_num];
        qp.send_slots -= std::min(qp.send_slots, 1 + silent);
        silent = 0;
    }

private:
    std::thread thread_;
    int users_ = 0, wake_ = -1;
    std::atomic<bool> stop_{false};
    bool down_ = false;
    bool waits_ = false;  // for a time to come, or for room
    uint64_t begun_ = 0;
    uint64_t clock_ = 0, last_step_ = 0;
    uint32_t steps_ = 0;
    std::mt19937_64 random_;
    std::vector<uint8_t> stage_, arriving_;
    std::vector<Held> held_;
    std::map<MessageKey, Incoming> incoming_;
    std::unordered_map<uint32_t, uint32_t> unsignaled_;
};

}  // namespace soft
