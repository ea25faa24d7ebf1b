// Data types, and the structs that Python fills in.
#pragma once

#include "target.cuh"

namespace mk {

// --- element types ---------------------------------------------------------------------------------------------------

struct float16 { u16 bits; };
struct bfloat16 { u16 bits; };
struct tfloat32 { float value; };  // a float of which products use 11 bits of the significand

MK_DEVICE float widen(float value) { return value; }
MK_DEVICE double widen(double value) { return value; }
MK_DEVICE float widen(float16 value) { return float_from_half(value.bits); }
MK_DEVICE float widen(bfloat16 value) { return float_of(u32(value.bits) << 16); }
MK_DEVICE float widen(tfloat32 value) { return tfloat32_from_float(value.value); }

// The type in which products of T are summed.
template <class T> struct AccumulatorOf { using Type = float; };
template <> struct AccumulatorOf<double> { using Type = double; };
template <class T> using Accumulator = typename AccumulatorOf<T>::Type;

// Rounds to nearest, ties to even.
template <class T> MK_DEVICE T narrow(double value) { return T(value); }
template <class T> MK_DEVICE T narrow(float value) { return T(value); }
template <> MK_DEVICE float16 narrow<float16>(float value) { return {half_from_float(value)}; }
template <> MK_DEVICE bfloat16 narrow<bfloat16>(float value) { return {bfloat16_from_float(value)}; }

template <class T> MK_DEVICE T not_a_number() { return narrow<T>(Accumulator<T>(float_of(0x7fc00000))); }

// --- structs shared with Python --------------------------------------------------------------------------------------
// mkernel_cp/structs.py reads them from here. Every member is 8 bytes (u64, i64, double, a pointer) or another such struct, so no
// compiler adds padding.

// A tensor map as the driver encodes it: how a box of a matrix in global memory is laid out in shared memory.
struct alignas(64) TensorMap { u64 opaque[16]; };

// Where an array lies: a segment, which every peer has mapped, and an offset in bytes.
struct Place {
    u64 segment;
    u64 offset;
};

// The first word of a rank to a peer in every call: what it calls, and where its operand and its output are.
struct CallMessage {
    u64 digest;  // of everything that all ranks must agree on
    Place operand;
    u64 operand_pitch;  // bytes from one line to the next
};

// What one peer tells this rank. Each word has one writer, that peer; `read` is a signal (signal.cuh).
struct Inbox {
    u64 message[8];  // its CallMessage, half a word after the other: generation << 32 | half
    u64 read;  // the peer has read all that it needs of this rank's message and operand
    u64 reserved[7];  // the senders' cache lines stay apart; also used by the start-up self-test
};
static_assert(sizeof(Inbox::message) == 2 * sizeof(CallMessage), "all halves");

// Why a wait failed; the names of the codes are in mkernel_cp/failure.py.
struct Record {
    u64 written;  // last, when the rest is there
    u64 reason;
    u64 generation;
    u64 role;
    u64 awaited;
    u64 index;
    u64 peer;
    u64 expected;
    u64 seen;
    u64 waited_ns;
};

// What is wrong with the data of a call, which has therefore written nothing; the codes are in mkernel_cp/failure.py.
struct DataFault {
    u64 problem;  // last, when the rest is there; 0 again when the host has taken note
    u64 generation;
    u64 rank;  // whose data, or whose room
    i64 values[3];
};

// One page per rank in host memory that all ranks of the node map: it works also when a GPU or a rank does not.
struct HostPage {
    u64 abort;   // 0, or 1 + the rank whose record says why (+ 2^32: its watcher's record, + 2^33: its proxy's)
    u64 beat;    // counted up ten times a second by the rank's watcher: its process runs
    u64 unmapped;  // 1: the rank has closed its communicator, and uses no memory of its peers any more
    u64 closed;    // 1 + the last generation that ended well, when the rank has closed its communicator
    u64 called;  // a signal: what the host does in place of a launch
    u64 digest;  // of what it has announced
    Record by_kernel;
    Record by_watcher;
    Record by_proxy;
    u64 card[8];  // the name of the network card that the proxy's record is about
    DataFault fault;
};

// The first word of a rank to one on another node in every call, which the network brings.
struct alignas(64) Letter {
    u64 generation;
    CallMessage message;
    u64 reserved[3];
};

// A span of time that an agent, or a part of one, has recorded.
struct TraceEvent {
    u64 kind;
    u64 role;
    u64 generation;
    u64 begin_ns;
    u64 end_ns;  // 0: not yet
    u64 failed;
    u64 peer;
    u64 values[2];
};

// Where traced launches record: each part of each agent has a track, with a count and slots; what finds no slot is
// counted all the same.
struct Trace {
    u64 parts;
    u64 capacity;
    u64* recorded;       // [agent * parts + part]
    TraceEvent* events;  // [(agent * parts + part) * capacity]
};

// What a kernel asks of the proxy: lines of bytes are to be written to a peer's memory, and then a chunk of them counts as
// arrived there. One cache line; the meaning of its fields is in channel.cuh.
struct alignas(64) Command {
    u64 number;  // 1 + its ticket: last, when the rest is there
    u64 kind_and_lines;
    u64 peer_and_chunk;
    u64 generation;
    u64 from;
    u64 to;
    u64 pitches;
    u64 line_bytes;
};

// Commands on their way to the proxy, a thread of the host. Slots and what the proxy counts are in pinned host memory; who
// is to write which slot is settled on the GPU.
struct CommandQueue {
    Command* slots;  // ticket t in slot t % capacity
    u64 capacity;
    u64* tickets;     // given out so far
    u64* taken_seen;  // what an agent last saw of `taken`
    u64* taken;       // by the proxy: their slots are free again
    u64* sent;        // of them, from the first on: their bytes have been read, and may be overwritten
};

// What a slot of host memory begins with: where the lines behind it belong.
struct alignas(64) Parcel {
    u64 chunk;
    u64 last;  // whether all of the chunk has come with it
    Place to;
    u64 to_pitch;
    u64 lines;
    u64 line_bytes;
    u64 reserved;
};

// A peer that this rank exchanges slots with. Each of its counts has one writer.
struct alignas(64) StagedLink {
    u64 rank;
    u64 number_there;  // of this rank among the links of that one
    u64 sent;          // slots, since this was made
    u64 received;
    u64 reserved[4];
};

// Where network cards do not reach what kernels do: rings of slots in host memory (staging.cuh), in one region. First come
// those that leave this rank, to whomever, then those that arrive from each link.
struct Staging {
    CommandQueue queue;  // to the proxy; that of `Network` is to the agent that fills slots
    u64 region;
    u8* memory;
    u64 slots;       // of a ring
    u64 room;        // bytes of a slot behind its parcel
    u64 first;       // number of the first of these arrivals: of each link its slots, and then its credits
    u64* arrived;    // counted by the proxy
    u64* left;       // how many slots have left
    u64* read_by;    // [slot that leaves]: the last command that the cards read it for
    u64* link_of;    // [rank]
    u64 link_count;
    StagedLink* links;
};

// The network, where there is more than one node. A rank sends to its gateways, one on each other node, and is a gateway
// itself to its sources; what comes to a gateway is for all of its node.
struct Network {
    CommandQueue queue;
    u64 gateway_count;
    u64* gateways;
    u64 source_count;
    u64* sources;
    u64 link_count;  // both
    u64* links;
    u64* holders;     // [rank]: who of this node has what it sends: itself, or its gateway
    u64* arrived;     // signals, raised by the proxy: [rank] its letter, [size + rank] its receipt, [2 size + chunk]
    Letter* letters;  // that of this rank, then [generation % 2][rank] of the others, one that nobody reads, a blank one
    u64 region;       // in which letters lie
    u64 node;         // the number of this one
    Staging* staging; // null where cards reach the memory of kernels
};

// A communicator, as its kernels see it. Arrays have one entry per rank. What every launch reads comes first, in one line
// of the cache: the first six words when it starts, the next when it ends. The host sets all but the first three.
struct World {
    u64 generation;  // of the last kernel that ended well
    u64 running;     // 1 while a kernel has not ended well, or 0
    u64 failures;    // agents whose wait failed: the first one writes the record, and no launch follows
    u64 delay_seed;  // test hook: each agent starts up to delay_ns[its role] late; 0: none does
    u64 rank;
    u64 size;
    u64* counters;    // two banks of 2 + size
    HostPage** pages;
    u64 node_begin;   // the first rank of this node
    u64 node_size;
    Network* network;  // null if there is one node
    Inbox* inbox;      // [peer]: what the peer tells this rank
    Inbox** outbox;    // [peer]: this rank's inbox at the peer
    void** segments;   // [segment * size + rank]
    u64* looked;       // when one of the waiting agents last looked at host memory for all
    u64* bytes_from_peers;
    u64 entry_timeout_ns;     // 0: no limit
    u64 progress_timeout_ns;  // 0: no limit
    u64 delay_ns[8];
    Trace* trace;             // of traced launches
};

// How many agents each role gets.
struct Split {
    u64 movers;
    u64 compute;
    u64 inter_reduce;  // of sums between nodes
};

// A strided matrix; strides in elements.
struct Matrix {
    TensorMap map;  // for engines with tensor copies
    u64 box_lines;  // that it brings or stores at a time; 0 if there is no map
    void* data;
    i64 row_stride;
    i64 column_stride;
    u64 reserved[4];
};

struct TileShape {
    i64 rows;
    i64 columns;
    i64 k;
    i64 row_step;  // where tiles may be of fewer rows: of a multiple of so many; or 0
};

// Rows of all ranks that are pulled to this one, chunk by chunk. Lines are what is contiguous: rows, or columns where the
// operand travels in F order.
struct LandingPlan {
    u64 by_columns;
    u64 gathered;      // whether all rows come together before they are multiplied, in tiles of those of any ranks
    i64 all_rows[2];   // 0 and M
    i64 k;
    i64 chunk_rows;
    i64 chunk_k;
    i64 phase_k;       // a multiple of chunk_k: so much of k comes from all ranks before more does
    i64* row_start;    // [rank], and the total behind the last
    Matrix* rows;      // [rank]: where they land; [size]: where all do, if they are gathered
    i64* first_chunk;  // [rank]: its first one in `arrived`
    u64* arrived;      // a signal per chunk
    Place zone;        // where `rows` begin at every rank, if there is more than one node
    Place relayed;     // and there a signal per chunk: it has come over the network to its gateway
    u64 chunks;        // of all ranks
    u64* writes;       // [chunk]: in how many writes it comes over the network
};

// What does not change from call to call of allgather_gemm.
struct AllGatherGemmPlan {
    Split split;
    u64 digest;
    i64 n;  // columns of this rank's B; if 0, nothing is pulled
    i64 whole;  // tiles that are not halved
    TileShape tile;
    LandingPlan landing;
};

struct AllGatherGemmParams {
    Matrix a;  // this rank's rows
    Matrix b;
    Matrix c;
    World* world;
    AllGatherGemmPlan* plan;
    CallMessage message;
    u64 reserved[2];
};

// Numbered slots at the same place in every rank's segment, and for each a signal, which the one who fills it raises.
struct ZonePlan {
    Place signals;
    Place slots;
    i64 slot_bytes;
};

// Sums of a node on their way to the ranks of other nodes that own their rows. Slots have no signals that ranks of a node
// raise, but for those of `products`.
struct NodeSumsPlan {
    ZonePlan products;  // [part of others' rows that is added here]: what this rank adds to it
    ZonePlan leaving;   // likewise: its sum over this node
    ZonePlan arriving;  // [other node][part of own rows]: its sum over that node, also the number of its chunk
    u64 first_total;    // chunks behind, by part, counted over all owners: sums over all ranks
    u64 chunks;
    u64* writes;  // [chunk]: in how many it comes over the network
};

// What does not change from call to call of gemm_reduce_scatter.
struct GemmReduceScatterPlan {
    Split split;
    u64 digest;
    i64 n;
    i64 k;  // of this rank
    TileShape tile;
    i64 stripe;         // columns that are summed before the next ones
    i64 part_rows;      // of a part of a tile, which is pushed and added at once
    i64 part_columns;
    i64 piece_columns;  // of a piece of a part, which is delivered at once
    i64* row_start;     // [rank]: the first of the rows that it owns, and the total behind the last
    i64* part_start;    // [rank]: the first part of those rows, and the total behind the last
    i64* added_start;   // [rank]: the same, among the parts that are added where those of its rows are, in this node
    i64 most_added;     // parts that a rank adds: of others' rows, as their gateway, and then of its own; of any the most
    u64 pulled;         // whether partial sums stay where they were computed, until who adds them has them brought
    ZonePlan partials;  // at who adds: [ring distance from there - 1][part that is added there]
    ZonePlan offered;   // the same; if pulled, the slots are where they were computed, and the signals at who adds
    NodeSumsPlan nodes;
};

struct GemmReduceScatterParams {
    Matrix a;
    Matrix b;
    Matrix c;  // this rank's rows of the sum
    World* world;
    GemmReduceScatterPlan* plan;
    CallMessage message;
    u64 reserved[2];
};

// What does not change from call to call of gemm_allreduce.
struct GemmAllReducePlan {
    GemmReduceScatterPlan reduction;
    ZonePlan sums;  // [part, counted over all owners]
};

struct GemmAllReduceParams {
    Matrix a;
    Matrix b;
    Matrix c;
    World* world;
    GemmAllReducePlan* plan;
    CallMessage message;
    u64 reserved[2];
};

// The same of both for few rows.
struct LowLatencyPlan {
    GemmReduceScatterPlan reduction;
    Place words;      // of data: [ring distance from the owner - 1][element] of products, then of sums
    u64 elements;     // of whole tiles
    u64 scattered;    // whether only the owner of a row keeps its sums, and not every rank
    i64 all_rows[2];  // 0 and M
    i64 first_row;    // where in c row 0 is, or would be: minus kept_begin
    i64 kept_begin;   // rows that this rank keeps
    i64 kept_end;
};

struct LowLatencyParams {
    Matrix a;
    Matrix b;
    Matrix c;
    World* world;
    LowLatencyPlan* plan;
    CallMessage message;
    u64 reserved[2];
};

// An array (batch, position, head, column); strides in elements.
struct Heads {
    TensorMap map;  // (column, position, head, batch), for engines with tensor copies
    void* data;
    i64 batch_stride;
    i64 position_stride;
    i64 head_stride;
    i64 column_stride;
    u64 reserved[3];
};

// One that peers read: its columns are contiguous; strides in bytes.
struct SharedHeads {
    Place place;
    i64 batch_stride;
    i64 position_stride;
    i64 head_stride;
};

// Where a rank's keys and values lie; this itself lies where its call message says.
struct KeysAndValues {
    SharedHeads keys;
    SharedHeads values;
};

// Positions that follow each other in the sequence, and at the rank that holds them.
struct Run {
    u64 source;
    i64 first;  // at the source
    i64 count;
    i64 position;     // of the first, in the sequence
    i64 place;        // of the first in a slot of this rank's window, or of the one that it is sent to
    i64 held;         // of the first in a slot of the gateway's window, if it comes from another node
    i64 first_chunk;  // counted over the runs of all ranks
};

// Slots in which keys and values of the peers land, unit after unit: unit u in slot u % slots.
struct WindowPlan {
    TensorMap map;  // (column, position, keys or values, slot)
    u64 slots;
    i64 slot_positions;
    i64 chunk_positions;
    u64 chunks;    // of a unit, of all ranks
    void* data;    // [slot][keys, values][position][column]
    u64* arrived;  // [unit][chunk][keys, values]: signals
    u64* left;     // [compute agent]: signals, of how many units it needs nothing any more
    u64 reserved[1];
};

// How windows are filled from other nodes. What comes to a gateway its node peers bring from its window.
struct NodeWindowPlan {
    Place zone;    // of the window at every rank
    Place heard;   // and there signals as `arrived`: it has come over the network to its gateway
    Place freed;   // [rank]: signals, of how many units it needs nothing any more
    u64 chunks;    // that may come over the network: those of all units, and by [node][unit] that it is needed no more
    u64* writes;   // [chunk]: in how many
    i64* slot_positions;  // [rank]
    u64 leaving_runs;
    Run* leaving;  // this rank's; `source`: the gateway
    u64 arriving_runs;
    Run* arriving;  // those of which this rank is the gateway
    u64 reserved[3];
};

// What does not change from call to call of ring_attention.
struct RingAttentionPlan {
    WindowPlan window;
    NodeWindowPlan nodes;
    Split split;
    u64 digest;
    i64 batches;
    i64 kv_heads;
    i64 group;  // query heads per head of keys and values
    u64 causal;
    double scale;
    TileShape tile;  // queries, keys, all columns of a head
    u64 query_runs;
    Run* queries;  // this rank's positions
    u64 walk_runs;
    Run* walk;  // the keys that they see, in the order in which they are used
    u64 reserved[7];
};

struct RingAttentionParams {
    Heads q;
    Heads k;
    Heads v;
    Heads out;
    Heads lse;  // without columns; no data: not wanted
    KeysAndValues own;
    KeysAndValues* shown;  // where peers find `own`
    World* world;
    RingAttentionPlan* plan;
    CallMessage message;
    u64 reserved[7];
};

// The experts that each token is sent to: ids of int32, or of int64 if `wide`; strides in elements.
struct TokenChoice {
    void* ids;
    i64 row_stride;
    i64 column_stride;
    u64 wide;
};

// How many rows of an expert come from one rank, and for how many of them the token has not come for an earlier expert.
struct ExpertShare {
    i64 rows;
    i64 tokens;
};

// One row of an expert's: which token of the rank that sends it, why, and where it lands among those of that rank.
struct Route {
    i64 token;
    i64 slot;
    i64 landed;
};

// What a rank says of its tokens, beside its shares of all experts.
struct RoutingSummary {
    i64 tokens;
    i64 fault;  // the first id that is none, as token * slots + slot; or -1
    i64 faulty_id;
};

// What one rank sends to one expert.
struct Delivery {
    i64 row;  // the first of the expert's
    i64 rows;
    i64 route;  // the first in the sender's table
    i64 token;  // the first in the sender's list of tokens
    i64 tokens;
    i64 landed;  // of the first token, among those of the sender here
};

// Where gateways have what ranks of other nodes show.
struct MirrorPlan {
    i64 first;    // bytes from a table to that of rank 0
    i64 bytes;    // and from there to that of the next rank
    Place heard;  // [rank][part]: signals: the gateway here has this part of what comes from another node
    u64 parts;
};

// How a rank sorts its tokens by expert, and learns what it gets. `Place`s are tables that peers read.
struct RoutingPlan {
    u64 experts;  // of all ranks
    i64 slots;    // ids of a token
    i64 max_tokens;
    i64 sorted;     // tokens that an agent sorts at a time
    i64* capacity;  // [rank]: rows of its result
    Place summary;
    Place starts;          // [expert], and all behind the last: what comes before it
    Place routes;          // by expert, token, slot
    Place tokens;          // u32, each once per destination, in the order in which its experts need them
    ExpertShare* counts;   // [agent][expert], and behind the last how many ids are none, and the first of these
    ExpertShare* known;    // [rank][expert]: the `starts` of all
    RoutingSummary* said;  // [rank]
    i64* totals;           // [rank]
    Delivery* deliveries;  // [own expert][rank]
    u64* told;             // [agent]: signals: it has counted (1), it has listed (2)
    u64* routed;           // a signal: what this rank gets is known (1), or that nobody gets anything (2)
    MirrorPlan mirror;
};

// Where tokens of peers land, those of each rank together, and where each row of A is.
struct TokenLandingPlan {
    void* tokens;  // [rank][max_tokens], lines
    i64 pitch;     // bytes from one to the next
    i64 bytes;     // of one
    i64 chunk_tokens;
    i64 chunks;        // of a rank
    i64 first_chunks;  // of a peer, that compute agents bring, one each: all wait for these in the beginning
    u32* list;         // [rank][max_tokens]: of those that land, which of its tokens they are
    u64* arrived;      // [rank][chunk]: signals
    u64* placed;       // [own expert][rank]: signals
    u8** places;       // [row]: where it is
};

// How tokens go to other nodes: each once to every node that needs it, with tables that say to whom, to a gateway there.
struct NodeDispatchPlan {
    i64* first_expert;  // [node], and all behind the last
    i64 head_bytes;     // of tables that all agree by: from `summary` on
    Place crossing;     // [node]: a table: how many of this rank's tokens go there
    Place list;         // as `tokens`, by their places among those that go to the same node
    u32* place_of;      // [token]
    u32* order;         // [gateway][max_tokens]: which tokens go there
    Place leaving;      // [gateway][max_tokens]: they themselves, without gaps
    Place landed;       // [rank][max_tokens]: those of other nodes, at the gateway
    u64 chunks;         // that may come over the network: the parts of all ranks
    u64* writes;        // [chunk]: in how many
};

// What does not change from call to call of moe_dispatch_gemm.
struct MoeDispatchGemmPlan {
    Split split;
    u64 digest;
    u64 experts;  // of this rank
    i64 h;
    i64 n;
    TileShape tile;
    i64* whole;  // offsets of a result that is one expert's
    RoutingPlan routing;
    TokenLandingPlan landing;
    NodeDispatchPlan nodes;
};

// Arrays that tell the rows of a result apart.
struct RowOrigins {
    u64* dispatch;  // the generation of the call that has filled them in
    i64* expert_offsets;
    i32* source_rank;
    i32* source_token;
    i32* source_slot;
};

struct MoeDispatchGemmParams {
    Matrix x;
    Matrix w;  // of the first expert
    Matrix rows;
    i64 w_stride;  // bytes from one expert's to the next
    i64 tokens;
    TokenChoice choice;
    RowOrigins origins;
    World* world;
    MoeDispatchGemmPlan* plan;
    CallMessage message;
    u64 reserved[7];
};

// Sums between nodes: of each chunk of a rank's tokens, its gateway on another node sends one message. It says where in it
// the sum for each token is, or that there is none (u32), and behind that are the sums, without gaps.
struct NodeCombinePlan {
    Place summed;       // [rank of another node][rank][chunk]: signals: the one's sums for the other's tokens are there
    Place leaving;      // [rank][chunk]: messages
    Place arriving;     // [node][chunk]
    i64 head_bytes;     // of a message
    i64 message_bytes;  // at the most
    u64 first_chunk;    // [node][chunk]: of what may come over the network
    u64 chunks;         // all that may
    u64* writes;        // [chunk]: in how many
};

// Sums over the rows of each token, which the ranks of its experts form for the rank that has it. `Place`s are what peers
// read or raise, at the same place in every rank's segment.
struct CombinePlan {
    i64 n;
    i64 slots;
    i64 max_tokens;
    i64 chunk_tokens;
    i64 chunks;     // of a rank's tokens, at the most
    u64 computing;  // agents that make rows
    Place weights;  // [token][slot] of this rank's tokens
    u64* rows;      // [rank][token][slot]: as a signal, generation << 32 | row: which row is made of it here
    void* factors;  // [rank][token][slot]: the weight of that
    Place sums;     // [rank][token]: for the peers, lines
    i64 pitch;      // bytes from one to the next
    Place sent;     // [rank][token]: as signals: the rank has a sum for this one's token
    Place summed;   // [rank][chunk]: signals: the rank's sums for this one's tokens are there
    u64* computed;  // [compute agent]: signals: its rows are there, and what they are made of is known
    MirrorPlan mirror;
    NodeCombinePlan nodes;
};

// What does not change from call to call of moe_combine.
struct MoeCombinePlan {
    Split split;
    u64 digest;
    u64 experts;  // of this rank
    CombinePlan combine;
};

struct MoeCombineParams {
    Matrix rows;
    Matrix out;
    i64 row_count;
    i64 tokens;
    RowOrigins origins;
    World* world;
    MoeCombinePlan* plan;
    CallMessage message;
    u64 reserved[3];
};

// What does not change from call to call of moe_layer. The second product starts from `hidden`, and gives `made`.
struct MoeLayerPlan {
    Split split;
    u64 digest;
    u64 experts;  // of this rank
    i64 h;
    i64 inner;  // columns of `hidden`
    i64 n;
    TileShape tile;
    i64 part_rows;  // of a part of a tile, which is stored at once
    i64 part_columns;
    i64 capacity;  // rows of `hidden` and `made`
    i64* expert_offsets;  // what this rank gets in a call
    Matrix* hidden;
    Matrix* made;
    u64* finished;  // signals: the parts of tiles of `hidden`
    void* stash;    // [compute agent]: sums of a tile, until those that they are multiplied with are there
    RoutingPlan routing;
    TokenLandingPlan landing;
    NodeDispatchPlan nodes;
    CombinePlan combine;
};

struct MoeLayerParams {
    Matrix x;
    Matrix w1;  // of the first expert
    Matrix w2;
    Matrix out;
    i64 w1_stride;  // bytes from one expert's to the next
    i64 w2_stride;
    i64 tokens;
    TokenChoice choice;
    World* world;
    MoeLayerPlan* plan;
    CallMessage message;
    u64 reserved[3];
};

// --- end of the shared structs ---------------------------------------------------------------------------------------

}  // namespace mk
