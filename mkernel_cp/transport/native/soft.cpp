// libibverbs.so.1 and libefa.so.1 on a network card made of software, by the names and the layout that they have.
#include <sys/resource.h>

#include "soft_nic.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

using namespace soft;

namespace {

constexpr unsigned cards = 4;  // soft0, soft1: reliable connections; soft_efa0, soft_efa1: SRD
constexpr unsigned infiniband = 1;  // the card that is on InfiniBand, not on Ethernet, by the second of two ports
constexpr int gids = 3;             // RoCE v1, RoCE v2 of the link alone, RoCE v2 that is routed; of InfiniBand one
constexpr uint32_t most_wr = 4096, most_sge = 4, most_inline = 128, efa_inline = 32;
constexpr int most_cqe = 1 << 20;
constexpr uint64_t most_bytes = 1 << 30;

ibv_device* devices() {
    static ibv_device* all = [] {
        auto* list = new ibv_device[cards]();
        for (unsigned i = 0; i < cards; ++i) {
            list[i].node_type = i < 2 ? IBV_NODE_CA : IBV_NODE_UNSPECIFIED;
            list[i].transport_type = i < 2 ? IBV_TRANSPORT_IB : IBV_TRANSPORT_UNSPECIFIED;
            snprintf(list[i].name, sizeof list[i].name, i < 2 ? "soft%u" : "soft_efa%u", i % 2);
            snprintf(list[i].dev_name, sizeof list[i].dev_name, "uverbs%u", i);
        }
        return list;
    }();
    return all;
}

Nic& nic() { return Nic::instance(); }
using Guard = std::lock_guard<std::mutex>;

template <class T>
T* refuse(int reason) {
    errno = reason;
    return nullptr;
}

unsigned number_of(const ibv_context* context) { return unsigned(context->device - devices()); }
unsigned network_of(unsigned card) { return std::min(card, 2u); }  // Ethernet, InfiniBand, EFA
bool on_infiniband(const ibv_context* context) { return number_of(context) == infiniband; }
uint8_t ports_of(const ibv_context* context) { return on_infiniband(context) ? 2 : 1; }
int gids_of(const ibv_context* context) { return on_infiniband(context) ? 1 : gids; }

ibv_gid gid_of(unsigned card, int index) {
    ibv_gid gid{};
    const uint64_t token = nic().links.token();
    gid.raw[0] = index == 2 ? 0xfd : 0xfe, gid.raw[1] = 0x80, gid.raw[6] = uint8_t(card), gid.raw[7] = uint8_t(index);
    memcpy(gid.raw + 8, &token, sizeof token);
    return gid;
}

// Where an address leads; null, and errno, if nowhere.
Link* link_to(const Context& context, const ibv_ah_attr& to) {
    const unsigned card = number_of(&context);
    const int index = to.grh.sgid_index;
    const uint8_t* raw = to.grh.dgid.raw;
    // The two versions of RoCE do not understand each other.
    const bool fits = raw[0] >= 0xfd && raw[1] == 0x80 && raw[7] == index && index < gids_of(&context) &&
                      network_of(raw[6]) == network_of(card);
    const bool by_number = on_infiniband(&context) && !to.is_global && to.dlid;
    if (to.port_num != ports_of(&context) || !(by_number || (to.is_global && fits))) return refuse<Link>(EINVAL);
    uint64_t token = to.dlid;
    if (!by_number) memcpy(&token, raw + 8, sizeof token);
    Link* link = nic().links.to(token);
    return link ? link : refuse<Link>(EHOSTUNREACH);
}

int poll_cq(ibv_cq* queue, int count, ibv_wc* wc) {
    Cq& cq = *static_cast<Cq*>(queue);
    if (cq.ready.load(std::memory_order_acquire) == 0) return 0;
    Guard lock(nic().mutex);
    if (cq.overrun) return -1;
    int found = 0;
    for (; found < count && !cq.entries.empty(); ++found) {
        nic().polled(cq.entries.front());
        wc[found] = cq.entries.front().wc;
        cq.entries.pop_front();
        cq.ready.fetch_sub(1, std::memory_order_relaxed);
    }
    return found;
}

int no_notification(ibv_cq*, int) { return ENOSYS; }

// Takes a request over, or says why not.
int accept(Qp& qp, SendRequest& send, unsigned flags) {
    if (nic().dead) return EIO;
    if (qp.qp_base.state != IBV_QPS_RTS) return EINVAL;
    if (qp.send_slots >= qp.cap.max_send_wr) return ENOMEM;
    if (send.from.size() > qp.cap.max_send_sge || send.bytes > most_bytes || !send.link) return EINVAL;
    if (flags & ~unsigned(IBV_SEND_SIGNALED | IBV_SEND_INLINE)) return EOPNOTSUPP;
    send.signaled = qp.signals_all || (flags & IBV_SEND_SIGNALED);
    if (flags & IBV_SEND_INLINE) {
        if (send.bytes > qp.cap.max_inline_data) return EINVAL;
        for (const ibv_sge& sge : send.from) {
            const auto* data = reinterpret_cast<const uint8_t*>(sge.addr);
            send.inlined.insert(send.inlined.end(), data, data + sge.length);
        }
    }
    send.number = qp.next_number;
    qp.next_number = (qp.next_number + 1) & number_mask;
    ++qp.send_slots;
    qp.sends.push_back(send);
    return 0;
}

int post_send(ibv_qp* pair, ibv_send_wr* wr, ibv_send_wr** bad) {
    Qp& qp = *reinterpret_cast<Qp*>(pair);
    int problem = 0;
    {
        Guard lock(nic().mutex);
        for (; wr && !problem; wr = problem ? wr : wr->next) {
            SendRequest send{};
            send.wr_id = wr->wr_id;
            send.with_imm = wr->opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
            send.imm = wr->imm_data, send.rkey = wr->wr.rdma.rkey, send.address = wr->wr.rdma.remote_addr;
            for (int i = 0; i < wr->num_sge; ++i) {
                send.from.push_back(wr->sg_list[i]);
                send.bytes += wr->sg_list[i].length;
            }
            send.link = qp.link, send.to_qp = qp.attr.dest_qp_num;
            const bool known = wr->opcode == IBV_WR_RDMA_WRITE || wr->opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
            problem = qp.is_srd || !known || wr->num_sge < 0 ? EOPNOTSUPP : accept(qp, send, wr->send_flags);
            if (problem) *bad = wr;
        }
    }
    nic().wake();
    return problem;
}

int post_recv(ibv_qp* pair, ibv_recv_wr* wr, ibv_recv_wr** bad) {
    Qp& qp = *reinterpret_cast<Qp*>(pair);
    Guard lock(nic().mutex);
    for (; wr; wr = wr->next) {
        int problem = 0;
        if (qp.qp_base.state == IBV_QPS_RESET || qp.qp_base.state == IBV_QPS_ERR) problem = EINVAL;
        else if (qp.receive_slots >= qp.cap.max_recv_wr) problem = ENOMEM;
        else if (wr->num_sge < 0 || uint32_t(wr->num_sge) > qp.cap.max_recv_sge) problem = EINVAL;
        if (problem) {
            *bad = wr;
            return problem;
        }
        ++qp.receive_slots;
        qp.receives.push_back(*wr);
    }
    return 0;
}

// --- requests of an extended queue pair, one member at a time --------------------------------------------------------

Qp& qp_of(ibv_qp_ex* qp) { return *static_cast<Qp*>(qp); }

void wr_start(ibv_qp_ex* pair) {
    Qp& qp = qp_of(pair);
    qp.batch.clear();
    qp.batching = true;
    qp.batch_problem = 0;
}

void wr_write(ibv_qp_ex* pair, uint32_t rkey, uint64_t address, uint32_t imm, bool with_imm, uint64_t operation) {
    Qp& qp = qp_of(pair);
    if (!qp.batching || !(qp.operations & operation)) qp.batch_problem = EINVAL;
    SendRequest send{};
    send.wr_id = qp.wr_id, send.rkey = rkey, send.address = address, send.imm = imm, send.with_imm = with_imm;
    qp.batch.push_back(send);
}

void wr_rdma_write(ibv_qp_ex* pair, uint32_t rkey, uint64_t address) {
    wr_write(pair, rkey, address, 0, false, IBV_QP_EX_WITH_RDMA_WRITE);
}

void wr_rdma_write_imm(ibv_qp_ex* pair, uint32_t rkey, uint64_t address, uint32_t imm) {
    wr_write(pair, rkey, address, imm, true, IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM);
}

void wr_set_sge(ibv_qp_ex* pair, uint32_t lkey, uint64_t address, uint32_t length) {
    Qp& qp = qp_of(pair);
    if (qp.batch.empty()) {
        qp.batch_problem = EINVAL;
        return;
    }
    qp.batch.back().from.push_back({address, length, lkey});
    qp.batch.back().bytes += length;
}

void wr_set_ud_addr(ibv_qp_ex* pair, ibv_ah* ah, uint32_t number, uint32_t qkey) {
    Qp& qp = qp_of(pair);
    if (qp.batch.empty() || !ah || ah->pd != qp.qp_base.pd) {
        qp.batch_problem = EINVAL;
        return;
    }
    SendRequest& send = qp.batch.back();
    send.link = static_cast<Ah*>(ah)->link, send.to_qp = number, send.qkey = qkey;
}

int wr_complete(ibv_qp_ex* pair) {
    Qp& qp = qp_of(pair);
    int problem = qp.batching ? qp.batch_problem : EINVAL;
    qp.batching = false;
    {
        Guard lock(nic().mutex);
        // All of them or none.
        if (!problem && qp.send_slots + qp.batch.size() > qp.cap.max_send_wr) problem = ENOMEM;
        for (SendRequest& send : qp.batch)
            if (!problem) problem = accept(qp, send, IBV_SEND_SIGNALED);
    }
    nic().wake();
    return problem;
}

void wr_abort(ibv_qp_ex* pair) { qp_of(pair).batching = false; }

// --- queue pairs -----------------------------------------------------------------------------------------------------

ibv_qp* create(ibv_pd* pd, const ibv_qp_init_attr& wanted, bool is_srd, uint64_t operations) {
    const Context& context = *static_cast<Context*>(pd->context);
    const ibv_qp_cap& cap = wanted.cap;
    if (context.is_efa != is_srd) return refuse<ibv_qp>(EOPNOTSUPP);
    if (!wanted.send_cq || !wanted.recv_cq || wanted.srq || wanted.send_cq->context != pd->context ||
        wanted.recv_cq->context != pd->context || cap.max_send_wr > most_wr || cap.max_recv_wr > most_wr ||
        cap.max_send_sge > (is_srd ? 1 : most_sge) || cap.max_recv_sge > most_sge ||
        cap.max_inline_data > (is_srd ? efa_inline : most_inline))
        return refuse<ibv_qp>(EINVAL);
    Guard lock(nic().mutex);
    Qp* qp = new Qp();
    qp->cap = cap, qp->is_srd = is_srd, qp->operations = operations;
    qp->signals_all = is_srd || wanted.sq_sig_all;
    ibv_qp& base = qp->qp_base;
    base.context = pd->context, base.qp_context = wanted.qp_context, base.pd = pd;
    base.send_cq = wanted.send_cq, base.recv_cq = wanted.recv_cq;
    base.qp_type = wanted.qp_type, base.state = IBV_QPS_RESET;
    base.qp_num = base.handle = nic().next_qp++ & number_mask;
    qp->wr_start = wr_start, qp->wr_complete = wr_complete, qp->wr_abort = wr_abort;
    qp->wr_rdma_write = wr_rdma_write, qp->wr_rdma_write_imm = wr_rdma_write_imm;
    qp->wr_set_sge = wr_set_sge, qp->wr_set_ud_addr = wr_set_ud_addr;
    static_cast<Cq*>(base.send_cq)->users += 1;
    static_cast<Cq*>(base.recv_cq)->users += 1;
    nic().qps[base.qp_num] = qp;
    return &base;
}

struct Step {
    ibv_qp_state from, to;
    int required, optional;
};

constexpr Step rc_steps[] = {
    {IBV_QPS_RESET, IBV_QPS_INIT, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS, 0},
    {IBV_QPS_INIT, IBV_QPS_INIT, 0, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS},
    {IBV_QPS_INIT, IBV_QPS_RTR,
     IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER,
     IBV_QP_ACCESS_FLAGS | IBV_QP_PKEY_INDEX},
    {IBV_QPS_RTR, IBV_QPS_RTS,
     IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC,
     IBV_QP_CUR_STATE | IBV_QP_ACCESS_FLAGS | IBV_QP_MIN_RNR_TIMER},
    {IBV_QPS_RTS, IBV_QPS_RTS, 0, IBV_QP_CUR_STATE | IBV_QP_ACCESS_FLAGS | IBV_QP_MIN_RNR_TIMER},
};

constexpr Step srd_steps[] = {
    {IBV_QPS_RESET, IBV_QPS_INIT, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY, 0},
    {IBV_QPS_INIT, IBV_QPS_RTR, 0, IBV_QP_PKEY_INDEX | IBV_QP_QKEY},
    {IBV_QPS_RTR, IBV_QPS_RTS, IBV_QP_SQ_PSN, IBV_QP_CUR_STATE | IBV_QP_QKEY | IBV_QP_RNR_RETRY},
};

template <size_t n>
bool allows(const Step (&steps)[n], ibv_qp_state from, ibv_qp_state to, int mask) {
    for (const Step& step : steps)
        if (step.from == from && step.to == to)
            return (mask & step.required) == step.required && !(mask & ~(step.required | step.optional));
    return false;
}

bool sensible(const ibv_qp_attr& attr, int mask, uint8_t port) {
    return !((mask & IBV_QP_PKEY_INDEX && attr.pkey_index != 0) || (mask & IBV_QP_PORT && attr.port_num != port) ||
             (mask & IBV_QP_PATH_MTU && (attr.path_mtu < IBV_MTU_256 || attr.path_mtu > IBV_MTU_4096)) ||
             (mask & IBV_QP_TIMEOUT && attr.timeout > 31) || (mask & IBV_QP_RETRY_CNT && attr.retry_cnt > 7) ||
             (mask & IBV_QP_RNR_RETRY && attr.rnr_retry > 7) || (mask & IBV_QP_MIN_RNR_TIMER && attr.min_rnr_timer > 31) ||
             (mask & IBV_QP_RQ_PSN && attr.rq_psn > number_mask) || (mask & IBV_QP_SQ_PSN && attr.sq_psn > number_mask) ||
             (mask & IBV_QP_DEST_QPN && attr.dest_qp_num > number_mask));
}

}  // namespace

