// tap_rows on CPU tensors (see captum_ssm/ops/taps.py).

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>

#include "dispatch.h"
#include "parallel.h"

namespace captum_ssm {
namespace {

// rows (B, m, R, L), values (K, B, c, L), left (B, c, R), out (B, c, R, C) of any stride over B.
void tap_rows(const Tensor& rows_, const Tensor& values_, const std::optional<Tensor>& left_,
              Tensor out) {
  const Tensor rows = torch::stable::contiguous(rows_), values = torch::stable::contiguous(values_);
  STD_TORCH_CHECK(rows.dim() == 4 && values.dim() == 4 && out.dim() == 4,
                  "captum_ssm: an argument has the wrong number of dimensions");
  const int64_t B = out.size(0), c = out.size(1), R = out.size(2), C = out.size(3);
  const int64_t m = rows.size(1), L = rows.size(3), K = values.size(0);
  std::optional<Tensor> left;
  if (left_) left = torch::stable::contiguous(*left_);
  STD_TORCH_CHECK(m > 0 && c % m == 0 && K > 0 && rows.size(0) == B && rows.size(2) == R &&
                      values.size(1) == B && values.size(2) == c && values.size(3) == L && C <= L &&
                      (!left || left->numel() == B * c * R),
                  "captum_ssm: the shapes of the arguments do not agree");
  STD_TORCH_CHECK(out.stride(3) == 1 && out.stride(2) == C && out.stride(1) == R * C,
                  "captum_ssm: out must be contiguous within a sequence");
  for (const Tensor* x : {&values, left ? &*left : &values, (const Tensor*)&out})
    STD_TORCH_CHECK(x->scalar_type() == rows.scalar_type(),
                    "captum_ssm: the arguments must have one dtype");
  if (out.numel() == 0) return;
  dispatch(rows, [&](auto zero) {
    using T = decltype(zero);
    const T* from = rows.const_data_ptr<T>();
    const T* value = values.const_data_ptr<T>();
    const T* scale = left ? left->const_data_ptr<T>() : nullptr;
    T* to = out.mutable_data_ptr<T>();
    const int64_t stride = out.stride(0);
    each_task<T>(B * c, 0, [&](int64_t task, T*) {
      const int64_t b = task / c, d = task % c;
      kernels<T>().tap_rows(from + (b * m + d / (c / m)) * R * L, value + task * L, B * c * L, K,
                            scale ? scale + task * R : nullptr, R, L, C,
                            to + b * stride + d * R * C);
    });
  });
}

}  // namespace
}  // namespace captum_ssm

STABLE_TORCH_LIBRARY_IMPL(captum_ssm, CPU, m) {
  m.impl("tap_rows", TORCH_BOX(&captum_ssm::tap_rows));
}
