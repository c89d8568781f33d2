// A fiber per CUDA thread, one block at a time, on one thread of the host.
//
// Collectives of a warp (shuffles, ballots, __syncwarp) and __syncthreads are places where fibers
// meet; divergence and deadlock are found there. Lanes run in an order that can be permuted, so that
// a missing barrier shows in some order.
//
// With RESIDENT=n, n blocks run in turns, each on a thread of its own: a block is interrupted where
// it waits for another one, and at random in atomic operations and fences. Only one runs at a time, so
// that a run can be repeated; orders of memory that only a GPU shows are not shown.
#pragma once
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
constexpr size_t kStack = 1 << 18;

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
    const int me = current, my_warp = me / 32, count = (threads + 31) / 32;
    for (int step = 0; step < count; step++) {
        const int warp = (my_warp + step) % count;
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

static void barrier_of_warp(int line) { meet(0xffffffffu, 0, line); }

// Returns what a lane of this warp has put into a buffer.
static uint64_t value_of(int lane, int buffer) { return warps[current / 32].slot[buffer][lane]; }

static const uint3& thread_index() { return fibers[current].thread; }

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

#if defined(RESIDENT)
static std::mutex mutex;
static std::condition_variable changed;
static std::vector<bool> running;  // of the OS threads
static int turn;
static int waited;  // how many blocks in a row found nothing to do
PER_BLOCK int thread_number;  // of this OS thread

static uint32_t random_number() { return seed = seed * 1664525u + 1013904223u, seed >> 8; }

static void give_turn() {
    int left = 0;
    for (bool runs : running) left += runs;
    int next = left ? (int)(random_number() % left) : -1;
    turn = -1;
    for (size_t i = 0; i < running.size(); i++)
        if (running[i] && next-- == 0) turn = (int)i;
    changed.notify_all();
}
static void wait_for_turn(std::unique_lock<std::mutex>& lock) {
    changed.wait(lock, [] { return turn == thread_number; });
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
    std::vector<std::thread> threads_of_host;
    for (int i = 0; i < RESIDENT; i++)
        threads_of_host.emplace_back([i, &left] {
            thread_number = i;
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
    for (std::thread& thread : threads_of_host) thread.join();
    return !error.empty();
}
#else
static void interrupt(bool waits, int line) {
    if (waits) fail("a block waits for one that has not run", line);
}

#endif

static void on_fault(int) {
    fail("a kernel touches memory beyond its arguments, after a collective", fibers[current].line);
}

}  // namespace emulator