// --- for tests and for Python ----------------------------------------------------------------------------------------

// `fault`: down@N (the link), error@N (a completion), drop@N (a message), dies@N (the card), where N counts the messages of
// this process; refuse (registrations), memlock (heed the limit of locked memory), absent (cards), denied (their use); null:
// none.
EXPORT int soft_configure(double bytes_per_second, uint64_t seed, const char* fault) {
    static const std::pair<const char*, Fault::Kind> kinds[] = {
        {"down", Fault::down}, {"error", Fault::error}, {"drop", Fault::drop}, {"dies", Fault::dies}};
    static const std::pair<const char*, Fault::Kind> lasting[] = {
        {"refuse", Fault::refuse}, {"memlock", Fault::memlock}, {"absent", Fault::absent}, {"denied", Fault::denied}};
    Fault wanted;
    for (const auto& kind : lasting)
        if (fault && !strcmp(fault, kind.first)) wanted.kind = kind.second;
    if (fault && wanted.kind == Fault::none) {
        const char* at = strchr(fault, '@');
        char* end = nullptr;
        for (const auto& kind : kinds)
            if (at && !strncmp(fault, kind.first, at - fault) && strlen(kind.first) == size_t(at - fault))
                wanted = {kind.second, strtoull(at + 1, &end, 10)};
        if (wanted.message == 0 || *end) return EINVAL;
    }
    Guard lock(nic().mutex);
    nic().configure(bytes_per_second, seed, wanted);
    return 0;
}

