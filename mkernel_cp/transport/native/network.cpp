// The proxy: a thread that takes what kernels ask for out of their queue, has network cards write it to peers, and raises
// signals for what peers have written here. It never calls CUDA, since a running kernel may depend on it.
#include <sched.h>
#include <time.h>

#include <atomic>
#include <mutex>
#include <thread>

#include "cards.h"
#include "command_reader.h"

using namespace mk;
using namespace mk::net;

namespace {

// What the proxy shares with Python and the kernels.
struct Shared {
    CommandQueue* queue;
    u64 rank;
    u64 size;
    u64* arrived;    // signals: [rank] for letters, [rank] for receipts, and then [chunk]; behind them counts
    u64 counted;     // the first of these
    u64 arrivals;    // so many words
    Letter* letters;  // [generation % 2][rank] of peers
    HostPage** pages;
};

struct Region {
    u64 address = 0;
    std::vector<ibv_mr*> here;    // per card
    std::vector<u64> there;       // keys, per card
};

class Proxy {
public:
    Proxy(const char* verbs, const char* efa, const std::string& names, bool is_efa, unsigned queue_pairs, unsigned links)
        : library_(verbs, is_efa ? efa : "") {
        for (size_t begin = 0; begin <= names.size();) {
            const size_t end = std::min(names.find(',', begin), names.size());
            cards_.emplace_back(new Card(library_, names.substr(begin, end - begin), is_efa, queue_pairs, links));
            begin = end + 1;
        }
    }

    ~Proxy() {
        stop();
        // Before memory goes: to write where it was would be a fault of the writer, who is to hear that this rank is gone.
        for (auto& card : cards_) card->disconnect();
        for (auto& region : own_) forget(region.second);
    }

    std::vector<std::unique_ptr<Card>>& cards() { return cards_; }

    void enroll(u64 number, void* address, u64 bytes, int dmabuf, u64* keys) {
        Region region;
        region.address = reinterpret_cast<u64>(address);
        try {
            for (auto& card : cards_) {
                region.here.push_back(card->enroll(address, bytes, dmabuf));
                keys[region.here.size() - 1] = region.here.back()->rkey;
            }
        } catch (...) {
            forget(region);
            throw;
        }
        std::lock_guard<std::mutex> lock(mutex_);
        own_[number] = region;
    }

    void forget(u64 number) {
        std::lock_guard<std::mutex> lock(mutex_);
        forget(own_[number]);
        own_.erase(number);
    }

    void learn(u64 peer, u64 number, u64 address, const u64* keys) {
        std::lock_guard<std::mutex> lock(mutex_);
        Region& region = theirs_[peer << 16 | number];
        region.address = address;
        region.there.assign(keys, keys + cards_.size());
    }

    void start(const Shared& shared) {
        shared_ = shared;
        reader_.reset(new CommandReader(*shared_.queue));
        thread_ = std::thread(&Proxy::run, this);
    }

    void stop() {
        stop_ = true;
        if (thread_.joinable()) thread_.join();
    }

    // Whether there was anything to do.
    bool step() {
        bool busy = false;
        if (!failed_ && !doubt_.since) trying(working_, [&] { busy = post_some(); });
        busy = complete_some() || busy;
        if (doubt_.since && now() - doubt_.since > patience_ns) fail(doubt_.card, shared_.rank, doubt_.status, 0);
        return busy;
    }

private:
    static constexpr u64 flights = 1024;  // commands whose bytes have not been read yet, at most
    static constexpr int batch = 16;
    static constexpr u64 awake_ns = 2000 * nanoseconds_per_microsecond;
    static constexpr u64 least_nap_ns = 50 * nanoseconds_per_microsecond, most_nap_ns = 20 * least_nap_ns;
    static constexpr u64 patience_ns = 1000000 * nanoseconds_per_microsecond;
    static constexpr u32 chunk_bits = 28;

    struct Flight {
        u64 peer;
        u64 left;  // requests that have not completed, and one more while not all are posted
    };

    void run() {
        u64 last = now();
        while (!stop_) {
            if (step()) last = now();
            else nap(now() - last);
        }
    }

    // Longer and longer, but never so long that it matters after so much time of idleness.
    static void nap(u64 idle_ns) {
        if (idle_ns < awake_ns) return void(sched_yield());
        const timespec time{0, long(std::min(std::max(idle_ns / 256, least_nap_ns), most_nap_ns))};
        nanosleep(&time, nullptr);
    }

    static u64 now() {
        timespec time;
        clock_gettime(CLOCK_MONOTONIC, &time);
        return u64(time.tv_sec) * 1000000000 + u64(time.tv_nsec);
    }

