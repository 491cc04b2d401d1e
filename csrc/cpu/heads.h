// The arguments of the kernels of recurrences on a matrix-valued state (for the algebra, see
// captum_ssm/kernels/linear_attention.py). Free of torch.
#pragma once

#include <cstdint>

namespace captum_ssm {

// One row of contiguous numbers for each token and head of a sequence; null where there is none.
template <class T>
struct Rows {
  T* data = nullptr;
  int64_t token = 0, head = 0;  // elements from one to the next; 0 where they share a row

  explicit operator bool() const { return data; }
  T* at(int64_t t, int64_t h) const { return data + t * token + h * head; }
};

// The coefficients of one sequence.
template <class T>
struct Heads {
  Rows<const T> query, key;     // N
  Rows<const T> log_decay;      // 1, or N where per_key
  Rows<const T> erase, probe;   // N, or null
  Rows<const T> bonus;          // 1, or null
  int64_t L, H, N;
  bool per_key;

  // Does a delta rule take away the very rows that it writes?
  bool erases_key() const {
    return erase && erase.data == key.data && erase.token == key.token && erase.head == key.head;
  }
};

// A run over steps [first, last), counted in its direction, of all of a few heads and columns of
// the state: forwards from values to outputs (linear_attention_scan), backwards the transposed
// (linear_attention_rmatvec).
template <class T>
struct HeadsRun {
  Heads<T> heads;
  bool backward;
  Rows<const T> input;  // P
  Rows<T> output;       // P, or null
  int64_t P;
  int64_t h0, h1;       // heads
  int64_t first, last;
  T* state;             // (heads, P, heads_padded(N)); in: start, out: end
  double* elapsed;      // (heads, heads_padded(N)) sums of the log decays, or null
};

// All of time of a few heads: the gradients of linear_attention_scan.
template <class T>
struct HeadsGradient {
  Heads<T> heads;
  Rows<const T> v, output;  // P; the values, and the gradient of the output
  int64_t P, h0, h1;
  // The gradients to write, each null where it is not wanted.
  Rows<T> of_v;                                   // P
  Rows<T> of_query, of_key, of_erase, of_probe;   // N
  Rows<T> of_log_decay;                           // 1, or N where per_key
  Rows<T> of_bonus;                               // 1

  // Do they need the states, and the gradients of the states?
  bool states() const { return of_query || of_probe || of_erase || of_log_decay; }
  bool adjoint() const { return of_v || of_key || of_probe || of_erase || of_log_decay; }
};

// Rows of the maps of heads [h0, h1): the backward run whose inputs are unit vectors, one per
// column.
template <class T>
struct HeadRows {
  Heads<T> heads;
  int64_t h0, h1;
  const int64_t* rows;   // count of them, none larger than the one before
  const int64_t* slots;  // where each goes: out + slot * L
  int64_t count;
  T* out;                // written by one head, or null where
  T* sum;                // (L, count) all heads are added up
};

// What the channels of the heads weigh: rows, columns, and columns before a convolution in between.
template <class T>
struct HeadWeights {
  const T* left;     // (rows, D), from the row `first` on
  const T* right;    // (L, D), or null
  const T* taps;     // (D, K), or null
  const T* columns;  // (L, D), or null
  int64_t first, P, D, K;
  T* out;            // (rows, L), likewise: the mean over the channels
};

constexpr int64_t kHeadsTogether = 8;

template <class T>
struct HeadsKernels {
  int64_t (*padded)(int64_t states);  // N in steps of whole vectors

  // Few columns, one vector per state: all heads side by side, token by token.
  int64_t (*narrow_scratch)(const HeadsRun<T>&);
  void (*narrow)(const HeadsRun<T>&, T* scratch);
  // state <- state + exp(elapsed) before, as in HeadsRun: joins two stretches.
  void (*join)(const HeadsRun<T>&, const T* before);

  // Many columns: matrix products over a few steps at a time. Starts at zero, over all steps of at
  // most kHeadsTogether heads.
  int64_t (*wide_scratch)(const Heads<T>&, int64_t heads, int64_t columns);
  void (*wide)(const HeadsRun<T>&, T* scratch);
  void (*rows)(const HeadRows<T>&, T* scratch);

  // The sum over the channels of weighted rows of maps (see weighted_heads.h).
  int64_t (*weighted_scratch)(const HeadRows<T>&, const HeadWeights<T>&);
  void (*weighted)(const HeadRows<T>&, const HeadWeights<T>&, T* scratch);

  int64_t (*gradient_scratch)(const HeadsGradient<T>&);
  void (*gradient)(const HeadsGradient<T>&, T* scratch);

  int64_t widest_narrow;  // columns up to which narrow is the faster one
  int64_t block;          // columns of one block of wide
};

}  // namespace captum_ssm
