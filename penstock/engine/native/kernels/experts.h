// A mixture of experts in place of a feed-forward layer (Shazeer et al. 2017, arXiv 1701.06538).
#pragma once
#include "stopwatch.h"

namespace penstock {

struct ExpertsJob {
  const PsWeight *router;  // [experts, hidden]
  const PsMlp *experts;    // as many as the router has outputs, all of one shape
  const void *x;           // [t, hidden]
  void *y;                 // [t, hidden]
  void *inner;             // [t, intermediate], scratch
  void *scratch;           // see experts_scratch_bytes
  int64_t t;
  int32_t type, top_k;
  bool normalise;  // the chosen experts' shares are scaled to sum to one
  bool add;        // y += the result, rounded once, instead of y = it
};

int64_t experts_scratch_bytes(const PsWeight *router, int64_t top_k, int64_t t, int64_t element);

// y is the sum of share * expert(x) over each token's `top_k` most probable experts, the first of equal ones. A token's
// experts are added in the order of their numbers, in float: its bits do not depend on who else chose them.
int32_t experts(const ExpertsJob *job, Stopwatch *watch);

}  // namespace penstock
