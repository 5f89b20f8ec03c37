// What adapters add to the sums of a linear, scale * (x A^T) B^T, before anything is rounded. Tokens are sorted by
// adapter, so that each adapter is read once for all of its tokens; those without one are not looked at. A linear's own
// threads do it: x A^T while its inputs are packed, and each thread the outputs of the panels that it computes.
#include "adapters.h"

#include "pool.h"
#include "table.h"

#include <string.h>

namespace penstock {
namespace {

constexpr int64_t kParts = 3;         // of a fused linear: queries, keys, values
constexpr int64_t kShrinkRanks = 8;   // ranks to a chunk of work
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
  int64_t parts, slices, most;  // the most that any segment has: parts, chunks of ranks, chunks of tokens

  const PsAdapterLinear *of(const AdapterSegment &segment) const { return linear_of(segment.layers + layer, which); }

  void measure() {
    int64_t ranks = 0, count = 0;
    parts = 0;
    for (int64_t i = 0; i < num_segments; i++) {
      const PsAdapterLinear *linear = of(segments[i]);
      if (linear->num_parts > parts) parts = linear->num_parts;
      if (segments[i].count > count) count = segments[i].count;
      for (int64_t p = 0; p < linear->num_parts; p++)
        if (linear->parts[p].rank > ranks) ranks = linear->parts[p].rank;
    }
    slices = ceil_div(ranks, kShrinkRanks), most = ceil_div(count, kChunkTokens);
  }

  AdapterPiece piece_of(const AdapterSegment &segment, int64_t part, int64_t from, int64_t count) const {
    const PsAdapterLinear *linear = of(segment);
    int64_t rank_first = 0;
    for (int64_t i = 0; i < part; i++) rank_first += linear->parts[i].rank;
    return {linear->parts + part, x, row_bytes, tokens + segment.first + from, type, count,
            inner + (segment.first + from) * ld_inner + rank_first, ld_inner,
            delta + (segment.first + from) * ld_delta, ld_delta};
  }

  int64_t num_chunks() const { return num_segments * parts * most * slices; }

  // Chunks are numbered by segment, part, tokens and ranks; numbers that nothing has are skipped.
  void shrink(int64_t chunk) const {
    int64_t first = chunk % slices * kShrinkRanks, from = chunk / slices % most * kChunkTokens,
            part = chunk / slices / most % parts;
    const AdapterSegment &segment = segments[chunk / slices / most / parts];
    const PsAdapterLinear *linear = of(segment);
    if (part >= linear->num_parts || from >= segment.count) return;
    AdapterPiece piece = piece_of(segment, part, from, min64(kChunkTokens, segment.count - from));
    int64_t last = min64(piece.part->rank, first + kShrinkRanks);
    if (first < last) table->adapter_shrink(&piece, first, last);
  }

  // The groups of 16 outputs that lie in these panels of 32.
  void expand(int64_t panel_first, int64_t panel_last) const {
    for (int64_t i = 0; i < num_segments; i++) {
      const PsAdapterLinear *linear = of(segments[i]);
      for (int64_t p = 0; p < linear->num_parts; p++) {
        const PsAdapterPart *part = linear->parts + p;
        auto group_at = [part](int64_t place) {  // The first of its groups that is not before this place.
          int64_t behind = place - part->first;
          return behind <= 0 ? 0 : min64(part->groups, ceil_div(behind, part->stride));
        };
        int64_t first = group_at(panel_first * 2), last = group_at(panel_last * 2);
        if (first >= last) continue;
        AdapterPiece piece = piece_of(segments[i], p, 0, segments[i].count);
        table->adapter_expand(&piece, first, last);
      }
    }
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
      Deltas deltas = {segments, count, layer, which, tokens_, (const char *)part.x, job->ldx * x_size,
                       kParts * PS_ADAPTER_RANK_MAX, width, job->x_type, inner, delta, 0, 0, 0};
      deltas.measure();
      LinearSide side = {&deltas, deltas.num_chunks(),
                         [](const void *ctx, int64_t chunk) { ((const Deltas *)ctx)->shrink(chunk); },
                         [](const void *ctx, int64_t first, int64_t last) { ((const Deltas *)ctx)->expand(first, last); }};
      part.added = added;
      if (penstock::linear(&part, &side)) return -1;
    } else if (penstock::linear(&part)) {
      return -1;
    }
  }
  return 0;
}

}  // namespace penstock