    // --- out ----------------------------------------------------------------------------------------------------------

    // A command with all that it says.
    struct Order {
        u64 number = 0;  // of the command; 0: none is at work
        u64 peer, chunk, generation, lines, line_bytes, from, to, from_pitch, to_pitch;
        size_t card_index;
        Card* card;
        Lane* lane;
        u32 local_key, remote_key;
        u64 posted;  // lines
    };

    bool post_some() {
        if (order_.number == 0 && !next_order()) return false;
        return order_.number == 0 || post_lines();
    }

    // False if there is none, or too much is under way.
    bool next_order() {
        if (reader_->taken() - sent_ >= flights) return false;
        const Command* command = reader_->next();
        if (!command) return false;
        const u64 number = reader_->taken() + 1;
        if (kind_of(*command) == Ask::enter) {
            generation_ = command->generation;
            writes_ = reinterpret_cast<const u64*>(command->from);
            chunks_ = command->line_bytes;
            came_.assign(chunks_, 0);
            reader_->take();
            flight(number) = {0, 0};
            publish();
            return true;
        }
        const Write write = unpacked(*command);
        Order order;
        order.number = number;
        order.peer = write.peer, order.chunk = write.chunk, order.generation = command->generation;
        order.lines = write.lines, order.line_bytes = write.line_bytes;
        order.from_pitch = write.from_pitch, order.to_pitch = write.to_pitch;
        reader_->take();
        // Lines without gaps are one write.
        if (order.to_pitch == order.line_bytes && order.from_pitch == order.line_bytes) order.line_bytes *= order.lines, order.lines = 1;
        std::lock_guard<std::mutex> lock(mutex_);
        const size_t index = order.chunk % cards_.size();
        const Region& source = own_.at(write.from.region);
        const Region& target = theirs_.at(order.peer << 16 | write.to.region);
        order.from = source.address + write.from.offset, order.to = target.address + write.to.offset;
        order.local_key = source.here[index]->lkey, order.remote_key = u32(target.there[index]);
        order.card_index = index, order.card = cards_[index].get();
        std::vector<Lane>& lanes = order.card->lanes(unsigned(order.peer));
        order.lane = &lanes[order.chunk / cards_.size() % lanes.size()];
        order.posted = 0;
        order_ = order;
        flight(number) = {order.peer, 1};
        return true;
    }

    // As many lines as may be under way. Whether there were any.
    bool post_lines() {
        Order& order = order_;
        working_ = order.card_index;
        const u64 immediates = order.card->efa ? 0 : 1;  // requests of their own
        const u64 room = order.card->send_depth - *order.lane->under_way;
        const u64 left = order.lines + immediates - order.posted;
        const u64 count = std::min({left, room, u64(batch)});
        if (count == 0) return false;
        const u32 imm = htonl(u32(order.generation & 15) << chunk_bits | u32(order.chunk));
        *order.lane->under_way += u32(count);
        flight(order.number).left += count;
        if (order.card->efa) post_srd(order, count, imm);
        else post_rc(order, count, imm);
        order.posted += count;
        if (order.posted == order.lines + immediates) {
            landed(order.number);
            order.number = 0;
        }
        return true;
    }

    // Data, and then an immediate without any: a plain write behind the data may overtake it.
    void post_rc(const Order& order, u64 count, u32 imm) {
        ibv_send_wr requests[batch]{}, *bad = nullptr;
        ibv_sge pieces[batch];
        for (u64 i = 0; i < count; ++i) {
            const u64 line = order.posted + i;
            ibv_send_wr& request = requests[i];
            request.wr_id = order.number;
            request.next = i + 1 < count ? &requests[i + 1] : nullptr;
            request.send_flags = IBV_SEND_SIGNALED;
            request.wr.rdma.rkey = order.remote_key;
            if (line == order.lines) {
                request.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
                request.imm_data = imm;
                request.wr.rdma.remote_addr = order.to;
                continue;
            }
            pieces[i] = piece(order, line);
            request.opcode = IBV_WR_RDMA_WRITE;
            request.sg_list = &pieces[i], request.num_sge = 1;
            request.wr.rdma.remote_addr = order.to + line * order.to_pitch;
        }
        const int problem = order.card->context->ops.post_send(order.lane->qp, requests, &bad);
        if (problem) refuse(order.card->name + ": ibv_post_send", problem);
    }

