// Lets blocks of one launch wait for one another, however many of them a GPU holds at once.
//
// A block takes its tasks by tickets, which an atomic counter gives out in order, and a task waits only
// for tasks of smaller tickets. The task of the smallest ticket that is not done therefore waits for
// nothing, and its block runs, since it has taken the ticket: some block always goes on. Numbers of
// blocks would not do, as blocks may start in any order.
#pragma once
#include "cuda.h"

constexpr int kWarps = 8;  // of a block, as cuda.py launches it

INLINE u32 seen(const u32* number) { return *(const volatile u32*)number; }
INLINE u64 seen(const u64* number) { return *(const volatile u64*)number; }

// Returns the next ticket; all threads of a block have ended the task before.
INLINE u32 next_ticket(u32* counter) {
    __shared__ u32 ticket;
    __syncthreads();
    if (threadIdx.x == 0) ticket = atomicAdd(counter, 1u);
    __syncthreads();
    return ticket;
}

// Waits until `number`, which another block announces, is at least `least`; what that block wrote before
// is seen then.
INLINE void wait_until(const u32* number, u32 least) {
    if (threadIdx.x == 0) {
        while (seen(number) < least) __nanosleep(32);
        __threadfence();
    }
    __syncthreads();
}
INLINE void announce(u32* number, u32 value) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) *(volatile u32*)number = value;
}

// Returns whether, with the `own` tasks that this block has ended, all `count` have been; it then sees what
// the other blocks wrote.
INLINE bool is_last(u32* done, u32 count, u32 own = 1) {
    __shared__ u32 last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(done, own) == count - own;
    __syncthreads();
    if (last) __threadfence();
    return last;
}

// Writes whether no warp of the launch calls this with `bad`; all threads call it once. `counters` are two
// zeros, and are zeros again afterwards.
INLINE void write_verdict(bool bad, u32* counters, u8* good) {
    if (bad && lane() == 0) atomicAdd(counters + 1, 1u);
    if (!is_last(counters, gridDim.x) || threadIdx.x) return;
    *good = seen(counters + 1) == 0;
    counters[0] = counters[1] = 0;
}

// A sum of up to 62 bits: of this part alone, or through this part from the first one on.
constexpr u64 kOwn = 1ull << 62, kThrough = 1ull << 63, kSum = kOwn - 1;

// Adds up the sums of all parts before this one (decoupled look-back: Merrill and Garland, 2016). One
// warp calls it. A lane waits for a part of a smaller ticket. The sum is one word, so that nothing has
// to be ordered with it.
INLINE u64 sum_before(u64* sums, i64 part, u64 own) {
    if (lane() == 0) *(volatile u64*)(sums + part) = (part ? kOwn : kThrough) | own;
    u64 before = 0;
    for (i64 nearest = part - 1; nearest >= 0; nearest -= kLanes) {
        const i64 at = nearest - lane();
        u64 sum = kThrough;  // zero, for what lies before the first part
        if (at >= 0)
            while ((sum = seen(sums + at)) < kOwn) __nanosleep(32);
        const u32 through = __ballot_sync(kAllLanes, sum >= kThrough);
        u64 some = !through || lane() < __ffs(through) ? sum & kSum : 0;
        for (int half = kLanes / 2; half; half /= 2) some += __shfl_xor_sync(kAllLanes, some, half);
        before += some;
        if (through) break;
    }
    if (lane() == 0 && part) *(volatile u64*)(sums + part) = kThrough | (before + own);
    return before;
}

// Returns the sum of the counts of all warps before this one, in the order of parts; all threads of the
// block call it. `end` receives the sum through this part.
INLINE u64 counts_before(u64* sums, i64 part, u64 count, u64& end) {
    __shared__ u64 counts[kWarps], starts[kWarps + 1];
    const int w = (int)threadIdx.x / kLanes;
    if (lane() == 0) counts[w] = count;
    __syncthreads();
    if (w == 0) {
        u64 own = 0;
        for (int i = 0; i < kWarps; ++i) own += counts[i];
        u64 start = sum_before(sums, part, own);
        for (int i = 0; i < kWarps && i < lane(); ++i) start += counts[i];
        if (lane() <= kWarps) starts[lane()] = start;
    }
    __syncthreads();
    end = starts[kWarps];
    return starts[w];
}
