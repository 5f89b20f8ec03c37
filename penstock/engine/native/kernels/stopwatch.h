// Where a step's time goes.
#pragma once
#include "penstock_native.h"

#include <time.h>

namespace penstock {

// Adds the time since the last call to a part's, where that is wanted.
struct Stopwatch {
  int64_t *part_ns, last;

  explicit Stopwatch(int64_t *part_ns) : part_ns(part_ns), last(part_ns ? now() : 0) {}
  static int64_t now() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1'000'000'000ll + t.tv_nsec;
  }
  int32_t lap(PsPart part, int32_t result) {
    if (!part_ns) return result;
    int64_t at = now();
    part_ns[part] += at - last, last = at;
    return result;
  }
};

}  // namespace penstock
