// Levels: the same kernels compiled once per CPU level, and the best one this machine can run.
#pragma once

#include "detent/call.hpp"

namespace detent {

struct Level {
  const char* name;
  bool (*supported)();
  Kernels kernels;
};

// From the plainest to the best; the first always runs.
extern const Level kLevels[];
extern const int kLevelCount;

int best_level();

}  // namespace detent