    // Nothing is in order here: each write has the immediate, and they are counted.
    void post_srd(const Order& order, u64 count, u32 imm) {
        ibv_qp_ex* qp = library_.qp_to_qp_ex(order.lane->qp);
        qp->wr_start(qp);
        for (u64 i = 0; i < count; ++i) {
            const u64 line = order.posted + i;
            const ibv_sge from = piece(order, line);
            qp->wr_id = order.number;
            qp->wr_flags = IBV_SEND_SIGNALED;
            qp->wr_rdma_write_imm(qp, order.remote_key, order.to + line * order.to_pitch, imm);
            qp->wr_set_sge(qp, from.lkey, from.addr, from.length);
            qp->wr_set_ud_addr(qp, order.lane->ah, order.lane->to_qp, order.lane->to_qkey);
        }
        if (const int problem = qp->wr_complete(qp)) refuse(order.card->name + ": ibv_wr_complete", problem);
    }

    static ibv_sge piece(const Order& order, u64 line) {
        return {order.from + line * order.from_pitch, u32(order.line_bytes), order.local_key};
    }

    Flight& flight(u64 number) { return flights_[number % flights]; }

    // One request of a command is over, or all of them are posted.
    void landed(u64 number) {
        if (--flight(number).left == 0) publish();
    }

    void publish() {
        const u64 before = sent_;
        while (sent_ < reader_->taken() && flight(sent_ + 1).left == 0) ++sent_;
        if (sent_ > before) reader_->publish(sent_);
    }

    // --- in -----------------------------------------------------------------------------------------------------------

    bool complete_some() {
        bool busy = false;
        for (size_t i = 0; i < cards_.size(); ++i) {
            Card& card = *cards_[i];
            ibv_wc done[batch];
            const int count = card.context->ops.poll_cq(card.cq, batch, done);
            if (count < 0) fail(i, shared_.rank, IBV_WC_GENERAL_ERR, 0);
            for (int j = 0; j < count; ++j) trying(i, [&] { complete(i, card, done[j]); });
            busy = busy || count > 0;
        }
        return busy;
    }

    void complete(size_t index, Card& card, const ibv_wc& done) {
        Lane* lane = card.of(done.qp_num);
        const bool receive = done.wr_id == Card::receive_id;
        if (!receive && lane) --*lane->under_way;
        if (failed_) return;
        if (done.status != IBV_WC_SUCCESS) {
            if (done.status == IBV_WC_WR_FLUSH_ERR) suspect(index, done.status, "");
            else
                fail(index, receive ? shared_.rank : flight(done.wr_id).peer, done.status, done.vendor_err);
        } else if (receive) {
            card.post_receives(lane->qp, 1);
            arrive(index, ntohl(done.imm_data));
        } else
            landed(done.wr_id);
    }

    // A chunk is there when all its writes are, in whatever order they came.
    void arrive(size_t index, u32 imm) {
        const u64 place = imm & ((u32(1) << chunk_bits) - 1), bits = imm >> chunk_bits;
        if (place >= shared_.counted && place < shared_.arrivals)
            return store_release<Scope::system>(&shared_.arrived[place], shared_.arrived[place] + 1);
        u64 generation = generation_;
        if (place < shared_.size) {
            generation = shared_.letters[bits % 2 * shared_.size + place].generation;
        } else if (place >= 2 * shared_.size) {
            const u64 chunk = place - 2 * shared_.size;
            if (chunk >= chunks_ || came_[chunk] >= writes_[chunk]) return fail(index, shared_.rank, IBV_WC_BAD_RESP_ERR, place);
            if (++came_[chunk] < writes_[chunk]) return;
        }
        if ((generation & 15) != bits || place >= shared_.arrivals) return fail(index, shared_.rank, IBV_WC_BAD_RESP_ERR, place);
        store_release<Scope::system>(&shared_.arrived[place], generation << 32 | 1);
    }

    // --- failure ------------------------------------------------------------------------------------------------------

    // What a queue pair that failed gives back, or refuses to take, says nothing; why it failed is told here or by the peer,
    // or, where the card itself has gone, by nobody: then this.
    void suspect(size_t card, ibv_wc_status status, const char* problem) {
        if (!doubt_.since) doubt_ = {now(), card, status, problem};
    }

    template <class Work>
    void trying(const size_t& card, Work work) {
        try {
            work();
        } catch (const std::exception& problem) {
            suspect(card, IBV_WC_GENERAL_ERR, problem.what());
        }
    }

