// Network cards: what is opened, created and connected on them, by the functions of libibverbs and libefa, which are looked
// up when they are needed. Two kinds: reliable connections (verbs), and SRD (EFA).
#pragma once

#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/resource.h>

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include "verbs.h"

namespace mk {
namespace net {

[[noreturn]] inline void refuse(const std::string& what, int reason) {
    throw std::runtime_error(what + ": " + strerror(reason) + " (errno " + std::to_string(reason) + ")");
}

// The libraries, as far as they are used.
struct Library {
    Library(const char* verbs, const char* efa) {
        void* library = open(verbs);
        find(library, get_device_list, "ibv_get_device_list");
        find(library, free_device_list, "ibv_free_device_list");
        find(library, get_device_name, "ibv_get_device_name");
        find(library, open_device, "ibv_open_device");
        find(library, close_device, "ibv_close_device");
        find(library, query_device, "ibv_query_device");
        find(library, query_port, "ibv_query_port");
        find(library, query_gid_ex, "_ibv_query_gid_ex");
        find(library, alloc_pd, "ibv_alloc_pd");
        find(library, dealloc_pd, "ibv_dealloc_pd");
        find(library, reg_mr, "ibv_reg_mr_iova2");
        find(library, dereg_mr, "ibv_dereg_mr");
        reg_dmabuf_mr = reinterpret_cast<decltype(reg_dmabuf_mr)>(dlsym(library, "ibv_reg_dmabuf_mr"));  // newer than the rest
        find(library, create_cq, "ibv_create_cq");
        find(library, destroy_cq, "ibv_destroy_cq");
        find(library, create_qp, "ibv_create_qp");
        find(library, modify_qp, "ibv_modify_qp");
        find(library, destroy_qp, "ibv_destroy_qp");
        find(library, create_ah, "ibv_create_ah");
        find(library, destroy_ah, "ibv_destroy_ah");
        find(library, wc_status_str, "ibv_wc_status_str");
        if (!*efa) return;
        void* more = open(efa);
        find(library, qp_to_qp_ex, "ibv_qp_to_qp_ex");
        find(more, efa_query_device, "efadv_query_device");
        find(more, efa_create_qp, "efadv_create_qp_ex");
    }

    ibv_device** (*get_device_list)(int*);
    void (*free_device_list)(ibv_device**);
    const char* (*get_device_name)(ibv_device*);
    ibv_context* (*open_device)(ibv_device*);
    int (*close_device)(ibv_context*);
    int (*query_device)(ibv_context*, ibv_device_attr*);
    int (*query_port)(ibv_context*, uint8_t, ibv_port_attr*);
    int (*query_gid_ex)(ibv_context*, uint32_t, uint32_t, ibv_gid_entry*, uint32_t, size_t);
    ibv_pd* (*alloc_pd)(ibv_context*);
    int (*dealloc_pd)(ibv_pd*);
    ibv_mr* (*reg_mr)(ibv_pd*, void*, size_t, uint64_t, unsigned);
    ibv_mr* (*reg_dmabuf_mr)(ibv_pd*, uint64_t offset, size_t, uint64_t iova, int fd, int access);
    int (*dereg_mr)(ibv_mr*);
    ibv_cq* (*create_cq)(ibv_context*, int, void*, ibv_comp_channel*, int);
    int (*destroy_cq)(ibv_cq*);
    ibv_qp* (*create_qp)(ibv_pd*, ibv_qp_init_attr*);
    int (*modify_qp)(ibv_qp*, ibv_qp_attr*, int);
    int (*destroy_qp)(ibv_qp*);
    ibv_ah* (*create_ah)(ibv_pd*, ibv_ah_attr*);
    int (*destroy_ah)(ibv_ah*);
    const char* (*wc_status_str)(ibv_wc_status);
    ibv_qp_ex* (*qp_to_qp_ex)(ibv_qp*) = nullptr;
    int (*efa_query_device)(ibv_context*, efadv_device_attr*, uint32_t) = nullptr;
    ibv_qp* (*efa_create_qp)(ibv_context*, ibv_qp_init_attr_ex*, efadv_qp_init_attr*, uint32_t) = nullptr;

private:
    static void* open(const char* path) {
        void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);  // never closed: its threads and callbacks may outlive us
        if (!library)
            throw std::runtime_error(std::string(dlerror()) +
                                     "; it belongs to rdma-core: apt install ibverbs-providers, or dnf install libibverbs");
        return library;
    }