EXPORT void soft_counters(ibv_context* context, uint64_t* four) {
    Guard lock(nic().mutex);
    memcpy(four, &static_cast<Context*>(context)->counters, sizeof(Counters));
}

// For simulations: ends the thread of this process's cards, whose steps others take from then on, until all cards are closed.
EXPORT void soft_halt() {
    Guard turn(nic().turn);
    nic().halt();
}
EXPORT int soft_step(void*) { return nic().step_by_hand(); }

// --- devices ---------------------------------------------------------------------------------------------------------

EXPORT ibv_device** ibv_get_device_list(int* count) {
    Guard lock(nic().mutex);
    const unsigned present = nic().fault.kind == Fault::absent ? 0 : cards;
    auto** list = static_cast<ibv_device**>(calloc(cards + 1, sizeof(ibv_device*)));
    for (unsigned i = 0; i < present; ++i) list[i] = devices() + i;
    if (count) *count = int(present);
    return list;
}

EXPORT void ibv_free_device_list(ibv_device** list) { free(list); }
EXPORT const char* ibv_get_device_name(ibv_device* device) { return device->name; }
EXPORT uint64_t ibv_get_device_guid(ibv_device* device) { return 0x736f6674 + uint64_t(device - devices()); }

EXPORT ibv_context* ibv_open_device(ibv_device* device) {
    Guard turn(nic().turn);
    Guard lock(nic().mutex);
    const int problem = nic().fault.kind == Fault::denied ? EACCES : nic().start();
    if (problem) return refuse<ibv_context>(problem);
    Context* context = new Context();
    context->device = device;
    context->is_efa = device - devices() >= 2;
    context->cmd_fd = context->async_fd = -1;
    context->num_comp_vectors = 1;
    pthread_mutex_init(&context->mutex, nullptr);
    context->ops.poll_cq = poll_cq, context->ops.req_notify_cq = no_notification;
    context->ops.post_send = post_send, context->ops.post_recv = post_recv;
    return context;
}