    // The record first, then the abort words of all ranks. `peer`: this rank, where it is not known.
    void fail(size_t index, u64 peer, ibv_wc_status status, u64 detail) {
        if (failed_) return;
        failed_ = true;
        HostPage* own = shared_.pages[shared_.rank];
        Record& record = own->by_proxy;
        record.reason = u64(Reason::network);
        record.generation = generation_;
        record.index = status;
        record.peer = peer;
        record.seen = detail;
        if (peer == shared_.rank && !doubt_.problem.empty())
            fprintf(stderr, "mkernel_cp: rank %llu, network: %s\n", shared_.rank, doubt_.problem.c_str());
        snprintf(reinterpret_cast<char*>(own->card), sizeof own->card, "%s", cards_[index]->name.c_str());
        store_release<Scope::system>(&record.written, 1);
        for (u64 i = 0; i < shared_.size; ++i) {
            u64* abort = &shared_.pages[(shared_.rank + i) % shared_.size]->abort;
            if (load_relaxed(abort) == 0) store_release<Scope::system>(abort, (1 + shared_.rank) | u64(1) << 33);
        }
    }

    void forget(Region& region) {
        for (ibv_mr* mr : region.here) library_.dereg_mr(mr);
        region.here.clear();
    }

    Library library_;
    std::vector<std::unique_ptr<Card>> cards_;
    std::mutex mutex_;  // of the regions
    std::unordered_map<u64, Region> own_, theirs_;
    Shared shared_{};
    std::unique_ptr<CommandReader> reader_;
    std::thread thread_;
    std::atomic<bool> stop_{false};
    bool failed_ = false;
    struct {
        u64 since;  // when something was given back or refused first
        size_t card;
        ibv_wc_status status;
        std::string problem;
    } doubt_{};
    size_t working_ = 0;  // the card that was asked to send last
    Order order_;
    u64 sent_ = 0;
    Flight flights_[flights]{};
    u64 generation_ = 0, chunks_ = 0;
    const u64* writes_ = nullptr;
    std::vector<u64> came_;
};

// What goes wrong is told as text.
template <class Work>
int told(char* text, u64 room, Work work) {
    try {
        work();
        return 0;
    } catch (const std::exception& problem) {
        snprintf(text, room, "%s", problem.what());
        return 1;
    }
}

Proxy& of(void* network) { return *static_cast<Proxy*>(network); }

}  // namespace

// `names`: of cards, separated by commas. `links`: peers that will be connected.
MK_EXPORT int network_open(void** network, const char* verbs, const char* efa, const char* names, u64 is_efa,
                           u64 queue_pairs, u64 links, char* text, u64 room) {
    return told(text, room, [&] {
        if (queue_pairs < 1 || queue_pairs > most_queue_pairs) throw std::runtime_error("too many queue pairs");
        *network = new Proxy(verbs, efa, names, is_efa, unsigned(queue_pairs), unsigned(links));
    });
}

MK_EXPORT u64 network_address_bytes() { return sizeof(CardAddress); }

// Per card, what a peer needs to be connected.
MK_EXPORT int network_address(void* network, u64 peer, CardAddress* addresses, char* text, u64 room) {
    return told(text, room, [&] {
        for (auto& card : of(network).cards()) *addresses++ = card->address_for(unsigned(peer));
    });
}

MK_EXPORT int network_connect(void* network, u64 peer, const CardAddress* addresses, char* text, u64 room) {
    return told(text, room, [&] {
        for (auto& card : of(network).cards()) card->connect(unsigned(peer), *addresses++);
    });
}

// Memory that the cards may read and peers may write; per card, the key for peers.
MK_EXPORT int network_register(void* network, u64 region, void* address, u64 bytes, int dmabuf, u64* keys, char* text,
                               u64 room) {
    return told(text, room, [&] { of(network).enroll(region, address, bytes, dmabuf, keys); });
}

MK_EXPORT void network_unregister(void* network, u64 region) { of(network).forget(region); }

MK_EXPORT void network_learn(void* network, u64 peer, u64 region, u64 address, const u64* keys) {
    of(network).learn(peer, region, address, keys);
}

MK_EXPORT int network_start(void* network, const void* shared, char* text, u64 room) {
    return told(text, room, [&] { of(network).start(*static_cast<const Shared*>(shared)); });
}

MK_EXPORT void* network_context(void* network, u64 card) { return of(network).cards().at(card)->context; }

// For simulations: ends the thread, whose steps others take from then on.
MK_EXPORT void network_halt(void* network) { of(network).stop(); }
MK_EXPORT int network_step(void* network) { return of(network).step(); }

// Ends the thread, and then all that it used.
MK_EXPORT void network_close(void* network) { delete static_cast<Proxy*>(network); }
