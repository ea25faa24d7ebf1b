// What the portable engines have in common: panels of operands in shared memory, how threads bring them there, and how
// the threads of a warp multiply blocks of them.
#pragma once

#include "../ptx.cuh"
#include "../schedule.cuh"

namespace mk {
namespace engine {

constexpr u32 warp_size = 32;
constexpr u32 loaders = 4 * warp_size;  // the first threads of a block: they bring panels

// Shared memory is read and written in pieces of 16 bytes.
template <class T>
constexpr u32 piece = 16 / sizeof(T);

// How the pieces of a line are permuted: those that one access reads from different lines lie in different banks.
template <class T>
MK_DEVICE u32 permutation(u32 line) {
    return sizeof(T) == 8 ? line / 2 % 2 * 4 + (line ^ line / 4) % 2 * 2 : line / (sizeof(T) / 2) % 8;
}
template <>
MK_DEVICE u32 permutation<tfloat32>(u32 line) { return (line ^ line / 4) % 4 * 2; }

// One operand's part of a panel: `extent` rows of A or columns of B, by `depth` terms. Lines run along k or across it.
// Where an element lies is linear in the bits of its line and of its place in it. So a thread works out its own part
// once, and further() adds one that is known when compiled, with which it has no bit in common.
template <class Element, u32 extent, u32 depth, bool lines_along_k>
struct Panel {
    using T = Element;
    static constexpr bool along_k = lines_along_k;
    static constexpr u32 lines = along_k ? extent : depth, run = along_k ? depth : extent;
    static constexpr u32 line_bytes = run * sizeof(T), line_pieces = run / piece<T>;

    static MK_DEVICE u32 place(u32 line, u32 at) { return line * line_bytes + in_line(line, at); }
    // Panels are aligned to the longest line.
    static MK_DEVICE u32 further(u32 address, u32 line, u32 at) {
        return (address ^ in_line(line, at)) + line * line_bytes;
    }

    // The same, counted in the operand.
    static MK_DEVICE u32 place_of(u32 outer, u32 k) { return along_k ? place(outer, k) : place(k, outer); }
    static MK_DEVICE u32 further_of(u32 address, u32 outer, u32 k) {
        return along_k ? further(address, outer, k) : further(address, k, outer);
    }

private:
    static MK_DEVICE u32 in_line(u32 line, u32 at) {
        return (at / piece<T> ^ permutation<T>(line)) * 16 + at % piece<T> * sizeof(T);
    }
};

// Some lines of an operand, to be brought to a panel by the loaders, with zeros where the panel has more.
template <class Panel>
struct Fetch {
    using T = typename Panel::T;
    const T* from;
    i64 line_stride, run_stride;
    u32 lines, run;

    MK_DEVICE void start(u8* panel, bool in_pieces) const {
        if (!in_pieces) bring_elements(panel);
        else if (lines == Panel::lines && run == Panel::run) bring_pieces<true>(panel);
        else bring_pieces<false>(panel);
    }

private:
    // Each thread brings pieces that are as far apart in memory as in the panel.
    template <bool whole>
    MK_DEVICE void bring_pieces(u8* panel) const {
        constexpr u32 threads = Panel::line_pieces < loaders ? Panel::line_pieces : loaders;  // on a line
        constexpr u32 lines_at_once = loaders / threads;
        const u32 thread = own_thread(), own_line = thread / threads, own_at = thread % threads * piece<T>;
        const u32 own = Panel::place(own_line, own_at);
        const T* source = from + own_line * line_stride + own_at;
#pragma unroll(whole ? 16 : 2)
        for (u32 line = 0; line < Panel::lines; line += lines_at_once, source += lines_at_once * line_stride)
            MK_UNROLL
            for (u32 at = 0; at < Panel::run; at += threads * piece<T>) {
                u8* to = panel + Panel::further(own, line, at);
                if (whole) ptx::copy_async(to, source + at);
                else ptx::copy_async(to, source + at, count(own_line + line, own_at + at) * u32(sizeof(T)));
            }
    }

