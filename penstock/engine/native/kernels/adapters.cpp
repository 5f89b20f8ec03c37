// What adapters add to the sums of a linear, scale * (x A^T) B^T, before anything is rounded. Tokens are sorted by
// adapter, so that each adapter is read once for all of its tokens; those without one are not looked at.
#include "adapters.h"

#include "pool.h"
#include "table.h"

#include <string.h>

namespace penstock {
namespace {

constexpr int64_t kParts = 3;         // of a fused linear: queries, keys, values
constexpr int64_t kShrinkRanks = 8;   // ranks to a chunk of work
constexpr int64_t kExpandGroups = 32; // groups of 16 outputs to a chunk of work
constexpr int64_t kChunkTokens = 64;

Arena order, sums;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }

const PsAdapterLinear *linear_of(const PsAdapterLayer *layer, AdaptedLinear which) {
  const PsAdapterLinear *all[] = {&layer->qkv, &layer->o, &layer->gate_up, &layer->down};
  return all[which];
}

// What the chunks of one linear and block share.
struct Deltas {
  const AdapterSegment *segments;
  int64_t num_segments, layer;
  AdaptedLinear which;
  const int32_t *tokens;
  const char *x;
  int64_t row_bytes, ld_inner, ld_delta;
  int32_t type;
  float *inner, *delta;  // [adapted tokens of the block][ld]

  const PsAdapterLinear *of(const AdapterSegment &segment) const { return linear_of(segment.layers + layer, which); }

  // Work is numbered by segment, part, tokens and a part of the ranks or outputs; numbers that nothing has are skipped.
  template <class F>
  void spread(int64_t tokens_most, int64_t slices, F &&work) const {
    int64_t per_part = ceil_div(tokens_most, kChunkTokens) * slices;
    auto chunk = [&](int64_t at, int) {
      int64_t slice = at % slices, from = at / slices % (per_part / slices) * kChunkTokens, part = at / per_part % kParts;
      const AdapterSegment &segment = segments[at / per_part / kParts];
      const PsAdapterLinear *linear = of(segment);
      if (part >= linear->num_parts || from >= segment.count) return;
      int64_t rank_first = 0;
      for (int64_t i = 0; i < part; i++) rank_first += linear->parts[i].rank;
      AdapterPiece piece = {linear->parts + part, x, row_bytes, tokens + segment.first + from, type,
                            min64(kChunkTokens, segment.count - from),
                            inner + (segment.first + from) * ld_inner + rank_first, ld_inner,
                            delta + (segment.first + from) * ld_delta, ld_delta};
      work(piece, slice);
    };
    parallel(num_segments * kParts * per_part, chunk);
  }

  void compute() const {
    int64_t most = 0, ranks = 0, groups = 0;
    for (int64_t i = 0; i < num_segments; i++) {
      const PsAdapterLinear *linear = of(segments[i]);
      if (segments[i].count > most) most = segments[i].count;
      for (int64_t p = 0; p < linear->num_parts; p++) {
        if (linear->parts[p].rank > ranks) ranks = linear->parts[p].rank;
        if (linear->parts[p].groups > groups) groups = linear->parts[p].groups;
      }
    }
    auto shrink = [](const AdapterPiece &piece, int64_t slice) {
      int64_t first = slice * kShrinkRanks, last = min64(piece.part->rank, first + kShrinkRanks);
      if (first < last) table->adapter_shrink(&piece, first, last);
    };
    auto expand = [](const AdapterPiece &piece, int64_t slice) {
      int64_t first = slice * kExpandGroups, last = min64(piece.part->groups, first + kExpandGroups);
      if (first < last) table->adapter_expand(&piece, first, last);
    };
    spread(most, ceil_div(ranks, kShrinkRanks), shrink);
    spread(most, ceil_div(groups, kExpandGroups), expand);
  }
};

}  // namespace

bool StepAdapters::prepare(const PsStep *step) {
  step_ = nullptr;
  if (!step->adapters) return true;
  int64_t blocks = ceil_div(step->t, kRowsMax), segments_most = step->rows + blocks;
  int64_t tokens_bytes = ceil_div(step->t * 4, 64) * 64, starts_bytes = ceil_div((blocks + 1) * 8, 64) * 64;
  if (!order.reserve(tokens_bytes + starts_bytes + segments_most * (int64_t)sizeof(AdapterSegment))) return false;
  tokens_ = (int32_t *)order.at, starts_ = (int64_t *)(order.at + tokens_bytes);
  segments_ = (AdapterSegment *)(order.at + tokens_bytes + starts_bytes);
  step_ = step, starts_[0] = 0;
  for (int64_t block = 0; block < blocks; block++)
    starts_[block + 1] = starts_[block] + fill(block, segments_ + starts_[block]);
  return true;
}