EXPORT int ibv_close_device(ibv_context* context) {
    Guard turn(nic().turn);
    std::unique_lock<std::mutex> lock(nic().mutex);
    if (static_cast<Context*>(context)->objects) return EBUSY;
    nic().stop(lock);
    pthread_mutex_destroy(&context->mutex);
    delete static_cast<Context*>(context);
    return 0;
}

EXPORT int ibv_query_device(ibv_context* context, ibv_device_attr* attr) {
    memset(attr, 0, sizeof *attr);
    snprintf(attr->fw_ver, sizeof attr->fw_ver, "soft");
    attr->node_guid = ibv_get_device_guid(context->device);
    attr->max_mr_size = ~uint64_t(0), attr->page_size_cap = 4096;
    attr->max_qp = 1 << 16, attr->max_qp_wr = most_wr, attr->max_sge = most_sge;
    attr->max_cq = 1 << 16, attr->max_cqe = most_cqe, attr->max_mr = 1 << 20, attr->max_pd = 1 << 16;
    attr->max_ah = 1 << 20, attr->max_pkeys = 1, attr->phys_port_cnt = ports_of(context);
    return 0;
}

EXPORT int ibv_query_port(ibv_context* context, uint8_t port, ibv_port_attr* attr) {
    if (port < 1 || port > ports_of(context)) return EINVAL;
    // Who calls this by its old name has an old struct, which ends before what is new.
    memset(attr, 0, offsetof(ibv_port_attr, port_cap_flags2));
    attr->state = port == ports_of(context) ? IBV_PORT_ACTIVE : IBV_PORT_DOWN;
    attr->max_mtu = attr->active_mtu = IBV_MTU_4096;
    attr->gid_tbl_len = gids_of(context), attr->max_msg_sz = most_bytes, attr->pkey_tbl_len = 1;
    attr->active_width = 2, attr->active_speed = 32, attr->phys_state = 5;
    attr->link_layer = on_infiniband(context) ? IBV_LINK_LAYER_INFINIBAND : IBV_LINK_LAYER_ETHERNET;
    if (on_infiniband(context)) attr->lid = uint16_t(nic().links.token());
    return 0;
}

