// The C entry points: scratch memory, cutting work into chunks, spreading it over the pool.
#include "cpu.h"
#include "ops.h"
#include "pool.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <atomic>

namespace penstock {

const KernelTable *table = nullptr;

namespace {

constexpr int64_t kInputBytes = 5 << 18;     // packed inputs that should stay in a core's L2
constexpr int64_t kWideInputBytes = 1 << 19; // the same beside panels of weights that are read many times
constexpr int64_t kPartialBytes = 16 << 20;  // sums waiting between pieces of k
constexpr int64_t kChunkBytes = 64 << 10;    // weights worth handing to a thread
constexpr int64_t kChunksPerThread = 16;
constexpr int64_t kAttentionItemsPerThread = 4;
constexpr int64_t kRowChunkElements = 16 << 10;  // elementwise work worth handing to a thread

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

Arena arena;

struct RowSplit {
  int64_t rows, per_chunk;
  RowSplit(int64_t rows, int64_t elements_per_row)
      : rows(rows), per_chunk(max64(1, kRowChunkElements / max64(1, elements_per_row))) {}
  int64_t chunks() const { return ceil_div(rows, per_chunk); }
  int64_t first(int64_t chunk) const { return chunk * per_chunk; }
  int64_t last(int64_t chunk) const { return min64(rows, (chunk + 1) * per_chunk); }
};

int64_t element_bytes(int32_t type) { return type == PS_F32 ? 4 : type == PS_BF16 ? 2 : 1; }

// How one linear is cut: slabs of panels, pieces of k within a slab, chunks of panels within a piece.
struct LinearPlan {
  int64_t m_padded, row_bytes, a_bytes, scale_bytes, k_piece, slab, partial_bytes;
  bool packed;

