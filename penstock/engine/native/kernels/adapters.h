// Low-rank adapters: which tokens of a step have one, and linears that add what it gives.
#pragma once
#include "ops.h"

namespace penstock {

enum AdaptedLinear { kAdaptedQkv, kAdaptedO, kAdaptedGateUp, kAdaptedDown };

// The tokens of one adapter in a block of kRowsMax tokens: `count` of them from `first` on in the order of adapters.
struct AdapterSegment {
  const PsAdapterLayer *layers;
  int64_t first, count;
};

class StepAdapters {
 public:
  // Sorts the step's tokens by adapter. False: no memory.
  bool prepare(const PsStep *step, int64_t num_layers);
  // As `linear`, with the adapters' parts of this linear of this layer added to the sums. The job's m is the step's t.
  int32_t linear(const PsLinear *job, int64_t layer, AdaptedLinear which) const;

 private:
  const PsStep *step_ = nullptr;
  int64_t num_layers_ = 0;
  int32_t *tokens_ = nullptr;           // of a block, counted from its first one; sorted by adapter
  AdapterSegment *segments_ = nullptr;  // of all blocks
  int64_t *starts_ = nullptr;           // [blocks + 1]: each block's first segment

  int64_t fill(int64_t block, AdapterSegment *out) const;
};

}  // namespace penstock