EXPORT int ibv_query_gid(ibv_context* context, uint8_t port, int index, ibv_gid* gid) {
    if (port != ports_of(context) || index < 0 || index >= gids_of(context)) return -1;
    *gid = gid_of(number_of(context), index);
    return 0;
}

EXPORT int _ibv_query_gid_ex(ibv_context* context, uint32_t port, uint32_t index, ibv_gid_entry* entry, uint32_t,
                             size_t size) {
    if (port != ports_of(context) || size < sizeof *entry) return EINVAL;
    if (index >= uint32_t(gids_of(context))) return ENODATA;
    const ibv_gid gid = gid_of(number_of(context), int(index));
    const uint32_t roce = index == 0 ? IBV_GID_TYPE_ROCE_V1 : IBV_GID_TYPE_ROCE_V2;
    *entry = {gid, index, port, on_infiniband(context) ? uint32_t(IBV_GID_TYPE_IB) : roce, 0};
    return 0;
}

EXPORT int efadv_query_device(ibv_context* context, efadv_device_attr* attr, uint32_t size) {
    if (!static_cast<Context*>(context)->is_efa) return EOPNOTSUPP;
    efadv_device_attr all{};
    all.max_sq_wr = all.max_rq_wr = most_wr, all.max_sq_sge = all.max_rq_sge = 1, all.inline_buf_size = efa_inline;
    all.device_caps = EFADV_DEVICE_ATTR_CAPS_RNR_RETRY | EFADV_DEVICE_ATTR_CAPS_RDMA_WRITE;
    all.max_rdma_size = most_bytes;
    memcpy(attr, &all, std::min<size_t>(size, sizeof all));
    return 0;
}

