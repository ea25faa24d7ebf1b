// The attention engine that this kernel is compiled with. All have one interface: attention() of attention_host.cuh says
// which.
#pragma once

// Threads of a block: two blocks of so many share a multiprocessor. A plan for another engine says how many.
#ifndef MK_THREADS
#define MK_THREADS 128
#endif

#include "../target.cuh"

#if MK_TARGET_HOST
#include "attention_host.cuh"
#elif defined(MK_ENGINE_HOPPER)
#include "attention_hopper.cuh"
#else
#include "attention_portable.cuh"
#endif
