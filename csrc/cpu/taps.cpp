// tap_rows on CPU tensors (see captum_ssm/kernels/taps.py).

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>

#include "../arguments.h"
#include "dispatch.h"
#include "parallel.h"

namespace captum_ssm {
namespace {

void tap_rows(const Tensor& rows, const Tensor& values, const std::optional<Tensor>& left,
              Tensor out) {
  const TapArguments a(rows, values, left, out);
  if (out.numel() == 0) return;
  dispatch(rows, [&](auto zero) {
    using T = decltype(zero);
    const T* from = a.rows.const_data_ptr<T>();
    const T* value = a.values.const_data_ptr<T>();
    const T* scale = data<T>(a.left);
    T* to = out.mutable_data_ptr<T>();
    const Kernels<T>& k = kernels<T>();
    each_task<T>(a.B * a.D, 0, [&](int64_t task, T*) {
      const int64_t b = task / a.D, d = task % a.D;
      k.tap_rows(from + (b * a.M + d / (a.D / a.M)) * a.R * a.L, value + task * a.L, a.B * a.D * a.L,
                 a.K, scale ? scale + task * a.R : nullptr, a.R, a.L, a.C,
                 to + b * a.stride + d * a.R * a.C);
    });
  });
}

}  // namespace
}  // namespace captum_ssm

CAPTUM_SSM_IMPL(CPU, m) {
  m.impl("tap_rows", TORCH_BOX(&captum_ssm::tap_rows));
}
