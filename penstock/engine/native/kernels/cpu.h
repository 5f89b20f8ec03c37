// Run-time choice of instruction set.
#pragma once
#include "table.h"

namespace penstock {
// The best table that this machine can run, or the one of that name if it can; else null.
const KernelTable *choose(const char *name);
}  // namespace penstock
