// What adapters add to the sums of a linear, scale * (x A^T) B^T, before anything is rounded. Tokens are sorted by
// adapter, so that each A is read once for all of its tokens; those without one are not looked at. A linear's own threads
// do it: x A^T while its inputs are packed, and the products with B^T where the sums of a panel end (adapter_rows.h).
#include "adapters.h"

#include "pool.h"
#include "table.h"

#include <string.h>

namespace penstock {
namespace {

constexpr int64_t kShrinkPanels = 3;  // of ranks, to a chunk of work
constexpr int64_t kShrinkTokens = 4;
constexpr int64_t kAheadEach = kAdapterParts + 1;
constexpr int64_t kRowsBytes = kRowsMax * 4;

Arena order, sums;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }

const PsAdapterLinear *linear_of(const PsAdapterLayer *layer, AdaptedLinear which) {
  const PsAdapterLinear *all[] = {&layer->qkv, &layer->o, &layer->gate_up, &layer->down};
  return all[which];
}

// What the chunks of one linear and block share.
struct Additions {
  const AdapterSegment *segments;
  int64_t num_segments, layer;
  AdaptedLinear which;
  const int32_t *tokens;
  const char *x;
  int64_t row_bytes;
  int32_t type;
  const int32_t *adapters, *places;  // [rows of the block], see LinearAdded
  char *inner;            // [tokens of the block that have adapters][kAdapterRanks] of `type`
  AddedHalf *halves;      // [workers][segments][panels_most][2]
  int64_t panels_most;    // to a chunk of work
  const PsAdapterLinear *(*next)(const PsAdapterLayer *layers, int64_t layer);  // the linear after this one
  LinearAhead *ahead;     // [workers][kAheadEach * segments]
  int64_t panels, workers;
  int64_t slices, most;  // the most that any segment has: chunks of ranks, chunks of tokens

  const PsAdapterLinear *of(const AdapterSegment &segment) const { return linear_of(segment.layers + layer, which); }

  void measure() {
    int64_t panels = 0, count = 0;
    for (int64_t i = 0; i < num_segments; i++) {
      const PsAdapterLinear *linear = of(segments[i]);
      if (linear->panels > panels) panels = linear->panels;
      if (segments[i].count > count) count = segments[i].count;
    }
    slices = ceil_div(panels, kShrinkPanels), most = ceil_div(count, kShrinkTokens);
  }

  int64_t size() const { return type == PS_BF16 ? 2 : 4; }
  int64_t num_chunks() const { return num_segments * most * slices; }

  // Chunks are numbered by segment, tokens and ranks; numbers that nothing has are skipped.
  void shrink(int64_t chunk) const {
    int64_t first = chunk % slices * kShrinkPanels, from = chunk / slices % most * kShrinkTokens;
    const AdapterSegment &segment = segments[chunk / slices / most];
    int64_t last = min64(of(segment)->panels, first + kShrinkPanels);
    if (first >= last || from >= segment.count) return;
    int64_t at = segment.first + from;
    AdapterPiece piece = {of(segment), x, row_bytes, tokens + at, type, min64(kShrinkTokens, segment.count - from),
                          inner + (at - segments->first) * kAdapterRanks * size()};
    table->adapter_shrink(&piece, first, last);
  }

  // The groups of 16 outputs of a part that lie in panels of 32.
  struct Groups {
    int64_t first, last;
    Groups(const PsAdapterPart *part, int64_t panel_first, int64_t panel_last)
        : first(at(part, panel_first * 2)), last(at(part, panel_last * 2)) {}
    static int64_t at(const PsAdapterPart *part, int64_t place) {  // The first that is not before this place.
      int64_t behind = place - part->first;
      return behind <= 0 ? 0 : min64(part->groups, ceil_div(behind, part->stride));
    }
  };

  void add(int64_t panel_first, int64_t panel_last, int worker, LinearPiece *out) const {
    AddedHalf *found = halves + worker * num_segments * panels_most * 2;
    for (int64_t i = 0; i < num_segments; i++) {
      const PsAdapterLinear *linear = of(segments[i]);
      AddedHalf *at = found + i * panels_most * 2;
      int64_t covered = 0;
      for (int64_t p = 0; p < linear->num_parts; p++) covered += linear->parts[p].groups;
      if (covered < panels * 2) memset(at, 0, (size_t)((panel_last - panel_first) * 2) * sizeof(AddedHalf));
      for (int64_t p = 0; p < linear->num_parts; p++) {
        const PsAdapterPart *part = linear->parts + p;
        Groups mine(part, panel_first, panel_last);
        int64_t place = part->first + mine.first * part->stride - panel_first * 2, bytes = part->rank * 16 * size();
        for (int64_t group = mine.first; group < mine.last; group++, place += part->stride)
          at[place] = {(const char *)part->b + group * bytes, (int32_t)part->from, (int32_t)part->rank};
      }
    }
    out->added = {adapters, places, inner, found, panels_most, panel_first};
    out->ahead = ahead + worker * kAheadEach * num_segments;
    out->num_ahead = look_ahead(panel_first, panel_last, ahead + worker * kAheadEach * num_segments);
  }

