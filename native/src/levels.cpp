// Table of the kernels: one row per instruction set.
#include "detent/levels.hpp"

#if defined(DETENT_X86_LEVELS)
#include <cpuid.h>
#endif

#define DETENT_DECLARE_ONE(NAME) void NAME(const Call&, int64_t, int64_t);
#define DETENT_DECLARE(LEVEL)                \
  namespace detent::LEVEL {                  \
  DETENT_FOR_EACH_KERNEL(DETENT_DECLARE_ONE) \
  constexpr Kernels table() {                \
    return {DETENT_FOR_EACH_KERNEL(DETENT_LIST_ONE)}; \
  }                                          \
  }
#define DETENT_LIST_ONE(NAME) NAME,

DETENT_DECLARE(baseline)
#if defined(DETENT_X86_LEVELS)
DETENT_DECLARE(v3)
DETENT_DECLARE(v4)
#endif

namespace detent {
namespace {

bool always() { return true; }

#if defined(DETENT_X86_LEVELS)
// Some versions of Clang do not support the name in __builtin_cpu_supports.
bool has_f16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

bool has_v3() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
         __builtin_cpu_supports("bmi2") && has_f16c();
}

bool has_v4() {
  return has_v3() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

}  // namespace

const Level kLevels[] = {
    {"baseline", always, baseline::table()},
#if defined(DETENT_X86_LEVELS)
    {"x86-64-v3", has_v3, v3::table()},
    {"x86-64-v4", has_v4, v4::table()},
#endif
};
const int kLevelCount = static_cast<int>(sizeof kLevels / sizeof kLevels[0]);

int best_level() {
  int best = 0;
  for (int i = 1; i < kLevelCount; ++i) {
    if (kLevels[i].supported()) best = i;
  }
  return best;
}

}  // namespace detent