    template <class Function>
    static void find(void* library, Function& function, const char* name) {
        function = reinterpret_cast<Function>(dlsym(library, name));
        if (!function) throw std::runtime_error(std::string(name) + " is missing in the library: it is too old");
    }
};

constexpr unsigned most_queue_pairs = 8;

// What a peer has to know of a card: plain bytes, the same for all who build this.
struct CardAddress {
    ibv_gid gid;
    uint32_t gid_type, link_layer;
    uint32_t lid, mtu, qkey;
    uint32_t numbers[most_queue_pairs], first[most_queue_pairs];  // of queue pairs, and of their messages
};

// A queue pair, or of an SRD one what leads to one peer: what may be under way on it.
struct Lane {
    ibv_qp* qp = nullptr;
    uint32_t* under_way = nullptr;  // send requests whose completion has not come; of all that share the queue pair
    ibv_ah* ah = nullptr;
    uint32_t to_qp = 0, to_qkey = 0;
};

inline uint32_t random_word() {
    uint32_t word = 0;
    if (getentropy(&word, sizeof word)) word = uint32_t(errno);
    return word;
}

class Card {
public:
    static constexpr uint64_t receive_id = ~uint64_t(0);  // of all receives

    // `name`: perhaps with a colon and the number of a port, else it is the first active one. `links`: peers that it will be
    // connected with.
    Card(const Library& library, const std::string& name, bool efa, unsigned queue_pairs, unsigned links)
        : name(name), efa(efa), library_(library), queue_pairs_(efa ? 1 : queue_pairs) {
        try {
            open_device(name.substr(0, name.find(':')));
            open(links);
        } catch (...) {
            close();
            throw;
        }
    }
    ~Card() { close(); }
    Card(const Card&) = delete;

    const std::string name;
    const bool efa;
    ibv_context* context = nullptr;
    ibv_cq* cq = nullptr;
    uint32_t send_depth = 128, receive_depth = 64;

    // Lanes to a peer, made with its first use.
    CardAddress address_for(unsigned peer) {
        CardAddress own{};
        own.gid = gid_.gid, own.gid_type = gid_.gid_type, own.link_layer = port_.link_layer;
        own.lid = port_.lid, own.mtu = uint32_t(port_.active_mtu), own.qkey = qkey_;
        std::vector<Lane>& lanes = lanes_[peer];
        if (lanes.empty())
            for (unsigned i = 0; i < queue_pairs_; ++i) lanes.push_back(efa ? srd_lane() : rc_lane());
        for (unsigned i = 0; i < queue_pairs_; ++i) {
            own.numbers[i] = lanes[i].qp->qp_num;
            own.first[i] = first_number_;
        }
        return own;
    }

    void connect(unsigned peer, const CardAddress& theirs) {
        if (theirs.link_layer != port_.link_layer || theirs.gid_type != gid_.gid_type)
            throw std::runtime_error(name + " and the card of rank " + std::to_string(peer) +
                                     " do not understand each other: they are on different networks, or one of them has no "
                                     "address for RoCE v2 (here " + kind(port_.link_layer, gid_.gid_type) + ", there " +
                                     kind(theirs.link_layer, theirs.gid_type) + ")");
        for (unsigned i = 0; i < queue_pairs_; ++i) {
            Lane& lane = lanes_.at(peer)[i];
            ibv_ah_attr to{};
            to.port_num = port_number_;
            // Within a subnet of InfiniBand, packets go by the number of the port (LID) alone.
            constexpr size_t prefix = 8;
            const bool same_subnet = !memcmp(theirs.gid.raw, gid_.gid.raw, prefix);
            to.is_global = port_.link_layer != IBV_LINK_LAYER_INFINIBAND || theirs.lid == 0 || !same_subnet;
            to.dlid = uint16_t(theirs.lid);
            to.grh.dgid = theirs.gid, to.grh.sgid_index = uint8_t(gid_.gid_index), to.grh.hop_limit = 64;
            lane.to_qp = theirs.numbers[i], lane.to_qkey = theirs.qkey;
            if (efa) {
                lane.ah = library_.create_ah(pd_, &to);
                if (!lane.ah) refuse(name + ": ibv_create_ah", errno);
            } else
                start(lane.qp, to, theirs, i);
        }
    }

