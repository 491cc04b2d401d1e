// map_distances on CPU tensors (see captum_ssm/kernels/distances.py).

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "../arguments.h"
#include "dispatch.h"
#include "parallel.h"

namespace captum_ssm {
namespace {

Tensor map_distances(const Tensor& maps_, const Tensor& values_, const Tensor& outputs_) {
  const Tensor maps = whole(maps_, maps_, 4), values = whole(values_, maps_, 4);
  const Tensor outputs = whole(outputs_, maps_, 3);
  const int64_t B = maps.size(0), C = maps.size(1), M = maps.size(2), R = maps.size(3);
  const int64_t E = outputs.size(2);
  STD_TORCH_CHECK(values.size(0) == B && values.size(1) == C && values.size(2) == M &&
                      values.size(3) == E && outputs.size(0) == B && outputs.size(1) == R,
                  "captum_ssm: the shapes of the arguments do not agree");
  const Tensor out = torch::stable::new_empty(maps, {B, R, C});
  if (out.numel() == 0) return out;
  dispatch(maps, [&](auto zero) {
    using T = decltype(zero);
    const T* map = maps.const_data_ptr<T>();
    const T* value = values.const_data_ptr<T>();
    const T* output = outputs.const_data_ptr<T>();
    T* to = out.mutable_data_ptr<T>();
    const Kernels<T>& k = kernels<T>();
    each_task<T>(B * C, R * k.lanes, [&](int64_t task, T* scratch) {
      const int64_t b = task / C, c = task % C;
      k.map_distances(map + task * M * R, value + task * M * E, output + b * R * E, M, R, E,
                      to + b * R * C + c, C, scratch);
    });
  });
  return out;
}

}  // namespace
}  // namespace captum_ssm

CAPTUM_SSM_IMPL(CPU, m) {
  m.impl("map_distances", TORCH_BOX(&captum_ssm::map_distances));
}