  // B of the panels that come after those which other workers compute now, and a share of the next linear's A.
  int64_t look_ahead(int64_t panel_first, int64_t panel_last, LinearAhead *out) const {
    int64_t found = 0, width = panel_last - panel_first,
            from = min64(panels, panel_first + workers * width), to = min64(panels, from + width);
    auto want = [&](const void *at, int64_t first_byte, int64_t last_byte) {
      const char *first = (const char *)at + first_byte / 64 * 64;
      if (first_byte < last_byte) out[found++] = {first, ceil_div((const char *)at + last_byte - first, 64)};
    };
    for (int64_t i = 0; i < num_segments; i++) {
      const PsAdapterLinear *linear = of(segments[i]), *after = next(segments[i].layers, layer);
      for (int64_t p = 0; p < linear->num_parts; p++) {
        const PsAdapterPart *part = linear->parts + p;
        Groups theirs(part, from, to);
        want(part->b, theirs.first * part->rank * 16 * size(), theirs.last * part->rank * 16 * size());
      }
      int64_t bytes = after ? after->panels * 16 * after->k * size() : 0;
      if (bytes) want(after->a, bytes * panel_first / panels, bytes * panel_last / panels);
    }
    return found;
  }
};

// The linear that is computed after `which` of this layer.
template <AdaptedLinear which>
const PsAdapterLinear *after(const PsAdapterLayer *layers, int64_t layer) {
  return which == kAdaptedDown ? &layers[layer + 1].qkv : linear_of(layers + layer, (AdaptedLinear)(which + 1));
}

const PsAdapterLinear *none_after(const PsAdapterLayer *, int64_t) { return nullptr; }

}  // namespace

bool StepAdapters::prepare(const PsStep *step, int64_t num_layers) {
  step_ = nullptr, num_layers_ = num_layers;
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
  int64_t x_size = job->x_type == PS_BF16 ? 2 : 4, y_size = job->y_type == PS_BF16 ? 2 : 4;
  int64_t most = chunk_panels_most(w);
  bool is_last = which == kAdaptedDown && layer + 1 == num_layers_;
  constexpr decltype(&none_after) kAfter[] = {after<kAdaptedQkv>, after<kAdaptedO>, after<kAdaptedGateUp>,
                                              after<kAdaptedDown>};
  auto next = is_last ? none_after : kAfter[which];
  for (int64_t block = 0; block * kRowsMax < job->m; block++) {
    int64_t low = block * kRowsMax, rows = min64(kRowsMax, job->m - low), first = starts_[block],
            count = starts_[block + 1] - first;
    PsLinear part = *job;
    part.m = rows;
    part.x = (const char *)job->x + low * job->ldx * x_size;
    part.y = (char *)job->y + low * job->ldy * y_size;
    part.residual = job->residual ? (const char *)job->residual + low * job->ldr * y_size : nullptr;
    if (!count) {
      if (penstock::linear(&part)) return -1;
      continue;
    }
    const AdapterSegment *segments = segments_ + first, *end = segments + count;
    int64_t inner_bytes = (end[-1].first + end[-1].count - segments->first) * kAdapterRanks * x_size;
    int64_t halves_bytes = num_threads() * count * most * 2 * (int64_t)sizeof(AddedHalf),
            ahead_bytes = num_threads() * kAheadEach * count * (int64_t)sizeof(LinearAhead);
    if (!sums.reserve(2 * kRowsBytes + inner_bytes + halves_bytes + ahead_bytes)) return -1;
    int32_t *adapters = (int32_t *)sums.at, *places = adapters + kRowsMax;
    memset(adapters, -1, kRowsBytes);
    for (const AdapterSegment *s = segments; s < end; s++)
      for (int64_t i = s->first; i < s->first + s->count; i++)
        if (linear_of(s->layers + layer, which)->num_parts)
          adapters[tokens_[i]] = (int32_t)(s - segments), places[tokens_[i]] = (int32_t)(i - segments->first);
    char *inner = sums.at + 2 * kRowsBytes, *halves = inner + inner_bytes;
    Additions additions = {segments, count, layer, which, tokens_, (const char *)part.x, job->ldx * x_size,
                           job->x_type, adapters, places, inner, (AddedHalf *)halves, most, next,
                           (LinearAhead *)(halves + halves_bytes), w->panels, num_threads(), 0, 0};
    additions.measure();
    LinearSide side = {&additions, additions.num_chunks(),
                       [](const void *ctx, int64_t chunk) { ((const Additions *)ctx)->shrink(chunk); },
                       [](const void *ctx, int64_t first, int64_t last, int worker, LinearPiece *piece) {
                         ((const Additions *)ctx)->add(first, last, worker, piece);
                       }};
    if (penstock::linear(&part, &side)) return -1;
  }
  return 0;
}

}  // namespace penstock