// --- memory ----------------------------------------------------------------------------------------------------------

EXPORT ibv_pd* ibv_alloc_pd(ibv_context* context) {
    Guard lock(nic().mutex);
    static_cast<Context*>(context)->objects += 1;
    return new ibv_pd{context, nic().next_key++};
}

EXPORT int ibv_dealloc_pd(ibv_pd* pd) {
    Guard lock(nic().mutex);
    for (const auto& entry : nic().qps)
        if (entry.second->qp_base.pd == pd) return EBUSY;
    for (const auto& entry : nic().by_lkey)
        if (entry.second->pd == pd) return EBUSY;
    static_cast<Context*>(pd->context)->objects -= 1;
    delete pd;
    return 0;
}

EXPORT ibv_mr* ibv_reg_mr_iova2(ibv_pd* pd, void* address, size_t length, uint64_t iova, unsigned access) {
    constexpr unsigned known = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
                               IBV_ACCESS_RELAXED_ORDERING;
    if (iova != reinterpret_cast<uint64_t>(address) || length == 0 || access & ~known ||
        (access & IBV_ACCESS_REMOTE_WRITE && !(access & IBV_ACCESS_LOCAL_WRITE)))
        return refuse<ibv_mr>(EINVAL);
    const uint64_t page = uint64_t(sysconf(_SC_PAGESIZE)), first = iova / page * page;
    if (msync(reinterpret_cast<void*>(first), iova + length - first, MS_ASYNC)) return refuse<ibv_mr>(EFAULT);
    Guard lock(nic().mutex);
    if (nic().fault.kind == Fault::refuse) return refuse<ibv_mr>(EOPNOTSUPP);
    rlimit most{};
    getrlimit(RLIMIT_MEMLOCK, &most);
    if (nic().fault.kind == Fault::memlock && nic().locked + length > most.rlim_cur) return refuse<ibv_mr>(ENOMEM);
    nic().locked += length;
    Mr* mr = new Mr();
    mr->context = pd->context, mr->pd = pd, mr->addr = address, mr->length = length, mr->access = int(access);
    mr->handle = nic().next_key;
    mr->lkey = nic().next_key++ << 8, mr->rkey = nic().next_key++ << 8 | 0x55;
    nic().by_lkey[mr->lkey] = nic().by_rkey[mr->rkey] = mr;
    return mr;
}

EXPORT ibv_mr* ibv_reg_mr(ibv_pd* pd, void* address, size_t length, int access) {
    return ibv_reg_mr_iova2(pd, address, length, reinterpret_cast<uint64_t>(address), unsigned(access));
}

EXPORT ibv_mr* ibv_reg_dmabuf_mr(ibv_pd*, uint64_t, size_t, uint64_t, int, int) { return refuse<ibv_mr>(EOPNOTSUPP); }

