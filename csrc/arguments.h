// The operations' arguments, on any device. Python checks them with better messages; this is the
// last guard of memory for callers of torch.ops, and it keeps alive what was made contiguous.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <optional>
#include <vector>

// The library of operations. Where Hugging Face's kernel-builder builds these sources, each build has
// a name of its own, and a module of its own (recipe/hub).
#if defined(CPU_KERNEL) || defined(CUDA_KERNEL)
#define CAPTUM_SSM_HUB
#define CAPTUM_SSM_OPS TORCH_EXTENSION_NAME
#else
#define CAPTUM_SSM_OPS captum_ssm
#endif
#define CAPTUM_SSM_IMPL_OF(ops, device, m) STABLE_TORCH_LIBRARY_IMPL(ops, device, m)
#define CAPTUM_SSM_IMPL(device, m) CAPTUM_SSM_IMPL_OF(CAPTUM_SSM_OPS, device, m)

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
                    "captum_ssm: expected arguments of dtype float32 or float64");
    f(double());
  }
}

template <class T>
const T* data(const std::optional<Tensor>& x) {
  return x ? x->const_data_ptr<T>() : nullptr;
}

inline void check_alike(const Tensor& x, const Tensor& like, int64_t dim) {
  STD_TORCH_CHECK(x.scalar_type() == like.scalar_type(),
                  "captum_ssm: expected arguments of one dtype");
  STD_TORCH_CHECK(x.is_cuda() == like.is_cuda() && x.get_device_index() == like.get_device_index(),
                  "captum_ssm: expected arguments on one device");
  STD_TORCH_CHECK(x.dim() == dim, "captum_ssm: an argument has the wrong number of dimensions");
}

// x, contiguous.
inline Tensor whole(const Tensor& x, const Tensor& like, int64_t dim) {
  check_alike(x, like, dim);
  return torch::stable::contiguous(x);
}

// x of (B, L, H, size); only the numbers of one token and head are made contiguous.
inline Tensor rows(const Tensor& x, const Tensor& like) {
  check_alike(x, like, 4);
  return x.size(3) == 1 || x.stride(3) == 1 ? x : torch::stable::contiguous(x);
}

// Rows asked for, (B, R).
inline Tensor row_index(const Tensor& x, const Tensor& like) {
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::Long && x.dim() == 2 &&
                      x.size(0) == like.size(0) && x.is_cuda() == like.is_cuda(),
                  "captum_ssm: index must be int64 of shape (B, R), on the device of the others");
  return torch::stable::contiguous(x);
}

inline void check_range(int64_t start, int64_t stop, int64_t L) {
  STD_TORCH_CHECK(0 <= start && start < stop && stop <= L,
                  "captum_ssm: the rows asked for are outside the sequence");
}

// The gradients of an operation: a tensor for each argument. Those that are not wanted are empty.
class Gradients {
 public:
  Gradients(const Tensor& like, const std::vector<bool>& wanted) : like_(like), wanted_(wanted) {}

  // The gradient of the next argument, of its shape and contiguous; zero at first where it is added
  // up.
  Tensor next(const std::optional<Tensor>& x, bool zero = false) {
    STD_TORCH_CHECK(at_ < wanted_.size(), "captum_ssm: expected as many wanted as arguments");
    if (!wanted_[at_++]) return torch::stable::new_empty(like_, {0});
    STD_TORCH_CHECK(x.has_value(), "captum_ssm: the gradient of a missing argument is wanted");
    const auto sizes = x->sizes();
    return zero ? torch::stable::new_zeros(like_, sizes) : torch::stable::new_empty(like_, sizes);
  }

 private:
  const Tensor& like_;
  const std::vector<bool>& wanted_;
  size_t at_ = 0;
};

// Where a gradient goes; null where it is not wanted.
template <class T>
T* if_wanted(Tensor& x) {
  return x.numel() ? x.mutable_data_ptr<T>() : nullptr;
}

// The coefficients of a diagonal recurrence.
struct DiagonalArguments {
  Tensor dt, right, A, B, C;
  std::optional<Tensor> left, conv, columns;
  int64_t batch, L, D, N, G, K;

