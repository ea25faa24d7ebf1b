// The only file that knows what it is compiled for. Everything above it is the same text on both targets:
//   cuda   an agent is a thread block; its lanes are the block's threads
//   host   an agent is one thread (or, in tests, 2 or 3); a launch runs agents on a pool, or one by one in a simulator
// Both give: Agent (who am I, sync, broadcast), atomics with a scope, a clock, pause, Transfer, MK_DEVICE and MK_KERNEL.
#pragma once

#include "words.cuh"

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define MK_TARGET_CUDA 1
#else
#define MK_TARGET_HOST 1
#endif

// Kernels are compiled for ranks of one node, which then have nothing of the network, or with MK_NODES for several.
#ifndef MK_NODES
#define MK_NODES 0
#endif

namespace mk {

constexpr bool several_nodes = MK_NODES;

// Who may see a store: the agents of this GPU, or also peers, the host and the network.
enum class Scope { device, system };

constexpr u64 nanoseconds_per_microsecond = 1000;

}  // namespace mk

#if MK_TARGET_CUDA
#include "target_cuda.cuh"
#else
#include "target_host.cuh"
#endif
