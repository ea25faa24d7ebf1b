// The attention engine that this kernel is compiled with. All have one interface: attention() of attention_host.cuh says
// which.
#pragma once

// Threads of a block: two blocks of so many share a multiprocessor.
#ifndef MK_THREADS
#define MK_THREADS 128
#endif

#include "../target.cuh"

#if MK_TARGET_HOST
#include "attention_host.cuh"
#else
#include "attention_portable.cuh"
#endif
