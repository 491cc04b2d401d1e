// The operators of captum_ssm on CUDA tensors: see csrc/cpu/ops.cpp.

#include <Python.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>

#include "../dtype.h"
#include "linear.cuh"
#include "matrix.cuh"
#include "recurrence.cuh"
#include "rows.cuh"
#include "taps.cuh"

namespace captum_ssm {
namespace {

template <class T>
const T* data(const std::optional<Tensor>& x) {
  return x ? x->const_data_ptr<T>() : nullptr;
}

Tensor checked(const Tensor& x, const Tensor& like) {
  STD_TORCH_CHECK(x.scalar_type() == like.scalar_type() && x.is_cuda() && x.is_contiguous(),
                  "captum_ssm: the arguments must be contiguous CUDA tensors of one dtype");
  return x;
}

struct Arguments {
  Tensor dt, right, A, B, C;
  std::optional<Tensor> left, conv;

  Arguments(const Tensor& dt_, const Tensor& right_, const Tensor& A_, const Tensor& B_,
            const Tensor& C_, const std::optional<Tensor>& left_,
            const std::optional<Tensor>& conv_)
      : dt(checked(dt_, dt_)), right(checked(right_, dt_)), A(checked(A_, dt_)),
        B(checked(B_, dt_)), C(checked(C_, dt_)) {
    STD_TORCH_CHECK(dt.dim() == 3 && A.dim() == 2 && B.dim() == 4 && dt.size(1) > 0 && dt.size(2) > 0 &&
                        right.numel() == dt.numel() && A.size(0) == dt.size(2) &&
                        B.size(0) == dt.size(0) && B.size(1) == dt.size(1) &&
                        B.size(3) == A.size(1) && dt.size(2) % B.size(2) == 0 &&
                        C.numel() == B.numel(),
                    "captum_ssm: the shapes of the coefficients do not agree");
    if (left_) left = checked(*left_, dt_);
    if (conv_) conv = checked(*conv_, dt_);
    STD_TORCH_CHECK((!left || left->numel() == dt.numel()) &&
                        (!conv || (conv->dim() == 2 && conv->size(0) == dt.size(2))),
                    "captum_ssm: left or conv has the wrong shape");
    STD_TORCH_CHECK(!conv || conv->size(1) <= gpu::kMaxTaps,
                    "captum_ssm: CUDA kernels take at most 64 taps");
  }

