// How the software network cards of two processes reach each other: a ring of packets in shared memory for each direction,
// and a socket, which rings the bell of a card that sleeps, and ends with its process.
#pragma once

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <memory>
#include <vector>

namespace soft {

struct Packet {
    enum Kind : uint32_t { data, reply };
    enum Flag : uint32_t { with_imm = 1 };
    uint32_t kind;
    uint32_t to_qp, from_qp;
    uint32_t number;  // of the message, among those of its queue pair
    uint32_t flags;
    uint32_t imm;
    uint32_t rkey;
    uint32_t status;  // of a reply: an ibv_wc_status; success is an acknowledgement
    uint64_t address;
    uint64_t message_bytes;
    uint64_t offset;
    uint32_t bytes;  // that follow
    uint32_t qkey;
};
static_assert(sizeof(Packet) == 64, "packets keep their alignment in a ring");

constexpr uint32_t fragment_bytes = 8192;

// One writer, one reader.
class Ring {
public:
    static constexpr uint64_t room = 1 << 20;
    struct Memory {
        alignas(64) std::atomic<uint64_t> written;
        alignas(64) std::atomic<uint64_t> read;
        alignas(64) std::atomic<uint32_t> sleeping;  // the reader: ring its bell
        alignas(64) uint8_t bytes[room];
    };

    explicit Ring(Memory* memory) : memory_(memory) {}

    bool fits(uint32_t payload) const {
        return memory_->written.load(std::memory_order_relaxed) + whole(payload) -
                   memory_->read.load(std::memory_order_acquire) <=
               room;
    }

    // Returns whether the reader sleeps.
    bool push(const Packet& packet, const uint8_t* payload) {
        const uint64_t at = memory_->written.load(std::memory_order_relaxed);
        copy_in(at, reinterpret_cast<const uint8_t*>(&packet), sizeof packet);
        copy_in(at + sizeof packet, payload, packet.bytes);
        memory_->written.store(at + whole(packet.bytes));
        return memory_->sleeping.load() && memory_->sleeping.exchange(0);
    }

    bool empty() const {
        return memory_->written.load() == memory_->read.load(std::memory_order_relaxed);
    }

    void pop(Packet& packet, std::vector<uint8_t>& payload) {
        const uint64_t at = memory_->read.load(std::memory_order_relaxed);
        copy_out(at, reinterpret_cast<uint8_t*>(&packet), sizeof packet);
        payload.resize(packet.bytes);
        copy_out(at + sizeof packet, payload.data(), packet.bytes);
        memory_->read.store(at + whole(packet.bytes), std::memory_order_release);
    }

    void sleeps(bool value) { memory_->sleeping.store(value); }

private:
    static uint64_t whole(uint32_t payload) { return sizeof(Packet) + (payload + 63) / 64 * 64; }

    void copy_in(uint64_t at, const uint8_t* from, uint64_t bytes) {
        const uint64_t place = at % room, first = std::min(bytes, room - place);
        if (first) memcpy(memory_->bytes + place, from, first);
        if (bytes > first) memcpy(memory_->bytes, from + first, bytes - first);
    }
    void copy_out(uint64_t at, uint8_t* to, uint64_t bytes) {
        const uint64_t place = at % room, first = std::min(bytes, room - place);
        if (first) memcpy(to, memory_->bytes + place, first);
        if (bytes > first) memcpy(to + first, memory_->bytes, bytes - first);
    }

    Memory* memory_;
};

// To another process, or to this one. The one that has made it sends data over it, the other one replies.
class Link {
public:
    Link(uint64_t token, int socket, Ring::Memory* out, Ring::Memory* in, bool opened_here, bool maps)
        : token(token), opened_here(opened_here), socket_(socket), out_(out), in_(in),
          mapped_(maps ? std::min(out, in) : nullptr) {}
    ~Link() {
        if (socket_ >= 0) close(socket_);
        if (mapped_) munmap(mapped_, 2 * sizeof(Ring::Memory));
    }

    const uint64_t token;  // of the process at the other end
    const bool opened_here;

    Ring& in() { return in_; }
    int socket() const { return socket_; }
    bool fits(uint32_t payload) const { return replies_.empty() && out_.fits(payload); }
    void send(const Packet& packet, const uint8_t* payload) {
        if (out_.push(packet, payload) && socket_ >= 0) ::send(socket_, "", 1, MSG_DONTWAIT | MSG_NOSIGNAL);
    }

    // A reply always goes out, if need be later.
    void reply(const Packet& packet) {
        replies_.push_back(packet);
        flush();
    }
    void flush() {
        for (; !replies_.empty() && out_.fits(0); replies_.pop_front()) send(replies_.front(), &nothing_);
    }

private:
    int socket_;
    Ring out_, in_;
    void* mapped_;
    std::deque<Packet> replies_;
    const uint8_t nothing_ = 0;
};

// All links of this process.
class Links {
public:
    // Of this process, on this host: 16 bits, as a number of a port on InfiniBand (LID) has.
    uint64_t token() const { return token_; }