EXPORT int ibv_dereg_mr(ibv_mr* mr) {
    Guard lock(nic().mutex);
    nic().locked -= mr->length;
    nic().by_lkey.erase(mr->lkey);
    nic().by_rkey.erase(mr->rkey);
    delete static_cast<Mr*>(mr);
    return 0;
}

// --- completion queues -----------------------------------------------------------------------------------------------

EXPORT ibv_cq* ibv_create_cq(ibv_context* context, int cqe, void* cq_context, ibv_comp_channel* channel, int vector) {
    if (cqe < 1 || cqe > most_cqe || channel || vector != 0) return refuse<ibv_cq>(EINVAL);
    Guard lock(nic().mutex);
    Cq* cq = new Cq();
    cq->context = context, cq->cq_context = cq_context, cq->cqe = cqe;
    static_cast<Context*>(context)->objects += 1;
    return cq;
}

EXPORT int ibv_destroy_cq(ibv_cq* queue) {
    Guard lock(nic().mutex);
    Cq* cq = static_cast<Cq*>(queue);
    if (cq->users) return EBUSY;
    static_cast<Context*>(cq->context)->objects -= 1;
    delete cq;
    return 0;
}

// --- queue pairs and addresses ---------------------------------------------------------------------------------------

EXPORT ibv_qp* ibv_create_qp(ibv_pd* pd, ibv_qp_init_attr* wanted) {
    if (wanted->qp_type != IBV_QPT_RC) return refuse<ibv_qp>(EOPNOTSUPP);
    return create(pd, *wanted, false, 0);
}

EXPORT ibv_qp* efadv_create_qp_ex(ibv_context*, ibv_qp_init_attr_ex* wanted, efadv_qp_init_attr* efa, uint32_t size) {
    const uint32_t needed = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
    if (wanted->qp_type != IBV_QPT_DRIVER || size < sizeof *efa || efa->comp_mask || wanted->comp_mask != needed ||
        efa->driver_qp_type != EFADV_QP_DRIVER_TYPE_SRD)
        return refuse<ibv_qp>(EINVAL);
    ibv_qp_init_attr plain{};
    plain.qp_context = wanted->qp_context, plain.send_cq = wanted->send_cq, plain.recv_cq = wanted->recv_cq;
    plain.srq = wanted->srq, plain.cap = wanted->cap, plain.qp_type = wanted->qp_type;
    return create(wanted->pd, plain, true, wanted->send_ops_flags);
}

EXPORT ibv_qp_ex* ibv_qp_to_qp_ex(ibv_qp* qp) { return reinterpret_cast<ibv_qp_ex*>(qp); }

EXPORT int ibv_modify_qp(ibv_qp* pair, ibv_qp_attr* attr, int mask) {
    Qp& qp = *reinterpret_cast<Qp*>(pair);
    Guard lock(nic().mutex);
    const ibv_qp_state from = pair->state, to = mask & IBV_QP_STATE ? attr->qp_state : from;
    const int rest = mask & ~IBV_QP_STATE;
    if (mask & IBV_QP_CUR_STATE && attr->cur_qp_state != from) return EINVAL;
    if (to == IBV_QPS_RESET || to == IBV_QPS_ERR) {
        if (rest) return EINVAL;
        if (to == IBV_QPS_ERR) nic().to_error(qp);
        else nic().reset(qp);
        pair->state = to;
        return 0;
    }
    const bool allowed = qp.is_srd ? allows(srd_steps, from, to, rest) : allows(rc_steps, from, to, rest);
    if (!allowed || !sensible(*attr, mask, ports_of(pair->context))) return EINVAL;
    if (rest & IBV_QP_AV) {
        qp.link = link_to(*static_cast<Context*>(pair->context), attr->ah_attr);
        if (!qp.link) return errno;
        qp.attr.ah_attr = attr->ah_attr;
    }
    if (rest & IBV_QP_ACCESS_FLAGS) qp.attr.qp_access_flags = attr->qp_access_flags;
    if (rest & IBV_QP_PORT) qp.attr.port_num = attr->port_num;
    if (rest & IBV_QP_QKEY) qp.attr.qkey = attr->qkey;
    if (rest & IBV_QP_PATH_MTU) qp.attr.path_mtu = attr->path_mtu;
    if (rest & IBV_QP_DEST_QPN) qp.attr.dest_qp_num = attr->dest_qp_num;
    if (rest & IBV_QP_RQ_PSN) qp.expected = qp.attr.rq_psn = attr->rq_psn;
    if (rest & IBV_QP_SQ_PSN) qp.next_number = qp.attr.sq_psn = attr->sq_psn;
    if (rest & IBV_QP_TIMEOUT) qp.attr.timeout = attr->timeout;
    if (rest & IBV_QP_RETRY_CNT) qp.attr.retry_cnt = attr->retry_cnt;
    if (rest & IBV_QP_RNR_RETRY) qp.attr.rnr_retry = attr->rnr_retry;
    pair->state = to;
    return 0;
}

