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

// Threads meet at two barriers by turns: what a thread that is ahead releases at the next one is then
// not acquired by a thread that is about to leave this one.
struct Meeting {
    pthread_barrier_t barriers[2];

    void prepare(int count) {
        for (auto& barrier : barriers) pthread_barrier_init(&barrier, nullptr, (unsigned)count);
    }
    void wait(uint32_t& turn) { pthread_barrier_wait(&barriers[turn++ & 1]); }
};
struct Warp {
    Meeting meeting;
    uint64_t slot[2][32];
};

static Warp warps[32];
static Meeting of_block;
static uint3 block_index;
static std::string skipped;  // "file:line" of a barrier that is passed without waiting
static thread_local int current;
static thread_local uint32_t turn_of_block, turn_of_warp;

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
    if (!is_skipped(file, line)) of_block.wait(turn_of_block);
}
static void barrier_of_warp(int line, const char* file = __builtin_FILE()) {
    if (!is_skipped(file, line)) warps[current / 32].meeting.wait(turn_of_warp);
}

// Meets the other lanes; returns which of the two buffers holds every lane's value.
static int meet(uint32_t mask, uint64_t value, int line) {
    if (mask != 0xffffffffu) fail("a warp collective leaves lanes out", line);
    Warp& warp = warps[current / 32];
    const int buffer = (int)(turn_of_warp & 1);
    __atomic_store_n(&warp.slot[buffer][current % 32], value, __ATOMIC_RELAXED);
    AnnotateIgnoreSyncBegin(__FILE__, __LINE__);
    warp.meeting.wait(turn_of_warp);
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
    of_block.prepare(threads);
    for (int w = 0; w < threads / 32; w++) warps[w].meeting.prepare(32);
    std::vector<std::thread> threads_of_host;
    for (int i = 0; i < threads; i++)
        threads_of_host.emplace_back([i] {
            current = i, turn_of_block = turn_of_warp = 0;
            body(body_argument);
        });
    for (std::thread& thread : threads_of_host) thread.join();
    return 0;
}

}  // namespace emulator
