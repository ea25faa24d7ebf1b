// Sources: where the factors of a tile lie. Sinks: what becomes of a finished one.
#pragma once

#include "roles.cuh"

namespace mk {

struct alignas(16) Word { u64 halves[2]; };

// Rows of a matrix from `first` on.
struct Rows {
    const Matrix& matrix;
    i64 first;
};

// Rows of which each lies where its place says, without gaps.
struct ListedRows {
    u8* const* places;
};

// Matrices of equal shape, `stride` bytes apart: a tile takes the one of its source.
struct MatrixStack {
    const Matrix& first;
    i64 stride;
};

// A stack in which each column belongs together with the one that is so many further.
struct PairedStack : MatrixStack {
    i64 apart;
};

MK_DEVICE const Matrix& factor_of(const Matrix& b, const Tile&) { return b; }
MK_DEVICE Matrix factor_of(const MatrixStack& b, const Tile& tile) {
    Matrix one = b.first;
    one.data = static_cast<u8*>(one.data) + i64(tile.source) * b.stride;
    return one;
}

// A finished tile, or a piece of one, as an engine stages it: lines `pitch` elements apart.
template <class T>
struct Staged {
    T* data;
    i64 pitch;

    MK_DEVICE T* operator()(i64 row, i64 column) const { return data + row * pitch + column; }

    // Whether 16 bytes of a line, from a multiple of 16 on, lie together and aligned.
    MK_DEVICE bool in_words() const {
        return (reinterpret_cast<u64>(data) | u64(pitch) * sizeof(T)) % sizeof(Word) == 0;
    }
};

// The same as a strip: 64 lines of 128 bytes, as tensor copies swizzle them: the 16 bytes that belong at place i of a line
// are at i ^ line % 8.
template <class T>
struct Strip {
    static constexpr u32 rows = 64, line_bytes = 128, bytes = rows * line_bytes;
    static constexpr u32 columns = line_bytes / sizeof(T);
    u8* lines;

    MK_DEVICE T* operator()(i64 row, i64 column) const {
        const u32 line = u32(row), at = u32(column) * u32(sizeof(T));
        return reinterpret_cast<T*>(lines + line * line_bytes + ((at / 16) ^ line % 8) * 16 + at % 16);
    }
    MK_DEVICE bool in_words() const { return true; }
};

// Whether a sink takes sums as the threads hold them that have multiplied, from an engine that can hand them over so: it
// says what it wants of the sink.
template <class Sink> constexpr bool takes_fragments = false;

// Whether a sink changes sums with peers, of those threads a few columns of a row at a time, before they are stored.
template <class Sink> constexpr bool exchanges_sums = false;

// What lies in fragments and is to be added to a part of a tile: `count` times as much, `apart` bytes from each other.
struct Addends {
    const u8* first;
    i64 apart;
    u32 count;
};

// visit(line, place) for all places of all lines; neighbouring lanes get neighbouring places.
template <class Visit>
MK_DEVICE void spread(const Agent& agent, i64 lines, i64 run, Visit visit) {
    const u32 count = u32(lines), length = u32(run);
    if (length == 0) return;
    const u32 lines_on = agent.lanes() / length, places_on = agent.lanes() % length;
    for (u32 line = agent.lane() / length, place = agent.lane() % length; line < count;) {
        visit(line, place);
        line += lines_on;
        place += places_on;
        if (place >= length) place -= length, ++line;
    }
}

// Stores the tile into a matrix whose rows are numbered over all ranks, or are those of one rank.
template <class T>
class Store {
public:
    using Type = T;
    MK_DEVICE Store(const Matrix& to, i64 rows, const i64* row_start = nullptr)
        : to_(&to), row_start_(row_start), rows_(rows) {}

    template <class Acc>
    MK_DEVICE T transform(Acc sum) const { return narrow<T>(sum); }

    // Where boxes of so many rows may be stored through a map; the last rows may be others than the tile's, so not always.
    MK_DEVICE const TensorMap* map(const Tile& tile, u32 box_rows) const {
        const bool whole = u32(tile.rows.size()) % box_rows == 0 || first_row(tile) + tile.rows.size() == rows_;
        return to_->box_lines && whole ? &to_->map : nullptr;
    }
    MK_DEVICE i64 first_row(const Tile& tile) const {
        return (row_start_ ? row_start_[tile.source] : 0) + tile.rows.begin;
    }

    MK_DEVICE bool begin(Launch&, const Tile&) const { return true; }