  explicit LinearPlan(const PsLinear *job) {
    const PsWeight *w = job->weight;
    bool tiled = table->row_tile && w->type != PS_F32, wide = w->type == PS_BF16 && table->wide_inputs;
    int64_t a_size = wide ? 4 : w->type == PS_I8 && table->wide_bytes ? 2 : element_bytes(w->type);
    packed = w->type >= PS_I8 || wide || w->k != w->k_padded || (tiled && job->m > 1);
    m_padded = job->m <= 16 ? job->m : ceil_div(job->m, 16) * 16;
    row_bytes = w->k_padded * a_size;
    a_bytes = packed ? m_padded * row_bytes : 0;
    scale_bytes = ceil_div(m_padded * (w->type == PS_I4 ? w->k_padded / w->group * 8 : 4), 64) * 64;
    k_piece = w->k_padded, slab = w->panels, partial_bytes = 0;
    int64_t fits = wide ? kWideInputBytes : kInputBytes;
    if (!(tiled || wide) || w->type != PS_BF16 || a_bytes <= fits) return;
    k_piece = max64(128, fits / (m_padded * a_size) / 64 * 64);
    m_padded = ceil_div(m_padded, 32) * 32;
    slab = max64(1, min64(w->panels, kPartialBytes / (m_padded * 32 * 4)));
    partial_bytes = slab * m_padded * 32 * 4;
  }
  int64_t bytes() const { return ceil_div(a_bytes, 64) * 64 + scale_bytes + partial_bytes; }
};

int64_t panels_per_chunk(const PsWeight *w, int64_t panels) {
  int64_t panel_bytes = max64(1, w->k_padded * 32 * element_bytes(w->type) / (w->type == PS_I4 ? 2 : 1));
  int64_t fewest = ceil_div(panels, kChunksPerThread * num_threads());
  return max64(1, min64(max64(fewest, kChunkBytes / panel_bytes), ceil_div(panels, num_threads())));
}

// Pieces of a linear's side that must have ended before others begin.
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

void run_linear(const PsLinear *job, const LinearSide *side, char *scratch) {
  const PsWeight *w = job->weight;
  LinearPlan plan(job);
  LinearPiece piece = {job, job->x, job->ldx, nullptr, nullptr, plan.m_padded, 0, 0, 0, {}, nullptr, 0};
  int64_t before = side ? side->num_chunks : 0;
  if (plan.packed) {
    float *scales = (float *)(scratch + ceil_div(plan.a_bytes, 64) * 64);
    int64_t rows = job->m <= 16 ? job->m : ceil_div(job->m, 16) * 16;
    RowSplit split(rows, w->k);
    auto pack = [&](int64_t chunk, int) {
      if (chunk < before) return side->inputs(side->ctx, chunk);
      table->pack_rows(job, split.first(chunk - before), split.last(chunk - before), scratch, scales);
    };
    parallel(before + split.chunks(), pack);
    piece.a = scratch, piece.lda = w->k_padded, piece.a_scale = scales;
    before = 0;
  }
  // Otherwise the side's chunks come first in the job of the panels: who takes one of those has no more to take of
  // these, and waits at most for what others compute already.
  Latch inputs = {{before}};
  if (plan.partial_bytes) piece.partial = (float *)(scratch + plan.bytes() - plan.partial_bytes);
  for (int64_t slab = 0; slab < w->panels; slab += plan.slab) {
    int64_t panels = min64(plan.slab, w->panels - slab), per_chunk = panels_per_chunk(w, panels);
    piece.partial_panel = slab;
    for (piece.k_first = 0; piece.k_first < w->k_padded; piece.k_first = piece.k_last) {
      piece.k_last = min64(w->k_padded, piece.k_first + plan.k_piece);
      auto work = [&](int64_t chunk, int worker) {
        if (chunk < before) {
          side->inputs(side->ctx, chunk);
          return inputs.arrive();
        }
        chunk -= before;
        int64_t first = slab + chunk * per_chunk, last = slab + min64(panels, (chunk + 1) * per_chunk);
        LinearPiece own = piece;
        if (side && piece.k_last == w->k_padded) {
          inputs.wait();
          side->panels(side->ctx, first, last, worker, &own);
        }
        table->linear(&own, first, last);
      };
      parallel(before + ceil_div(panels, per_chunk), work);
      before = 0;
    }
  }
}

}  // namespace

bool Arena::reserve(int64_t bytes) {
  if (bytes <= size) return true;
  constexpr int64_t kHuge = 2 << 20;
  bytes = ceil_div(bytes, kHuge) * kHuge;
  free(at);
  at = (char *)aligned_alloc(kHuge, (size_t)bytes);
  size = at ? bytes : 0;
  if (at) madvise(at, (size_t)bytes, MADV_HUGEPAGE);
  return at != nullptr;
}

int64_t chunk_panels_most(const PsWeight *weight) { return panels_per_chunk(weight, weight->panels); }

bool reserve_linear(const PsWeight *weight, int64_t m) {
  PsLinear job = {};
  job.weight = weight, job.m = min64(kRowsMax, m);
  return arena.reserve(LinearPlan(&job).bytes());
}

int32_t linear(const PsLinear *job, const LinearSide *side) {
  PsLinear part = *job;
  int64_t x_size = element_bytes(job->x_type), y_size = element_bytes(job->y_type);
  for (int64_t row = 0; row < job->m; row += kRowsMax) {
    part.m = min64(kRowsMax, job->m - row);
    part.x = (const char *)job->x + row * job->ldx * x_size;
    part.y = (char *)job->y + row * job->ldy * y_size;
    part.residual = job->residual ? (const char *)job->residual + row * job->ldr * y_size : nullptr;
    if (!arena.reserve(LinearPlan(&part).bytes())) return -1;
    run_linear(&part, side, arena.at);
  }
  return 0;
}

int32_t rms_norm(const PsNorm *job) {
  RowSplit split(job->m, job->n);
  auto work = [&](int64_t chunk, int) { table->rms_norm(job, split.first(chunk), split.last(chunk)); };
  parallel(split.chunks(), work);
  return 0;
}

int32_t silu_mul(const PsSiluMul *job) {
  RowSplit split(job->m, 4 * job->n);
  auto work = [&](int64_t chunk, int) { table->silu_mul(job, split.first(chunk), split.last(chunk)); };
  parallel(split.chunks(), work);
  return 0;
}

int32_t rope_write(const PsRopeWrite *job) {
  RowSplit split(job->t, (job->num_q_heads + 2 * job->cache.num_kv_heads) * job->cache.head_dim);
  auto work = [&](int64_t chunk, int) { table->rope_write(job, split.first(chunk), split.last(chunk)); };
  parallel(split.chunks(), work);
  return 0;
}

int32_t attention(const PsAttention *job) {
  int64_t heads = job->cache.num_kv_heads, group = job->num_q_heads / heads;
  int64_t scratch = ceil_div(attention_scratch_bytes(job->cache.head_dim), 4096) * 4096;
  int64_t starts_bytes = ceil_div((job->rows + 1) * 8, 4096) * 4096;
  if (!arena.reserve(starts_bytes + scratch * num_threads())) return -1;
  int64_t *starts = (int64_t *)arena.at;  // first lane block of each row
  starts[0] = 0;
  for (int64_t row = 0; row < job->rows; row++)
    starts[row + 1] =
        starts[row] + ceil_div((job->query_starts[row + 1] - job->query_starts[row]) * group, kAttentionLanes);
  // Heads of one row come after one another, so that the first keys of each arrive while the one before is computed.
  int64_t blocks = starts[job->rows],
          per_item = max64(1, min64(heads, blocks * heads / (kAttentionItemsPerThread * num_threads()))),
          items = ceil_div(heads, per_item);
  auto work = [&](int64_t chunk, int worker) {
    int64_t block = chunk / items, low = 0, high = job->rows;
    while (high - low > 1) {
      int64_t middle = (low + high) / 2;
      (starts[middle] <= block ? low : high) = middle;
    }
    int64_t first = (block - starts[low]) * kAttentionLanes,
            lanes = (job->query_starts[low + 1] - job->query_starts[low]) * group, head = chunk % items * per_item,
            last = min64(heads, head + per_item) - 1;
    AttentionPiece piece = {
        job, low, head, first, min64(kAttentionLanes, lanes - first), false, false, arena.at + starts_bytes + worker * scratch};
    for (; piece.kv_head <= last; piece.kv_head++, piece.fetched = true) {
      piece.another = piece.kv_head < last;
      table->attention(&piece);
    }
  };
  parallel(blocks * items, work);
  return 0;
}

void scale_values(void *x, int32_t type, int64_t n, float factor) {
  RowSplit split(ceil_div(n, 16), 16);
  auto work = [&](int64_t chunk, int) {
    int64_t first = split.first(chunk) * 16, last = min64(n, split.last(chunk) * 16);
    table->scale_values((char *)x + first * element_bytes(type), type, last - first, factor);
  };
  parallel(split.chunks(), work);
}

void cap_values(float *x, int64_t n, float cap) {
  RowSplit split(ceil_div(n, 16), 16);
  auto work = [&](int64_t chunk, int) {
    int64_t first = split.first(chunk) * 16, last = min64(n, split.last(chunk) * 16);
    table->cap_values(x + first, last - first, cap);
  };
  parallel(split.chunks(), work);
}

int32_t sample(const PsSample *job) {
  int64_t scratch = ceil_div(sample_scratch_bytes(job->vocab), 4096) * 4096;
  if (!arena.reserve(scratch * num_threads())) return -1;
  auto work = [&](int64_t row, int worker) { table->sample_row(job, row, arena.at + worker * scratch); };
  parallel(job->rows, work);
  return 0;
}

}  // namespace penstock

