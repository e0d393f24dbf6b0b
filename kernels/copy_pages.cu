// Pages between two pools that may lie in memory in different ways: the one kernel of the device-host copies.
//
// A pool is, for each (layer, part), the address of a plane, and strides in bytes from page to page, token to
// token and head to head that are the same for all its planes (python/unified_cache/pools/planes.py). One run, the
// elements of a head, is contiguous on both sides; the caller has merged heads and tokens into it where both
// sides allow that. Either side may be device memory or host memory that is registered with the driver: the
// kernel runs in both directions.
//
// Every thread copies vectors of WIDTH bytes on its own: no barriers, no shuffles, no shared memory. So any grid
// gives the same bytes, few blocks leave the multiprocessors to the forward, and the same source runs thread by
// thread on a CPU, where its index arithmetic is checked (kernels/shim).
//
// Compiled at run time, without headers.

struct CopyPages {
    const unsigned long long* source_planes; // (layers of the pool, parts), addresses
    const unsigned long long* target_planes;
    const unsigned int* source_pages; // (pages), ids
    const unsigned int* target_pages;
    unsigned long long source_page_stride; // all strides in bytes
    unsigned long long source_token_stride;
    unsigned long long source_head_stride;
    unsigned long long target_page_stride;
    unsigned long long target_token_stride;
    unsigned long long target_head_stride;
    unsigned int pages;       // at most 2^30
    unsigned int first_layer; // of the planes
    unsigned int layers;      // from there on
    unsigned int tokens;
    unsigned int heads;
    unsigned int vectors; // WIDTH-byte vectors of a run
};

// --- memory ------------------------------------------------------------------------------------------------

template <unsigned int WIDTH>
struct Vector;
template <>
struct Vector<16> {
    unsigned int x, y, z, w;
};
template <>
struct Vector<8> {
    unsigned int x, y;
};
template <>
struct Vector<4> {
    unsigned int x;
};
template <>
struct Vector<2> {
    unsigned short x;
};
template <>
struct Vector<1> {
    unsigned char x;
};

#ifdef __CUDA_ARCH__

// Loads take the read-only path (.nc). That is legal because nobody writes the source while a launch runs: whoever
// submits a copy keeps its source pages locked until the copy has ended. They leave nothing in L1, which
// belongs to the forward. The same form serves device memory and registered host memory: a load of the latter
// goes over the bus, past L2. Volatile, so that the compiler keeps all loads of a round before its stores.
//
// Stores are streaming (.cs, evict first): what passes through L2 on its way should not push out what the forward
// works on.

__device__ __forceinline__ Vector<16> load(const Vector<16>* at) {
    Vector<16> v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(__cvta_generic_to_global(at)));
    return v;
}

__device__ __forceinline__ Vector<8> load(const Vector<8>* at) {
    Vector<8> v;
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
                 : "=r"(v.x), "=r"(v.y)
                 : "l"(__cvta_generic_to_global(at)));
    return v;
}

__device__ __forceinline__ Vector<4> load(const Vector<4>* at) {
    Vector<4> v;
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(v.x) : "l"(__cvta_generic_to_global(at)));
    return v;
}

__device__ __forceinline__ Vector<2> load(const Vector<2>* at) {
    Vector<2> v;
    asm volatile("ld.global.nc.L1::no_allocate.u16 %0, [%1];" : "=h"(v.x) : "l"(__cvta_generic_to_global(at)));
    return v;
}

__device__ __forceinline__ Vector<1> load(const Vector<1>* at) {
    unsigned int wide; // there are no registers of 8 bits
    asm volatile("ld.global.nc.L1::no_allocate.u8 %0, [%1];" : "=r"(wide) : "l"(__cvta_generic_to_global(at)));
    return Vector<1>{static_cast<unsigned char>(wide)};
}

__device__ __forceinline__ void store(Vector<16>* at, Vector<16> v) {
    asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};"
                 :
                 : "l"(__cvta_generic_to_global(at)), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}

__device__ __forceinline__ void store(Vector<8>* at, Vector<8> v) {
    asm volatile("st.global.cs.v2.u32 [%0], {%1, %2};"
                 :
                 : "l"(__cvta_generic_to_global(at)), "r"(v.x), "r"(v.y)
                 : "memory");
}

__device__ __forceinline__ void store(Vector<4>* at, Vector<4> v) {
    asm volatile("st.global.cs.u32 [%0], %1;" : : "l"(__cvta_generic_to_global(at)), "r"(v.x) : "memory");
}

__device__ __forceinline__ void store(Vector<2>* at, Vector<2> v) {
    asm volatile("st.global.cs.u16 [%0], %1;" : : "l"(__cvta_generic_to_global(at)), "h"(v.x) : "memory");
}

__device__ __forceinline__ void store(Vector<1>* at, Vector<1> v) {
    asm volatile("st.global.cs.u8 [%0], %1;"
                 :
                 : "l"(__cvta_generic_to_global(at)), "r"(static_cast<unsigned int>(v.x))
                 : "memory");
}