    // Whatever the strides are: through registers, two pieces at a time.
    MK_DEVICE void bring_elements(u8* panel) const {
        constexpr u32 pieces = Panel::lines * Panel::line_pieces / loaders, batch = 2;
        const u32 thread = own_thread();
#pragma unroll 1
        for (u32 first = thread; first < pieces * loaders; first += batch * loaders) {
            alignas(16) T elements[batch][piece<T>] = {};
            MK_UNROLL
            for (u32 i = 0; i < batch; ++i) {
                const u32 index = first + i * loaders;
                const u32 line = index / Panel::line_pieces, at = index % Panel::line_pieces * piece<T>;
                const u32 there = count(line, at);
                const T* source = from + line * line_stride + at * run_stride;
                MK_UNROLL
                for (u32 j = 0; j < piece<T>; ++j)
                    if (j < there) elements[i][j] = source[j * run_stride];
            }
            MK_UNROLL
            for (u32 i = 0; i < batch; ++i) {
                const u32 index = first + i * loaders;
                u8* to = panel + Panel::place(index / Panel::line_pieces, index % Panel::line_pieces * piece<T>);
                *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(elements[i]);
            }
        }
    }

    // How much of a piece there is.
    MK_DEVICE u32 count(u32 line, u32 at) const {
        return line >= lines || at >= run ? 0 : run - at < piece<T> ? run - at : piece<T>;
    }

    // Opaque: what is derived from it, here and for the other kinds of lines, is not to stay in registers meanwhile.
    static MK_DEVICE u32 own_thread() { return ptx::opaque(threadIdx.x); }
};

// The threads of a warp share a block of 16 x 16 sums, 8 each, and add to it `depth` products at a time. Each loads its
// share of the factors, whose place in a block it says: own_outer, own_k. Sums 2 i and 2 i + 1 are neighbours in a row.
template <class T>
struct Lane {  // bfloat16 and float16
    static constexpr u32 depth = 16, unroll = 7;
    struct Factor { u32 words[4]; };
    u32 lane;

    // Of four matrices of 8 x 8, a line.
    template <bool is_a, class Panel>
    MK_DEVICE u32 own_outer() const { return (is_a ? second() : last()) + (Panel::along_k ? lane % 8 : 0); }
    template <bool is_a, class Panel>
    MK_DEVICE u32 own_k() const { return (is_a ? last() : second()) + (Panel::along_k ? 0 : lane % 8); }

    template <bool is_a, class Panel>
    static MK_DEVICE Factor load(u32 own, u32 outer, u32 k) {
        Factor factor;
        ptx::load_matrices<!Panel::along_k>(factor.words, Panel::further_of(own, outer, k));
        return factor;
    }
    static MK_DEVICE void multiply_add(float (&sums)[8], const Factor& a, const Factor& b) {
        ptx::mma<T>(&sums[0], a.words, &b.words[0]);
        ptx::mma<T>(&sums[4], a.words, &b.words[2]);
    }
    MK_DEVICE u32 row_of(u32 sum) const { return lane / 4 + sum / 2 % 2 * 8; }
    MK_DEVICE u32 column_of(u32 sum) const { return lane % 4 * 2 + sum % 2 + sum / 4 * 8; }

private:
    MK_DEVICE u32 second() const { return lane / 8 % 2 * 8; }
    MK_DEVICE u32 last() const { return lane / 16 * 8; }
};

// Terms may come in any order: here a thread has neighbours, and loads them at once if they are in a line.
template <>
struct Lane<tfloat32> {
    static constexpr u32 depth = 8, unroll = 3;
    struct Factor { u32 words[4]; };  // a term of a row (or column) and of the one 8 further; then the next term
    u32 lane;

    template <bool is_a, class Panel>
    MK_DEVICE u32 own_outer() const { return lane / 4; }
    template <bool is_a, class Panel>
    MK_DEVICE u32 own_k() const { return lane % 4 * 2; }

