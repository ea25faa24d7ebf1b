// The engine that this kernel is compiled with. All have one interface: gemm() of host.cuh says which.
#pragma once

#include "host.cuh"
