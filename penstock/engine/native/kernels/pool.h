// The kernels' own threads: a fork-join pool that hands out numbered chunks.
#pragma once
#include <stdint.h>

namespace penstock {

// Runs fn(ctx, chunk, worker) for every chunk in [0, num_chunks), on the caller (worker 0) and the pool.
// Which thread gets a chunk is a race; nothing that a chunk computes may depend on it.
using ChunkFn = void (*)(void *ctx, int64_t chunk, int worker);

int num_threads();
void set_threads(int num_threads, int spin_us, bool pin);

// Holds the pool for one call from outside; calls from other threads wait their turn.
struct PoolLock {
  PoolLock();
  ~PoolLock();
};

// Caller holds a PoolLock.
void run_chunks(int64_t num_chunks, ChunkFn fn, void *ctx);

template <class F>
void parallel(int64_t num_chunks, F &fn) {
  run_chunks(num_chunks, [](void *ctx, int64_t chunk, int worker) { (*(F *)ctx)(chunk, worker); }, &fn);
}

}  // namespace penstock
