// A thread of the host per CUDA thread, one block at a time, under ThreadSanitizer.
//
// Barriers alone order what threads do: ThreadSanitizer reports two accesses to the same memory without
// a barrier between them, of which one writes, whatever the result is. As on a GPU, shuffles, ballots
// and atomic operations order no other memory.
#pragma once
#include <pthread.h>
#include <thread>
#include <unistd.h>

// Between these calls ThreadSanitizer takes nothing as an order.
extern "C" void AnnotateIgnoreSyncBegin(const char* file, int line);
extern "C" void AnnotateIgnoreSyncEnd(const char* file, int line);

namespace emulator {

struct Warp {
    pthread_barrier_t barrier;
    uint64_t slot[2][32];
};

static Warp warps[32];
static pthread_barrier_t barrier_of_block;
static uint3 block_index;
static std::string skipped;  // "file:line" of a barrier that is passed without waiting
static thread_local int current;
static thread_local uint32_t generation;

[[noreturn]] static void fail(const char* what, int line) {
    fprintf(stderr, "%s at line %d, thread %d\n", what, line, current);
    _exit(1);
}

static bool is_skipped(const char* file, int line) {
    if (skipped.empty()) return false;
    const char* name = strrchr(file, '/');
    return skipped == std::string(name ? name + 1 : file) + ":" + std::to_string(line);
}
static void barrier(int line, const char* file = __builtin_FILE()) {
    if (!is_skipped(file, line)) pthread_barrier_wait(&barrier_of_block);
}
static void barrier_of_warp(int line, const char* file = __builtin_FILE()) {
    if (!is_skipped(file, line)) pthread_barrier_wait(&warps[current / 32].barrier);
}

// Meets the other lanes; returns which of the two buffers holds every lane's value.
static int meet(uint32_t mask, uint64_t value, int line) {
    if (mask != 0xffffffffu) fail("a warp collective leaves lanes out", line);
    Warp& warp = warps[current / 32];
    const int buffer = (int)(generation++ & 1);
    __atomic_store_n(&warp.slot[buffer][current % 32], value, __ATOMIC_RELAXED);
    AnnotateIgnoreSyncBegin(__FILE__, __LINE__);
    pthread_barrier_wait(&warp.barrier);
    AnnotateIgnoreSyncEnd(__FILE__, __LINE__);
    return buffer;
}

// Returns what a lane of this warp has put into a buffer.
static uint64_t value_of(int lane, int buffer) {
    return __atomic_load_n(&warps[current / 32].slot[buffer][lane], __ATOMIC_RELAXED);
}

static uint3 thread_index() { return {(unsigned)current, 0, 0}; }

static void interrupt(bool waits, int line) {
    if (waits) fail("a block waits for one that has not run", line);
}

static int run_block(uint3 index) {
    block_index = index;
    pthread_barrier_init(&barrier_of_block, nullptr, (unsigned)threads);
    for (int w = 0; w < threads / 32; w++) pthread_barrier_init(&warps[w].barrier, nullptr, 32);
    std::vector<std::thread> all;
    for (int i = 0; i < threads; i++)
        all.emplace_back([i] {
            current = i, generation = 0;
            body(body_argument);
        });
    for (std::thread& one : all) one.join();
    return 0;
}

}  // namespace emulator