    // Returns 0 or an errno.
    int open() {
        if (listener_ >= 0) return 0;
        listener_ = ::socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
        if (listener_ < 0) return errno;
        sockaddr_un name;
        int problem = EADDRINUSE;
        for (int i = 0; i < 100 && problem == EADDRINUSE; ++i) {
            uint16_t token = 0;
            if (getentropy(&token, sizeof token)) problem = errno;
            else if (token) {
                token_ = token;
                problem = bind(listener_, reinterpret_cast<sockaddr*>(&name), address(token_, name)) ? errno : 0;
            }
        }
        if (!problem && listen(listener_, 1024)) problem = errno;
        if (problem) close();
        return problem;
    }

    void close() {
        all_.clear();
        for (int socket : strangers_) ::close(socket);
        strangers_.clear();
        if (listener_ >= 0) ::close(listener_);
        listener_ = -1;
    }

    // The link by which this process sends to another one; null if nobody listens there.
    Link* to(uint64_t token) {
        for (auto& link : all_)
            if (link->token == token && link->opened_here) return link.get();
        if (token == token_) {
            own_.reset(new Ring::Memory());
            return add(token, -1, own_.get(), own_.get(), true, false);
        }
        const int socket = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
        const int file = memfd_create("mkernel_cp soft link", MFD_CLOEXEC);
        Ring::Memory* rings = nullptr;
        sockaddr_un name;
        const socklen_t length = address(token, name);
        if (socket >= 0 && file >= 0 && !ftruncate(file, 2 * sizeof(Ring::Memory)) &&
            !connect(socket, reinterpret_cast<sockaddr*>(&name), length) && pass(socket, file))
            rings = map(file);
        if (file >= 0) ::close(file);
        if (rings) return add(token, socket, rings, rings + 1, true, true);
        if (socket >= 0) ::close(socket);
        return nullptr;
    }

    // Takes in who has connected. Whether there was anybody.
    bool accept() {
        bool busy = false;
        for (int socket; (socket = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK)) >= 0; busy = true)
            strangers_.push_back(socket);
        for (size_t i = 0; i < strangers_.size();) {
            uint64_t token;
            const int file = receive(strangers_[i], token);
            if (file == not_yet) {
                ++i;
                continue;
            }
            Ring::Memory* rings = file >= 0 ? map(file) : nullptr;
            if (file >= 0) ::close(file);
            if (rings) add(token, strangers_[i], rings + 1, rings, false, true);
            else ::close(strangers_[i]);
            strangers_.erase(strangers_.begin() + i);
            busy = true;
        }
        return busy;
    }

    std::vector<std::unique_ptr<Link>>& all() { return all_; }
    int listener() const { return listener_; }
    const std::vector<int>& strangers() const { return strangers_; }

private:
    static constexpr int not_yet = -2;

    Link* add(uint64_t token, int socket, Ring::Memory* out, Ring::Memory* in, bool opened_here, bool maps) {
        all_.emplace_back(new Link(token, socket, out, in, opened_here, maps));
        return all_.back().get();
    }

    static socklen_t address(uint64_t token, sockaddr_un& name) {
        memset(&name, 0, sizeof name);
        name.sun_family = AF_UNIX;
        // Abstract: no file is left behind.
        const int length = snprintf(name.sun_path + 1, sizeof name.sun_path - 1, "mkernel_cp-soft-%016llx",
                                    static_cast<unsigned long long>(token));
        return socklen_t(offsetof(sockaddr_un, sun_path) + 1 + length);
    }

    static Ring::Memory* map(int file) {
        void* at = mmap(nullptr, 2 * sizeof(Ring::Memory), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        return at == MAP_FAILED ? nullptr : static_cast<Ring::Memory*>(at);
    }

    bool pass(int socket, int file) const {
        iovec data{const_cast<uint64_t*>(&token_), sizeof token_};
        alignas(cmsghdr) char control[CMSG_SPACE(sizeof file)] = {};
        msghdr message{};
        message.msg_iov = &data, message.msg_iovlen = 1;
        message.msg_control = control, message.msg_controllen = sizeof control;
        cmsghdr* header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET, header->cmsg_type = SCM_RIGHTS, header->cmsg_len = CMSG_LEN(sizeof file);
        memcpy(CMSG_DATA(header), &file, sizeof file);
        return sendmsg(socket, &message, MSG_NOSIGNAL) == sizeof token_;
    }

    static int receive(int socket, uint64_t& token) {
        iovec data{&token, sizeof token};
        int file = -1;
        alignas(cmsghdr) char control[CMSG_SPACE(sizeof file)] = {};
        msghdr message{};
        message.msg_iov = &data, message.msg_iovlen = 1;
        message.msg_control = control, message.msg_controllen = sizeof control;
        const ssize_t got = recvmsg(socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
        if (got < 0 && (errno == EAGAIN || errno == EINTR)) return not_yet;
        cmsghdr* header = CMSG_FIRSTHDR(&message);
        if (header && header->cmsg_type == SCM_RIGHTS) memcpy(&file, CMSG_DATA(header), sizeof file);
        if (got == sizeof token) return file;
        if (file >= 0) ::close(file);
        return -1;
    }

    uint64_t token_ = 0;
    int listener_ = -1;
    std::vector<int> strangers_;
    std::vector<std::unique_ptr<Link>> all_;
    std::unique_ptr<Ring::Memory> own_;
};

}  // namespace soft
