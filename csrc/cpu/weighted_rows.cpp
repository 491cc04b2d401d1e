// weighted_rows on CPU tensors (see captum_ssm/kernels/weighted.py).

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>

#include "../arguments.h"
#include "dispatch.h"
#include "parallel.h"

namespace captum_ssm {
namespace {

Tensor weighted_rows(const Tensor& rows_, const Tensor& left_, const Tensor& sources_,
                     int64_t last) {
  const Tensor rows = whole(rows_, rows_, 4), left = whole(left_, rows_, 3);
  check_alike(sources_, rows_, 4);
  // The channels of some heads are read where they are.
  const bool lie = sources_.stride(3) == 1 && sources_.stride(2) == sources_.size(3);
  const Tensor sources = lie ? sources_ : torch::stable::contiguous(sources_);
  const int64_t B = rows.size(0), M = rows.size(1), R = rows.size(2), L = rows.size(3);
  const int64_t D = left.size(2), K = sources.size(0);
  STD_TORCH_CHECK(M > 0 && D > 0 && D % M == 0 && left.size(0) == B && left.size(1) == R &&
                      sources.size(1) == B && sources.size(2) == D && sources.size(3) == L &&
                      last >= 0,
                  "captum_ssm: the shapes of the arguments do not agree");
  const Tensor out = torch::stable::new_empty(rows, {B, R, L});
  if (out.numel() == 0) return out;
  dispatch(rows, [&](auto zero) {
    using T = decltype(zero);
    const Kernels<T>& k = kernels<T>();
    const T* row = rows.const_data_ptr<T>();
    const T* weight = left.const_data_ptr<T>();
    const T* source = sources.const_data_ptr<T>();
    T* to = out.mutable_data_ptr<T>();
    const int64_t parts = up(R, k.weighted_rows_together);
    each_task<T>(B * parts, k.weighted_scratch(D, M), [&](int64_t task, T* scratch) {
      // Later rows of a causal map take the most work, so they come first.
      const int64_t b = task % B, first = (parts - 1 - task / B) * k.weighted_rows_together;
      k.weighted_rows({row + (b * M * R + first) * L, weight + (b * R + first) * D,
                       source + b * sources.stride(1), sources.stride(0), M, D, R, L, K,
                       std::min(R - first, k.weighted_rows_together), last + first,
                       to + (b * R + first) * L},
                      scratch);
    });
  });
  return out;
}

}  // namespace
}  // namespace captum_ssm

CAPTUM_SSM_IMPL(CPU, m) {
  m.impl("weighted_rows", TORCH_BOX(&captum_ssm::weighted_rows));
}
