// The 16 levels that codes of iq4_nl and iq4_xs select. Internal linkage, as in half.hpp.
#pragma once

namespace {

constexpr int kLevels = 16;
constexpr float kLevel[kLevels] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

}  // namespace
