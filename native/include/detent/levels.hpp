// Levels: kernels compiled once per instruction set, and the best instruction set that this CPU supports.
#pragma once

#include "detent/call.hpp"

namespace detent {

struct Level {
  const char* name;
  bool (*supported)();
  Kernels kernels;
};

// From the baseline, which every CPU supports, to the best.
extern const Level kLevels[];
extern const int kLevelCount;

int best_level();

}  // namespace detent