  template <class T>
  gpu::Maps<T> maps() const {
    return {dt.const_data_ptr<T>(), right.const_data_ptr<T>(), A.const_data_ptr<T>(),
            B.const_data_ptr<T>(), C.const_data_ptr<T>(), data<T>(left), data<T>(conv),
            dt.size(0), dt.size(1), dt.size(2), A.size(1), B.size(2),
            conv ? conv->size(1) : 1};
  }
};

cudaStream_t stream_of(const Tensor& x) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(x.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

Tensor recurrence(const Arguments& a, bool backward, const Tensor& input, bool mean) {
  torch::stable::accelerator::DeviceGuard guard(a.dt.get_device_index());
  const int64_t batch = a.dt.size(0), L = a.dt.size(1), D = a.dt.size(2), N = a.A.size(1);
  const bool shared = input.dim() == 2;
  STD_TORCH_CHECK(input.numel() == batch * L * (shared ? 1 : D),
                  "captum_ssm: the values must have the shape of dt");
  const Tensor out = mean ? torch::stable::new_empty(a.dt, {batch, L})
                          : torch::stable::new_empty(a.dt, {batch, L, D});
  if (batch == 0) return out;
  const int64_t chunks = (L + gpu::kChunk - 1) / gpu::kChunk;
  const Tensor state = torch::stable::new_empty(a.dt, {chunks > 1 ? batch * chunks * N * D : 0});
  const Tensor elapsed = torch::stable::new_empty(a.dt, {chunks > 1 ? batch * chunks * D : 0});
  const Tensor partial =
      torch::stable::new_empty(a.dt, {mean ? gpu::channel_blocks(D) * batch * L : 0});
  dispatch(a.dt, [&](auto zero) {
    using T = decltype(zero);
    T* p = out.mutable_data_ptr<T>();
    const gpu::Run<T> r{a.maps<T>(),
                        backward,
                        shared,
                        input.const_data_ptr<T>(),
                        mean ? nullptr : p,
                        mean ? partial.mutable_data_ptr<T>() : nullptr,
                        state.mutable_data_ptr<T>(),
                        elapsed.mutable_data_ptr<T>()};
    STD_CUDA_CHECK(gpu::run<T>(r, mean ? p : nullptr, stream_of(a.dt)));
  });
  return out;
}

Tensor diagonal_scan(const Tensor& v, const Tensor& dt, const Tensor& right, const Tensor& A,
                     const Tensor& Bm, const Tensor& Cm, const std::optional<Tensor>& left) {
  const Arguments a(dt, right, A, Bm, Cm, left, std::nullopt);
  return recurrence(a, false, checked(v, dt), false);
}

Tensor diagonal_vecmat(const Tensor& w, const Tensor& dt, const Tensor& right, const Tensor& A,
                       const Tensor& Bm, const Tensor& Cm, const std::optional<Tensor>& left,
                       const std::optional<Tensor>& conv, bool mean) {
  const Arguments a(dt, right, A, Bm, Cm, left, conv);
  return recurrence(a, true, checked(w, dt), mean);
}

Tensor diagonal_mean(const Tensor& dt, const Tensor& right, const Tensor& A, const Tensor& Bm,
                     const Tensor& Cm, const std::optional<Tensor>& left,
                     const std::optional<Tensor>& conv, int64_t start, int64_t stop) {
  const Arguments a(dt, right, A, Bm, Cm, left, conv);
  const int64_t batch = dt.size(0), L = dt.size(1), D = dt.size(2);
  STD_TORCH_CHECK(0 <= start && start < stop && stop <= L,
                  "captum_ssm: the rows asked for leave the sequence");
  torch::stable::accelerator::DeviceGuard guard(dt.get_device_index());
  const Tensor out = torch::stable::new_zeros(dt, {batch, stop - start, L});
  if (batch == 0) return out;
  const Tensor before = torch::stable::new_empty(dt, {batch, L, D});
  const Tensor after = torch::stable::new_empty(dt, {batch, L, D});
  const int64_t sums = batch * ((stop + gpu::kTile - 1) / gpu::kTile + 1) * D;
  const Tensor sum = torch::stable::new_empty(dt, {sums}, ScalarType::Double);
  const Tensor resets = torch::stable::new_empty(dt, {sums}, ScalarType::Int);
  dispatch(dt, [&](auto zero) {
    using T = decltype(zero);
    const gpu::Mean<T> p{a.maps<T>(),
                         {before.mutable_data_ptr<T>(), after.mutable_data_ptr<T>(),
                          sum.mutable_data_ptr<double>(), resets.mutable_data_ptr<int>()},
                         out.mutable_data_ptr<T>(),
                         start,
                         stop};
    STD_CUDA_CHECK(gpu::mean<T>(p, stream_of(dt)));
  });
  return out;
}

// Rows wanted, (batch, R).
Tensor rows_wanted(const Tensor& index, int64_t batch) {
  STD_TORCH_CHECK(index.scalar_type() == ScalarType::Long && index.is_cuda() && index.dim() == 2 &&
                      index.size(0) == batch,
                  "captum_ssm: index must be a CUDA tensor of int64 of shape (B, R)");
  return torch::stable::contiguous(index);
}

Tensor diagonal_rows(const Tensor& index_, const Tensor& dt, const Tensor& right, const Tensor& A,
                     const Tensor& Bm, const Tensor& Cm, const std::optional<Tensor>& left,
                     const std::optional<Tensor>& conv) {
  const Arguments a(dt, right, A, Bm, Cm, left, conv);
  torch::stable::accelerator::DeviceGuard guard(dt.get_device_index());
  const Tensor index = rows_wanted(index_, dt.size(0));
  const Tensor out =
      torch::stable::new_empty(dt, {dt.size(0), dt.size(2), index.size(1), dt.size(1)});
  if (out.numel() == 0) return out;
  dispatch(dt, [&](auto zero) {
    using T = decltype(zero);
    const gpu::MatrixRows<T> r{a.maps<T>(), index.const_data_ptr<int64_t>(), index.size(1),
                               out.mutable_data_ptr<T>()};
    STD_CUDA_CHECK(gpu::rows<T>(r, stream_of(dt)));
  });
  return out;
}

// ---- matrix-valued states --------------------------------------------------------------------

// Only the numbers of one token and head have to be contiguous.
Tensor rows(const Tensor& x, const Tensor& like) {
  STD_TORCH_CHECK(x.scalar_type() == like.scalar_type() && x.is_cuda() && x.dim() == 4,
                  "captum_ssm: the arguments must be CUDA tensors of one dtype");
  return x.size(3) == 1 || x.stride(3) == 1 ? x : torch::stable::contiguous(x);
}

template <class T>
gpu::Rows<T> rows_of(const std::optional<Tensor>& x) {
  if (!x) return {nullptr, 0, 0, 0};
  return {x->const_data_ptr<T>(), x->stride(0), x->stride(1), x->size(2) == 1 ? 0 : x->stride(2)};
}

// The coefficients as given to an operator.
struct HeadArguments {
  Tensor query, key, log_decay;
  std::optional<Tensor> erase, probe, bonus;
  int64_t batch, L, H, N;

  HeadArguments(const Tensor& query_, const Tensor& key_, const Tensor& log_decay_,
                const std::optional<Tensor>& erase_, const std::optional<Tensor>& probe_,
                const std::optional<Tensor>& bonus_)
      : query(rows(query_, query_)), key(rows(key_, query_)), log_decay(rows(log_decay_, query_)) {
    batch = query.size(0), L = query.size(1), H = query.size(2), N = query.size(3);
    STD_TORCH_CHECK(erase_.has_value() == probe_.has_value(),
                    "captum_ssm: erase and probe go together");
    if (erase_) erase = rows(*erase_, query), probe = rows(*probe_, query);
    if (bonus_) bonus = rows(torch::stable::unsqueeze(*bonus_, -1), query);
    STD_TORCH_CHECK(L > 0 && H > 0 && N > 0 && fits(key, H, N) &&
                        (fits(log_decay, H, 1) || fits(log_decay, H, N)) &&
                        (!erase || (fits(*erase, H, N) && fits(*probe, H, N))) &&
                        (!bonus || fits(*bonus, H, 1)),
                    "captum_ssm: the shapes of the coefficients do not agree");
    STD_TORCH_CHECK(N <= gpu::kMaxKeys, "captum_ssm: CUDA kernels take at most 1024 keys a head");
  }

  bool fits(const Tensor& x, int64_t heads, int64_t size) const {
    return x.size(0) == batch && x.size(1) == L && x.size(2) == heads && x.size(3) == size;
  }

  template <class T>
  gpu::Heads<T> heads() const {
    return {rows_of<T>(query), rows_of<T>(key),   rows_of<T>(log_decay),
            rows_of<T>(erase), rows_of<T>(probe), rows_of<T>(bonus),
            log_decay.size(3) > 1, batch, L, H, N};
  }
};

Tensor linear(const HeadArguments& a, bool backward, const Tensor& given) {
  torch::stable::accelerator::DeviceGuard guard(a.query.get_device_index());
  const Tensor input = rows(given, a.query);
  const int64_t P = input.size(3);
  STD_TORCH_CHECK(a.fits(input, a.H, P) || (backward && a.fits(input, 1, P)),
                  "captum_ssm: the values must be (B, L, H, P)");
  const Tensor out = torch::stable::new_empty(a.query, {a.batch, a.L, a.H, P});
  if (out.numel() == 0) return out;
  dispatch(a.query, [&](auto zero) {
    using T = decltype(zero);
    gpu::HeadsRun<T> r{a.heads<T>(), P, backward, rows_of<T>(input), out.mutable_data_ptr<T>()};
    const bool divided = r.chunks() > 1;
    const Tensor state = torch::stable::new_empty(a.query, {divided ? r.states() : 0});
    const Tensor elapsed = torch::stable::new_empty(a.query, {divided ? r.sums() : 0});
    r.state = state.mutable_data_ptr<T>(), r.elapsed = elapsed.mutable_data_ptr<T>();
    STD_CUDA_CHECK(gpu::run<T>(r, stream_of(a.query)));
  });
  return out;
}

Tensor linear_scan(const Tensor& v, const Tensor& query, const Tensor& key, const Tensor& log_decay,
                   const std::optional<Tensor>& erase, const std::optional<Tensor>& probe,
                   const std::optional<Tensor>& bonus) {
  return linear(HeadArguments(query, key, log_decay, erase, probe, bonus), false, v);
}

Tensor linear_vecmat(const Tensor& w, const Tensor& query, const Tensor& key,
                     const Tensor& log_decay, const std::optional<Tensor>& erase,
                     const std::optional<Tensor>& probe, const std::optional<Tensor>& bonus) {
  return linear(HeadArguments(query, key, log_decay, erase, probe, bonus), true, w);
}

Tensor linear_rows(const Tensor& index_, const Tensor& query, const Tensor& key,
                   const Tensor& log_decay, const std::optional<Tensor>& erase,
                   const std::optional<Tensor>& probe, const std::optional<Tensor>& bonus) {
  const HeadArguments a(query, key, log_decay, erase, probe, bonus);
  torch::stable::accelerator::DeviceGuard guard(a.query.get_device_index());
  const Tensor index = rows_wanted(index_, a.batch);
  const int64_t count = index.size(1);
  const Tensor out = torch::stable::new_empty(a.query, {a.batch, a.H, count, a.L});
  if (out.numel() == 0) return out;
  dispatch(a.query, [&](auto zero) {
    using T = decltype(zero);
    const gpu::HeadRows<T> r{a.heads<T>(), count, index.const_data_ptr<int64_t>(), 0,
                             out.mutable_data_ptr<T>(), false};
    STD_CUDA_CHECK(gpu::rows<T>(r, stream_of(a.query)));
  });
  return out;
}

Tensor linear_mean(const Tensor& query, const Tensor& key, const Tensor& log_decay,
                   const std::optional<Tensor>& erase, const std::optional<Tensor>& probe,
                   const std::optional<Tensor>& bonus, int64_t start, int64_t stop) {
  const HeadArguments a(query, key, log_decay, erase, probe, bonus);
  STD_TORCH_CHECK(0 <= start && start < stop && stop <= a.L,
                  "captum_ssm: the rows asked for leave the sequence");
  torch::stable::accelerator::DeviceGuard guard(a.query.get_device_index());
  const Tensor out = torch::stable::new_zeros(a.query, {a.batch, stop - start, a.L});
  if (out.numel() == 0) return out;
  dispatch(a.query, [&](auto zero) {
    using T = decltype(zero);
    const gpu::HeadRows<T> r{a.heads<T>(), stop - start, nullptr, start,
                             out.mutable_data_ptr<T>(), true};
    STD_CUDA_CHECK(gpu::rows<T>(r, stream_of(a.query)));
  });
  return out;
}

// ---- taps ------------------------------------------------------------------------------------

void tap_rows(const Tensor& rows_, const Tensor& values_, const std::optional<Tensor>& left_,
              Tensor out) {
  torch::stable::accelerator::DeviceGuard guard(out.get_device_index());
  const Tensor rows = torch::stable::contiguous(rows_), values = torch::stable::contiguous(values_);
  STD_TORCH_CHECK(rows.dim() == 4 && values.dim() == 4 && out.dim() == 4,
                  "captum_ssm: an argument has the wrong number of dimensions");
  const int64_t B = out.size(0), D = out.size(1), R = out.size(2), C = out.size(3);
  const int64_t M = rows.size(1), L = rows.size(3), K = values.size(0);
  std::optional<Tensor> left;
  if (left_) left = torch::stable::contiguous(*left_);
  STD_TORCH_CHECK(M > 0 && D % M == 0 && K > 0 && rows.size(0) == B && rows.size(2) == R &&
                      values.size(1) == B && values.size(2) == D && values.size(3) == L && C <= L &&
                      (!left || left->numel() == B * D * R),
                  "captum_ssm: the shapes of the arguments do not agree");
  STD_TORCH_CHECK(out.stride(3) == 1 && out.stride(2) == C && out.stride(1) == R * C,
                  "captum_ssm: out must be contiguous within a sequence");
  for (const Tensor* x : {&values, left ? &*left : &values, (const Tensor*)&out})
    STD_TORCH_CHECK(x->scalar_type() == rows.scalar_type() && x->is_cuda(),
                    "captum_ssm: the arguments must be CUDA tensors of one dtype");
  if (out.numel() == 0) return;
  dispatch(rows, [&](auto zero) {
    using T = decltype(zero);
    const gpu::TapRows<T> t{rows.const_data_ptr<T>(), values.const_data_ptr<T>(), data<T>(left),
                            B, M, D, R, L, C, K, out.stride(0), out.mutable_data_ptr<T>()};
    STD_CUDA_CHECK(gpu::tap_rows<T>(t, stream_of(rows)));
  });
}

}  // namespace
}  // namespace captum_ssm

STABLE_TORCH_LIBRARY_IMPL(captum_ssm, CUDA, m) {
  m.impl("diagonal_scan", TORCH_BOX(&captum_ssm::diagonal_scan));
  m.impl("diagonal_vecmat", TORCH_BOX(&captum_ssm::diagonal_vecmat));
  m.impl("diagonal_mean", TORCH_BOX(&captum_ssm::diagonal_mean));
  m.impl("diagonal_rows", TORCH_BOX(&captum_ssm::diagonal_rows));
  m.impl("linear_scan", TORCH_BOX(&captum_ssm::linear_scan));
  m.impl("linear_vecmat", TORCH_BOX(&captum_ssm::linear_vecmat));
  m.impl("linear_rows", TORCH_BOX(&captum_ssm::linear_rows));
  m.impl("linear_mean", TORCH_BOX(&captum_ssm::linear_mean));
  m.impl("tap_rows", TORCH_BOX(&captum_ssm::tap_rows));
}

extern "C" __attribute__((visibility("default"))) PyObject* PyInit__C_cuda(void) {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C_cuda", nullptr, -1, nullptr};
  return PyModule_Create(&module);
}
