// The arguments of the CPU kernels, and the table through which one instruction set's version of
// them is called. Free of torch: the kernels see pointers and sizes; diagonal.cpp,
// linear_attention.cpp, taps.cpp and distances.cpp see tensors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

#include "heads.h"

namespace captum_ssm {

// The coefficients of one sequence, contiguous (see captum_ssm/kernels/diagonal.py for the algebra).
template <class T>
struct Maps {
  const T* dt;     // (L, D)
  const T* right;  // (L, D)
  const T* A;      // (D, N)
  const T* B;      // (L, G, N)
  const T* C;      // (L, G, N)
  const T* left;   // (L, D), or null
  const T* conv;   // (D, K), or null
  const T* columns;  // (L, D) with a convolution, or null; of tile_mean alone
  int64_t L, D, N, G, K;

  int64_t group(int64_t d) const { return d / (D / G); }
  // Columns by which taps extend a source to the left.
  int64_t reach() const { return conv ? K - 1 : 0; }
};

// A run of the recurrence over time and a range of channels, forwards (diagonal_scan) or
// backwards (diagonal_rmatvec). Steps are counted in the direction of the run.
template <class T>
struct Run {
  Maps<T> maps;
  bool backward;
  const T* input;   // values v, or row vectors w: (L, D), or (L) where shared
  bool shared;      // input is (L)
  T* output;        // (L, D), or null
  T* sum;           // (L) sums over these channels are added here, or null
  T* state;         // (channels rounded up to lanes, N) in blocks of lanes; in: start, out: end
  double* elapsed;  // (channels rounded up to lanes) sums of the decay steps, or null
  int64_t d0, d1;   // channels; d0 is a multiple of the number of lanes
  int64_t first, last;  // steps to run
  int64_t emit;         // the first step whose output is wanted
};

// A run over all of time of a range of channels: the gradients of diagonal_scan.
template <class T>
struct RunGradient {
  Maps<T> maps;     // without a convolution
  const T* v;       // (L, D)
  const T* output;  // (L, D), the gradient of the output
  int64_t d0, d1;   // channels; d0 is a multiple of the number of lanes
  // The gradients to write, each null where it is not wanted.
  T *of_v, *of_dt, *of_right, *of_left;  // (L, D)
  T* of_A;                               // (D, N)
  T *of_B, *of_C;                        // (L, groups of these channels, N); added to

  int64_t groups() const { return maps.group(d1 - 1) - maps.group(d0) + 1; }
  // Do they need the states, and the gradients of the states?
  bool states() const { return of_dt || of_A || of_C || of_left; }
  bool adjoint() const { return of_v || of_dt || of_right || of_A || of_B; }
};

// Rows [r0, r1) and columns [c0, c1) of a matrix. Either c1 <= r0, and the sources from c1 on are
// left to other tiles except where taps bring them into these columns; or c0 == r0 and c1 == r1,
// the tile on the diagonal, whose sources extend to the left of c0 where there is a convolution.
struct Tile {
  int64_t r0, r1, c0, c1;
  bool diagonal() const { return c0 == r0; }
};

// Rows of maps times products of weights (see weighted_rows.h).
template <class T>
struct WeightedRows {
  const T* rows;     // (M, R, L), from the first of these rows on
  const T* left;     // (R, D), likewise
  const T* sources;  // K of (D, L), tap_step elements apart
  int64_t tap_step;
  int64_t M, D, R, L, K;
  int64_t count;     // of these rows
  int64_t last;      // the last column at which the first row is not zero; a later row has one more
  T* out;            // (count, L)
};

template <class T>
struct Kernels {
  int64_t lanes;

  // Elements of scratch that run() needs for a range of channels.
  int64_t (*run_scratch)(const Run<T>&);
  void (*run)(const Run<T>&, T* scratch);
  // state <- state + exp(A elapsed) before, for blocks of channels as in Run: joins two stretches.
  void (*join)(const Maps<T>&, int64_t d0, int64_t d1, const double* elapsed, const T* before,
               T* state);

  // The gradients of a run, and the elements of scratch that they need.
  int64_t (*gradient_scratch)(const RunGradient<T>&);
  void (*gradient)(const RunGradient<T>&, T* scratch);

  // Elements of scratch for tiles of at most `size` rows and columns.
  int64_t (*tile_scratch)(const Maps<T>&, int64_t size);
  // Adds scale times the sum over all channels of one tile to out, (rows, ld), whose first row is
  // row0, while it holds the lock (if any: tiles of the same rows overlap where taps extend sources
  // to the left). `between` are sums of dt over stretches of kStretch steps, (stretches, D).
  void (*tile_mean)(const Maps<T>&, const Tile&, int64_t size, const double* between, T scale,
                    T* out, int64_t ld, int64_t row0, bool* lock, T* scratch);
  // Writes the chosen rows of one tile for channels [d0, d1): row rows[k] of channel d goes to
  // out + (d * stride + slots[k]) * L. A tile on the diagonal comes last: it adds to what is
  // left of it, and fills the rows with zeros to the right.
  void (*tile_rows)(const Maps<T>&, const Tile&, int64_t size, const double* between, int64_t d0,
                    int64_t d1, const int64_t* rows, const int64_t* slots, int64_t count, T* out,
                    int64_t stride, T* scratch);

  // Rows (count, length) of one channel's map times values (taps) that are `step` elements apart,
  // scaled by left (count) where there is one, to out (count, columns).
  void (*tap_rows)(const T* rows, const T* values, int64_t step, int64_t taps, const T* left,
                   int64_t count, int64_t length, int64_t columns, T* out);

  // Distances of the vectors of one token from outputs (count, width), where vectors are maps
  // (number, count) times values (number, width), to elements of out that are `step` apart. Scratch
  // is `count` vectors.
  void (*map_distances)(const T* maps, const T* values, const T* outputs, int64_t number,
                        int64_t count, int64_t width, T* out, int64_t step, T* scratch);

  // Takes at most weighted_rows_together rows; scratch holds so many elements for D channels of M maps.
  int64_t (*weighted_scratch)(int64_t D, int64_t M);
  void (*weighted_rows)(const WeightedRows<T>&, T* scratch);
  int64_t weighted_rows_together;

  HeadsKernels<T> heads;
};

constexpr int64_t kStretch = 64;  // steps of dt summed in one entry of `between`

// Null where the processor or the compiler lacks the instructions.
template <class T>
const Kernels<T>* kernels_avx512();
template <class T>
const Kernels<T>* kernels_avx2();
template <class T>
const Kernels<T>* kernels_portable();

}  // namespace captum_ssm
