#include "kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512dq,avx512bw,avx512vl,fma"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512dq,avx512bw,avx512vl,fma,prefer-vector-width=512")
#endif
#define CAPTUM_SSM_ISA avx512
#define CAPTUM_SSM_VECTOR_BYTES 64
#define CAPTUM_SSM_REGISTERS 32
#include "kernels.inc"
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

namespace captum_ssm {

template <class T>
const Kernels<T>* kernels_avx512() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
    return &avx512::table<T>;
#endif
  return nullptr;
}
template const Kernels<float>* kernels_avx512();
template const Kernels<double>* kernels_avx512();

}  // namespace captum_ssm
