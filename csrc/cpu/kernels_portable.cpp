#include "kernels.h"

#define CAPTUM_SSM_ISA portable
#define CAPTUM_SSM_VECTOR_BYTES 16
#if defined(__aarch64__)
#define CAPTUM_SSM_REGISTERS 32
#else
#define CAPTUM_SSM_REGISTERS 16
#endif
#include "kernels.inc"

namespace captum_ssm {

template <class T>
const Kernels<T>* kernels_portable() {
  return &portable::table<T>;
}
template const Kernels<float>* kernels_portable();
template const Kernels<double>* kernels_portable();

}  // namespace captum_ssm
