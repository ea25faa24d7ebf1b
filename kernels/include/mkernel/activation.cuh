// What lies between the two products of a layer of experts.
#pragma once

#include "experts.cuh"

namespace mk {

// One of two values, whose types differ.
template <bool first, class A, class B>
MK_DEVICE auto either(const A& a, const B& b) {
    if constexpr (first) return a;
    else return b;
}

enum class Activation { none = 0, silu = 1, gelu = 2, swiglu = 3 };

MK_DEVICE float complementary_error(float a) { return erfcf(a); }
MK_DEVICE double complementary_error(double a) { return erfc(a); }

template <class Acc>
MK_DEVICE Acc silu(Acc a) { return quotient(a, Acc(1) + exponential(-a)); }

// Without the cancellation of 1 + erf for negative numbers.
template <class Acc>
MK_DEVICE Acc gelu(Acc a) { return Acc(0.5) * a * complementary_error(a * Acc(-0.70710678118654752440)); }

// Which parts of the tiles of the experts' rows are finished: a signal each. Parts start anew with every expert.
class FinishedParts {
public:
    MK_DEVICE FinishedParts(Launch& launch, const MoeLayerPlan& plan) : launch_(launch), plan_(plan) {}

    MK_DEVICE void finish(const Tile& part, Completed stored) const {
        launch_.raise<Scope::device>(&plan_.finished[index(part.source, part.rows.begin, part.columns.begin)], 1,
                                     stored);
    }

    // Waits for some columns of the rows of a tile. Mostly all columns are there when the first are asked for.
    MK_DEVICE bool wait(const Agent& who, const Tile& tile, Range columns) {
        if (tile.source == known_.expert && tile.rows.begin == known_.row) return launch_.live();
        const bool begins = columns.begin == 0 && who.lanes() > 1;
        const Parts all{*this, tile, {columns.begin, begins ? plan_.inner : columns.end}}, some{*this, tile, columns};
        const bool here = launch_.all_there(who, all.count(), 1, all);
        if (!here && !launch_.wait_all(who, some.count(), 1, some, [&](u64 i) {
                return Subject{Awaited::arrival, everyone, u64(some(i) - plan_.finished)};
            }))
            return false;
        if (here && begins) known_ = {tile.source, tile.rows.begin};
        return launch_.live();
    }

private:
    // Those that hold some columns of the rows of a tile.
    struct Parts {
        const FinishedParts& of;
        const Tile& tile;
        Range columns;

        MK_DEVICE u64 high() const { return u64(ceil_div(tile.rows.size(), of.plan_.part_rows)); }
        MK_DEVICE i64 first() const { return columns.begin / of.plan_.part_columns * of.plan_.part_columns; }
        MK_DEVICE u64 count() const { return high() * u64(ceil_div(columns.end - first(), of.plan_.part_columns)); }
        MK_DEVICE u64* operator()(u64 i) const {
            const i64 row = i64(i % high()), column = i64(i / high());
            return &of.plan_.finished[of.index(tile.source, tile.rows.begin + row * of.plan_.part_rows,
                                               first() + column * of.plan_.part_columns)];
        }
    };

    // No parts of two experts have one number: each expert starts one further than the rows before it say.
    MK_DEVICE u64 index(u64 expert, i64 row, i64 column) const {
        const i64 first = plan_.expert_offsets[expert], rows = plan_.expert_offsets[expert + 1] - first;
        const i64 before = first / plan_.part_rows + i64(expert);
        const i64 height = tile_height(u32(rows), u32(plan_.tile.rows), u32(plan_.tile.row_step));
        const i64 across = ceil_div(plan_.inner, plan_.part_columns);
        const i64 part = row / (height < plan_.part_rows ? height : plan_.part_rows);
        return u64((before + part) * across + column / plan_.part_columns);
    }

    Launch& launch_;
    const MoeLayerPlan& plan_;
    struct {
        u64 expert;
        i64 row;
    } known_ = {~u64(0), 0};  // rows that are there
};

// `gate`: of swiglu, which has two columns for each of the result.
template <Activation kind, class Acc>
MK_DEVICE Acc activate(Acc sum, Acc gate = 0) {
    return kind == Activation::silu     ? silu(sum)
           : kind == Activation::gelu   ? gelu(sum)
           : kind == Activation::swiglu ? silu(gate) * sum
                                        : sum;
}

// Stores what the activation makes of the first product.
template <class T, Activation kind>
class Activate : public Store<T> {
public:
    using Acc = Accumulator<T>;
    MK_DEVICE Activate(Store<T> store, const MoeLayerPlan& plan) : Store<T>(store), plan_(&plan) {}

    MK_DEVICE T transform(Acc sum) const { return narrow<T>(activate<kind>(sum)); }
    MK_DEVICE T transform(Acc gate, Acc sum) const { return narrow<T>(activate<kind>(sum, gate)); }

    MK_DEVICE void end(Launch& launch, const Tile& part, Completed stored) const {
        FinishedParts(launch, *plan_).finish(part, stored);
    }

protected:
    const MoeLayerPlan* plan_;
};

// The same for an engine that does not pair columns: a tile of the gate is kept until that of the other half follows it.
template <class T, Activation kind>
class ActivateInTurn : public Activate<T, kind> {
public:
    using Acc = Accumulator<T>;
    using Type = Acc;
    MK_DEVICE ActivateInTurn(const Activate<T, kind>& activate, u64 member)
        : Activate<T, kind>(activate),
          stash_(static_cast<Acc*>(this->plan_->stash) + i64(member) * this->plan_->tile.rows * this->plan_->tile.columns) {}

    MK_DEVICE Acc transform(Acc sum) const { return sum; }

    template <class View>
    MK_DEVICE Completed deliver(Launch& launch, const Tile& piece, View staged) const {
        const Agent& agent = launch.agent();
        const TileShape& tile = this->plan_->tile;
        const Tile result = result_of(piece);
        T* to = this->place_of(result);
        Acc* stash = stash_ + result.rows.begin % tile.rows * tile.columns + result.columns.begin % tile.columns;
        spread(agent, piece.rows.size(), piece.columns.size(), [&](i64 i, i64 j) {
            const Acc sum = *staged(i, j);
            Acc& gate = stash[i * tile.columns + j];
            if (is_gate(piece)) gate = sum;
            else to[i * this->to_->row_stride + j * this->to_->column_stride] = narrow<T>(activate<kind>(sum, gate));
        });
        return Writes().complete(agent);
    }

    MK_DEVICE void end(Launch& launch, const Tile& part, Completed stored) const {
        if (!is_gate(part)) Activate<T, kind>::end(launch, result_of(part), stored);
    }

private:
    MK_DEVICE bool is_gate(const Tile& piece) const { return piece.columns.begin < this->plan_->inner; }

    MK_DEVICE Tile result_of(const Tile& piece) const {
        const i64 shift = is_gate(piece) ? 0 : this->plan_->inner;
        return {piece.source, piece.rows, {piece.columns.begin - shift, piece.columns.end - shift}};
    }

    Acc* stash_;
};

}  // namespace mk
