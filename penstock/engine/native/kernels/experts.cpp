// Tokens are sorted by expert: each expert's weights are read once for all that chose it, and those that nobody chose not
// at all.
#include "experts.h"

#include "ops.h"
#include "pool.h"

#include <math.h>
#include <string.h>

namespace penstock {
namespace {

constexpr int64_t kChunkElements = 16 << 10;  // elementwise work worth handing to a thread

float widen(uint16_t x) {
  uint32_t bits = (uint32_t)x << 16;
  float wide;
  memcpy(&wide, &bits, 4);
  return wide;
}
float widen(float x) { return x; }

// Round to nearest even; NaN stays one.
void narrow(float x, uint16_t *out) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  *out = x != x ? (uint16_t)0x7fc0 : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
void narrow(float x, float *out) { *out = x; }

template <class F>
void for_rows(int64_t rows, int64_t elements_per_row, F &&work) {
  int64_t per_chunk = kChunkElements / (elements_per_row < 1 ? 1 : elements_per_row) + 1;
  auto chunk = [&](int64_t at, int) {
    int64_t last = (at + 1) * per_chunk;
    for (int64_t row = at * per_chunk; row < (last < rows ? last : rows); row++) work(row);
  };
  parallel((rows + per_chunk - 1) / per_chunk, chunk);
}

// What a call computes in. A pick is one token's choice of one expert; picks are sorted by expert, then token.
struct Scratch {
  float *total, *given;  // [t, hidden]: sums; what one expert gives
  char *rows;            // [t, hidden]: one expert's inputs
  char *logits;          // [t, experts]
  float *probabilities;  // [t, experts]
  float *shares;         // [t, top_k]
  int32_t *chosen;       // [t, top_k]
  float *pick_shares;    // [t * top_k]
  int32_t *pick_tokens;  // [t * top_k]
  int64_t *starts;       // [experts + 1]: each one's first pick
  int64_t bytes;

