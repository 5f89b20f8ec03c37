// Pieces of a job that must have ended before others of it go on.
#pragma once
#include <sched.h>
#include <stdint.h>

#include <atomic>

namespace penstock {

struct Latch {
  std::atomic<int64_t> left;
  void arrive() { left.fetch_sub(1, std::memory_order_release); }
  void wait() const {
    for (int round = 0; left.load(std::memory_order_acquire) > 0; round++) {
      if (round < 2000)
        __builtin_ia32_pause();
      else
        sched_yield();
    }
  }
};

}  // namespace penstock