    // All lanes to a peer.
    std::vector<Lane>& lanes(unsigned peer) { return lanes_.at(peer); }

    // From here on nothing reaches a peer, nor a peer this card.
    void disconnect() {
        for (auto& peer : lanes_)
            for (Lane& lane : peer.second)
                if (lane.ah) library_.destroy_ah(lane.ah);
        for (auto& entry : by_number_) library_.destroy_qp(entry.second.qp);
        lanes_.clear();
        by_number_.clear();
    }
    Lane* of(uint32_t qp_number) {
        const auto found = by_number_.find(qp_number);
        return found == by_number_.end() ? nullptr : &found->second;
    }

    void post_receives(ibv_qp* qp, uint32_t count) {
        ibv_recv_wr receive{}, *bad;
        receive.wr_id = receive_id;
        for (uint32_t i = 0; i < count; ++i)
            if (const int problem = context->ops.post_recv(qp, &receive, &bad)) refuse(name + ": ibv_post_recv", problem);
    }

    // `dmabuf`: a file that stands for the memory, from its beginning; -1: the card's driver knows the address.
    ibv_mr* enroll(void* address, uint64_t bytes, int dmabuf) {
        // What is written may become visible in any order, which the immediates allow for.
        const unsigned access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_RELAXED_ORDERING;
        const uint64_t place = reinterpret_cast<uint64_t>(address);
        const std::string size = " of " + std::to_string(bytes) + " bytes";
        if (dmabuf >= 0) {
            if (!library_.reg_dmabuf_mr) throw std::runtime_error("ibv_reg_dmabuf_mr is missing in the library: it is too old");
            ibv_mr* mr = library_.reg_dmabuf_mr(pd_, 0, bytes, place, dmabuf, int(access));
            if (!mr) refuse(name + ": ibv_reg_dmabuf_mr" + size, errno);
            return mr;
        }
        ibv_mr* mr = library_.reg_mr(pd_, address, bytes, place, access);
        if (mr) return mr;
        const int reason = errno;
        rlimit limit{};
        getrlimit(RLIMIT_MEMLOCK, &limit);
        const std::string most = limit.rlim_cur == RLIM_INFINITY ? "unlimited" : std::to_string(limit.rlim_cur);
        refuse(name + ": ibv_reg_mr" + size + " (limit of locked memory, ulimit -l: " + most + " bytes)", reason);
    }

private:
    void open_device(const std::string& wanted) {
        int count = 0;
        ibv_device** list = library_.get_device_list(&count);
        if (!list) refuse("ibv_get_device_list", errno);
        std::string names;
        ibv_device* device = nullptr;
        for (int i = 0; i < count; ++i) {
            const std::string found = library_.get_device_name(list[i]);
            names += (i ? ", " : "") + found;
            if (found == wanted) device = list[i];
        }
        if (device) context = library_.open_device(device);
        const int reason = errno;
        library_.free_device_list(list);
        if (!device) throw std::runtime_error("there is no network card " + wanted + "; there are: " + (count ? names : "none"));
        if (!context) refuse(name + ": ibv_open_device (may this user open /dev/infiniband?)", reason);
    }

