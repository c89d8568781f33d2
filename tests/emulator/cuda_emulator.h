// Runs CUDA C++ kernels on the host: one fiber per CUDA thread, one block at a time, one OS thread.
//
// Collectives of a warp (shuffles, ballots, __syncwarp) and __syncthreads are places where fibers
// meet; divergence and deadlock are found there. Lanes run in an order that can be permuted, so that
// a missing barrier shows in some order. Shared memory starts as garbage, as on a GPU.
//
// With RESIDENT=n, n blocks run in turns, each on an OS thread of its own: a block is interrupted where
// it waits for another one, and at random in atomic operations and fences. Only one runs at a time, so
// that a run can be repeated; orders of memory that only a GPU shows are not shown.
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
#include <signal.h>
#include <sys/mman.h>
#if defined(RESIDENT)
#include <condition_variable>
#include <mutex>
#include <thread>
#define PER_BLOCK static thread_local
#else
#define PER_BLOCK static
#endif

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#if defined(RESIDENT)
#define __shared__ PER_BLOCK
#else
#define __shared__ static __attribute__((section("emulated_shared")))
#endif

struct uint3 { unsigned x, y, z; };
struct dim3 { unsigned x, y, z; };

namespace emulator {

enum State : uint8_t { READY, AT_WARP, AT_BLOCK, DONE };
struct Fiber { void* stack; uint3 thread; State state; uint32_t mask; int line; };
struct Warp { uint64_t slot[2][32]; uint32_t arrived, live, generation; int line; };

PER_BLOCK Fiber fibers[1024];
PER_BLOCK Warp warps[32];
PER_BLOCK int current, live, at_barrier;
PER_BLOCK void* main_stack;
PER_BLOCK char* stacks;
PER_BLOCK uint3 block_index;
static int threads;
static dim3 block_size, grid_size;
static std::string error;
static uint32_t lane_order;  // lane i runs as i ^ lane_order
static uint32_t seed;        // of the turns of blocks
constexpr size_t kStack = 1 << 16;

// Saves the callee's registers on the stack `*from` and goes on with those on the stack `to`.
extern "C" void emulator_switch(void** from, void* to);
#if defined(__x86_64__)
asm(R"(.text
.p2align 4
.type emulator_switch,@function
emulator_switch:
 push %rbp
 push %rbx
 push %r12
 push %r13
 push %r14
 push %r15
 mov %rsp,(%rdi)
 mov %rsi,%rsp
 pop %r15
 pop %r14
 pop %r13
 pop %r12
 pop %rbx
 pop %rbp
 ret
.size emulator_switch,.-emulator_switch
)");
static void* fresh_stack(char* top, void (*entry)()) {
    void** stack = (void**)((uintptr_t)top & ~15ull);
    *--stack = nullptr;
    *--stack = (void*)entry;
    for (int i = 0; i < 6; i++) *--stack = nullptr;
    return stack;
}
#else
#error "the emulator's switch of stacks is written for x86-64"
#endif

[[noreturn]] static void fail(const char* what, int line) {
    if (error.empty()) {
        char text[256];
        snprintf(text, sizeof text, "%s at line %d, block (%u,%u,%u) thread %d", what, line,
                 block_index.x, block_index.y, block_index.z, current);
        error = text;
    }
    void* dead;
    emulator_switch(&dead, main_stack);
    abort();
}

// Gives the core to the next ready fiber: of this warp first, then of the others.
static void yield() {
    const int me = current, own = me / 32, count = (threads + 31) / 32;
    for (int step = 0; step < count; step++) {
        const int warp = (own + step) % count;
        for (int turn = 1; turn <= 32; turn++) {
            const uint32_t begin = step ? 31 : (uint32_t)(me & 31) ^ lane_order;
            const int i = warp * 32 + (int)(((begin + turn) & 31) ^ lane_order);
            if (i >= threads || fibers[i].state != READY) continue;
            if (i == me) return;
            current = i;
            emulator_switch(&fibers[me].stack, fibers[i].stack);
            return;
        }
    }
    if (live)
        fail(fibers[me].state == AT_BLOCK
                 ? "deadlock: __syncthreads not reached by all live threads"
                 : "deadlock: a warp collective waits for a lane that ended or is at a barrier",
             fibers[me].line);
    emulator_switch(&fibers[me].stack, main_stack);
}

static void release_block() {
    for (int i = 0; i < threads; i++)
        if (fibers[i].state == AT_BLOCK) fibers[i].state = READY;
    at_barrier = 0;
}

static void barrier(int line) {
    Fiber& fiber = fibers[current];
    fiber.line = line;
    fiber.state = AT_BLOCK;
    if (++at_barrier == live) release_block();
    else yield();
}

// Meets the lanes of `mask`; returns which of the two buffers holds every lane's value.
static int meet(uint32_t mask, uint64_t value, int line) {
    Warp& warp = warps[current / 32];
    Fiber& fiber = fibers[current];
    const int lane = current & 31, buffer = warp.generation & 1;
    fiber.line = line;
    fiber.mask = mask;
    if (!(mask >> lane & 1)) fail("a lane calls a warp collective whose mask leaves it out", line);
    if (mask & ~warp.live) fail("the mask of a warp collective names a lane that ended", line);
    if (warp.arrived && warp.line != line) fail("divergence: lanes meet in different collectives", line);
    for (uint32_t rest = warp.arrived; rest; rest &= rest - 1)
        if (fibers[(current & ~31) + __builtin_ctz(rest)].mask != mask)
            fail("lanes disagree on the mask", line);
    warp.line = line;
    warp.slot[buffer][lane] = value;
    warp.arrived |= 1u << lane;
    if (warp.arrived == mask) {
        warp.arrived = 0;
        warp.generation++;
        for (int l = 0; l < 32; l++)
            if (mask >> l & 1) fibers[(current & ~31) + l].state = READY;
        return buffer;
    }
    fiber.state = AT_WARP;
    yield();
    return buffer;
}

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
    return from_bits<T>(warps[current / 32].slot[buffer][source & 31]);
}

