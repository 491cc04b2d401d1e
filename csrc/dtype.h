// From a tensor's dtype to a type: what the operators compute in, on every device.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

namespace captum_ssm {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Calls f(T()) for the dtype of x.
template <class F>
void dispatch(const Tensor& x, const F& f) {
  if (x.scalar_type() == ScalarType::Float) {
    f(float());
  } else {
    STD_TORCH_CHECK(x.scalar_type() == ScalarType::Double,
                    "captum_ssm: the kernels take float32 and float64");
    f(double());
  }
}

}  // namespace captum_ssm
