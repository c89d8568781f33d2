// Runs CUDA C++ kernels on the host. Shared memory starts as garbage, as on a GPU.
//
// By default a thread of CUDA is a fiber (fibers.h); with THREADS it is a thread of the host
// (threads.h), under ThreadSanitizer.
#pragma once
#define CUDA_EMU 1
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#if defined(RESIDENT)
#define __shared__ static thread_local
#else
#define __shared__ static __attribute__((section("emulated_shared")))
#endif

struct uint3 { unsigned x, y, z; };
struct dim3 { unsigned x, y, z; };

namespace emulator {

static dim3 block_size, grid_size;
static int threads;  // of a block
static std::string error;
static uint32_t lane_order;  // lane i runs as i ^ lane_order
static uint32_t seed;        // of the turns of blocks
static bool ends_only;       // run the first two blocks and the last three

static void (*body)(void*);
static void* body_argument;

static std::vector<uint3> indices_of(dim3 grid) {
    std::vector<uint3> all;
    for (unsigned z = 0; z < grid.z; z++)
        for (unsigned y = 0; y < grid.y; y++)
            for (unsigned x = 0; x < grid.x; x++) {
                if (ends_only && x == 2 && grid.x > 5) x = grid.x - 3;
                all.push_back({x, y, z});
            }
    return all;
}

}  // namespace emulator

#if defined(THREADS)
#include "threads.h"
#else
#include "fibers.h"
#endif

namespace emulator {

template <class T> uint64_t as_bits(T value) {
    static_assert(sizeof(T) <= 8);
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof value);
    return bits;
}
template <class T> T from_bits(uint64_t bits) {
    T value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

template <class T> T shuffle(uint32_t mask, T value, int source, bool inside, int line) {
    const int buffer = meet(mask, as_bits(value), line);
    if (!inside) return value;
    if (!(mask >> (source & 31) & 1)) fail("a shuffle reads a lane outside its mask", line);
    return from_bits<T>(value_of(source & 31, buffer));
}

// Combines the values of all lanes of the mask.
template <class F> uint32_t over_lanes(uint32_t mask, uint32_t value, int line, F combine) {
    const int buffer = meet(mask, value, line);
    uint32_t result = 0;
    for (int l = 0; l < 32; l++)
        if (mask >> l & 1) result = combine(result, (uint32_t)value_of(l, buffer), l);
    return result;
}

// An atomic operation, which orders nothing else.
template <class T, class F> T atomically(T* place, F change) {
    interrupt(false, __LINE__);
    T old, next;
    __atomic_load(place, &old, __ATOMIC_RELAXED);
    do next = change(old);
    while (!__atomic_compare_exchange(place, &old, &next, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return old;
}

#if !defined(RESIDENT)
extern "C" {
extern char __start_emulated_shared[] __attribute__((weak));
extern char __stop_emulated_shared[] __attribute__((weak));
}

// Blocks run one after the other: what a block waits for has to come from one before.
static int run_blocks(dim3 grid) {
    for (const uint3 index : indices_of(grid)) {
        if (__start_emulated_shared)
            memset(__start_emulated_shared, 0xA5, __stop_emulated_shared - __start_emulated_shared);
        if (run_block(index)) return 1;
    }
    return 0;
}
#endif

static int run(dim3 grid, dim3 block, void (*function)(void*), void* argument) {
    error.clear();
    block_size = block, grid_size = grid, body = function, body_argument = argument;
    threads = (int)(block.x * block.y * block.z);
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)  // which report it better
    return run_blocks(grid);
#else
    struct sigaction before, now = {};
    now.sa_handler = on_fault;
    now.sa_flags = SA_NODEFER;  // `fail` leaves the handler, and it may be called again
    sigaction(SIGSEGV, &now, &before);
    const int failed = run_blocks(grid);
    sigaction(SIGSEGV, &before, nullptr);
    return failed;
#endif
}

template <class... A, size_t... I>
int call(void (*kernel)(A...), void** arguments, dim3 grid, dim3 block, std::index_sequence<I...>) {
    std::tuple<std::decay_t<A>...> values{*(std::decay_t<A>*)arguments[I]...};
    auto thread = [&values, kernel] { kernel(std::get<I>(values)...); };
    return run(grid, block, [](void* f) { (*(decltype(thread)*)f)(); }, &thread);
}
// As cuLaunchKernel: pointers to the arguments.
template <class... A> int launch(void (*kernel)(A...), void** arguments, dim3 grid, dim3 block) {
    return call(kernel, arguments, grid, block, std::index_sequence_for<A...>{});
}

}  // namespace emulator

#define threadIdx emulator::thread_index()
#define blockIdx emulator::block_index
#define blockDim emulator::block_size
#define gridDim emulator::grid_size
#define __syncthreads() emulator::barrier(__LINE__)
#define __syncwarp() emulator::barrier_of_warp(__LINE__)
#define __shfl_sync(mask, value, source) emulator::shuffle(mask, value, source, true, __LINE__)
#define __shfl_xor_sync(mask, value, other) \
    emulator::shuffle(mask, value, (emulator::current & 31) ^ (other), true, __LINE__)
#define __shfl_up_sync(mask, value, by)                               \
    emulator::shuffle(mask, value, (emulator::current & 31) - (int)(by), \
                      (emulator::current & 31) >= (int)(by), __LINE__)
#define __ballot_sync(mask, yes)                        \
    emulator::over_lanes(mask, (yes) ? 1 : 0, __LINE__, \
                         [](uint32_t all, uint32_t one, int l) { return all | one << l; })
#define __reduce_max_sync(mask, value)            \
    emulator::over_lanes(mask, value, __LINE__, \
                         [](uint32_t most, uint32_t one, int) { return one > most ? one : most; })
#define __reduce_add_sync(mask, value)            \
    emulator::over_lanes(mask, value, __LINE__, \
                         [](uint32_t sum, uint32_t one, int) { return sum + one; })
#define __threadfence() emulator::interrupt(false, __LINE__)
#define __nanosleep(time) emulator::interrupt(true, __LINE__)
template <class T, class U> T atomicAdd(T* p, U v) {
    return emulator::atomically(p, [v](T old) { return old + (T)v; });
}
template <class T, class U> T atomicMax(T* p, U v) {
    return emulator::atomically(p, [v](T old) { return (T)v > old ? (T)v : old; });
}
template <class T, class U> T atomicOr(T* p, U v) {
    return emulator::atomically(p, [v](T old) { return old | (T)v; });
}
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __ffs(unsigned v) { return __builtin_ffs((int)v); }
inline int __clz(unsigned v) { return v ? __builtin_clz(v) : 32; }
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned places) {
    const uint64_t bytes = (uint64_t)y << 32 | x;
    unsigned result = 0;
    for (int i = 0; i < 4; i++) result |= (unsigned)(bytes >> (places >> 4 * i & 7) * 8 & 255) << 8 * i;
    return result;
}