  Scratch(char *at, int64_t hidden, int64_t num_experts, int64_t top_k, int64_t t, int64_t element) {
    char *begin = at;
    auto take = [&at](int64_t bytes) {
      char *taken = at;
      at += (bytes + 63) / 64 * 64;
      return taken;
    };
    total = (float *)take(t * hidden * 4), given = (float *)take(t * hidden * 4), rows = take(t * hidden * element);
    logits = take(t * num_experts * element), probabilities = (float *)take(t * num_experts * 4);
    shares = (float *)take(t * top_k * 4), chosen = (int32_t *)take(t * top_k * 4);
    pick_shares = (float *)take(t * top_k * 4), pick_tokens = (int32_t *)take(t * top_k * 4);
    starts = (int64_t *)take((num_experts + 1) * 8);
    bytes = at - begin;
  }
};

// Softmax of one token's logits, then its experts and their shares.
template <class T>
void choose(const ExpertsJob *job, const T *logits, float *probabilities, int32_t *chosen, float *shares) {
  int64_t count = job->router->n;
  float top = -INFINITY, sum = 0, kept = 0;
  for (int64_t e = 0; e < count; e++) top = widen(logits[e]) > top ? widen(logits[e]) : top;
  for (int64_t e = 0; e < count; e++) sum += probabilities[e] = expf(widen(logits[e]) - top);
  for (int64_t e = 0; e < count; e++) probabilities[e] /= sum;
  for (int64_t k = 0; k < job->top_k; k++) {
    int64_t best = 0;
    while (probabilities[best] == -1) best++;  // It was chosen before.
    for (int64_t e = best + 1; e < count; e++)  // No comparison with NaN is true: such a token gets the first ones.
      if (probabilities[e] > probabilities[best]) best = e;
    chosen[k] = (int32_t)best, shares[k] = probabilities[best], kept += probabilities[best];
    probabilities[best] = -1;
  }
  for (int64_t k = 0; job->normalise && k < job->top_k; k++) shares[k] /= kept;
}

void sort_picks(const ExpertsJob *job, const Scratch &at) {
  int64_t count = job->router->n, picks = job->t * job->top_k;
  memset(at.starts, 0, (size_t)(count + 1) * 8);
  for (int64_t i = 0; i < picks; i++) at.starts[at.chosen[i] + 1]++;
  for (int64_t e = 0; e < count; e++) at.starts[e + 1] += at.starts[e];
  for (int64_t i = 0; i < picks; i++) {
    int64_t pick = at.starts[at.chosen[i]]++;
    at.pick_tokens[pick] = (int32_t)(i / job->top_k), at.pick_shares[pick] = at.shares[i];
  }
  memmove(at.starts + 1, at.starts, (size_t)count * 8);  // Each start had moved on to the next one's.
  at.starts[0] = 0;
}

int32_t multiply(const PsWeight *w, const void *x, int64_t m, int32_t x_type, void *y, int32_t y_type) {
  PsLinear job = {w, x, y, nullptr, m, w->k, w->n, 0, x_type, y_type};
  return linear(&job);
}

// One expert on those that chose it, added to their sums.
int32_t expert(const ExpertsJob *job, const Scratch &at, int64_t e, Stopwatch *watch) {
  int64_t first = at.starts[e], m = at.starts[e + 1] - first, hidden = job->router->k,
          row_bytes = hidden * (job->type == PS_BF16 ? 2 : 4);
  const int32_t *tokens = at.pick_tokens + first;
  if (!m) return 0;
  const void *x = job->x;
  if (m < job->t) {  // Else all chose it, in their order.
    for_rows(m, hidden, [&](int64_t i) {
      memcpy(at.rows + i * row_bytes, (const char *)job->x + tokens[i] * row_bytes, (size_t)row_bytes);
    });
    x = at.rows;
  }
  watch->lap(PS_PART_REST, 0);
  const PsMlp *mlp = job->experts + e;
  int32_t failed = watch->lap(PS_PART_GATE_UP, multiply(&mlp->gate_up, x, m, job->type, job->inner, job->type));
  failed |= watch->lap(PS_PART_DOWN, multiply(&mlp->down, job->inner, m, job->type, at.given, PS_F32));
  for_rows(m, hidden, [&](int64_t i) {
    float share = at.pick_shares[first + i], *total = at.total + tokens[i] * hidden;
    const float *given = at.given + i * hidden;
    for (int64_t c = 0; c < hidden; c++) total[c] += share * given[c];
  });
  return watch->lap(PS_PART_REST, failed);
}

template <class T>
void finish(const ExpertsJob *job, const Scratch &at) {
  int64_t hidden = job->router->k;
  for_rows(job->t, hidden, [&](int64_t row) {
    const float *total = at.total + row * hidden;
    T *y = (T *)job->y + row * hidden;
    if (job->add)
      for (int64_t c = 0; c < hidden; c++) narrow(widen(y[c]) + total[c], y + c);
    else
      for (int64_t c = 0; c < hidden; c++) narrow(total[c], y + c);
  });
}

template <class T>
int32_t run(const ExpertsJob *job, Stopwatch *watch) {
  int64_t count = job->router->n, hidden = job->router->k;
  Scratch at((char *)job->scratch, hidden, count, job->top_k, job->t, sizeof(T));
  // Any number of rows may come to an expert in a later step: what the most of them take is asked for now.
  if (!reserve_linear(&job->experts->gate_up, job->t) || !reserve_linear(&job->experts->down, job->t)) return -1;
  int32_t failed = multiply(job->router, job->x, job->t, job->type, at.logits, job->type);
  for_rows(job->t, count * job->top_k, [&](int64_t row) {
    choose(job, (const T *)at.logits + row * count, at.probabilities + row * count, at.chosen + row * job->top_k,
           at.shares + row * job->top_k);
  });
  sort_picks(job, at);
  memset(at.total, 0, (size_t)(job->t * hidden) * 4);
  for (int64_t e = 0; e < count; e++) failed |= expert(job, at, e, watch);
  finish<T>(job, at);
  return watch->lap(PS_PART_REST, failed);
}

}  // namespace

int64_t experts_scratch_bytes(const PsWeight *router, int64_t top_k, int64_t t, int64_t element) {
  return Scratch(nullptr, router->k, router->n, top_k, t, element).bytes;
}

int32_t experts(const ExpertsJob *job, Stopwatch *watch) {
  return job->type == PS_BF16 ? run<uint16_t>(job, watch) : run<float>(job, watch);
}

}  // namespace penstock
