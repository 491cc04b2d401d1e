#include "kernels.h"

#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif
#define CAPTUM_SSM_ISA avx2
#define CAPTUM_SSM_VECTOR_BYTES 32
#define CAPTUM_SSM_REGISTERS 16
#include "kernels.inc"
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

namespace captum_ssm {

template <class T>
const Kernels<T>* kernels_avx2() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
    return &avx2::table<T>;
#endif
  return nullptr;
}
template const Kernels<float>* kernels_avx2();
template const Kernels<double>* kernels_avx2();

}  // namespace captum_ssm
