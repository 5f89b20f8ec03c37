// Threads spin briefly for the next job, then sleep on a futex: an idle process costs nothing.
//
// A job's chunks are claimed by compare-and-swap on one word that holds the job's number and the next chunk, so
// a worker that arrives late (descheduled on a busy machine) finds nothing to claim instead of holding up the
// others: the caller never waits for a thread that has not started work.
#include "pool.h"

#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>

namespace penstock {
namespace {

constexpr int kMaxThreads = 256;
constexpr uint64_t kClosed = 0xffffffffu;

struct Pool {
  pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
  int wanted = 1;  // threads, the caller included
  int started = 1;
  bool pin = false;
  std::atomic<int64_t> spin_ns{50'000};
  std::atomic<int> active{1};  // workers with a higher index sit out
  std::atomic<ChunkFn> fn{nullptr};
  std::atomic<void *> ctx{nullptr};
  std::atomic<int64_t> num_chunks{0};
  alignas(64) std::atomic<uint64_t> state{kClosed};  // job number << 32 | next chunk
  alignas(64) std::atomic<int64_t> done{0};
  alignas(64) std::atomic<uint32_t> bell{0};  // the job number again, as a futex
  std::atomic<int> sleepers{0};
};
Pool pool;

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1'000'000'000ll + t.tv_nsec;
}

void futex(std::atomic<uint32_t> *word, int op, uint32_t value) {
  syscall(SYS_futex, (uint32_t *)word, op, value, nullptr, nullptr, 0);
}

void claim_chunks(int worker) {
  for (;;) {
    uint64_t seen = pool.state.load(std::memory_order_acquire);
    uint64_t next = seen & 0xffffffffu;
    ChunkFn fn = pool.fn.load(std::memory_order_relaxed);
    void *ctx = pool.ctx.load(std::memory_order_relaxed);
    if (next == kClosed || (int64_t)next >= pool.num_chunks.load(std::memory_order_relaxed)) return;
    // Succeeds only if the job is still the one whose fields were just read.
    if (!pool.state.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel)) continue;
    fn(ctx, (int64_t)next, worker);
    pool.done.fetch_add(1, std::memory_order_release);
  }
}

bool spin_for_job(uint32_t last) {
  int64_t until = 0;
  for (int round = 0;; round++) {
    if (pool.bell.load(std::memory_order_acquire) != last) return true;
    __builtin_ia32_pause();
    if (round % 64) continue;
    int64_t now = now_ns();
    if (!until) until = now + pool.spin_ns.load(std::memory_order_relaxed);
    if (now >= until) return false;
  }
}

void *worker_main(void *arg) {
  int worker = (int)(intptr_t)arg;
  uint32_t last = pool.bell.load();
  for (;;) {
    if (worker >= pool.active.load() || !spin_for_job(last)) {
      pool.sleepers.fetch_add(1);
      futex(&pool.bell, FUTEX_WAIT_PRIVATE, last);
      pool.sleepers.fetch_sub(1);
    }
    last = pool.bell.load(std::memory_order_acquire);
    if (worker < pool.active.load()) claim_chunks(worker);
  }
  return nullptr;
}

void pin_to_cpu(pthread_t thread, int index) {
  cpu_set_t allowed, one;
  if (sched_getaffinity(0, sizeof allowed, &allowed)) return;
  index %= CPU_COUNT(&allowed);
  for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
    if (!CPU_ISSET(cpu, &allowed) || index-- > 0) continue;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    pthread_setaffinity_np(thread, sizeof one, &one);
    return;
  }
}

void start_workers() {
  for (; pool.started < pool.wanted; pool.started++) {
    pthread_attr_t attr;
    pthread_t thread;
    pthread_attr_init(&attr);
    pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attr, 1 << 20);
    int failed = pthread_create(&thread, &attr, worker_main, (void *)(intptr_t)pool.started);
    pthread_attr_destroy(&attr);
    if (failed) break;  // Fewer threads give the same bits, later.
    if (pool.pin) pin_to_cpu(thread, pool.started);
  }
  pool.active.store(pool.wanted < pool.started ? pool.wanted : pool.started);
}

// A forked child has none of its parent's threads; it starts its own at the first call.
void after_fork() {
  pthread_mutex_init(&pool.lock, nullptr);
  pool.started = 1;
  pool.active.store(1);
  pool.sleepers.store(0);
  pool.state.store((pool.state.load() & ~kClosed) | kClosed);
}

__attribute__((constructor)) void watch_forks() { pthread_atfork(nullptr, nullptr, after_fork); }

}  // namespace

int num_threads() { return pool.wanted; }

void set_threads(int num_threads, int spin_us, bool pin) {
  PoolLock held;
  pool.wanted = num_threads < 1 ? 1 : num_threads > kMaxThreads ? kMaxThreads : num_threads;
  pool.spin_ns.store((int64_t)spin_us * 1000);
  pool.pin = pin;
  if (pool.active.load() > pool.wanted) pool.active.store(pool.wanted);
}

PoolLock::PoolLock() { pthread_mutex_lock(&pool.lock); }
PoolLock::~PoolLock() { pthread_mutex_unlock(&pool.lock); }

void run_chunks(int64_t num_chunks, ChunkFn fn, void *ctx) {
  if (num_chunks <= 1 || pool.wanted == 1) {
    for (int64_t chunk = 0; chunk < num_chunks; chunk++) fn(ctx, chunk, 0);
    return;
  }
  if (pool.active.load(std::memory_order_relaxed) != pool.wanted) start_workers();
  uint64_t job = ((pool.state.load() >> 32) + 1) & 0xffffffffu;
  pool.state.store(job << 32 | kClosed);  // Late workers of the last job stop claiming before its fields change.
  pool.fn.store(fn);
  pool.ctx.store(ctx);
  pool.num_chunks.store(num_chunks);
  pool.done.store(0);
  pool.state.store(job << 32);
  pool.bell.store((uint32_t)job);
  if (pool.sleepers.load() > 0) futex(&pool.bell, FUTEX_WAKE_PRIVATE, kMaxThreads);
  claim_chunks(0);
  for (int round = 0; pool.done.load(std::memory_order_acquire) < num_chunks; round++) {
    if (round < 2000)
      __builtin_ia32_pause();
    else
      sched_yield();  // The thread that holds the last chunk may need this core.
  }
}

}  // namespace penstock