  DiagonalArguments(const Tensor& dt_, const Tensor& right_, const Tensor& A_, const Tensor& B_,
                    const Tensor& C_, const std::optional<Tensor>& left_,
                    const std::optional<Tensor>& conv_,
                    const std::optional<Tensor>& columns_ = std::nullopt)
      : dt(whole(dt_, dt_, 3)), right(whole(right_, dt_, 3)), A(whole(A_, dt_, 2)),
        B(whole(B_, dt_, 4)), C(whole(C_, dt_, 4)) {
    batch = dt.size(0), L = dt.size(1), D = dt.size(2);
    N = A.size(1), G = B.size(2), K = 1;
    if (left_) left = whole(*left_, dt_, 3);
    if (conv_) conv = whole(*conv_, dt_, 2), K = conv->size(1);
    if (columns_) columns = whole(*columns_, dt_, 3);
    STD_TORCH_CHECK(L > 0 && D > 0 && N > 0 && G > 0 && K > 0 && D % G == 0,
                    "captum_ssm: an argument is empty, or the groups do not divide the channels");
    STD_TORCH_CHECK(right.numel() == dt.numel() && A.numel() == D * N &&
                        B.numel() == batch * L * G * N && C.numel() == B.numel() &&
                        (!left || left->numel() == dt.numel()) && (!conv || conv->size(0) == D) &&
                        (!columns || (conv && columns->numel() == dt.numel())),
                    "captum_ssm: the shapes of the coefficients do not agree");
  }
};

// The coefficients of a recurrence on a matrix-valued state. Heads may share memory, and tokens may
// lie anywhere.
struct HeadArguments {
  Tensor query, key, log_decay;
  std::optional<Tensor> erase, probe, bonus;
  int64_t batch, L, H, N;

  HeadArguments(const Tensor& query_, const Tensor& key_, const Tensor& log_decay_,
                const std::optional<Tensor>& erase_, const std::optional<Tensor>& probe_,
                const std::optional<Tensor>& bonus_)
      : query(rows(query_, query_)), key(rows(key_, query_)), log_decay(rows(log_decay_, query_)) {
    batch = query.size(0), L = query.size(1), H = query.size(2), N = query.size(3);
    STD_TORCH_CHECK(L > 0 && H > 0 && N > 0, "captum_ssm: an argument is empty");
    STD_TORCH_CHECK(erase_.has_value() == probe_.has_value(),
                    "captum_ssm: expected both erase and probe, or neither");
    if (erase_) erase = rows(*erase_, query_), probe = rows(*probe_, query_);
    if (bonus_) bonus = rows(torch::stable::unsqueeze(*bonus_, -1), query_);
    STD_TORCH_CHECK(fits(key, H, N) && (fits(log_decay, H, 1) || fits(log_decay, H, N)) &&
                        (!erase || (fits(*erase, H, N) && fits(*probe, H, N))) &&
                        (!bonus || fits(*bonus, H, 1)),
                    "captum_ssm: the shapes of the coefficients do not agree");
  }

  bool fits(const Tensor& x, int64_t heads, int64_t size) const {
    return x.size(0) == batch && x.size(1) == L && x.size(2) == heads && x.size(3) == size;
  }

  // Values, (B, L, H, P), or row vectors shared by the heads, (B, L, 1, P).
  Tensor values(const Tensor& x, bool backward) const {
    const Tensor found = rows(x, query);
    STD_TORCH_CHECK(fits(found, H, found.size(3)) || (backward && fits(found, 1, found.size(3))),
                    "captum_ssm: the values must be (B, L, H, P)");
    return found;
  }
};

// What tap_rows reads, and the tensor it fills: contiguous except in its first dimension.
struct TapArguments {
  Tensor rows, values;
  std::optional<Tensor> left;
  int64_t B, M, D, R, L, C, K, stride;

  TapArguments(const Tensor& rows_, const Tensor& values_, const std::optional<Tensor>& left_,
               const Tensor& out)
      : rows(whole(rows_, rows_, 4)), values(whole(values_, rows_, 4)) {
    check_alike(out, rows_, 4);
    if (left_) left = whole(*left_, rows_, 3);
    B = out.size(0), D = out.size(1), R = out.size(2), C = out.size(3);
    M = rows.size(1), L = rows.size(3), K = values.size(0), stride = out.stride(0);
    STD_TORCH_CHECK(M > 0 && D % M == 0 && K > 0 && rows.size(0) == B && rows.size(2) == R &&
                        values.size(1) == B && values.size(2) == D && values.size(3) == L &&
                        C <= L && (!left || left->numel() == B * D * R),
                    "captum_ssm: the shapes of the arguments do not agree");
    STD_TORCH_CHECK(out.stride(3) == 1 && out.stride(2) == C && out.stride(1) == R * C,
                    "captum_ssm: out must be contiguous within a sequence");
  }
};

}  // namespace captum_ssm