    void choose_port(uint8_t ports) {
        const size_t colon = name.find(':');
        const int asked = colon == std::string::npos ? 0 : atoi(name.c_str() + colon + 1);
        if (colon != std::string::npos && (asked < 1 || asked > ports))
            throw std::runtime_error(name + ": there is no such port; there are 1 to " + std::to_string(ports));
        for (int i = asked ? asked : 1; i <= (asked ? asked : ports); ++i) {
            port_number_ = uint8_t(i);
            if (const int problem = library_.query_port(context, port_number_, &port_)) refuse(name + ": ibv_query_port", problem);
            if (port_.state == IBV_PORT_ACTIVE) return;
        }
        throw std::runtime_error(name + (asked ? ": this port is not" : ": none of its ports is") + " active: is the link up?");
    }

    void open(unsigned links) {
        ibv_device_attr most{};
        if (const int problem = library_.query_device(context, &most)) refuse(name + ": ibv_query_device", problem);
        choose_port(most.phys_port_cnt);
        if (efa) {
            efadv_device_attr what{};
            const int problem = library_.efa_query_device(context, &what, sizeof what);
            if (problem) refuse(name + ": efadv_query_device (is it an EFA?)", problem);
            if (!(what.device_caps & EFADV_DEVICE_ATTR_CAPS_RDMA_WRITE))
                throw std::runtime_error(name + " cannot write to remote memory: use a newer EFA, driver and library");
            send_depth = 512, receive_depth = std::min<uint32_t>(2048, what.max_rq_wr);
            send_depth = std::min(send_depth, what.max_sq_wr);
        }
        choose_gid();
        pd_ = library_.alloc_pd(context);
        if (!pd_) refuse(name + ": ibv_alloc_pd", errno);
        const uint32_t pairs = efa ? 1 : std::max(1u, links * queue_pairs_);
        const uint64_t entries = uint64_t(pairs) * (send_depth + receive_depth);
        if (entries > uint64_t(most.max_cqe)) throw std::runtime_error(name + ": its completion queues are too short");
        cq = library_.create_cq(context, int(entries), nullptr, nullptr, 0);
        if (!cq) refuse(name + ": ibv_create_cq", errno);
        qkey_ = random_word() & 0x7fffffff;
        first_number_ = random_word() & 0xffffff;
        if (efa) by_number_lane(create_srd());
    }

    void close() {
        disconnect();
        if (cq) library_.destroy_cq(cq);
        if (pd_) library_.dealloc_pd(pd_);
        if (context) library_.close_device(context);
    }

