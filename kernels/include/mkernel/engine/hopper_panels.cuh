// Panels of the operands of hopper.cuh: how they lie in shared memory, as matrix instructions read them, and how they come
// there, by tensor copies, or where rows of A lie apart by threads.
#pragma once

#include "../ptx.cuh"
#include "../sink.cuh"

#ifndef MK_CLUSTER
#define MK_CLUSTER 1
#endif

namespace mk {
namespace engine {

constexpr u32 cluster = MK_CLUSTER;  // blocks that share a tile
constexpr u32 copiers = 64;          // threads that copy rows which lie apart
constexpr u32 line_bytes = Strip<u8>::line_bytes;  // of shared memory, within which tensor copies swizzle

// Bytes of k that a matrix instruction takes.
constexpr u32 step_bytes = 32, steps = line_bytes / step_bytes;

// A panel in a stage: `extent` rows of A or columns of B, by a line of k, loaded by `parts` blocks of the cluster. Lines
// are along k, one for each of the extent; or, where k is not contiguous (of 16 bits only), across it: a box of 64
// lines, one for each of k, holds 64 of the extent, and box follows box. `own_box`: along k too, if it is not 0. Along k a
// box has no more lines than the matrix, as those beyond its edge take longer than others to load.
template <class T, u32 extent, bool across, u32 parts, u32 own_box = 0>
struct Panel {
    static constexpr u32 line = line_bytes / sizeof(T);
    static constexpr u32 bytes = extent * line_bytes;
    static constexpr u32 part = extent / parts;
    static constexpr u32 box = across ? line : own_box ? own_box : part;  // of the extent, that a tensor copy brings
    static constexpr u32 box_bytes = box * line_bytes;
    static constexpr u32 step = across ? step_bytes / sizeof(T) * line_bytes : step_bytes;  // to what is next of k
    static_assert(part % box == 0 && box <= 256, "a part is whole boxes");

    // Of the extent, as few boxes as have `wanted` of it. load(to, x, y) brings one.
    template <class Load>
    static MK_DEVICE void load(u8* to, u32 which, i64 first, i64 k, Load load, u32 wanted = extent) {
        MK_UNROLL
        for (u32 i = which * part; i < (which + 1) * part; i += box) {
            if (i >= wanted) break;
            load(to + i * line_bytes, i32(across ? first + i : k), i32(across ? k : first + i));
        }
    }
    // `lines`: of a box of the matrix.
    static MK_DEVICE u32 bytes_of(u32 wanted, u32 lines) {
        return (wanted + box - 1) / box * (across ? box_bytes : lines * line_bytes);
    }
    static MK_DEVICE u64 descriptor(const u8* from) {
        return ptx::operand_descriptor(ptx::shared_address(from), box_bytes);
    }
};

// The lines of a panel of A that are rows which lie apart, copied by a warp: four lanes have one, and copy 16 bytes each of
// either half of it. Each warp of copiers has every other panel.
template <class T, u32 extent>
class Gathered {
public:
    static constexpr u32 warps = copiers / 32;

    MK_DEVICE Gathered()
        : line_(threadIdx.x % 32 / sharers), at_(threadIdx.x % sharers * 16), swizzled_(at_ ^ line_ % 8 * 16) {}

    // From now on, those that are so many of a tile, from a byte of them on. Behind the last ones a lane copies the last one,
    // as all lanes copy as many: nobody reads what is there.
    MK_DEVICE void look_up(const u8* const* places, u32 count, i64 first) {
        count_ = ptx::uniform(ceil_div(count, together));
        MK_UNROLL
        for (u32 i = 0; i < own; ++i) {
            const u32 line = line_ + i * together;
            from_[i] = count > 0 ? places[line < count ? line : count - 1] + at_ + first : nullptr;
        }
    }

    // Copies the next of this warp's panels, of which `left` terms are left, and zeros behind them.
    MK_DEVICE void copy(u8* panel, i64 left) {
        const i64 rest = left * i64(sizeof(T)) - at_;
        if (left >= line_bytes / i64(sizeof(T)))  // of a known size, which takes fewer instructions
            each_piece(panel, [](u32 to, const u8* from, i64) { ptx::copy_async(to, from); });
        else
            each_piece(panel, [&](u32 to, const u8* from, i64 before) {
                const i64 some = rest - before;
                ptx::copy_async(to, from, some < 0 ? 0 : some < 16 ? u32(some) : 16);
            });
    }

private:
    static constexpr u32 half = line_bytes / 2, sharers = half / 16, together = 32 / sharers, own = extent / together;
    static constexpr u32 some = 4;  // own lines that are copied without a look at their count
    static_assert(together % 8 == 0, "all lines of a lane are swizzled alike");
    static_assert(own % some == 0, "or more than there are would be copied");

    template <class Copy>
    MK_DEVICE void each_piece(u8* panel, const Copy& copy) {
        // As tensor copies swizzle. Once for all lines: the next ones are at constants from there.
        const u32 lines = ptx::shared_address(panel) + line_ * line_bytes;
        const u32 to = ptx::opaque(lines + swizzled_), second = ptx::opaque(lines + (swizzled_ ^ half));
        MK_UNROLL
        for (u32 i = 0; i < own; ++i) {
            if (i % some == 0 && i >= count_) break;
            copy(to + i * together * line_bytes, from_[i], 0);
            copy(second + i * together * line_bytes, from_[i] + half, half);
            from_[i] += warps * line_bytes;
        }
    }

    u32 line_, at_, swizzled_;
    u32 count_ = 0;  // of own lines
    const u8* from_[own];
};

// How boxes of B come: of a matrix to all blocks of the cluster, of a stack from the one of the tile's source.
MK_DEVICE const Matrix& mapped_of(const Matrix& b) { return b; }
MK_DEVICE const Matrix& mapped_of(const MatrixStack& b) { return b.first; }
MK_DEVICE void load_factor(const Matrix&, const TensorMap* map, u32, void* to, u64* barrier, i32 x, i32 y) {
    if (cluster == 1) ptx::load_box(to, map, barrier, x, y);
    else ptx::load_box_to((1 << cluster) - 1, to, map, barrier, x, y);
}
MK_DEVICE void load_factor(const MatrixStack&, const TensorMap* map, u32 source, void* to, u64* barrier, i32 x, i32 y) {
    ptx::load_box(to, map, barrier, x, y, i32(source));
}

// Two columns that belong together are half a tile apart.
template <class Factor>
struct Sides {
    static constexpr u32 count = 1;
    static MK_DEVICE i64 apart(const Factor&) { return 0; }
};
template <>
struct Sides<PairedStack> {
    static constexpr u32 count = 2;
    static MK_DEVICE i64 apart(const PairedStack& b) { return b.apart; }
};

template <class From> constexpr bool lies_apart = false;
template <> constexpr bool lies_apart<ListedRows> = true;

// In shared memory: the next tile whose rows lie apart, for those who copy them.
template <bool gathers, u32 rows>
struct Found {};
template <u32 rows>
struct Found<true, rows> {
    u64 found, taken;  // barriers
    const u8* places[rows];
    Tile tile;
    bool more, here;  // there is one, and so are its rows
};

}  // namespace engine
}  // namespace mk
