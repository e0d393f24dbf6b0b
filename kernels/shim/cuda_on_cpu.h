// Just enough of CUDA C++ for a kernel without barriers, shuffles and shared memory to be compiled as C++ and
// run thread by thread.

#pragma once

#include <cstddef>
#include <cstdint>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(threads)

struct ShimIndex {
    unsigned int x, y, z;
};

static thread_local ShimIndex gridDim, blockDim, blockIdx, threadIdx;

// What a GPU would trap on.
static thread_local unsigned long long shim_misaligned;

static inline void shim_access(const void* at, unsigned int width) {
    shim_misaligned += reinterpret_cast<std::uintptr_t>(at) % width != 0;
}
