// Counts the bytes that a process has allocated, on all of its threads: those alive, and the most so
// far. Loaded before the C library (LD_PRELOAD), whose functions it wraps, so that it sees what
// torch, its kernels and Gloo allocate alike. Nothing is sampled.
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <malloc.h>

extern "C" {
void* __libc_malloc(std::size_t);
void* __libc_calloc(std::size_t, std::size_t);
void* __libc_realloc(void*, std::size_t);
void* __libc_memalign(std::size_t, std::size_t);
void __libc_free(void*);
}

namespace {
std::atomic<long long> live{0}, most{0};

// Smaller blocks are of the interpreter, of libraries and of Gloo's connections, and not buckets.
constexpr std::size_t least = 32768;

long long size_of(void* address) {
    const std::size_t size = address == nullptr ? 0 : malloc_usable_size(address);
    return size < least ? 0 : static_cast<long long>(size);
}

void* counted(void* address) {
    const long long size = size_of(address);
    if (size == 0) return address;
    const long long now = live += size;
    long long seen = most.load();
    while (now > seen && !most.compare_exchange_weak(seen, now)) {
    }
    return address;
}

void forgotten(void* address) {
    if (const long long size = size_of(address)) live -= size;
}
}  // namespace

extern "C" {
long long live_bytes() { return live; }
long long most_live_bytes() { return most; }
void forget_most() { most = live.load(); }

void* malloc(std::size_t size) { return counted(__libc_malloc(size)); }
void* calloc(std::size_t count, std::size_t size) { return counted(__libc_calloc(count, size)); }
void* memalign(std::size_t unit, std::size_t size) { return counted(__libc_memalign(unit, size)); }
void* aligned_alloc(std::size_t unit, std::size_t size) { return memalign(unit, size); }

int posix_memalign(void** address, std::size_t unit, std::size_t size) {
    *address = memalign(unit, size);
    return *address == nullptr ? ENOMEM : 0;
}

void* realloc(void* address, std::size_t size) {
    forgotten(address);
    void* moved = __libc_realloc(address, size);
    if (moved == nullptr && size != 0) counted(address);  // it stays where it was
    return counted(moved);
}

void free(void* address) {
    forgotten(address);
    __libc_free(address);
}
}
