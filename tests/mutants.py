"""Breaks one line of the kernels at a time: the suite must pass on the original, and fail on each.

python tests/mutants.py [name ...] runs all or some; exit code 1 if a mutant survives.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from mkernel_cp import compiler

TESTS = Path(__file__).parent
RUNS = 3  # of the tests until they notice: threads decide when a race shows
SHARED_OUT = ("-n", str(os.cpu_count()), "--dist", "worksteal")  # among processes
QUICK = ("test_interleavings.py", "test_failure.py", "test_allgather_gemm.py")
INTERLEAVINGS = ("test_interleavings.py",)


def interleavings(form: str) -> tuple[str, ...]:
    """Return the tests of one form of an operator, with lanes and splits of all kinds."""
    seeds = {(1, 0): 4000, (1, 1): 4000, (2, 2): 500, (3, 3): 500}
    test = "test_interleavings.py::test_every_interleaving_gives_the_right_result"
    return tuple(f"{test}[{form}-{lane}-split{i}-{n}]" for (lane, i), n in seeds.items())


STOPPED = ("test_interleavings.py::test_a_stopped_rank_ends_all_waits_at_a_deadline",)
LEFT = ("test_interleavings.py::test_words_that_a_failed_call_has_left_are_no_sums",)
FAILURES = ("test_failure.py",)
DIFFERENT_SUMS = ("test_failure.py::test_sums_that_differ_are_told_on_all_ranks",)
SUMS = ("test_reductions.py",)
OWN_ROWS = ("test_allgather_gemm.py::test_own_rows_are_gathered_too",)
GATHERED = (
    "test_allgather_gemm.py::test_equals_reference",
    *interleavings("allgather_gemm"),
    *interleavings("allgather_gemm, gathered"),
)
LOW_LATENCY = (
    *(
        "test_interleavings.py::test_every_interleaving_gives_the_right_result"
        f"[{operator}, low latency-1-split1-4000]"
        for operator in ("gemm_reduce_scatter", "gemm_allreduce")
    ),
    "test_reductions.py::test_sums_start_with_the_owner_and_go_around_the_ring",
    "test_interleavings.py::test_a_stopped_rank_ends_all_waits_at_a_deadline",
)
SANITIZED = ("test_thread_sanitizer.py",)
ATTENTION = ("test_ring_attention.py",)
EXPERTS = tuple(
    f"test_moe_dispatch_gemm.py::{name}"
    for name in (
        "test_every_interleaving_gives_the_right_result",
        "test_a_stopped_rank_ends_all_waits_at_a_deadline",
        "test_faults_of_data_are_told_on_all_ranks_and_nothing_is_written",
        "test_a_rank_that_never_calls_ends_in_the_deadline_and_leaves_nan",
    )
)
COMBINED = tuple(
    f"test_moe_combine.py::{name}"
    for name in (
        "test_sums_are_in_the_order_of_slots_and_then_of_ranks",
        "test_sums_cross_links_once_and_in_the_type_asked_for",
    )
)
COMBINED_IN_TURNS = tuple(
    f"test_moe_combine.py::{name}"
    for name in (
        "test_a_stopped_rank_ends_all_waits_at_a_deadline",
        "test_every_interleaving_gives_the_right_result",
    )
)
LAYOUTS = ("test_moe_combine.py::test_a_layout_of_another_dispatch_on_one_rank_is_told_on_all",)
TRACES = ("test_trace.py::test_sums_of_each_rank_for_each_are_spans",)
LAYER = tuple(
    f"test_moe_layer.py::{name}"
    for name in (
        "test_every_interleaving_gives_the_right_result",
        "test_a_stopped_rank_ends_all_waits_at_a_deadline",
    )
)
NETWORK = ("test_channel.py", "test_network.py")
NODE_RACES, EXPERT_RACES = (
    (f"{SANITIZED[0]}::test_ranks_as_threads_do_not_race[{program}_threads.py]",)
    for program in ("node", "expert")
)
NODES = ("test_interleavings.py::test_every_interleaving_between_nodes_gives_the_right_result",)
NODE_WINDOW, NODE_EXPERTS = (
    (f"{file}::test_every_interleaving_gives_the_right_result",)
    for file in ("test_node_window.py", "test_node_experts.py")
)
NODE_EXPERT_ORDER = (
    "test_node_experts.py::test_sums_are_in_the_order_of_ranks_in_a_node_and_then_of_nodes",
)
NODE_ORDER = ("test_nodes.py::test_sums_go_around_the_ring_of_a_node_and_then_from_node_to_node",)
EMULATED_GEMM = ("test_emulated_gemm.py",)
EMULATED_TURN = ("test_emulated_gemm.py::test_who_has_not_called_is_told_nothing",)
EMULATED_SUMS = ("test_emulated_gemm.py::test_sums_over_ranks",)
EMULATED_TOTALS = (
    f"{EMULATED_SUMS[0]}[gemm_allreduce-hopper-tails-70+33+5x100x45+70+9-float16-CC]",
)
EMULATED_WIDE = (
    "test_emulated_gemm.py::test_rows_of_all_ranks"
    "[hopper-wide-140+70x200x300+8-bfloat16-float32-CCp-False]",
)
EMULATED_PAIRS = ("test_emulated_gemm.py::test_sums_of_pairs_of_blocks",)
EMULATED_FEW_ROWS = ("test_emulated_gemm.py::test_few_rows_in_tiles_of_any_width",)
EMULATED_STRIPS = ("test_emulated_gemm.py::test_many_strips_pass_through_few_slots",)
EMULATED_COURIER = ("test_emulated_gemm.py::test_long_chunks_pass_through_few_slots",)
EMULATED_ATTENTION = ("test_emulated_attention.py",)
EMULATED_DISPATCH = ("test_emulated_experts.py::test_dispatch_equals_reference",)
EMULATED_GATHER = ("test_emulated_experts.py::test_rows_are_gathered",)
EMULATED_LAYER = ("test_emulated_experts.py::test_layer_equals_reference",)


# How a consumer of attention_hopper.cuh stores its finished rows.
DELIVERED = (
    "            stage(shared, kept, lines, log_sums, sink);\n"
    "            __syncwarp();\n"
    "            const QueryTile part = part_of(own.tile, warp_row, 16);\n"
    "            if (part.rows.size() > 0)\n"
    "                sink.deliver(Agent::warp(), own.unit, part, Rows{lines}, log_sums, "
    "shared.columns);\n"
    "            ptx::fence_shared_to_async();\n"
)
# What staging.cuh does with a slot that has arrived.
COPIED = (
    "        const Completed copied = copy(launch_.agent(), to, from, i64(parcel.lines), "
    "i64(parcel.line_bytes)).complete();\n        if (leads()) link.received = received + 1;\n"
)
RAISED = (
    "        if (parcel.last) "
    "launch_.template raise<Scope::device>(&network_.arrived[parcel.chunk], 1, copied);\n"
)
CREDITED = (
    "        post(link.rank, arrival(link.number_there) + slots, 0, sizeof(Parcel), sizeof(u64), "
    "copied);"
)


class Mutant(NamedTuple):
    """A text that occurs once in a file of the kernels, its replacement, and who must notice."""

    file: str
    old: str
    new: str
    tests: tuple[str, ...] = QUICK


H = "include/mkernel/"
OFFERED = (
    "launch.stand_by([&] {\n"
    "                const bool is_there = launch.sees(signal, 1);\n"
    "                if (!is_there) courier.go_on();\n"
    "                return is_there;\n"
    "            });\n"
    "            "
    "if (!launch.wait(launch.agent(), signal, 1, {Awaited::partial, peer, u64(number)}))"
)
WAIT_FOR_PARTIALS = (
    "if (!launch.wait(launch.agent(), partials.signal(rank, number), 1, partial)) return false;"
)
MUTANTS = {
    "gate wait": Mutant(
        H + "landing.cuh",
        "u64 here = launch_.there(who, all.count(), 1, all);",
        "u64 here = all.count();",
    ),
    "gate wait, sanitized": Mutant(
        H + "landing.cuh",
        "u64 here = launch_.there(who, all.count(), 1, all);",
        "u64 here = all.count();",
        SANITIZED,
    ),
    "call-message wait": Mutant(
        H + "world.cuh",
        "if (seen < goal) return Poll::pending;",
        "if (seen < goal) return Poll::done;",
    ),
    "call digest": Mutant(
        H + "world.cuh",
        "return i < 2 && u32(seen) != u32(digest >> 32 * i) ? Poll::mismatch : Poll::done;",
        "return Poll::done;",
        DIFFERENT_SUMS,
    ),
    "refusal": Mutant(
        H + "world.cuh",
        "if (seen >= target(u64(Called::refused))) return Poll::refused;\n",
        "",
        ("test_failure.py::test_a_rank_that_refuses_a_sum_alone_is_quoted_though_it_owns_no_rows",),
    ),
    "signals of an earlier call": Mutant(
        H + "signal.cuh",
        "here[i] = i < count && load_ahead(signal_of(i)) >= goal;",
        "here[i] = i < count && load_ahead(signal_of(i)) > 0;",
    ),
    "signals of an earlier call, of lanes": Mutant(
        H + "signal.cuh",
        "lane >= count || load_acquire(signal_of(lane)) >= goal",
        "lane >= count || load_acquire(signal_of(lane)) > 0",
    ),
    "chunks that nobody brings": Mutant(
        H + "landing.cuh",
        "panel = share.first + rest / height;",
        "panel = share.first;",
    ),
    "completion wait": Mutant(H + "copy.cuh", "transfer_.finish(agent_);", ""),
    "release": Mutant(
        H + "target_host.cuh", "__ATOMIC_RELEASE); }", "__ATOMIC_RELAXED); }", SANITIZED
    ),
    "acquire": Mutant(
        H + "target_host.cuh", "word, __ATOMIC_ACQUIRE)", "word, __ATOMIC_RELAXED)", SANITIZED
    ),
    "finish handshake": Mutant(
        H + "world.cuh",
        "if (!wait(agent().alone(), &world().inbox[peer].read, 1, read)) return;",
        "",
    ),
    "look at readers": Mutant(
        H + "world.cuh",
        "all_have_read = sees(&world().inbox[neighbour(i)].read, 1) && all_have_read;",
        "(void)i;",
    ),
    "all words of a call": Mutant(
        H + "world.cuh",
        "world().inbox[peer].message, halves,",
        "world().inbox[peer].message, 1,",
        SANITIZED,
    ),
    "last reader": Mutant(
        H + "world.cuh", "fetch_add(counter(1 + peer), 1) + 1 == readers", "readers > 0"
    ),
    "counter banks": Mutant(H + "world.cuh", "next[i] = 0;", "(void)i;"),
    "generation in signals": Mutant(
        H + "signal.cuh", "return generation() << 32 | progress;", "return u64(1) << 32 | progress;"
    ),
    "abort look": Mutant(
        H + "signal.cuh",
        "if (load_relaxed(&world_.pages[rank()]->abort)) return give_up();",
        "",
        DIFFERENT_SUMS,
    ),
    "abort of the others": Mutant(
        H + "signal.cuh",
        "if (load_relaxed(abort) == 0) store_release",
        "if (!abort) store_release",
        STOPPED,
    ),
    "closed look": Mutant(
        H + "signal.cuh",
        "if (alone)",
        "if (false)",
        ("test_failure.py::test_a_peer_that_has_closed_is_not_waited_for",),
    ),
    "behind which launch a peer has closed": Mutant(
        H + "signal.cuh",
        "->closed) - 1 < generation_",
        "->closed) != 0",
        ("test_interleavings.py::test_what_a_rank_has_sent_comes_when_it_has_closed",),
    ),
    "receipt of a peer that has closed": Mutant(
        H + "internode.cuh",
        "{Awaited::receipt, from, 0}",
        "{Awaited::receipt, everyone, 0}",
        (
            "test_interleavings.py::test_a_rank_that_closes_behind_a_broken_launch_is_not_waited_for",
        ),
    ),
    "deadline of the last to enter": Mutant(
        H + "signal.cuh",
        "const u64 last = last_of_all(subject.peer);",
        "const u64 last = subject.peer == everyone ? rank() : subject.peer;",
        (
            "test_interleavings.py"
            "::test_who_waits_for_a_rank_that_waits_for_the_call_of_another_gives_it_time",
        ),
    ),
    "deadline of who passes calls on": Mutant(
        H + "signal.cuh",
        "several_nodes && phase_of(world_.network->holders[last])",
        "several_nodes && Phase::entered",
        ("test_interleavings.py::test_who_passes_no_call_on_is_late_not_those_who_have_called",),
    ),
    "naps that get longer": Mutant(
        H + "host_runtime.cuh",
        "first_nap_ns << (doublings < most_doublings ? doublings : most_doublings)",
        "first_nap_ns",
        ("test_failure.py::test_who_waits_long_leaves_the_cores_to_others",),
    ),
    "deadline": Mutant(
        H + "signal.cuh", "if (limit && now - clock.since > limit)", "if (limit > now)"
    ),
    "lane barrier": Mutant(
        H + "target_host.cuh",
        "        run(agent);\n        agent.sync();",
        "        run(agent);",
        ("test_allgather_gemm.py::test_back_to_back_calls_with_late_ranks_and_roles",),
    ),
    "lane barrier, sanitized": Mutant(
        H + "target_host.cuh",
        "        run(agent);\n        agent.sync();",
        "        run(agent);",
        SANITIZED,
    ),
    "verdict broadcast": Mutant(
        H + "signal.cuh",
        "return check(i, seen); }, look);\n        live_ = !who.any(!live_);",
        "return check(i, seen); }, look);",
        interleavings("gemm_allreduce"),
    ),
    "NaN after a failure": Mutant(
        H + "engine/host.cuh",
        "arrived ? sink.transform(sums[i * pitch + j]) : not_a_number<Out>()",
        "sink.transform(sums[i * pitch + j])",
        STOPPED,
    ),
    "M tail": Mutant(
        H + "schedule.cuh",
        "block(first + rest % height, tiles_.tile_rows_, rows_)",
        "block(first + rest % height, tiles_.tile_rows_, rows_ + 1)",
    ),
    "N tail": Mutant(
        H + "schedule.cuh",
        "stretch(column_ + rest / height * width, width, tiles_.columns_)",
        "stretch(column_ + rest / height * width, width, tiles_.columns_ - 1)",
    ),
    "K tail": Mutant(
        H + "engine/host.cuh",
        "for (Range panel : Blocks(depth, shape.k))",
        "for (Range panel : Blocks(depth / shape.k * shape.k, shape.k))",
    ),
    "chunk tail": Mutant(
        H + "landing.cuh",
        "block(row, chunk_rows_, share.rows)",
        "block(row, chunk_rows_, share.rows - 1)",
    ),
    "source of another rank": Mutant(
        H + "schedule.cuh",
        "if (behind < 0) return {source_, rows, columns};",
        "if (behind < 0) return {u64(step_), rows, columns};",
    ),
    "halves of a tile": Mutant(
        H + "schedule.cuh",
        "behind % 2 ? Range{middle",
        "behind % 1 ? Range{middle",
        ("test_emulated_gemm.py::test_halved_tiles",),
    ),
    "a tile too far": Mutant(
        H + "schedule.cuh",
        "index_ += tiles_.agents_;",
        "index_ += tiles_.agents_ + 1;",
    ),
    "columns of another stripe": Mutant(
        H + "schedule.cuh", "stretch(column_ + rest", "stretch(rest", SUMS
    ),
    "order of sums": Mutant(
        H + "reduction.cuh",
        "const Partial* from = pushed;\n            MK_NO_UNROLL\n"
        "            for (u32 peer = 0; peer < peers; ++peer, from += to_next) {",
        "const Partial* from = pushed + i64(peers - 1) * to_next;\n"
        "            for (u32 peer = 0; peer < peers; ++peer, from -= to_next) {",
        ("test_reductions.py::test_sums_start_with_the_owner_and_go_around_the_ring",),
    ),
    "slot of another source": Mutant(
        H + "reduction.cuh",
        "around(launch.rank() - node.begin, back, node.size)",
        "around(adds - node.begin, node.size - (launch.rank() - node.begin), node.size)",
        SUMS,
    ),
    "wait for partial sums": Mutant(
        H + "reduction.cuh",
        WAIT_FOR_PARTIALS,
        "if ((void)partial, !launch.live()) return false;",
        interleavings("gemm_reduce_scatter"),
    ),
    "wait for what is offered": Mutant(
        H + "reduction.cuh",
        OFFERED,
        "if (!launch.live())",
        interleavings("gemm_reduce_scatter, pulled"),
    ),
    "offer of another rank": Mutant(
        H + "reduction.cuh",
        "{offered.slot(peer, number), bytes}",
        "{offered.slot(rank, number), bytes}",
        SUMS,
    ),
    "offers that are still read": Mutant(
        "gemm_reduce_scatter.cu",
        "plan.pulled ? self.readers() : 0",
        "0",
        interleavings("gemm_reduce_scatter, pulled"),
    ),
    "wait for partial sums, sanitized": Mutant(
        H + "reduction.cuh",
        WAIT_FOR_PARTIALS,
        "if ((void)partial, !launch.live()) return false;",
        SANITIZED,
    ),
    "push before the owner's call": Mutant(
        H + "reduction.cuh",
        "launch.await_call(launch.holder(part.source), plan_->digest);",
        "launch.live();",
        interleavings("gemm_reduce_scatter"),
    ),
    "push after a failure": Mutant(
        H + "reduction.cuh",
        "if (launch.live()) {\n            if (is_kept",
        "if (true) {\n            if (is_kept",
        FAILURES,
    ),
    "NaN in place of a sum": Mutant(
        H + "reduction.cuh",
        "if (!launch.live()) {\n            this->fill",
        "if (false) {\n            this->fill",
        STOPPED,
    ),
    "partial sums in the output's type": Mutant(
        "gemm_reduce_scatter.cu",
        "Push<SumType, PartialType>",
        "Push<SumType, Type>",
        ("test_reductions.py::test_small_integers_are_exact",),
    ),
    "own rows first": Mutant(
        "gemm_reduce_scatter.cu",
        "{1, size + 1}",
        "{0, size}",
        interleavings("gemm_reduce_scatter"),
    ),
    "greeting": Mutant(
        H + "world.cuh",
        "if (!await_call(peer, message.digest)) return false;",
        "",
        DIFFERENT_SUMS,
    ),
    "wait for sums": Mutant(
        H + "sums.cuh",
        "if (!launch_.wait(launch_.agent(), zone_.signal(launch_.rank(), number), 1, sum))",
        "if ((void)sum, !launch_.live())",
        interleavings("gemm_allreduce"),
    ),
    "sums: strips that are not loaded yet": Mutant(
        H + "sums.cuh",
        "ptx::wait(&slot.loaded, stored_++ / slots_ % 2);",
        "++stored_;",
        EMULATED_STRIPS,
    ),
    "sums: strips that are still read": Mutant(
        H + "sums.cuh",
        "        ptx::wait_stores_read<0>();  // the last one may have been of this slot\n",
        "",
        EMULATED_STRIPS,
    ),
    "sums: the last strips": Mutant(
        H + "sums.cuh", "while (stored_ < sent_) store_oldest();", "", EMULATED_STRIPS
    ),
    "sums: where strips are swizzled": Mutant(
        H + "sums.cuh", "(begin + pattern - 1) / pattern * pattern", "begin", EMULATED_STRIPS
    ),
    "hopper: bytes of a box with fewer rows": Mutant(
        H + "engine/hopper_panels.cuh",
        "(across ? box_bytes : lines * line_bytes)",
        "box_bytes",
        EMULATED_FEW_ROWS,
    ),
    "gathered: own rows before they land": Mutant(
        H + "landing.cuh",
        "(source == launch_.rank() && !takes_own(own))",
        "source == launch_.rank()",
        OWN_ROWS,
    ),
    "gathered: own rows where they lie": Mutant(
        H + "landing.cuh",
        "return gathered_ && own.data != plan_.rows[launch_.rank()].data;",
        "return false && own.data;",
        interleavings("allgather_gemm, gathered"),
    ),
    "gathered: all rows when those of one are here": Mutant(
        H + "landing.cuh", "if (gathered_) here_ = u32(", "here_ = u32(", GATHERED
    ),
    "gathered: rows of the first": Mutant(
        H + "landing.cuh",
        "end = gathered_ ? launch_.size() : source + 1;",
        "end = source + 1;",
        GATHERED,
    ),
    "gathered: own rows come from peers": Mutant(
        H + "landing.cuh",
        "if (source != launch_.rank()) pulled_ += ",
        "pulled_ += ",
        OWN_ROWS,
    ),
    "low latency: words of an earlier call": Mutant(
        H + "low_latency.cuh",
        "if (i < count) asked[i].forget(from + i * step);",
        "{}",
        LOW_LATENCY,
    ),
    "low latency: half a pair": Mutant(
        H + "low_latency.cuh",
        "if (!words_[i]) first = words + i;",
        "if (i % 2 == 0 && !words_[i]) first = words + i;",
        LOW_LATENCY,
    ),
    "low latency: data that look like nothing": Mutant(
        H + "low_latency.cuh",
        "~data ? ~data : u64(1) << 63",
        "~data",
        ("test_reductions.py::test_all_bits_of_a_sum_may_be_set",),
    ),
    "low latency: order of sums": Mutant(
        H + "low_latency.cuh",
        "partials(distance) + words<Partial>(place), count, sums);",
        "partials(launch.size() - distance) + words<Partial>(place), count, sums);",
        LOW_LATENCY,
    ),
    "low latency: NaN in place of another's sum": Mutant(
        H + "low_latency.cuh",
        "launch.live() ? widen(terms.values[c]) : not_a_number<Acc>();",
        "widen(terms.values[c]);",
        LEFT,
    ),
    "low latency: awaits whom it tells nothing": Mutant(
        H + "low_latency.cuh", "if (has_some(peer, part.rows) && ", "if (", LOW_LATENCY
    ),
    "low latency: awaits who has no rows": Mutant(
        H + "low_latency.cuh", "return start[0] < start[1] && ", "return ", LOW_LATENCY
    ),
    "low latency: awaits nobody": Mutant(
        H + "low_latency.cuh", "if (has_some(peer, part.rows) && ", "if (false && ", LOW_LATENCY
    ),
    "low latency: rows of others": Mutant(
        H + "low_latency.cuh",
        "if (kept.rows.end > plan_->kept_end) kept.rows.end = plan_->kept_end;",
        "",
        EMULATED_FEW_ROWS,
    ),
    "low latency: boxes that begin before the matrix": Mutant(
        H + "low_latency.cuh", "plan_->kept_begin <= tile.rows.begin && ", "", EMULATED_FEW_ROWS
    ),
    "low latency: a turn ahead of who begins": Mutant(
        H + "engine/hopper.cuh",
        "ptx::wait(&shared.awaited[consumer], awaited.parity);\n"
        "        awaited.advance();\n"
        "        if (has_failed(shared)) self.drop();",
        "if (has_failed(shared)) self.drop();",
        EMULATED_TURN,
    ),
    "hopper: a stage that is free while it is multiplied": Mutant(
        H + "engine/hopper.cuh",
        "            if (add) release(before(slot));",
        "            if (add) release(slot);",
        EMULATED_GEMM,
    ),
    "hopper: a ring that begins anew with each tile": Mutant(
        H + "engine/ring.cuh",
        "if (i != slot || count == 0) continue;",
        "if (count == 0) continue;",
        EMULATED_GEMM,
    ),
    "hopper: partial sums loaded too early": Mutant(
        H + "engine/hopper.cuh",
        "ptx::wait(&shared.used[slot], turn.parity ^ 1);\n"
        "                if (!ptx::elect()) continue;",
        "if (!ptx::elect()) continue;",
        EMULATED_STRIPS,
    ),
    "hopper: NaN in place of a total": Mutant(
        H + "engine/hopper.cuh",
        "if (failed) fill(to, not_a_number<Result>());",
        "if (false) fill(to, not_a_number<Result>());",
        ("test_emulated_gemm.py::test_what_does_not_arrive_leaves_nan",),
    ),
    "attention: first round of a unit": Mutant(
        H + "attention.cuh",
        "dealt(round) < before_ ? round + 1 : round",
        "dealt(round) < before_ ? round + 2 : round",
        ATTENTION,
    ),
    "attention: tiles dealt to two": Mutant(
        H + "attention.cuh",
        "round % 2 ? agents_ - 1 - agent_ : agent_",
        "round % 2 ? agents_ - 1 - agent_ / 2 : agent_",
        ATTENTION,
    ),
    "attention: gate wait": Mutant(
        H + "attention.cuh",
        "if (!launch_.wait(who, signal(here)",
        "if (!launch_.live() && !launch_.wait(who, signal(here)",
        ATTENTION,
    ),
    "attention: values come with their keys": Mutant(
        H + "attention.cuh",
        "signal_of(unit, run, first, part);",
        "signal_of(unit, run, first, Part::keys);",
        ATTENTION,
    ),
    "attention: slot freed too early": Mutant(
        H + "attention.cuh",
        "agents_, unit + 1,",
        "agents_, unit,",
        ATTENTION,
    ),
    "attention: slot freed by one for all": Mutant(
        H + "attention.cuh", "agents_, unit + 1,", "1, unit + 1,", ATTENTION
    ),
    "attention: unit left too early": Mutant(
        H + "attention.cuh", "u64(unit.index) + 1, Comp", "u64(unit.index) + 2, Comp", ATTENTION
    ),
    "attention: what the peers are told of": Mutant(
        "ring_attention.cu", "*p.shown = p.own;", "p.shown->keys = p.own.keys;", ATTENTION
    ),
    "attention: mask off by one": Mutant(
        H + "attention.cuh", "query - keys.position + 1;", "query - keys.position;", ATTENTION
    ),
    "attention: mask from local positions": Mutant(
        H + "attention.cuh", "run->position + rows.begin", "run->first + rows.begin", ATTENTION
    ),
    "attention: rescale of the sum": Mutant(
        H + "engine/attention_host.cuh", "    total *= kept;\n", "", ATTENTION
    ),
    "attention: rescale of the values": Mutant(
        H + "engine/attention_host.cuh", "sums[d] *= kept;", "(void)kept;", ATTENTION
    ),
    "attention: masked values": Mutant(
        H + "engine/attention_host.cuh",
        "panel_, 1, columns_, seen(i), keys_",
        "panel_, 1, columns_, some.size(), keys_",
        ATTENTION,
    ),
    "attention: NaN after a failure": Mutant(
        H + "engine/attention_host.cuh",
        "arrived ? sink.transform(sums_[i * columns_ + d] / total_[i]) : not_a_number<T>()",
        "sink.transform(sums_[i * columns_ + d] / total_[i])",
        ATTENTION,
    ),
    "attention: heads of a group": Mutant(
        H + "attention.cuh",
        "unit_.head * plan_.group + index % plan_.group",
        "unit_.head + index % plan_.group",
        ATTENTION,
    ),
    "experts: tokens for a rank without experts": Mutant(
        H + "experts.cuh",
        "if (experts_ == 0) return 0;",
        "",
        ("test_moe_dispatch_gemm.py::test_nothing_comes_to_ranks_without_experts",),
    ),
    "experts: first chunks not waited for": Mutant(
        H + "experts.cuh", "plan_.first_chunks < end ? plan_.first_chunks : end;", "0;", EXPERTS
    ),
    "experts: first chunks of the next agent": Mutant(
        H + "experts.cuh", "chunk -= plan_.first_chunks;", "", EXPERTS
    ),
    "experts: compute agents are no readers": Mutant(
        "moe_dispatch_gemm.cu",
        "plan.landing.first_chunks > 0 ? plan.split.compute : 0",
        "plan.landing.first_chunks > 0 ? 0 : 0",
        EXPERTS,
    ),
    "experts: tiles behind those looked at together": Mutant(
        H + "experts.cuh",
        "expert_ += ahead) {",
        "expert_ += ahead + 1) {",
        ("test_moe_dispatch_gemm.py::test_equals_reference",),
    ),
    "experts: gate wait": Mutant(
        H + "experts.cuh",
        "if (source != launch_.rank() && !await_tokens(",
        "if (!launch_.live() && !await_tokens(",
        EXPERTS,
    ),
    "experts: gate wait, sanitized": Mutant(
        H + "experts.cuh",
        "if (source != launch_.rank() && !await_tokens(",
        "if (!launch_.live() && !await_tokens(",
        EXPERT_RACES,
    ),
    "experts: chunks of all movers": Mutant(
        H + "experts.cuh", "movers = i64(launch_.readers());", "movers = 1;", EXPERTS
    ),
    "experts: tokens that rows may bring": Mutant(
        H + "experts.cuh", "delivery.landed + most))", "delivery.landed))", EXPERTS
    ),
    "experts: wait for the places of rows": Mutant(
        H + "experts.cuh",
        "if (!launch_.wait(who, &plan_.placed[unit]",
        "if (!launch_.live() && !launch_.wait(who, &plan_.placed[unit]",
        EXPERTS,
    ),
    "experts: wait for the others' counts": Mutant(
        H + "experts.cuh", "if (!await_others(1)) return;", "", EXPERTS
    ),
    "experts: wait for the others' lists": Mutant(
        H + "experts.cuh", "if (first) await_sorted();", "", EXPERTS
    ),
    "experts: call before the tables are there": Mutant(
        "moe_dispatch_gemm.cu",
        "    Routing(launch, plan.routing).sort(",
        "    if (launch.agent().index() == 0) launch.announce(p.message);\n"
        "    Routing(launch, plan.routing).sort(",
        EXPERTS,
    ),
    "experts: tables of peers that have not called": Mutant(
        H + "experts.cuh",
        "if (!launch_.await_call(peer, digest) || !shown_.await(peer, Crossing::heads)) return;",
        "(void)peer, (void)digest;",
        EXPERTS,
    ),
    "experts: parts that overlap": Mutant(
        H + "experts.cuh", "desk.next[expert] = before;", "desk.next[expert] = {0, 0};", EXPERTS
    ),
    "experts: counts of the first agents only": Mutant(
        H + "experts.cuh",
        "begin < members; begin += batch",
        "begin < batch; begin += batch",
        ("test_moe_dispatch_gemm.py::test_same_bits_over_repeats_and_splits",),
    ),
    "experts: rows that are sorted before": Mutant(
        H + "experts.cuh",
        "const i64 token = first + i / slots, place = ",
        "const i64 token = tokens.begin + i / slots, place = ",
        ("test_moe_dispatch_gemm.py::test_many_calls_of_one_plan_with_any_numbers_of_tokens",),
    ),
    "experts: bits of the rows before": Mutant(
        H + "experts.cuh",
        "desk.bits[i] = 0;",
        "desk.bits[i] &= first == tokens.begin ? 0 : ~0u;",
        ("test_moe_dispatch_gemm.py::test_many_calls_of_one_plan_with_any_numbers_of_tokens",),
    ),
    "experts: order of sources": Mutant(
        H + "experts.cuh",
        "plan_.deliveries[i].row = before(i)",
        "plan_.deliveries[i / ranks * ranks + ranks - 1 - i % ranks].row = before(i)",
        EXPERTS,
    ),
    "experts: tokens on top of each other": Mutant(
        H + "experts.cuh", "own->tokens - starts[first].tokens}", "0}", EXPERTS
    ),
    "experts: last token of a chunk": Mutant(
        H + "experts.cuh",
        "block(chunk, plan_.chunk_tokens, all)",
        "block(chunk, plan_.chunk_tokens, all - 1)",
        EXPERTS,
    ),
    "experts: too many rows at a peer": Mutant(
        H + "experts.cuh",
        "if (plan_.totals[rank] > plan_.capacity[rank])",
        "if (rank == launch_.rank() && plan_.totals[rank] > plan_.capacity[rank])",
        EXPERTS,
    ),
    "experts: faults of own data only": Mutant(
        H + "experts.cuh",
        "*table<RoutingSummary>(i, plan_.summary);",
        "*table<RoutingSummary>(launch_.rank(), plan_.summary);",
        EXPERTS,
    ),
    "experts: a layout of a refused call": Mutant(
        H + "experts.cuh", "expert_offsets[i] = 0;", "(void)i;", EXPERTS
    ),
    "experts: a fault that is not told": Mutant(
        H + "signal.cuh", "if (load_relaxed(&told.problem)) return;", "return;", EXPERTS
    ),
    "experts: inputs that are free too early": Mutant(
        "moe_dispatch_gemm.cu",
        "        if (routing.await() && !routing.refused()) {",
        "        const bool go = routing.await() && !routing.refused();\n"
        "        let_go(self);\n"
        "        if (go) {",
        EXPERTS,
    ),
    "combination: wait for the peers' sums": Mutant(
        H + "combine.cuh",
        "fine = fine && launch_.wait_all(",
        "fine = fine || launch_.wait_all(",
        COMBINED,
    ),
    "combination: wait for all rows": Mutant(
        H + "combine.cuh",
        "plan_.computing, 1, [&](u64 i)",
        "1, 1, [&](u64 i)",
        COMBINED_IN_TURNS,
    ),
    "combination: rows of an earlier call": Mutant(
        H + "combine.cuh",
        "const bool has = word[i] >= none,",
        "const bool has = word[i] > 0,",
        COMBINED,
    ),
    "combination: sums of an earlier call": Mutant(
        H + "combine.cuh",
        "return *sent_by(peer, owner, token) >= launch_.target(0);",
        "return *sent_by(peer, owner, token) > 0;",
        COMBINED,
    ),
    "combination: weights before the peer's call": Mutant(
        "moe_combine.cu",
        "if (!launch.await_call(peer, message.digest) || !shown.await(peer, Crossing::heads)) "
        "break;",
        "if (!launch.live() || peer > launch.size()) break;",
        COMBINED_IN_TURNS,
    ),
    "combination: spans of all sums": Mutant(
        H + "combine.cuh",
        "Traced::sum, Tile{peer, tokens,",
        "Traced::note, Tile{peer, tokens,",
        TRACES,
    ),
    "deadline: of a wait that goes on": Mutant(
        H + "signal.cuh",
        "clock.since = now_ns();  // it goes on",
        "",
        ("test_kernel.py::test_a_wait_that_goes_on_is_not_over[12-0.1]",),
    ),
    "combination: layouts of different dispatches": Mutant(
        "moe_combine.cu", "message.digest += *p.origins.dispatch;", "", LAYOUTS
    ),
    "experts: a layout that does not tell its call": Mutant(
        "moe_dispatch_gemm.cu", "*p.origins.dispatch = launch.generation();", "{}", LAYOUTS
    ),
    "combination: order of ranks": Mutant(
        H + "combine.cuh",
        "for (u64 peer = node.begin; peer < node.begin + node.size; ++peer) {",
        "for (u64 turn = 0; turn < node.size; ++turn) {\n"
        "            const u64 peer = (launch_.rank() + turn) % node.size;",
        COMBINED,
    ),
    "combination: sums in the rows' type": Mutant(
        "moe_combine.cu",
        "using PartialType = MK_TRANSFER_TYPE;",
        "using PartialType = MK_TYPE;",
        COMBINED,
    ),
    "combination: NaN after a failure": Mutant(
        H + "combine.cuh",
        "fine ? narrow<T>(total[i]) : not_a_number<T>()",
        "narrow<T>(total[i])",
        COMBINED_IN_TURNS,
    ),
    "combination: readers of the sums": Mutant(
        "moe_combine.cu",
        "launch.have_read(launch.neighbour(i), launch.agent().count());",
        "launch.have_read(launch.neighbour(i), 1);",
        COMBINED_IN_TURNS,
    ),
    "layer: wait for what is between the products": Mutant(
        H + "activation.cuh",
        "const bool here = launch_.all_there(who, all.count(), 1, all);",
        "const bool here = true;",
        LAYER,
    ),
    "layer: wait for what is between the products, sanitized": Mutant(
        H + "activation.cuh",
        "const bool here = launch_.all_there(who, all.count(), 1, all);",
        "const bool here = true;",
        EXPERT_RACES,
    ),
    "layer: parts of an earlier call": Mutant(
        H + "signal.cuh",
        "all = load_acquire(signal_of(i)) >= goal && all;",
        "all = load_acquire(signal_of(i)) > 0 && all;",
        LAYER,
    ),
    "layer: parts of two experts with one signal": Mutant(
        H + "activation.cuh", "/ plan_.part_rows + i64(expert);", "/ plan_.part_rows;", LAYER
    ),
    "layer: gate and other half": Mutant(
        H + "activation.cuh", "? silu(gate) * sum", "? silu(sum) * gate", LAYER
    ),
    "layer: other half of a pair": Mutant(
        H + "experts.cuh", "second_ ? tiles_.columns_ : 0;", "0;", LAYER
    ),
    "layer: inputs that are free too early": Mutant(
        "moe_layer.cu",
        "launch.have_read(launch.neighbour(i), launch.agent().count());",
        "launch.have_read(launch.neighbour(i), 1);",
        LAYER,
    ),
    "combination: packs that do not fit": Mutant(
        H + "combine.cuh", "&& places % 16 == 0;", ";", COMBINED
    ),
    "courier: lines of a list": Mutant(
        H + "courier.cuh", "next * from.pitch", "i * from.pitch", EMULATED_GATHER
    ),
    "portable: rows of a list": Mutant(
        H + "engine/portable.cuh", "operand.places[line]", "operand.places[0]", EMULATED_DISPATCH
    ),
    "gathered rows: place of 16 bytes": Mutant(
        H + "engine/hopper_panels.cuh", "(at_ ^ line_ % 8 * 16)", "(at_)", EMULATED_GATHER
    ),
    "experts in step: said more than once": Mutant(
        H + "engine/hopper.cuh", "at == nearly", "at >= nearly", EMULATED_GATHER
    ),
    "experts in step: steps of an earlier call": Mutant(
        H + "world.cuh", "i < counters(); ++i", "i < steps(); ++i", EMULATED_GATHER
    ),
    "gathered rows: terms behind the last": Mutant(
        H + "engine/hopper_panels.cuh",
        "some < 0 ? 0 : some < 16 ? u32(some) : 16",
        "16",
        EMULATED_GATHER,
    ),
    "gathered rows: rows of the tile before": Mutant(
        H + "engine/hopper.cuh",
        "lines.look_up(shared.next.places,",
        "if (tiles.parity == 0) lines.look_up(shared.next.places,",
        EMULATED_GATHER,
    ),
    "gathered rows: next ones found before these are taken": Mutant(
        H + "engine/hopper.cuh",
        "ptx::wait(&next.taken, turn_.parity ^ 1);",
        "",
        EMULATED_GATHER,
    ),
    "gathered rows: taken before they are found": Mutant(
        H + "engine/hopper.cuh",
        "ptx::wait(&shared.next.found, tiles.parity);",
        "",
        EMULATED_GATHER,
    ),
    "gathered rows: wait for a free stage": Mutant(
        H + "engine/hopper.cuh",
        "                ptx::wait(&shared.used[slot], turn.parity ^ 1);\n"
        "                if (ptx::elect()) {\n"
        "                    ptx::arrive_expect(loaded, here",
        "                if (ptx::elect()) {\n                    ptx::arrive_expect(loaded, here",
        EMULATED_GATHER,
    ),
    "gathered rows: wait for copies": Mutant(
        H + "engine/hopper.cuh",
        "ptx::arrive_when_copied(loaded);",
        "ptx::arrive(loaded);",
        EMULATED_GATHER,
    ),
    "gathered rows: fence behind copies": Mutant(
        H + "engine/hopper.cuh",
        "        if (gathers) ptx::fence_shared_to_async();\n",
        "",
        EMULATED_GATHER,
    ),
    "gathered rows: fewer than the tile has": Mutant(
        H + "engine/hopper.cuh",
        "if (height > some)",
        "if (height > some + row_step)",
        EMULATED_GATHER,
    ),
    "gathered rows: strips of a column further": Mutant(
        H + "engine/hopper.cuh",
        "(column / 8 + lane / 8 % 2) ^ lane % 8",
        "(column / 8 + lane / 16) ^ lane % 8",
        EMULATED_GATHER,
    ),
    "gathered rows: boxes behind the last": Mutant(
        H + "engine/hopper_panels.cuh",
        "if (i >= wanted) break;",
        "if (i + box >= wanted && i > 0) break;",
        EMULATED_GATHER,
    ),
    "layer: parts of tiles of one height": Mutant(
        H + "activation.cuh",
        "(height < plan_.part_rows ? height : plan_.part_rows)",
        "plan_.part_rows",
        ("test_moe_layer.py::test_every_interleaving_of_tiles_of_fewer_rows",),
    ),
    "gathered rows: weights of the first expert": Mutant(
        H + "engine/hopper_panels.cuh", "x, y, i32(source));", "x, y, 0);", EMULATED_GATHER
    ),
    "gathered rows: the same terms again": Mutant(
        H + "engine/hopper_panels.cuh",
        "from_[i] += warps * line_bytes;",
        "from_[i] += line_bytes;",
        EMULATED_GATHER,
    ),
    "gathered rows: both copiers begin with the first terms": Mutant(
        H + "engine/hopper.cuh", "mine ? 0 : line_bytes", "0", EMULATED_GATHER
    ),
    "gathered rows: lines that are not copied": Mutant(
        H + "engine/hopper_panels.cuh",
        "if (i % some == 0 && i >= count_) break;",
        "if (i % some == 0 && i + some >= count_ && i > 0) break;",
        EMULATED_GATHER,
    ),
    "strips: every second line as the one before": Mutant(
        H + "sink.cuh", "(word ^ line ^ together)", "(word ^ line)", EMULATED_GATHER
    ),
    "strips: a box over the next rank's rows": Mutant(
        H + "sink.cuh",
        "return to_->box_lines && whole ?",
        "return to_->box_lines ?",
        EMULATED_GEMM,
    ),
    "layer: gates of the same column": Mutant(
        H + "engine/hopper_panels.cuh", "return b.apart;", "return 0;", EMULATED_LAYER
    ),
    "layer: sums that are their own gates": Mutant(
        H + "engine/hopper.cuh", "&sums[sides == 2 ? 1 : block]", "&sums[block]", EMULATED_LAYER
    ),
    "queue: room": Mutant(
        H + "channel.cuh",
        "if (!await_slot(launch, queue, ticket)) return false;",
        "",
        ("test_channel.py",),
    ),
    "queue: commands in whole": Mutant(
        H + "channel.cuh",
        "store_release<Scope::system>(&slot.number, ticket);",
        "store_relaxed(&slot.number, ticket);",
        NODE_RACES,
    ),
    "network: counted": Mutant(
        "native/network.cpp",
        "if (++came_[chunk] < writes_[chunk]) return;",
        "if (++came_[chunk] > 1) return;",
        NETWORK,
    ),
    "network: immediate before the data": Mutant(
        "native/network.cpp",
        "ibv_sge pieces[batch];\n        for (u64 i = 0; i < count; ++i) {\n"
        "            const u64 line = order.posted + i;",
        "ibv_sge pieces[batch];\n        for (u64 i = 0; i < count; ++i) {\n"
        "            const u64 line = order.lines - order.posted - i;",
        NETWORK,
    ),
    "network: sent when posted": Mutant(
        "native/network.cpp",
        "if (--flight(number).left == 0) publish();",
        "flight(number).left = 0, publish();",
        NETWORK,
    ),
    "network: what is given back": Mutant(
        "native/network.cpp",
        "if (doubt_.since && now() - doubt_.since > patience_ns)",
        "if (false)",
        NETWORK,
    ),
    "network: routed within a subnet": Mutant(
        "native/cards.h",
        "theirs.lid == 0 || !same_subnet;",
        "true;",
        ("test_network.py::test_packets_go_by_numbers_of_ports_on_infiniband_alone",),
    ),
    "network: any address": Mutant("native/cards.h", "if (worth > best)", "if (best < 0)", NETWORK),
    "network: generation of letters": Mutant(
        "native/network.cpp",
        "generation = shared_.letters[bits % 2 * shared_.size + place].generation;",
        "",
        NETWORK,
    ),
    "staging: a slot before it was sent": Mutant(
        H + "staging.cuh", "if (!proxy_.flush(leads() ? *read_by : 0)) return false;", "", NODES
    ),
    "staging: a slot that is not free yet": Mutant(
        H + "staging.cuh", "await_credits(number, sent - slots + 1)", "true", NODES
    ),
    "staging: the signal before the copy": Mutant(
        H + "staging.cuh",
        COPIED + RAISED,
        RAISED.replace("copied", "Completed()") + COPIED,
        NODES,
    ),
    "staging: a credit before the copy": Mutant(
        H + "staging.cuh",
        COPIED + RAISED + CREDITED,
        CREDITED.replace("copied", "Completed()") + COPIED + RAISED,
        NODES,
    ),
    "staging: those that stage are to sort": Mutant(
        H + "experts.cuh",
        "launch_.wait_all(launch_.workers(), progress,",
        "launch_.wait_all(launch_.agent().count(), progress,",
        NODE_EXPERTS,
    ),
    "staging: those that stage are to add up": Mutant(
        H + "combine.cuh",
        "tokens; chunk += i64(launch_.workers())) {",
        "tokens; chunk += launch_.agent().count()) {",
        ("test_staging.py::test_cards_write_tokens_and_sums_as_the_plan_says",),
    ),
    "nodes: rows before the call": Mutant(
        H + "internode.cuh",
        "if (launch_.await_call(gateway, message.digest)) send_rows",
        "send_rows",
        NODES,
    ),
    "nodes: gate of the network": Mutant(
        H + "internode.cuh",
        "if (!launch_.wait(launch_.agent(), arrived, 1, {Awaited::network, source, "
        "u64(chunk.index)})) return false;",
        "(void)arrived;",
        NODES,
    ),
    "nodes: chunks that the gateway has": Mutant(
        H + "internode.cuh",
        "return launch_.wait(launch_.agent(), relayed(launch_.rank(), chunk), 1, arrival);",
        "return (void)arrival, true;",
        NODES,
    ),
    "nodes: receipt": Mutant(
        H + "internode.cuh",
        "return launch_.wait(launch_.agent(), &network_.arrived[launch_.size() + from], 1, "
        "receipt);",
        "return (void)receipt, (void)from, true;",
        NODES,
    ),
    "nodes: half of the letters": Mutant(
        H + "internode.cuh",
        "launch_.generation() % 2 * launch_.size() + rank;",
        "rank;",
        NODES,
    ),
    "node sums: order of nodes": Mutant(
        H + "reduction.cuh", "own = u32(network.node);", "own = 0;", NODE_ORDER
    ),
    "node sums: sent before all of the node is added": Mutant(
        H + "node_sums.cuh", "if (!pushed_.await(launch_, part)) return;", "", NODES
    ),
    "node sums: sent before the gateway's own is there": Mutant(
        H + "node_sums.cuh",
        "if (!launch_.wait(launch_.agent(), products.signal(rank, number), 1, product)) return;",
        "(void)product;",
        NODES,
    ),
    "node sums: sent before the owner's call": Mutant(
        H + "node_sums.cuh",
        "if (!launch_.await_call(part.source, plan_.digest)) return;",
        "",
        NODES,
    ),
    "node sums: wait for other nodes": Mutant(
        H + "reduction.cuh",
        "if (!launch.wait(launch.agent(), &network.arrived[2 * launch.size() + chunk], 1, sum)) "
        "return false;",
        "(void)sum;",
        NODES,
    ),
    "node sums: place of another node": Mutant(
        H + "node_sums.cuh", "network->node - (before ? 1 : 0);", "network->node;", NODES
    ),
    "node sums: totals sent before they are there": Mutant(
        H + "node_sums.cuh",
        "if (!launch_.wait(launch_.agent(), totals.signal(rank, number), 1, sum)) return;",
        "(void)sum;",
        NODES,
    ),
    "node sums: totals passed on before they are there": Mutant(
        H + "node_sums.cuh",
        "if (!launch_.wait(launch_.agent(), arrived, 1, {Awaited::network, part.source, chunk})) "
        "return;",
        "(void)arrived;",
        NODES,
    ),
    "node sums: overwritten while they are sent": Mutant(
        H + "node_sums.cuh",
        "bytes_of<Partial>(part), added);\n        }\n        mail_.channel().flush();",
        "bytes_of<Partial>(part), added);\n        }",
        NODES,
    ),
    "node window: sent before the call": Mutant(
        H + "node_window.cuh",
        "for (u64 i = 0; i < network_.gateway_count; ++i) "
        "launch_.await_call(network_.gateways[i], message.digest);",
        "",
        NODE_WINDOW,
    ),
    "node window: sent before there is room": Mutant(
        H + "node_window.cuh",
        "launch_.wait(launch_.agent(), signal, 1, {Awaited::credit, network_.gateways[other], "
        "before});",
        "(void)signal;",
        NODE_WINDOW,
    ),
    "node window: room while this rank reads": Mutant(
        H + "node_window.cuh", "window_.await_left(unit);", "", NODE_WINDOW
    ),
    "node window: room while node peers read": Mutant(
        H + "node_window.cuh",
        "launch_.wait(launch_.agent(), freed(launch_.rank(), peer), unit + 1, {Awaited::credit, "
        "peer, unit});",
        "(void)peer;",
        NODE_WINDOW,
    ),
    "node window: gate of the network": Mutant(
        H + "node_window.cuh",
        "if (!launch_.wait(launch_.agent(), arrived, 1, {Awaited::network, run.source, index})) "
        "return false;",
        "(void)arrived;",
        NODE_WINDOW,
    ),
    "node window: chunks that the gateway has": Mutant(
        H + "node_window.cuh",
        "if (!launch_.wait(launch_.agent(), heard(launch_.rank(), index), 1, {Awaited::network, "
        "run.source, index}))\n            return {nullptr, 0};",
        "",
        NODE_WINDOW,
    ),
    "node experts: sent before the call": Mutant(
        H + "node_experts.cuh",
        "if (launch_.await_call(network_.gateways[i], message.digest))\n                "
        "mirrors_.send(i, Crossing::heads, routing_.summary,",
        "mirrors_.send(i, Crossing::heads, routing_.summary,",
        NODE_EXPERTS,
    ),
    "node experts: listed before they are sorted": Mutant(
        H + "node_experts.cuh",
        "if (routing.await_sorted())",
        "",
        NODE_EXPERTS,
    ),
    "node experts: agreed by what has not come": Mutant(
        H + "experts.cuh",
        "|| !shown_.await(peer, Crossing::heads)) return;",
        ") return;",
        NODE_EXPERTS,
    ),
    "node experts: lists that have not come": Mutant(
        H + "experts.cuh", "|| !shown_.await(source, Crossing::list)", "", NODE_EXPERTS
    ),
    "node experts: tokens that the gateway has not": Mutant(
        H + "experts.cuh",
        "if (several_nodes && !shown_.in_node(source) && !await_at_gateway(source, list, "
        "landing.size())) return false;",
        "",
        NODE_EXPERTS,
    ),
    "node experts: gate of the network": Mutant(
        H + "node_experts.cuh",
        "if (!launch_.wait(launch_.agent(), arrived, 1, {Awaited::network, source, number})) "
        "return;",
        "(void)arrived;",
        NODE_EXPERTS,
    ),
    "node experts: a token that two ranks want": Mutant(
        H + "node_experts.cuh",
        "if (id >= plan_.first_expert[node] && id < least) least = id;",
        "if (id >= plan_.first_expert[node]) least = id;",
        NODE_EXPERTS,
    ),
    "node experts: weights that have not come": Mutant(
        "moe_combine.cu", "|| !shown.await(peer, Crossing::heads)) break;", ") break;", NODE_EXPERTS
    ),
    "node experts: sums that peers have not formed": Mutant(
        H + "combine.cuh",
        "[&](u64 i) { return &summed_at(launch_.rank(), source, launch_.neighbour(1 + i))[chunk]; "
        "},",
        "[&](u64) { return plan_.computed; },",
        NODE_EXPERTS,
    ),
    "node experts: sums that other nodes have not sent": Mutant(
        H + "combine.cuh",
        "if (several_nodes) fine = fine && await_other_nodes(chunk);",
        "",
        NODE_EXPERTS,
    ),
    "node experts: order of nodes": Mutant(
        H + "combine.cuh",
        "for (u64 node = 0; node <= network.gateway_count; ++node) {",
        "for (u64 node = network.gateway_count; node < ~u64(0); --node) {",
        NODE_EXPERT_ORDER,
    ),
    "attention on GPUs: wait for a panel": Mutant(
        H + "engine/attention_portable.cuh",
        "wait_copies<stages - 2>",
        "wait_copies<stages>",
        EMULATED_ATTENTION,
    ),
    "attention on GPUs: barrier between panels": Mutant(
        H + "engine/attention_portable.cuh",
        "__syncthreads();\n        bring(shared, number + stages - 1);",
        "bring(shared, number + stages - 1);",
        EMULATED_ATTENTION,
    ),
    "attention on GPUs: mask": Mutant(
        H + "engine/attention_portable.cuh",
        "lane.column_of(k)) >= end)",
        "lane.column_of(k)) > end)",
        EMULATED_ATTENTION,
    ),
    "attention on GPUs: rescale of the values": Mutant(
        H + "engine/attention_portable.cuh",
        "kept.sums[i][j][k] *= part;",
        "(void)part;",
        EMULATED_ATTENTION,
    ),
    "attention on GPUs: sum of the weights of all lanes": Mutant(
        H + "engine/attention_portable.cuh",
        "total += __shfl_xor_sync(~0u, total, far);",
        "total += total;",
        EMULATED_ATTENTION,
    ),
    "attention on GPUs: masked values": Mutant(
        H + "engine/attention_portable.cuh",
        "if (all_see < lines &&",
        "if (all_see > lines &&",
        (
            f"{EMULATED_ATTENTION[0]}::test_masked_nan_does_not_leak_and_what_is_seen_acts_as_in_numpy",
        ),
    ),
    "attention on GPUs: NaN after a failure": Mutant(
        H + "engine/attention_portable.cuh",
        "failed ? not_a_number<T>() : sink",
        "failed ? T() : sink",
        (f"{EMULATED_ATTENTION[0]}::test_what_does_not_arrive_leaves_nan",),
    ),
}

# Of the engines for GPUs.
for name, (file, old, new, *watching) in {
    "hopper: stage loaded too early": (
        "hopper.cuh",
        "ptx::wait(&shared.used[slot], turn.parity ^ 1);\n                    if (ptx::elect()) {\n"
        "                        ptx::arrive_expect(loaded, A::",
        "if (ptx::elect()) {\n                        ptx::arrive_expect(loaded, A::",
    ),
    "hopper: stage given back too early": (
        "hopper.cuh",
        "ptx::multiply_wait<1>();  // the panel",
        "// the panel",
    ),
    "hopper: strip overwritten": (
        "hopper.cuh",
        "ptx::wait(&shared.stored[consumer][strip.slot], strip.parity ^ 1);",
        "",
        *EMULATED_WIDE,
    ),
    "hopper: strip given back too early": (
        "hopper.cuh",
        "wait_stores<false>(--unread);",
        "--unread;",
        *EMULATED_WIDE,
    ),
    "hopper: strips that are given back too late": (
        "hopper.cuh",
        "(i == 0 ? 0 : strips - 1)",
        "(i == 0 ? 0 : strips)",
        *EMULATED_STRIPS,
    ),
    "hopper: part signalled before it is there": (
        "hopper.cuh",
        "wait_stores<true>(behind);  // each",
        "// each",
        *EMULATED_SUMS,
    ),
    "hopper: partial sums read before they are there": (
        "hopper.cuh",
        "ptx::wait(&shared.awaited[consumer], awaited[consumer].parity);",
        "",
        *EMULATED_SUMS,
    ),
    "hopper: partial sums of another": (
        "hopper.cuh",
        "from.first + peer * from.apart",
        "from.first",
        *EMULATED_SUMS,
    ),
    "hopper: partial sums added too early": (
        "hopper.cuh",
        "ptx::wait(&shared.loaded[turn.slot], turn.parity);\n                const Some* from",
        "const Some* from",
        *EMULATED_SUMS,
    ),
    "hopper: partial sums pass by who has no rows": (
        "hopper.cuh",
        "passing += own ? peers * times<typename Sink::Partial> : 0;",
        "",
    ),
    "hopper: no partial sums for a block without rows": (
        "hopper.cuh",
        "const u32 peers = shared.sink.addends(launch);",
        "const u32 peers = wanting > 0 ? shared.sink.addends(launch) : 0;",
        *EMULATED_PAIRS,
    ),
    "hopper: sums of one peer for all": (
        "hopper.cuh",
        "(to == lane ? nearest : sink.slot(self, part, to))",
        "sink.slot(self, part, 0)",
        *EMULATED_TOTALS,
    ),
    "portable: slot overwritten": (
        "portable.cuh",
        "ptx::wait(&shared.used[turn.slot], turn.parity ^ 1);",
        "",
    ),
    "portable: panel not waited for": (
        "portable.cuh",
        "if (count != end) ptx::wait(&shared.loaded[count % stages], count / stages % 2);",
        "",
    ),
    "portable: strip overwritten": ("portable.cuh", "warp.sync();  // the strip is stored", ""),
    "courier: lines that lie apart stored as one": (
        "../courier.cuh",
        "dense = to.pitch == bytes;",
        "dense = true;",
    ),
}.items():
    MUTANTS[name] = Mutant(H + "engine/" + file, old, new, tuple(watching) or EMULATED_GEMM)

for name, (old, new) in {
    "courier: stored before it is loaded": (
        "ptx::wait(&slot_[out_].loaded, out_parity_);",
        "",
    ),
    "courier: goes on with what is not here": (
        "while (under_way_ > 0 && ptx::completed(&slot_[out_].loaded, out_parity_)) store",
        "while (under_way_ > 0) store",
    ),
    "courier: signal before the bytes where no store follows": (
        "ptx::wait_stores<0>();\n        landed(unsaid_);",
        "landed(unsaid_);",
    ),
    "courier: signal before the bytes where a store follows": (
        "ptx::wait_stores<1>();\n            landed(unsaid_);",
        "landed(unsaid_);",
    ),
    "courier: slot loaded while it is stored": (
        "ptx::wait_stores_read<1>();  // the store",
        "// the store",
    ),
}.items():
    MUTANTS[name] = Mutant(H + "courier.cuh", old, new, EMULATED_COURIER)

HOPPER_ATTENTION = tuple(
    f"{EMULATED_ATTENTION[0]}::{name}"
    for name in (
        "test_any_order_of_threads_and_copies",
        "test_equals_reference[hopper-causal-1x70+200x2+1x64-bfloat16-causal-contiguous]",
        "test_equals_reference[hopper-scale-1x70+31x2+2x40-bfloat16-full-contiguous]",
        "test_units_are_left_when_they_have_been_read",
    )
)
for name, (old, new, *tests) in {
    "queries overwritten": (
        "ptx::wait(&shared.ended[consumer], tiles.parity ^ 1);\n                    if (",
        "if (",
    ),
    "queries not waited for": (
        "            ptx::wait(&shared.begun[consumer], tiles.parity);",
        "            if (tiles.parity == 0) ptx::wait(&shared.begun[consumer], 0);",
    ),
    "finished rows overwritten before they are stored": (
        f"{DELIVERED}            release(shared, end);\n",
        f"            release(shared, end);\n{DELIVERED}",
    ),
    "slot for the other consumer's rows": (
        "if (i <= own_consumer() / strips_in_slot) {",
        "if (i < own_consumer() / strips_in_slot) {",
        f"{EMULATED_ATTENTION[0]}::test_equals_reference"
        "[hopper-wide-1x90+140x2+1x256-float16-causal-contiguous]",
    ),
    "slot loaded too early": ("ptx::wait(&shared.used[turn.slot], turn.parity ^ 1);", ""),
    "unit left before it is read": ("ptx::wait(&shared.loaded[slot], slot <", "(void)(slot <"),
    "values that come with their keys": (
        "arrived[part] = i32(gate(",
        "arrived[0] = arrived[1] = i32(gate(",
    ),
    "keys not waited for": (
        "ptx::wait(&shared.loaded[key.slot], key.parity);\n        if",
        "if",
    ),
    "values not waited for": (
        "if (adds) ptx::wait(&shared.loaded[value.slot], value.parity);",
        "",
    ),
    "scores not waited for": (
        "ptx::multiply_wait<1>();\n        ptx::results_are_there(scores);",
        "",
    ),
    "values given back too early": (
        "ptx::multiply_wait<0>();\n        ptx::results_are_there(kept.sums);\n        if (adds)",
        "if (adds)",
    ),
    "rescale of the values": ("kept.sums[i] *= part[row_of(i)];", "(void)part;"),
    "rescale for half of the rows": ("part[0] != 1 || part[1] != 1", "part[0] != 1"),
    "rescale of the sum": ("kept.total[which] * part[which], 0}", "kept.total[which], 0}"),
    "sum of the weights of all lanes": (
        "total += __shfl_xor_sync(~0u, total, far);",
        "total += total;",
    ),
    "mask": ("i32(column_of(i)) < end ?", "i32(column_of(i)) <= end ?"),
    "negative scale": ("if (negative) negate(scores);", ""),
    "masked values": (
        "if (!any_special(values, order.seen(first_row), order.lines)) return true;",
        "return true;",
        f"{EMULATED_ATTENTION[0]}::test_masked_nan_does_not_leak_and_what_is_seen_acts_as_in_numpy",
    ),
    "values behind the keys": (
        "clear(values, order.lines);",
        "",
        f"{EMULATED_ATTENTION[0]}::test_what_lies_behind_the_keys_has_no_influence",
    ),
    "infinite sums": (
        "return closer == closer ? closer : about;",
        "return closer;",
        f"{EMULATED_ATTENTION[0]}::test_masked_nan_does_not_leak_and_what_is_seen_acts_as_in_numpy",
    ),
    "NaN after a failure": (
        "if (failed) total = not_a_number<float>();",
        "",
        f"{EMULATED_ATTENTION[0]}::test_what_does_not_arrive_leaves_nan",
    ),
}.items():
    watchers = tuple(tests) or HOPPER_ATTENTION
    MUTANTS[f"attention on Hopper: {name}"] = Mutant(
        H + "engine/attention_hopper.cuh", old, new, watchers
    )


def run(
    kernels: Path, tests: Iterable[str], cache: str, *options: str
) -> subprocess.CompletedProcess[str]:
    """Run tests on a folder of kernels."""
    return subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "--timeout", "120"),
            *("-p", "no:cacheprovider", "--kernels", str(kernels), *options),
            *(str(TESTS / name) for name in tests),
        ],
        cwd=TESTS.parent,
        env={**os.environ, "MKERNEL_CACHE_DIR": cache},
        capture_output=True,
        text=True,
    )


def watchers(names: Iterable[str]) -> list[str]:
    """Return all tests that are to notice some mutants, each once."""
    tests = {test for name in names for test in MUTANTS[name].tests}
    return sorted(test for test in tests if test.split("::")[0] not in tests - {test})


def break_one(name: str, folder: Path) -> None:
    """Make a copy of the kernels in which one line is broken."""
    mutant = MUTANTS[name]
    shutil.copytree(compiler.kernels_dir(), folder)
    shutil.copytree(compiler.native_dir(), folder / "native")
    file = folder / mutant.file
    text = file.read_text()
    if text.count(mutant.old) != 1:
        raise ValueError(f"{name}: its text occurs {text.count(mutant.old)} times in {mutant.file}")
    file.write_text(text.replace(mutant.old, mutant.new))


def judge(name: str, folder: Path, cache: str) -> tuple[bool, str]:
    """Return whether the tests notice a mutant, and what to say of it."""
    tests, began = MUTANTS[name].tests, time.monotonic()
    # A sanitizer's word, not just a slow machine's.
    proof = "data race" if tests[0].startswith(SANITIZED) else ""
    caught, died, runs = False, False, 0
    while runs < RUNS and not (caught or died):
        runs += 1
        result = run(folder, tests, cache)
        output = result.stdout + result.stderr
        died = "CompileError" in output or "ConfigurationError" in output
        caught = result.returncode != 0 and not died and proof in output
    first = next((line for line in output.splitlines() if line.startswith("FAILED")), "")
    first = first or ("the process died" if result.returncode else "")
    verdict = "caught" if caught else "DOES NOT COMPILE" if died else "SURVIVED"
    again = f", run {runs}" if runs > 1 else ""
    text = f"{name}: {verdict} in {time.monotonic() - began:.0f} s{again}  {first[:100]}"
    return caught, f"{text}\n{output[-3000:]}" if died else text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(MUTANTS)}")
    parser.add_argument(
        "--passed", action="store_true", help="the suite has just passed on the original"
    )
    arguments = parser.parse_args()
    names = arguments.names or list(MUTANTS)
    with (
        tempfile.TemporaryDirectory() as scratch,
        ThreadPoolExecutor(os.cpu_count()) as pool,
    ):
        cache, folders = str(Path(scratch) / "cache"), {}
        for number, name in enumerate(names):
            folders[name] = Path(scratch) / str(number)
            break_one(name, folders[name])
        original = compiler.kernels_dir()
        result = None if arguments.passed else run(original, watchers(names), cache, *SHARED_OUT)
        if result and result.returncode:
            print(result.stdout[-4000:], result.stderr[-2000:])
            print("the original kernels fail: nothing can be learnt")
            return 1
        survivors = 0
        for caught, text in pool.map(lambda name: judge(name, folders[name], cache), names):
            survivors += not caught
            print(text, flush=True)
    print(f"{len(names) - survivors} passed, {survivors} failed")
    return bool(survivors)


if __name__ == "__main__":
    sys.exit(main())