#else // the shim: plain copies, that also check the alignment a GPU would insist on

template <unsigned int WIDTH>
Vector<WIDTH> load(const Vector<WIDTH>* at) {
    shim_access(at, WIDTH);
    Vector<WIDTH> v;
    __builtin_memcpy(&v, at, WIDTH);
    return v;
}

template <unsigned int WIDTH>
void store(Vector<WIDTH>* at, Vector<WIDTH> v) {
    shim_access(at, WIDTH);
    __builtin_memcpy(at, &v, WIDTH);
}

#endif

// --- which vector is whose ----------------------------------------------------------------------------------

// The place of a vector, as digits of its number: vector within a run, run within a token, and so on. Threads
// go on by adding the digits of the grid's size, with carries: after the first position there is no division.
struct Place {
    unsigned int vector, head, token, layer, page;
};

__device__ __forceinline__ Place place_of(unsigned int number, const CopyPages& c) {
    Place at;
    at.vector = number % c.vectors;
    number /= c.vectors;
    at.head = number % c.heads;
    number /= c.heads;
    at.token = number % c.tokens;
    number /= c.tokens;
    at.layer = number % c.layers;
    at.page = number / c.layers;
    return at;
}

__device__ __forceinline__ unsigned int carry(unsigned int& digit, unsigned int base) {
    const bool over = digit >= base;
    digit -= over ? base : 0;
    return over;
}

// No sum overflows: digits are smaller than their bases, the sizes of a page's parts, which are far below 2^31; and
// a page is at most 2^30 and a few steps of a grid behind it.
__device__ __forceinline__ void advance(Place& at, const Place& step, const CopyPages& c) {
    at.vector += step.vector;
    at.head += step.head + carry(at.vector, c.vectors);
    at.token += step.token + carry(at.head, c.heads);
    at.layer += step.layer + carry(at.token, c.tokens);
    at.page += step.page + carry(at.layer, c.layers);
}

template <unsigned int WIDTH, unsigned int PARTS>
__device__ __forceinline__ void copy_pages(const CopyPages& c) {
    // 64 bytes in flight a thread, whatever the number of parts: enough for two blocks to fill a bus with a
    // latency of two microseconds, and few enough registers for 1024 threads.
    constexpr unsigned int ROUNDS = 4 / PARTS;
    const Place step = place_of(gridDim.x * blockDim.x, c);
    Place at = place_of(blockIdx.x * blockDim.x + threadIdx.x, c);
    while (at.page < c.pages) {
        // All addresses first, then all loads, then all stores: latencies pass side by side.
        unsigned long long source[ROUNDS][PARTS], target[ROUNDS][PARTS];
        bool live[ROUNDS];
#pragma unroll
        for (unsigned int round = 0; round < ROUNDS; ++round) {
            live[round] = at.page < c.pages;
            // Behind the end: any place will do, nothing is read or written there.
            const unsigned int page = live[round] ? at.page : c.pages - 1;
            const unsigned int plane = (c.first_layer + at.layer) * PARTS;
            const unsigned long long inside = static_cast<unsigned long long>(at.vector) * WIDTH;
            const unsigned long long from = c.source_pages[page] * c.source_page_stride +
                                            at.token * c.source_token_stride +
                                            at.head * c.source_head_stride + inside;
            const unsigned long long to = c.target_pages[page] * c.target_page_stride +
                                          at.token * c.target_token_stride + at.head * c.target_head_stride +
                                          inside;
#pragma unroll
            for (unsigned int part = 0; part < PARTS; ++part) {
                source[round][part] = c.source_planes[plane + part] + from;
                target[round][part] = c.target_planes[plane + part] + to;
            }
            advance(at, step, c);
        }
        Vector<WIDTH> loaded[ROUNDS][PARTS];
#pragma unroll
        for (unsigned int round = 0; round < ROUNDS; ++round) {
#pragma unroll
            for (unsigned int part = 0; part < PARTS; ++part) {
                if (live[round]) {
                    loaded[round][part] = load(reinterpret_cast<const Vector<WIDTH>*>(source[round][part]));
                }
            }
        }
#pragma unroll
        for (unsigned int round = 0; round < ROUNDS; ++round) {
#pragma unroll
            for (unsigned int part = 0; part < PARTS; ++part) {
                if (live[round]) {
                    store(reinterpret_cast<Vector<WIDTH>*>(target[round][part]), loaded[round][part]);
                }
            }
        }
    }
}

// --- entries ------------------------------------------------------------------------------------------------

#define ENTRY(WIDTH, PARTS)                                                                                        \
    extern "C" __global__ void __launch_bounds__(1024) copy_pages_w##WIDTH##_p##PARTS(const CopyPages c) {          \
        copy_pages<WIDTH, PARTS>(c);                                                                               \
    }

ENTRY(16, 1)
ENTRY(16, 2)
ENTRY(8, 1)
ENTRY(8, 2)
ENTRY(4, 1)
ENTRY(4, 2)
ENTRY(2, 1)
ENTRY(2, 2)
ENTRY(1, 1)
ENTRY(1, 2)
