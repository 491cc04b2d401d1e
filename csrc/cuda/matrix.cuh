// The channel-mean matrix on a GPU, free of torch. A tile of kTile rows and sources left of the
// diagonal is a matrix product with inner dimension channels times states, both panels made by exp
// in shared memory; a tile on the diagonal runs the recurrence, one thread per column.
// See csrc/cpu/tile.h for the algebra.
//
// Tiles lie on a grid of kTile positions. Sums of dt are kept within stretches of kTile and, across
// them, as float64 sums of ordinary steps with a count of huge ones (resets): a difference of sums
// that held a huge step would lose the small ones after it.
#pragma once

#include "recurrence.cuh"

namespace captum_ssm {
namespace gpu {

constexpr int kTile = 64;
template <class T>
constexpr int kInner = 128 / sizeof(T);  // channels times states handled at once
constexpr int kTileThreads = 256;  // 16 by 16, each 4 by 4 entries
constexpr double kReset = 1e8;     // steps from here on count as resets

template <class T>
struct Steps {
  T* before;     // (batch, L, D): from the stretch's start through the position
  T* after;      // (batch, L, D): after the position to the stretch's end
  double* sum;   // (batch, stretches + 1, D): ordinary steps before the stretch
  int* resets;   // (batch, stretches + 1, D): huge steps before the stretch
};

template <class T>
struct Mean {
  Maps<T> maps;
  Steps<T> steps;
  T* out;  // (batch, stop - start, L), zero at first
  int64_t start, stop;

