// The engine that this kernel is compiled with. All have one interface: gemm() of host.cuh says which.
#pragma once

#include "../target.cuh"

#if MK_TARGET_HOST
#include "host.cuh"
#elif defined(MK_ENGINE_HOPPER)
#include "hopper.cuh"
#else
#include "portable.cuh"
#endif