    // RoCE v2 before v1, and then what is routed before what is not: IPv4, other IPv6, addresses of the link alone.
    // InfiniBand and EFA have one kind, of which the first is the right one.
    void choose_gid() {
        int best = -1;
        for (uint32_t i = 0; i < uint32_t(std::max(1, port_.gid_tbl_len)); ++i) {
            ibv_gid_entry entry{};
            if (library_.query_gid_ex(context, port_number_, i, &entry, 0, sizeof entry)) continue;
            const uint8_t* raw = entry.gid.raw;
            static const uint8_t none[16] = {}, mapped[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
            if (!memcmp(raw, none, sizeof none)) continue;
            const bool link_local = raw[0] == 0xfe && (raw[1] & 0xc0) == 0x80;
            const int worth = entry.gid_type != IBV_GID_TYPE_ROCE_V2 ? 0 : link_local ? 1 : memcmp(raw, mapped, sizeof mapped) ? 2 : 3;
            if (worth > best) best = worth, gid_ = entry, gid_.gid_index = i;
        }
        if (best < 0) throw std::runtime_error(name + " has no address (GID)");
    }

    static std::string kind(uint32_t link_layer, uint32_t gid_type) {
        if (link_layer == IBV_LINK_LAYER_INFINIBAND) return "InfiniBand";
        if (link_layer != IBV_LINK_LAYER_ETHERNET) return "EFA";
        return gid_type == IBV_GID_TYPE_ROCE_V2 ? "RoCE v2" : "RoCE v1";
    }

    Lane& by_number_lane(ibv_qp* qp) {
        counts_.emplace_back(new uint32_t(0));
        Lane& lane = by_number_[qp->qp_num];
        lane.qp = qp, lane.under_way = counts_.back().get();
        return lane;
    }

    Lane rc_lane() {
        ibv_qp_init_attr wanted{};
        wanted.send_cq = wanted.recv_cq = cq;
        wanted.cap = {send_depth, receive_depth, 1, 1, 0};
        wanted.qp_type = IBV_QPT_RC;
        ibv_qp* qp = library_.create_qp(pd_, &wanted);
        if (!qp) refuse(name + ": ibv_create_qp", errno);
        Lane& lane = by_number_lane(qp);
        ibv_qp_attr attr{};
        attr.qp_state = IBV_QPS_INIT, attr.port_num = port_number_, attr.qp_access_flags = IBV_ACCESS_REMOTE_WRITE;
        modify(qp, attr, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS, "INIT");
        post_receives(qp, receive_depth);
        return lane;
    }

    ibv_qp* create_srd() {
        ibv_qp_init_attr_ex wanted{};
        wanted.send_cq = wanted.recv_cq = cq;
        wanted.cap = {send_depth, receive_depth, 1, 1, 0};
        wanted.qp_type = IBV_QPT_DRIVER;
        wanted.pd = pd_;
        wanted.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
        wanted.send_ops_flags = IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM;
        efadv_qp_init_attr kind{};
        kind.driver_qp_type = EFADV_QP_DRIVER_TYPE_SRD;
        ibv_qp* qp = library_.efa_create_qp(context, &wanted, &kind, sizeof kind);
        if (!qp) refuse(name + ": efadv_create_qp_ex", errno);
        ibv_qp_attr attr{};
        attr.qp_state = IBV_QPS_INIT, attr.port_num = port_number_, attr.qkey = qkey_;
        modify(qp, attr, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY, "INIT");
        attr.qp_state = IBV_QPS_RTR;
        modify(qp, attr, 0, "RTR");
        attr.qp_state = IBV_QPS_RTS, attr.rnr_retry = 7;
        modify(qp, attr, IBV_QP_SQ_PSN | IBV_QP_RNR_RETRY, "RTS");
        post_receives(qp, receive_depth);
        return qp;
    }

    Lane srd_lane() { return by_number_.begin()->second; }

    void start(ibv_qp* qp, const ibv_ah_attr& to, const CardAddress& theirs, unsigned i) {
        ibv_qp_attr attr{};
        attr.qp_state = IBV_QPS_RTR, attr.ah_attr = to;
        attr.path_mtu = std::min(port_.active_mtu, ibv_mtu(theirs.mtu));
        attr.dest_qp_num = theirs.numbers[i], attr.rq_psn = theirs.first[i];
        attr.max_dest_rd_atomic = 1, attr.min_rnr_timer = 12;
        modify(qp, attr,
               IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
                   IBV_QP_MIN_RNR_TIMER,
               "RTR");
        // 268 ms, eight times over; a receiver that is not ready is waited for.
        attr.qp_state = IBV_QPS_RTS, attr.sq_psn = first_number_;
        attr.timeout = 16, attr.retry_cnt = 7, attr.rnr_retry = 7, attr.max_rd_atomic = 1;
        modify(qp, attr,
               IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC, "RTS");
    }

    void modify(ibv_qp* qp, ibv_qp_attr& attr, int mask, const char* state) {
        const int problem = library_.modify_qp(qp, &attr, mask | IBV_QP_STATE);
        if (problem) refuse(name + ": ibv_modify_qp to " + state, problem);
    }

    const Library& library_;
    const unsigned queue_pairs_;
    ibv_pd* pd_ = nullptr;
    ibv_port_attr port_{};
    uint8_t port_number_ = 1;
    ibv_gid_entry gid_{};
    uint32_t qkey_ = 0, first_number_ = 0;
    std::unordered_map<unsigned, std::vector<Lane>> lanes_;
    std::unordered_map<uint32_t, Lane> by_number_;
    std::vector<std::unique_ptr<uint32_t>> counts_;
};

}  // namespace net
}  // namespace mk