  __host__ __device__ int64_t stretches() const { return (stop + kTile - 1) / kTile; }
  __host__ __device__ int64_t first_tile() const { return start / kTile; }
};

// Blocks (channels, stretch, batch). Leaves each stretch's own sums in the entry after it.
template <class T>
__global__ void sum_steps(Mean<T> p) {
  const Maps<T>& m = p.maps;
  const int64_t d = blockIdx.x * int64_t(kThreads) + threadIdx.x, s = blockIdx.y, b = blockIdx.z;
  if (d >= m.D) return;
  const int64_t begin = s * kTile, end = begin + kTile < m.L ? begin + kTile : m.L;
  double sum = 0, ordinary = 0;
  int resets = 0;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t at = (b * m.L + i) * m.D + d;
    const double dt = m.dt[at] < T(kHugeStep) ? double(m.dt[at]) : kHugeStep;
    sum += dt;
    p.steps.before[at] = T(sum);
    if (dt < kReset)
      ordinary += dt;
    else
      ++resets;
  }
  sum = 0;
  for (int64_t i = end - 1; i >= begin; --i) {
    const int64_t at = (b * m.L + i) * m.D + d;
    p.steps.after[at] = T(sum);
    sum += m.dt[at] < T(kHugeStep) ? double(m.dt[at]) : kHugeStep;
  }
  const int64_t to = (b * (p.stretches() + 1) + s + 1) * m.D + d;
  p.steps.sum[to] = ordinary;
  p.steps.resets[to] = resets;
}

// Blocks (channels, 1, batch): running sums over stretches.
template <class T>
__global__ void accumulate_steps(Mean<T> p) {
  const Maps<T>& m = p.maps;
  const int64_t d = blockIdx.x * int64_t(kThreads) + threadIdx.x, b = blockIdx.z;
  if (d >= m.D) return;
  const int64_t base = b * (p.stretches() + 1) * m.D + d;
  p.steps.sum[base] = 0;
  p.steps.resets[base] = 0;
  for (int64_t s = 1; s <= p.stretches(); ++s) {
    p.steps.sum[base + s * m.D] += p.steps.sum[base + (s - 1) * m.D];
    p.steps.resets[base + s * m.D] += p.steps.resets[base + (s - 1) * m.D];
  }
}

// The time from the end of stretch s to the start of stretch e.
template <class T>
__device__ T time_between(const Mean<T>& p, int64_t b, int64_t d, int64_t s, int64_t e) {
  const int64_t base = b * (p.stretches() + 1) * p.maps.D + d;
  const int64_t from = base + (s + 1) * p.maps.D, to = base + e * p.maps.D;
  if (p.steps.resets[to] != p.steps.resets[from]) return T(kHugeStep);
  return T(p.steps.sum[to] - p.steps.sum[from]);
}

// Blocks (tile of columns, tile of rows from the first, batch) of kTileThreads threads.
template <class T>
__global__ void mean_left_of_diagonal(Mean<T> p) {
  const Maps<T>& m = p.maps;
  const int64_t row_tile = p.first_tile() + blockIdx.y, column_tile = blockIdx.x, b = blockIdx.z;
  if (column_tile >= row_tile) return;
  const int64_t r0 = row_tile * kTile, c0 = column_tile * kTile, reach = m.reach();
  const int64_t inner = m.D * m.N;
  __shared__ T P[kInner<T>][kTile + 4];
  __shared__ T Q[kInner<T>][kTile + 4];
  __shared__ T raw[kInner<T>][kTile + kMaxTaps];  // sources before their taps are folded in
  const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
  T sum[4][4] = {};
  const int sources = int(c0 + kTile + reach < r0 ? kTile + reach : r0 - c0);

  for (int64_t k0 = 0; k0 < inner; k0 += kInner<T>) {
    for (int x = threadIdx.x; x < kInner<T> * kTile; x += kTileThreads) {
      const int64_t k = k0 + x / kTile, i = r0 + x % kTile, d = k / m.N, n = k % m.N;
      T v = 0;
      if (k < inner && i < m.L) {
        const int64_t at = (b * m.L + i) * m.D + d;
        v = exponential(m.A[k] * p.steps.before[at]) *
            m.C[((b * m.L + i) * m.G + d / (m.D / m.G)) * m.N + n];
        if (m.left) v *= m.left[at];
      }
      P[x / kTile][x % kTile] = v;
    }
    const int width = kTile + int(reach);
    for (int x = threadIdx.x; x < kInner<T> * width; x += kTileThreads) {
      const int64_t k = k0 + x / width, j = c0 + x % width, d = k / m.N, n = k % m.N;
      T v = 0;
      if (k < inner && x % width < sources) {
        const int64_t at = (b * m.L + j) * m.D + d;
        const T time = p.steps.after[at] + time_between(p, b, d, j / kTile, row_tile);
        v = exponential(m.A[k] * time) * m.right[at] *
            m.B[((b * m.L + j) * m.G + d / (m.D / m.G)) * m.N + n];
      }
      raw[x / width][x % width] = v;
    }
    __syncthreads();
    for (int x = threadIdx.x; x < kInner<T> * kTile; x += kTileThreads) {
      const int row = x / kTile, c = x % kTile;
      T v = raw[row][c];
      if (m.conv && k0 + row < inner) {
        const T* taps = m.conv + (k0 + row) / m.N * m.K + reach;
        v *= taps[0];
        for (int q = 1; q <= reach; ++q) v += taps[-q] * raw[row][c + q];
        if (m.columns) v *= m.columns[(b * m.L + c0 + c) * m.D + (k0 + row) / m.N];
      }
      Q[row][c] = v;
    }
    __syncthreads();
#pragma unroll 4
    for (int k = 0; k < kInner<T>; ++k) {
      T a[4], q[4];
#pragma unroll
      for (int x = 0; x < 4; ++x) a[x] = P[k][ty * 4 + x], q[x] = Q[k][tx * 4 + x];
#pragma unroll
      for (int x = 0; x < 4; ++x)
#pragma unroll
        for (int y = 0; y < 4; ++y) sum[x][y] += a[x] * q[y];
    }
    __syncthreads();
  }
  for (int x = 0; x < 4; ++x) {
    const int64_t i = r0 + ty * 4 + x;
    if (i < p.start || i >= p.stop) continue;
    T* out = p.out + (b * (p.stop - p.start) + i - p.start) * m.L + c0 + tx * 4;
    for (int y = 0; y < 4; ++y) atomicAdd(out + y, sum[x][y] / T(m.D));
  }
}

constexpr int kSlices = 16;  // blocks that share the channels of a diagonal tile

// Blocks (slice of channels, tile of rows from the first, batch) of 2 kTile threads: one per
// column, from kTile left of the tile on, as taps extend sources to the left.
template <class T>
__global__ void mean_on_diagonal(Mean<T> p) {
  const Maps<T>& m = p.maps;
  const int64_t r0 = (p.first_tile() + blockIdx.y) * kTile, b = blockIdx.z, reach = m.reach();
  const int column = int(threadIdx.x) - kTile;  // from r0
  const int rows = int(m.L - r0 < kTile ? m.L - r0 : kTile);
  __shared__ T decay[kTile][kStates], enter[kTile][kStates], leave[kTile][kStates];
  T sum[kTile];  // of this column, row by row; in local memory
  for (int i = 0; i < kTile; ++i) sum[i] = 0;

  for (int64_t d = blockIdx.x; d < m.D; d += kSlices)
    for (int64_t n0 = 0; n0 < m.N; n0 += kStates) {
      for (int x = threadIdx.x; x < kTile * kStates; x += 2 * kTile) {
        const int i = x / kStates;
        const int64_t n = n0 + x % kStates, at = (b * m.L + r0 + i) * m.D + d;
        const int64_t of = ((b * m.L + r0 + i) * m.G + d / (m.D / m.G)) * m.N + n;
        const bool there = i < rows && n < m.N;
        const T dt = there ? (m.dt[at] < T(kHugeStep) ? m.dt[at] : T(kHugeStep)) : T(0);
        decay[i][x % kStates] = there ? exponential(m.A[d * m.N + n] * dt) : T(0);
        enter[i][x % kStates] = there ? m.right[at] * m.B[of] : T(0);
        leave[i][x % kStates] = there ? m.C[of] * (m.left ? m.left[at] : T(1)) : T(0);
      }
      __syncthreads();
      if (column >= -reach && r0 + column >= 0) {
        const T factor = m.columns ? m.columns[(b * m.L + r0 + column) * m.D + d] : T(1);
        T h[kStates] = {};
        for (int i = column > 0 ? column : 0; i < rows; ++i) {
          const int back = i - column;
          const T tap =
              factor * (back > reach ? T(0) : m.conv ? m.conv[d * m.K + reach - back] : T(1));
          T y = 0;
#pragma unroll
          for (int n = 0; n < kStates; ++n) {
            h[n] = h[n] * decay[i][n] + tap * enter[i][n];
            y += h[n] * leave[i][n];
          }
          sum[i] += y;
        }
      }
      __syncthreads();
    }
  const int64_t j = r0 + column;
  if (column < -reach || j < 0) return;
  for (int i = column > 0 ? column : 0; i < rows; ++i)
    if (r0 + i >= p.start && r0 + i < p.stop)
      atomicAdd(p.out + (b * (p.stop - p.start) + r0 + i - p.start) * m.L + j, sum[i] / T(m.D));
}

template <class T>
cudaError_t mean(const Mean<T>& p, cudaStream_t stream) {
  const Maps<T>& m = p.maps;
  const unsigned blocks = unsigned(channel_blocks(m.D)), batch = unsigned(m.batch);
  const unsigned tiles = unsigned(p.stretches() - p.first_tile());
  CAPTUM_SSM_LAUNCH(sum_steps<T>, dim3(blocks, unsigned(p.stretches()), batch), kThreads, stream, p);
  CAPTUM_SSM_LAUNCH(accumulate_steps<T>, dim3(blocks, 1, batch), kThreads, stream, p);
  if (p.stretches() > 1)
    CAPTUM_SSM_LAUNCH(mean_left_of_diagonal<T>, dim3(unsigned(p.stretches() - 1), tiles, batch),
                      kTileThreads, stream, p);
  CAPTUM_SSM_LAUNCH(mean_on_diagonal<T>, dim3(kSlices, tiles, batch), 2 * kTile, stream, p);
  return cudaGetLastError();
}

}  // namespace gpu
}  // namespace captum_ssm
