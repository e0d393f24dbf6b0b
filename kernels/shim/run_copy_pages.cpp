// ../copy_pages.cu on a CPU, for tests: any slice of a launch's threads, in any order.
//
//     g++ -std=c++17 -O1 -Wno-unknown-pragmas -shared -fPIC run_copy_pages.cpp -o copy_pages_on_cpu.so

#include "cuda_on_cpu.h"

#include "../copy_pages.cu"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

namespace {

using Kernel = void (*)(CopyPages);

const std::pair<const char*, Kernel> KERNELS[] = {
    {"copy_pages_w16_p1", copy_pages_w16_p1}, {"copy_pages_w16_p2", copy_pages_w16_p2},
    {"copy_pages_w8_p1", copy_pages_w8_p1},   {"copy_pages_w8_p2", copy_pages_w8_p2},
    {"copy_pages_w4_p1", copy_pages_w4_p1},   {"copy_pages_w4_p2", copy_pages_w4_p2},
    {"copy_pages_w2_p1", copy_pages_w2_p1},   {"copy_pages_w2_p2", copy_pages_w2_p2},
    {"copy_pages_w1_p1", copy_pages_w1_p1},   {"copy_pages_w1_p2", copy_pages_w1_p2},
};

} // namespace

extern "C" {

std::size_t shim_argument_bytes() {
    return sizeof(CopyPages);
}

// Threads `begin` to `end` of the launch, counted in the order that `seed` makes: 0 is first to last, 1 last to
// first, anything else a random order. Returns the number of misaligned accesses, -1 if there is no such kernel.
long long shim_launch(const char* name, const void* argument, unsigned int blocks, unsigned int threads,
                      unsigned long long seed, unsigned long long begin, unsigned long long end) {
    for (const auto& [known, kernel] : KERNELS) {
        if (std::strcmp(known, name) != 0) {
            continue;
        }
        CopyPages c;
        std::memcpy(&c, argument, sizeof c);
        std::vector<unsigned int> order(static_cast<std::size_t>(blocks) * threads);
        std::iota(order.begin(), order.end(), 0u);
        if (seed == 1) {
            std::reverse(order.begin(), order.end());
        } else if (seed > 1) {
            std::mt19937_64 random(seed);
            for (std::size_t i = order.size(); i > 1; --i) {
                std::swap(order[i - 1], order[random() % i]);
            }
        }
        gridDim = {blocks, 1, 1};
        blockDim = {threads, 1, 1};
        shim_misaligned = 0;
        for (unsigned long long i = begin; i < end && i < order.size(); ++i) {
            blockIdx = {order[i] / threads, 0, 0};
            threadIdx = {order[i] % threads, 0, 0};
            kernel(c);
        }
        return static_cast<long long>(shim_misaligned);
    }
    return -1;
}
}