    template <class View>
    MK_DEVICE Completed deliver(Launch& launch, const Tile& tile, View staged) const {
        const Agent& agent = launch.agent();
        const i64 rows = tile.rows.size(), columns = tile.columns.size();
        T* to = place_of(tile);
        if (in_words(tile, staged))
            spread(agent, rows, columns / per_word, [&](i64 i, i64 j) {
                *reinterpret_cast<Word*>(to + i * to_->row_stride + j * per_word) =
                    *reinterpret_cast<const Word*>(staged(i, j * per_word));
            });
        else if (to_->row_stride == 1)
            spread(agent, columns, rows, [&](i64 j, i64 i) { to[i + j * to_->column_stride] = *staged(i, j); });
        else
            spread(agent, rows, columns,
                   [&](i64 i, i64 j) { to[i * to_->row_stride + j * to_->column_stride] = *staged(i, j); });
        return Writes().complete(agent);
    }

    // The same of a strip, by a warp that has registers for several loads under way.
    MK_DEVICE Completed deliver_strip(Launch& launch, const Tile& tile, Strip<T> staged) const {
        if (!in_words(tile, staged)) return deliver(launch, tile, staged);
        constexpr u32 words = Strip<T>::line_bytes / sizeof(Word), together = 32 / words, batch = 8;
        static_assert(together == 4, "lines that a warp has at once, by which swizzling alternates");
        const u32 lane = launch.agent().lane(), line = lane / words, word = lane % words;
        const u32 rows = i64(word) * per_word < tile.columns.size() ? u32(tile.rows.size()) : 0;  // that this lane stores of
        const u8* const from[] = {staged.lines + line * Strip<T>::line_bytes + (word ^ line) * sizeof(Word),
                                  staged.lines + line * Strip<T>::line_bytes + (word ^ line ^ together) * sizeof(Word)};
        T* to = place_of(tile) + i64(line) * to_->row_stride + word * per_word;
        const i64 apart = together * to_->row_stride;
        MK_UNROLL
        for (u32 first = 0; first < Strip<T>::rows / together; first += batch) {
            Word values[batch];
            MK_UNROLL
            for (u32 i = 0; i < batch; ++i)
                values[i] = *reinterpret_cast<const Word*>(from[i % 2] + (first + i) * together * Strip<T>::line_bytes);
            MK_UNROLL
            for (u32 i = 0; i < batch; ++i, to += apart)
                if (line + (first + i) * together < rows) *reinterpret_cast<Word*>(to) = values[i];
        }
        return Writes().complete(launch.agent());
    }

    MK_DEVICE void end(Launch&, const Tile&, Completed) const {}

    // Stores what lies in global memory: several loads of a lane are under way.
    template <class View>
    MK_DEVICE Completed bring(Launch& launch, const Tile& tile, View landed) const {
        if (!in_words(tile, landed)) return deliver(launch, tile, landed);
        const Agent& agent = launch.agent();
        constexpr u32 batch = 4;
        const u32 words = u32(tile.columns.size() / per_word), count = u32(tile.rows.size()) * words;
        T* to = place_of(tile);
        for (u32 first = agent.lane(); first < count; first += batch * agent.lanes()) {
            Word values[batch];
            auto each = [&](u32 i) { return first + i * agent.lanes(); };
            MK_UNROLL
            for (u32 i = 0; i < batch; ++i)
                if (const u32 at = each(i); at < count)
                    values[i] = *reinterpret_cast<const Word*>(landed(at / words, at % words * per_word));
            MK_UNROLL
            for (u32 i = 0; i < batch; ++i)
                if (const u32 at = each(i); at < count)
                    *reinterpret_cast<Word*>(to + at / words * to_->row_stride + at % words * per_word) = values[i];
        }
        return Writes().complete(agent);
    }

    // What did not come.
    MK_DEVICE void fill(const Agent& agent, const Tile& tile, T value) const {
        T* to = place_of(tile);
        spread(agent, tile.rows.size(), tile.columns.size(),
               [&](i64 i, i64 j) { to[i * to_->row_stride + j * to_->column_stride] = value; });
    }

protected:
    static constexpr i64 per_word = i64(sizeof(Word) / sizeof(T));

    // Whether a tile is whole words, where it is staged and where it goes.
    template <class View>
    MK_DEVICE bool in_words(const Tile& tile, const View& staged) const {
        const u64 shape = u64(to_->row_stride | tile.columns.size()) * sizeof(T);
        return to_->column_stride == 1 && (reinterpret_cast<u64>(place_of(tile)) | shape) % sizeof(Word) == 0 &&
               staged.in_words();
    }

    MK_DEVICE T* place_of(const Tile& tile) const {
        return static_cast<T*>(to_->data) + first_row(tile) * to_->row_stride + tile.columns.begin * to_->column_stride;
    }

    const Matrix* to_;

private:
    const i64* row_start_;
    i64 rows_;
};

}  // namespace mk
