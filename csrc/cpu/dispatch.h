// The kernels of this processor.
#pragma once

#include <cstdlib>
#include <cstring>

#include "kernels.h"

namespace captum_ssm {

// The best kernels of this processor; CAPTUM_SSM_ISA names others, for tests and measurements.
template <class T>
const Kernels<T>& kernels() {
  const char* name = std::getenv("CAPTUM_SSM_ISA");
  const bool any = !name || !*name;
  const Kernels<T>* k = nullptr;
  if (any || !std::strcmp(name, "avx512")) k = kernels_avx512<T>();
  if (!k && (any || !std::strcmp(name, "avx2"))) k = kernels_avx2<T>();
  return k ? *k : *kernels_portable<T>();
}

inline int64_t up(int64_t x, int64_t by) { return (x + by - 1) / by; }

}  // namespace captum_ssm