    template <bool is_a, class Panel>
    static MK_DEVICE Factor load(u32 own, u32 outer, u32 k) {
        Factor factor;
        MK_UNROLL
        for (u32 i = 0; i < 2; ++i) {
            float2 terms;
            if (Panel::along_k) {
                ptx::load_shared(terms, Panel::further_of(own, outer + 8 * i, k));
            } else {
                ptx::load_shared(terms.x, Panel::further_of(own, outer + 8 * i, k));
                ptx::load_shared(terms.y, Panel::further_of(own, outer + 8 * i, k + 1));
            }
            factor.words[i] = bits_of(widen(tfloat32{terms.x}));
            factor.words[2 + i] = bits_of(widen(tfloat32{terms.y}));
        }
        return factor;
    }
    static MK_DEVICE void multiply_add(float (&sums)[8], const Factor& a, const Factor& b) {
        MK_UNROLL
        for (u32 i = 0; i < 2; ++i) {
            const u32 terms[2] = {b.words[i], b.words[2 + i]};
            ptx::mma<tfloat32>(&sums[4 * i], a.words, terms);
        }
    }
    MK_DEVICE u32 row_of(u32 sum) const { return Lane<bfloat16>{lane}.row_of(sum); }
    MK_DEVICE u32 column_of(u32 sum) const { return Lane<bfloat16>{lane}.column_of(sum); }
};

// Rows and columns, too, may come in any order: here a thread has neighbours of them.
template <>
struct Lane<double> {
    static constexpr u32 depth = 4, unroll = 1;
    struct Factor { double values[2]; };
    u32 lane;

    template <bool is_a, class Panel>
    MK_DEVICE u32 own_outer() const { return lane / 4 * 2; }
    template <bool is_a, class Panel>
    MK_DEVICE u32 own_k() const { return lane % 4; }

    template <bool is_a, class Panel>
    static MK_DEVICE Factor load(u32 own, u32 outer, u32 k) {
        double2 pair;
        if (Panel::along_k) {
            ptx::load_shared(pair.x, Panel::further_of(own, outer, k));
            ptx::load_shared(pair.y, Panel::further_of(own, outer + 1, k));
        } else {
            ptx::load_shared(pair, Panel::further_of(own, outer, k));
        }
        return {pair.x, pair.y};
    }
    static MK_DEVICE void multiply_add(double (&sums)[8], const Factor& a, const Factor& b) {
        MK_UNROLL
        for (u32 i = 0; i < 2; ++i) {
            double quad[4] = {sums[i], sums[2 + i], sums[4 + i], sums[6 + i]};
            ptx::mma(quad, a.values, b.values[i]);
            MK_UNROLL
            for (u32 j = 0; j < 4; ++j) sums[2 * j + i] = quad[j];
        }
    }
    MK_DEVICE u32 row_of(u32 sum) const { return lane / 4 * 2 + sum / 4; }
    MK_DEVICE u32 column_of(u32 sum) const { return lane % 4 * 4 + sum % 4; }
};

template <>
struct Lane<float> {
    static constexpr u32 depth = 2, unroll = 1;
    struct Factor { float values[4][2]; };  // of A [row][k], 4 rows; of B [column][k], 2 columns
    u32 lane;

    template <bool is_a, class Panel>
    MK_DEVICE u32 own_outer() const { return is_a ? lane / 8 * 4 : lane % 8 * 2; }
    template <bool is_a, class Panel>
    MK_DEVICE u32 own_k() const { return 0; }

    template <bool is_a, class Panel>
    static MK_DEVICE Factor load(u32 own, u32 outer, u32 k) {
        Factor factor;
        MK_UNROLL
        for (u32 i = 0; i < (Panel::along_k && is_a ? 4 : 2); ++i)
            if (is_a && !Panel::along_k) {
                float4 run;
                ptx::load_shared(run, Panel::further_of(own, outer, k + i));
                factor.values[0][i] = run.x, factor.values[1][i] = run.y;
                factor.values[2][i] = run.z, factor.values[3][i] = run.w;
            } else {
                float2 run;
                ptx::load_shared(run, Panel::along_k ? Panel::further_of(own, outer + i, k)
                                                     : Panel::further_of(own, outer, k + i));
                if (Panel::along_k) factor.values[i][0] = run.x, factor.values[i][1] = run.y;
                else factor.values[0][i] = run.x, factor.values[1][i] = run.y;
            }
        return factor;
    }
    static MK_DEVICE void multiply_add(float (&sums)[8], const Factor& a, const Factor& b) {
        MK_UNROLL
        for (u32 k = 0; k < depth; ++k)
            MK_UNROLL
            for (u32 i = 0; i < 8; ++i) sums[i] = fmaf(a.values[i / 2][k], b.values[i % 2][k], sums[i]);
    }
    MK_DEVICE u32 row_of(u32 sum) const { return lane / 8 * 4 + sum / 2; }
    MK_DEVICE u32 column_of(u32 sum) const { return lane % 8 * 2 + sum % 2; }
};

}  // namespace engine
}  // namespace mk
