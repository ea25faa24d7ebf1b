// The part of the ABI of libibverbs and libefa that is used here, by the names that it has there, so that a build needs no
// RDMA package and real libraries can be opened all the same. tests/verbs_abi.py compares it with a distribution's headers,
// field by field; what stands behind "end of what is compared" is newer than some of them.
#pragma once

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

extern "C" {

union ibv_gid {
    uint8_t raw[16];
    uint64_t aligned;
};

struct ibv_gid_entry {
    ibv_gid gid;
    uint32_t gid_index;
    uint32_t port_num;
    uint32_t gid_type;
    uint32_t ndev_ifindex;
};

enum ibv_gid_type { IBV_GID_TYPE_IB, IBV_GID_TYPE_ROCE_V1, IBV_GID_TYPE_ROCE_V2 };
enum ibv_node_type { IBV_NODE_CA = 1, IBV_NODE_UNSPECIFIED = 7 };
enum ibv_transport_type { IBV_TRANSPORT_IB = 0, IBV_TRANSPORT_UNSPECIFIED = 4 };
enum ibv_atomic_cap { IBV_ATOMIC_NONE };
enum ibv_mtu { IBV_MTU_256 = 1, IBV_MTU_1024 = 3, IBV_MTU_4096 = 5 };
enum ibv_mig_state { IBV_MIG_MIGRATED };
enum ibv_port_state { IBV_PORT_DOWN = 1, IBV_PORT_ACTIVE = 4 };
enum { IBV_LINK_LAYER_INFINIBAND = 1, IBV_LINK_LAYER_ETHERNET = 2 };
enum ibv_qp_type { IBV_QPT_RC = 2, IBV_QPT_UC, IBV_QPT_UD, IBV_QPT_DRIVER = 0xff };
enum ibv_qp_state {
    IBV_QPS_RESET,
    IBV_QPS_INIT,
    IBV_QPS_RTR,
    IBV_QPS_RTS,
    IBV_QPS_SQD,
    IBV_QPS_SQE,
    IBV_QPS_ERR
};

enum ibv_access_flags {
    IBV_ACCESS_LOCAL_WRITE = 1,
    IBV_ACCESS_REMOTE_WRITE = 1 << 1,
    IBV_ACCESS_REMOTE_READ = 1 << 2,
    IBV_ACCESS_RELAXED_ORDERING = 1 << 20
};

enum ibv_send_flags { IBV_SEND_SIGNALED = 1 << 1, IBV_SEND_INLINE = 1 << 3 };
enum ibv_wr_opcode { IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM };
enum ibv_wc_opcode { IBV_WC_RDMA_WRITE = 1, IBV_WC_RECV_RDMA_WITH_IMM = 129 };
enum { IBV_WC_WITH_IMM = 1 << 1 };

enum ibv_wc_status {
    IBV_WC_SUCCESS,
    IBV_WC_LOC_LEN_ERR,
    IBV_WC_LOC_QP_OP_ERR,
    IBV_WC_LOC_EEC_OP_ERR,
    IBV_WC_LOC_PROT_ERR,
    IBV_WC_WR_FLUSH_ERR,
    IBV_WC_MW_BIND_ERR,
    IBV_WC_BAD_RESP_ERR,
    IBV_WC_LOC_ACCESS_ERR,
    IBV_WC_REM_INV_REQ_ERR,
    IBV_WC_REM_ACCESS_ERR,
    IBV_WC_REM_OP_ERR,
    IBV_WC_RETRY_EXC_ERR,
    IBV_WC_RNR_RETRY_EXC_ERR,
    IBV_WC_FATAL_ERR = 19,
    IBV_WC_RESP_TIMEOUT_ERR,
    IBV_WC_GENERAL_ERR
};

enum ibv_qp_attr_mask {
    IBV_QP_STATE = 1 << 0,
    IBV_QP_CUR_STATE = 1 << 1,
    IBV_QP_ACCESS_FLAGS = 1 << 3,
    IBV_QP_PKEY_INDEX = 1 << 4,
    IBV_QP_PORT = 1 << 5,
    IBV_QP_QKEY = 1 << 6,
    IBV_QP_AV = 1 << 7,
    IBV_QP_PATH_MTU = 1 << 8,
    IBV_QP_TIMEOUT = 1 << 9,
    IBV_QP_RETRY_CNT = 1 << 10,
    IBV_QP_RNR_RETRY = 1 << 11,
    IBV_QP_RQ_PSN = 1 << 12,
    IBV_QP_MAX_QP_RD_ATOMIC = 1 << 13,
    IBV_QP_MIN_RNR_TIMER = 1 << 15,
    IBV_QP_SQ_PSN = 1 << 16,
    IBV_QP_MAX_DEST_RD_ATOMIC = 1 << 17,
    IBV_QP_DEST_QPN = 1 << 20
};

enum ibv_qp_init_attr_mask { IBV_QP_INIT_ATTR_PD = 1 << 0, IBV_QP_INIT_ATTR_SEND_OPS_FLAGS = 1 << 6 };
enum ibv_qp_create_send_ops_flags {
    IBV_QP_EX_WITH_RDMA_WRITE = 1 << 0,
    IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM = 1 << 1
};

enum { IBV_SYSFS_NAME_MAX = 64, IBV_SYSFS_PATH_MAX = 256 };

struct ibv_context;
struct ibv_cq;
struct ibv_qp;
struct ibv_srq;
struct ibv_comp_channel;

struct _ibv_device_ops {
    void* _dummy1;
    void* _dummy2;
};

struct ibv_device {
    _ibv_device_ops _ops;
    ibv_node_type node_type;
    ibv_transport_type transport_type;
    char name[IBV_SYSFS_NAME_MAX];
    char dev_name[IBV_SYSFS_NAME_MAX];
    char dev_path[IBV_SYSFS_PATH_MAX];
    char ibdev_path[IBV_SYSFS_PATH_MAX];
};

struct ibv_device_attr {
    char fw_ver[64];
    uint64_t node_guid;
    uint64_t sys_image_guid;
    uint64_t max_mr_size;
    uint64_t page_size_cap;
    uint32_t vendor_id;
    uint32_t vendor_part_id;
    uint32_t hw_ver;
    int max_qp;
    int max_qp_wr;
    unsigned device_cap_flags;
    int max_sge;
    int max_sge_rd;
    int max_cq;
    int max_cqe;
    int max_mr;
    int max_pd;
    int max_qp_rd_atom;
    int max_ee_rd_atom;
    int max_res_rd_atom;
    int max_qp_init_rd_atom;
    int max_ee_init_rd_atom;
    ibv_atomic_cap atomic_cap;
    int max_ee;
    int max_rdd;
    int max_mw;
    int max_raw_ipv6_qp;
    int max_raw_ethy_qp;
    int max_mcast_grp;
    int max_mcast_qp_attach;
    int max_total_mcast_qp_attach;
    int max_ah;
    int max_fmr;
    int max_map_per_fmr;
    int max_srq;
    int max_srq_wr;
    int max_srq_sge;
    uint16_t max_pkeys;
    uint8_t local_ca_ack_delay;
    uint8_t phys_port_cnt;
};

struct ibv_port_attr {
    ibv_port_state state;
    ibv_mtu max_mtu;
    ibv_mtu active_mtu;
    int gid_tbl_len;
    uint32_t port_cap_flags;
    uint32_t max_msg_sz;
    uint32_t bad_pkey_cntr;
    uint32_t qkey_viol_cntr;
    uint16_t pkey_tbl_len;
    uint16_t lid;
    uint16_t sm_lid;
    uint8_t lmc;
    uint8_t max_vl_num;
    uint8_t sm_sl;
    uint8_t subnet_timeout;
    uint8_t init_type_reply;
    uint8_t active_width;
    uint8_t active_speed;
    uint8_t phys_state;
    uint8_t link_layer;
    uint8_t flags;
    uint16_t port_cap_flags2;
};

struct ibv_pd {
    ibv_context* context;
    uint32_t handle;
};

struct ibv_mr {
    ibv_context* context;
    ibv_pd* pd;
    void* addr;
    size_t length;
    uint32_t handle;
    uint32_t lkey;
    uint32_t rkey;
};

struct ibv_global_route {
    ibv_gid dgid;
    uint32_t flow_label;
    uint8_t sgid_index;
    uint8_t hop_limit;
    uint8_t traffic_class;
};

struct ibv_ah_attr {
    ibv_global_route grh;
    uint16_t dlid;
    uint8_t sl;
    uint8_t src_path_bits;
    uint8_t static_rate;
    uint8_t is_global;
    uint8_t port_num;
};

struct ibv_ah {
    ibv_context* context;
    ibv_pd* pd;
    uint32_t handle;
};

struct ibv_qp_cap {
    uint32_t max_send_wr;
    uint32_t max_recv_wr;
    uint32_t max_send_sge;
    uint32_t max_recv_sge;
    uint32_t max_inline_data;
};

struct ibv_qp_init_attr {
    void* qp_context;
    ibv_cq* send_cq;
    ibv_cq* recv_cq;
    ibv_srq* srq;
    ibv_qp_cap cap;
    ibv_qp_type qp_type;
    int sq_sig_all;
};

struct ibv_rx_hash_conf {
    uint8_t rx_hash_function;
    uint8_t rx_hash_key_len;
    uint8_t* rx_hash_key;
    uint64_t rx_hash_fields_mask;
};

struct ibv_qp_init_attr_ex {
    void* qp_context;
    ibv_cq* send_cq;
    ibv_cq* recv_cq;
    ibv_srq* srq;
    ibv_qp_cap cap;
    ibv_qp_type qp_type;
    int sq_sig_all;
    uint32_t comp_mask;
    ibv_pd* pd;
    void* xrcd;
    uint32_t create_flags;
    uint16_t max_tso_header;
    void* rwq_ind_tbl;
    ibv_rx_hash_conf rx_hash_conf;
    uint32_t source_qpn;
    uint64_t send_ops_flags;
};

struct ibv_qp_attr {
    ibv_qp_state qp_state;
    ibv_qp_state cur_qp_state;
    ibv_mtu path_mtu;
    ibv_mig_state path_mig_state;
    uint32_t qkey;
    uint32_t rq_psn;
    uint32_t sq_psn;
    uint32_t dest_qp_num;
    unsigned qp_access_flags;
    ibv_qp_cap cap;
    ibv_ah_attr ah_attr;
    ibv_ah_attr alt_ah_attr;
    uint16_t pkey_index;
    uint16_t alt_pkey_index;
    uint8_t en_sqd_async_notify;
    uint8_t sq_draining;
    uint8_t max_rd_atomic;
    uint8_t max_dest_rd_atomic;
    uint8_t min_rnr_timer;
    uint8_t port_num;
    uint8_t timeout;
    uint8_t retry_cnt;
    uint8_t rnr_retry;
    uint8_t alt_port_num;
    uint8_t alt_timeout;
    uint32_t rate_limit;
};

struct ibv_sge {
    uint64_t addr;
    uint32_t length;
    uint32_t lkey;
};

struct ibv_send_wr {
    uint64_t wr_id;
    ibv_send_wr* next;
    ibv_sge* sg_list;
    int num_sge;
    ibv_wr_opcode opcode;
    unsigned send_flags;
    union {
        uint32_t imm_data;  // in network byte order
        uint32_t invalidate_rkey;
    };
    union {
        struct {
            uint64_t remote_addr;
            uint32_t rkey;
        } rdma;
        struct {
            uint64_t remote_addr;
            uint64_t compare_add;
            uint64_t swap;
            uint32_t rkey;
        } atomic;
        struct {
            ibv_ah* ah;
            uint32_t remote_qpn;
            uint32_t remote_qkey;
        } ud;
    } wr;
    uint64_t not_used_here[7];
};

struct ibv_recv_wr {
    uint64_t wr_id;
    ibv_recv_wr* next;
    ibv_sge* sg_list;
    int num_sge;
};

struct ibv_wc {
    uint64_t wr_id;
    ibv_wc_status status;
    ibv_wc_opcode opcode;
    uint32_t vendor_err;
    uint32_t byte_len;
    uint32_t imm_data;  // in network byte order
    uint32_t qp_num;
    uint32_t src_qp;
    unsigned wc_flags;
    uint16_t pkey_index;
    uint16_t slid;
    uint8_t sl;
    uint8_t dlid_path_bits;
};

struct ibv_cq {
    ibv_context* context;
    ibv_comp_channel* channel;
    void* cq_context;
    uint32_t handle;
    int cqe;
    pthread_mutex_t mutex;
    pthread_cond_t cond;
    uint32_t comp_events_completed;
    uint32_t async_events_completed;
};

struct ibv_qp {
    ibv_context* context;
    void* qp_context;
    ibv_pd* pd;
    ibv_cq* send_cq;
    ibv_cq* recv_cq;
    ibv_srq* srq;
    uint32_t handle;
    uint32_t qp_num;
    ibv_qp_state state;
    ibv_qp_type qp_type;
    pthread_mutex_t mutex;
    pthread_cond_t cond;
    uint32_t events_completed;
};

struct ibv_qp_ex {
    ibv_qp qp_base;
    uint64_t comp_mask;
    uint64_t wr_id;
    unsigned wr_flags;
    void* wr_atomic_cmp_swp;
    void* wr_atomic_fetch_add;
    void* wr_bind_mw;
    void* wr_local_inv;
    void* wr_rdma_read;
    void (*wr_rdma_write)(ibv_qp_ex*, uint32_t rkey, uint64_t remote_addr);
    void (*wr_rdma_write_imm)(ibv_qp_ex*, uint32_t rkey, uint64_t remote_addr, uint32_t imm_data);
    void* wr_send;
    void* wr_send_imm;
    void* wr_send_inv;
    void* wr_send_tso;
    void (*wr_set_ud_addr)(ibv_qp_ex*, ibv_ah* ah, uint32_t remote_qpn, uint32_t remote_qkey);
    void* wr_set_xrc_srqn;
    void* wr_set_inline_data;
    void* wr_set_inline_data_list;
    void (*wr_set_sge)(ibv_qp_ex*, uint32_t lkey, uint64_t addr, uint32_t length);
    void* wr_set_sge_list;
    void (*wr_start)(ibv_qp_ex*);
    int (*wr_complete)(ibv_qp_ex*);
    void (*wr_abort)(ibv_qp_ex*);
    void* wr_atomic_write;
};

struct ibv_context_ops {
    void* _compat_query_device;
    void* _compat_query_port;
    void* _compat_alloc_pd;
    void* _compat_dealloc_pd;
    void* _compat_reg_mr;
    void* _compat_rereg_mr;
    void* _compat_dereg_mr;
    void* alloc_mw;
    void* bind_mw;
    void* dealloc_mw;
    void* _compat_create_cq;
    int (*poll_cq)(ibv_cq*, int count, ibv_wc*);
    int (*req_notify_cq)(ibv_cq*, int solicited_only);
    void* _compat_cq_event;
    void* _compat_resize_cq;
    void* _compat_destroy_cq;
    void* _compat_create_srq;
    void* _compat_modify_srq;
    void* _compat_query_srq;
    void* _compat_destroy_srq;
    void* post_srq_recv;
    void* _compat_create_qp;
    void* _compat_query_qp;
    void* _compat_modify_qp;
    void* _compat_destroy_qp;
    int (*post_send)(ibv_qp*, ibv_send_wr*, ibv_send_wr** bad);
    int (*post_recv)(ibv_qp*, ibv_recv_wr*, ibv_recv_wr** bad);
    void* _compat_create_ah;
    void* _compat_destroy_ah;
    void* _compat_attach_mcast;
    void* _compat_detach_mcast;
    void* _compat_async_event;
};

struct ibv_context {
    ibv_device* device;
    ibv_context_ops ops;
    int cmd_fd;
    int async_fd;
    int num_comp_vectors;
    pthread_mutex_t mutex;
    void* abi_compat;
};

enum { EFADV_QP_DRIVER_TYPE_SRD = 0 };
enum { EFADV_DEVICE_ATTR_CAPS_RNR_RETRY = 1 << 1 };

struct efadv_qp_init_attr {
    uint64_t comp_mask;
    uint32_t driver_qp_type;
    uint8_t reserved[4];
};

struct efadv_device_attr {
    uint64_t comp_mask;
    uint32_t max_sq_wr;
    uint32_t max_rq_wr;
    uint16_t max_sq_sge;
    uint16_t max_rq_sge;
    uint16_t inline_buf_size;
    uint8_t reserved[2];
    uint32_t device_caps;
    uint32_t max_rdma_size;
};

// --- end of what is compared -----------------------------------------------------------------------------------------

enum { EFADV_DEVICE_ATTR_CAPS_RDMA_WRITE = 1 << 5 };

}  // extern "C"