// Combines the values of all lanes of the mask.
template <class F> uint32_t over_lanes(uint32_t mask, uint32_t value, int line, F combine) {
    const int buffer = meet(mask, value, line);
    uint32_t result = 0;
    for (int l = 0; l < 32; l++)
        if (mask >> l & 1) result = combine(result, (uint32_t)warps[current / 32].slot[buffer][l], l);
    return result;
}

static void (*body)(void*);
static void* body_argument;
static void run_thread() {
    body(body_argument);
    Fiber& fiber = fibers[current];
    fiber.state = DONE;
    live--;
    warps[current / 32].live &= ~(1u << (current & 31));
    if (live && at_barrier == live) release_block();
    yield();
    abort();
}

extern "C" {
extern char __start_emulated_shared[] __attribute__((weak));
extern char __stop_emulated_shared[] __attribute__((weak));
}

static int run_block(uint3 index) {
    if (!stacks)
        stacks = (char*)mmap(nullptr, kStack * 1024, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    block_index = index;
    live = threads;
    at_barrier = 0;
    for (int w = 0; w * 32 < threads; w++) {
        const int lanes = threads - w * 32;
        warps[w].arrived = warps[w].generation = 0;
        warps[w].live = lanes >= 32 ? ~0u : (1u << lanes) - 1;
    }
    for (int i = 0; i < threads; i++) {
        const unsigned t = (unsigned)i, x = block_size.x, y = block_size.y;
        fibers[i] = {fresh_stack(stacks + kStack * (i + 1), run_thread), {t % x, t / x % y, t / (x * y)}, READY, 0, 0};
    }
    current = (int)lane_order < threads ? (int)lane_order : 0;
    emulator_switch(&main_stack, fibers[current].stack);
    return !error.empty();
}

static std::vector<uint3> indices_of(dim3 grid) {
    std::vector<uint3> all;
    for (unsigned z = 0; z < grid.z; z++)
        for (unsigned y = 0; y < grid.y; y++)
            for (unsigned x = 0; x < grid.x; x++) all.push_back({x, y, z});
    return all;
}

#if defined(RESIDENT)
static std::mutex mutex;
static std::condition_variable changed;
static std::vector<bool> running;  // of the OS threads
static int turn;
static int waited;  // how many blocks in a row found nothing to do
PER_BLOCK int own;  // number of this OS thread

static uint32_t random_number() { return seed = seed * 1664525u + 1013904223u, seed >> 8; }

static void give_turn() {
    int left = 0;
    for (bool one : running) left += one;
    int next = left ? (int)(random_number() % left) : -1;
    turn = -1;
    for (size_t i = 0; i < running.size(); i++)
        if (running[i] && next-- == 0) turn = (int)i;
    changed.notify_all();
}
static void wait_for_turn(std::unique_lock<std::mutex>& lock) {
    changed.wait(lock, [] { return turn == own; });
}

static void interrupt(bool waits, int line) {
    if (!waits && random_number() % 8) return;
    waited = waits ? waited + 1 : 0;
    if (waited > 100000) fail("deadlock: blocks wait for one another", line);
    {
        std::unique_lock<std::mutex> lock(mutex);
        give_turn();
        wait_for_turn(lock);
    }
    if (!error.empty()) fail("", line);
}

static int run_blocks(dim3 grid) {
    std::vector<uint3> left = indices_of(grid);
    running.assign(RESIDENT, true);
    waited = 0;
    std::vector<std::thread> all;
    for (int i = 0; i < RESIDENT; i++)
        all.emplace_back([i, &left] {
            own = i;
            std::unique_lock<std::mutex> lock(mutex);
            wait_for_turn(lock);
            while (!left.empty() && error.empty()) {  // blocks may start in any order
                const size_t at = random_number() % left.size();
                const uint3 index = left[at];
                left.erase(left.begin() + (long)at);
                lock.unlock();
                run_block(index);
                lock.lock();
                give_turn();
                wait_for_turn(lock);
            }
            if (stacks) munmap(stacks, kStack * 1024);
            running[i] = false;
            give_turn();
        });
    {
        std::unique_lock<std::mutex> lock(mutex);
        give_turn();
    }
    for (std::thread& one : all) one.join();
    return !error.empty();
}
#else
// Blocks run one after the other: what a block waits for has to come from one before.
static void interrupt(bool waits, int line) {
    if (waits) fail("a block waits for one that has not run", line);
}

static int run_blocks(dim3 grid) {
    for (const uint3 index : indices_of(grid)) {
        if (__start_emulated_shared)
            memset(__start_emulated_shared, 0xA5, __stop_emulated_shared - __start_emulated_shared);
        if (run_block(index)) return 1;
    }
    return 0;
}
#endif

static void on_fault(int) {
    fail("a kernel touches memory beyond its arguments, after a collective", fibers[current].line);
}

static int run(dim3 grid, dim3 block, void (*function)(void*), void* argument) {
    error.clear();
    block_size = block, grid_size = grid, body = function, body_argument = argument;
    threads = (int)(block.x * block.y * block.z);
#if defined(__SANITIZE_ADDRESS__)  // which reports it better
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

#define threadIdx (emulator::fibers[emulator::current].thread)
#define blockIdx emulator::block_index
#define blockDim emulator::block_size
#define gridDim emulator::grid_size
#define __syncthreads() emulator::barrier(__LINE__)
#define __syncwarp() ((void)emulator::meet(0xffffffffu, 0, __LINE__))
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
    emulator::interrupt(false, __LINE__);
    T old = *p;
    *p = old + (T)v;
    return old;
}
template <class T, class U> T atomicMax(T* p, U v) { T old = *p; if ((T)v > old) *p = (T)v; return old; }
template <class T, class U> T atomicOr(T* p, U v) { T old = *p; *p = old | (T)v; return old; }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __ffs(unsigned v) { return __builtin_ffs((int)v); }
inline int __clz(unsigned v) { return v ? __builtin_clz(v) : 32; }