using namespace penstock;

PS_EXPORT int32_t ps_abi_version(void) { return PS_ABI_VERSION; }

PS_EXPORT int64_t ps_struct_bytes(int32_t index) {
  constexpr size_t sizes[] = {sizeof(PsWeight),  sizeof(PsLinear),    sizeof(PsNorm),      sizeof(PsSiluMul),
                              sizeof(PsKvCache), sizeof(PsRopeWrite), sizeof(PsAttention), sizeof(PsMlp),       sizeof(PsLayer),
                              sizeof(PsDecoder), sizeof(PsStep),   sizeof(PsSample), sizeof(PsAdapterPart), sizeof(PsAdapterLinear),
                              sizeof(PsAdapterLayer), sizeof(PsLookup), sizeof(PsDraft), sizeof(PsPack)};
  return index >= 0 && index < (int32_t)(sizeof sizes / sizeof *sizes) ? (int64_t)sizes[index] : -1;
}

PS_EXPORT const char *ps_init(const char *isa) {
  PoolLock held;
  table = choose(isa);
  return table ? table->name : nullptr;
}

PS_EXPORT int32_t ps_set_threads(int32_t threads, int32_t spin_us, int32_t pin) {
  set_threads(threads, spin_us, pin != 0);
  return num_threads();
}

PS_EXPORT int32_t ps_supports(int32_t type) { return table && (table->weight_types >> type & 1); }

PS_EXPORT void ps_advise_huge(void *at, int64_t bytes) {
  constexpr uintptr_t kHuge = 2 << 20;
  constexpr int kCollapse = 25;  // MADV_COLLAPSE, since Linux 6.1: also moves what was touched before
  uintptr_t first = ((uintptr_t)at + kHuge - 1) & ~(kHuge - 1),
            last = ((uintptr_t)at + (uintptr_t)bytes) & ~(kHuge - 1);
  if (last <= first) return;
  madvise((void *)first, last - first, MADV_HUGEPAGE);
  madvise((void *)first, last - first, kCollapse);
}

PS_EXPORT void ps_round(int32_t type, int32_t x_type, const void *x, int64_t n, int64_t k, int64_t ldx, int64_t group,
                        void *values, float *scale) {
  PoolLock held;
  RoundJob job = {x, values, scale, ldx, k, group, x_type, type};
  RowSplit split(n, k);
  auto work = [&](int64_t chunk, int) { table->round_rows(&job, split.first(chunk), split.last(chunk)); };
  parallel(split.chunks(), work);
}

PS_EXPORT int32_t ps_linear(const PsLinear *job) {
  PoolLock held;
  return linear(job);
}
PS_EXPORT int32_t ps_rms_norm(const PsNorm *job) {
  PoolLock held;
  return rms_norm(job);
}
PS_EXPORT int32_t ps_silu_mul(const PsSiluMul *job) {
  PoolLock held;
  return silu_mul(job);
}
PS_EXPORT int32_t ps_rope_write(const PsRopeWrite *job) {
  PoolLock held;
  return rope_write(job);
}
PS_EXPORT int32_t ps_attention(const PsAttention *job) {
  PoolLock held;
  return attention(job);
}
PS_EXPORT int32_t ps_sample(const PsSample *job) {
  PoolLock held;
  return sample(job);
}
PS_EXPORT int32_t ps_lookup(const PsLookup *job) {
  lookup(job);
  return 0;
}
PS_EXPORT int32_t ps_step(const PsDecoder *decoder, const PsStep *job) {
  PoolLock held;
  return step(decoder, job);
}
PS_EXPORT int32_t ps_draft(const PsDecoder *decoder, const PsDraft *job) {
  PoolLock held;
  return draft(decoder, job);
}