EXPORT int ibv_query_qp(ibv_qp* pair, ibv_qp_attr* attr, int, ibv_qp_init_attr* init) {
    const Qp& qp = *reinterpret_cast<Qp*>(pair);
    Guard lock(nic().mutex);
    *attr = qp.attr;
    attr->qp_state = attr->cur_qp_state = pair->state;
    attr->cap = qp.cap;
    *init = {pair->qp_context, pair->send_cq, pair->recv_cq, nullptr, qp.cap, pair->qp_type, qp.signals_all};
    return 0;
}

EXPORT int ibv_destroy_qp(ibv_qp* pair) {
    Guard lock(nic().mutex);
    Qp* qp = reinterpret_cast<Qp*>(pair);
    nic().reset(*qp);
    nic().qps.erase(pair->qp_num);
    static_cast<Cq*>(pair->send_cq)->users -= 1;
    static_cast<Cq*>(pair->recv_cq)->users -= 1;
    delete qp;
    return 0;
}

EXPORT ibv_ah* ibv_create_ah(ibv_pd* pd, ibv_ah_attr* attr) {
    Guard lock(nic().mutex);
    Link* link = link_to(*static_cast<Context*>(pd->context), *attr);
    if (!link) return nullptr;
    Ah* ah = new Ah();
    ah->context = pd->context, ah->pd = pd, ah->link = link;
    return ah;
}

EXPORT int ibv_destroy_ah(ibv_ah* ah) {
    delete static_cast<Ah*>(ah);
    return 0;
}

EXPORT const char* ibv_wc_status_str(ibv_wc_status status) {
    static const char* const names[] = {"success",
                                        "local length error",
                                        "local QP operation error",
                                        "local EE context operation error",
                                        "local protection error",
                                        "Work Request Flushed Error",
                                        "memory management operation error",
                                        "bad response error",
                                        "local access error",
                                        "remote invalid request error",
                                        "remote access error",
                                        "remote operation error",
                                        "transport retry counter exceeded",
                                        "RNR retry counter exceeded"};
    if (status == IBV_WC_RESP_TIMEOUT_ERR) return "response timeout error";
    return size_t(status) < sizeof names / sizeof *names ? names[status] : "unknown";
}

// --- what the soft card does not have, for clients that look for it --------------------------------------------------

EXPORT ibv_comp_channel* ibv_create_comp_channel(ibv_context*) { return refuse<ibv_comp_channel>(ENOSYS); }
EXPORT int ibv_destroy_comp_channel(ibv_comp_channel*) { return ENOSYS; }
EXPORT int ibv_get_cq_event(ibv_comp_channel*, ibv_cq**, void**) { return -1; }
EXPORT void ibv_ack_cq_events(ibv_cq*, unsigned) {}
EXPORT ibv_srq* ibv_create_srq(ibv_pd*, void*) { return refuse<ibv_srq>(ENOSYS); }
EXPORT int ibv_modify_srq(ibv_srq*, void*, int) { return ENOSYS; }
EXPORT int ibv_query_srq(ibv_srq*, void*) { return ENOSYS; }
EXPORT int ibv_destroy_srq(ibv_srq*) { return ENOSYS; }
EXPORT int ibv_get_async_event(ibv_context*, void*) { return -1; }
EXPORT void ibv_ack_async_event(void*) {}
EXPORT const char* ibv_event_type_str(int) { return "no event"; }