// Rows of the block with the same adapter become one segment, in the order in which adapters are first met.
int64_t StepAdapters::fill(int64_t block, AdapterSegment *out) const {
  int64_t low = block * kRowsMax, high = min64(step_->t, low + kRowsMax), found = 0, next = low;
  auto each_row = [&](auto &&work) {
    for (int64_t row = 0; row < step_->rows; row++) {
      int64_t first = step_->query_starts[row], last = step_->query_starts[row + 1];
      if (first < low) first = low;
      if (last > high) last = high;
      if (first < last && step_->adapters[row]) work(step_->adapters[row], first, last);
    }
  };
  each_row([&](const PsAdapterLayer *layers, int64_t first, int64_t last) {
    int64_t i = 0;
    while (i < found && out[i].layers != layers) i++;
    if (i == found) out[found++] = {layers, 0, 0};
    out[i].count += last - first;
  });
  for (int64_t i = 0; i < found; i++) out[i].first = next, next += out[i].count, out[i].count = 0;
  each_row([&](const PsAdapterLayer *layers, int64_t first, int64_t last) {
    int64_t i = 0;
    while (out[i].layers != layers) i++;
    for (int64_t token = first; token < last; token++)
      tokens_[out[i].first + out[i].count++] = (int32_t)(token - low);
  });
  return found;
}

int32_t StepAdapters::linear(const PsLinear *job, int64_t layer, AdaptedLinear which) const {
  if (!step_) return penstock::linear(job);
  const PsWeight *w = job->weight;
  int64_t x_size = job->x_type == PS_BF16 ? 2 : 4, y_size = job->y_type == PS_BF16 ? 2 : 4, width = w->panels * 32;
  int64_t full = (w->n + 15) / 16 * (w->epilogue == PS_PLAIN ? 1 : 2);  // groups of outputs before a gate
  int64_t inner_bytes = kRowsMax * kParts * PS_ADAPTER_RANK_MAX * 4, added_bytes = kRowsMax * 8;
  for (int64_t block = 0; block * kRowsMax < job->m; block++) {
    int64_t low = block * kRowsMax, rows = min64(kRowsMax, job->m - low), first = starts_[block],
            count = starts_[block + 1] - first;
    PsLinear part = *job;
    part.m = rows;
    part.x = (const char *)job->x + low * job->ldx * x_size;
    part.y = (char *)job->y + low * job->ldy * y_size;
    part.residual = job->residual ? (const char *)job->residual + low * job->ldr * y_size : nullptr;
    if (count) {
      const AdapterSegment *segments = segments_ + first, *end = segments + count;
      int64_t adapted = end[-1].first + end[-1].count - low;
      if (!sums.reserve(inner_bytes + added_bytes + adapted * width * 4)) return -1;
      // `first` of a segment counts from the step's first token; buffers begin with the block's.
      float *inner = (float *)sums.at - low * kParts * PS_ADAPTER_RANK_MAX,
            *delta = (float *)(sums.at + inner_bytes + added_bytes) - low * width;
      const float **added = (const float **)(sums.at + inner_bytes);
      memset(added, 0, (size_t)added_bytes);
      for (const AdapterSegment *s = segments; s < end; s++) {
        const PsAdapterLinear *linear = linear_of(s->layers + layer, which);
        if (!linear->num_parts) continue;
        int64_t covered = 0;
        for (int64_t p = 0; p < linear->num_parts; p++) covered += linear->parts[p].groups;
        if (covered < full) memset(delta + s->first * width, 0, (size_t)(s->count * width * 4));
        for (int64_t i = s->first; i < s->first + s->count; i++) added[tokens_[i]] = delta + i * width;
      }
      Deltas job_deltas = {segments, count, layer, which, tokens_, (const char *)part.x, job->ldx * x_size,
                           kParts * PS_ADAPTER_RANK_MAX, width, job->x_type, inner, delta};
      job_deltas.compute();
      part.added = added;
    }
    if (penstock::linear(&part)) return -1;
  }
  return 0;
}

}  // namespace penstock
