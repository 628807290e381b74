// Kernels of many kinds, each small: what threads share, where they part, and how memory is reached.
#define KERNEL extern "C" __attribute__((global)) void
#define DEVICE __attribute__((device)) static
#define SHARED __attribute__((shared))
#define TX __nvvm_read_ptx_sreg_tid_x()
#define TY __nvvm_read_ptx_sreg_tid_y()
#define BX __nvvm_read_ptx_sreg_ctaid_x()
#define BY __nvvm_read_ptx_sreg_ctaid_y()
#define THREADS __nvvm_read_ptx_sreg_ntid_x()
typedef unsigned int uint;

DEVICE inline int place() { return BX * THREADS + TX; }

KERNEL saxpy(float a, const float *x, float *y, int n) {
  int i = place();
  if (i < n) y[i] = a * x[i] + y[i];
}

KERNEL transpose(const float *x, float *y, int n) {
  SHARED float tile[16][17];
  int row = BY * 16 + TY, column = BX * 16 + TX;
  if (row < n && column < n) tile[TY][TX] = x[row * n + column];
  __syncthreads();
  row = BX * 16 + TY, column = BY * 16 + TX;
  if (row < n && column < n) y[row * n + column] = tile[TX][TY];
}

KERNEL reduce(const float *x, float *sums, int n) {
  SHARED float parts[32];
  float sum = 0.f;
  for (int i = place(); i < n; i += THREADS * __nvvm_read_ptx_sreg_nctaid_x()) sum += x[i];
  for (int k = 16; k; k /= 2) sum += __nvvm_shfl_sync_down_f32(-1, sum, k, 31);
  if (TX % 32 == 0) parts[TX / 32] = sum;
  __syncthreads();
  if (TX == 0) {
    for (int k = 1; k < THREADS / 32; k++) sum += parts[k];
    sums[BX] = sum;
  }
}

KERNEL histogram(const uint *x, uint *counts, int n) {
  SHARED uint bins[64];
  if (TX < 64) bins[TX] = 0;
  __syncthreads();
  int i = place();
  if (i < n) __nvvm_atom_add_gen_i((int *)&bins[x[i] % 64], 1);
  __syncthreads();
  if (TX < 64) __nvvm_atom_add_gen_i((int *)&counts[TX], bins[TX]);
}

KERNEL scan(const int *x, int *y) {
  SHARED int sums[2][128];
  int from = 0;
  sums[0][TX] = x[place()];
  __syncthreads();
  for (int step = 1; step < 128; step *= 2, from ^= 1) {
    sums[from ^ 1][TX] = sums[from][TX] + (TX >= step ? sums[from][TX - step] : 0);
    __syncthreads();
  }
  y[place()] = sums[from][TX];
}

KERNEL bitonic_sort(int *x) {
  SHARED int keys[128];
  keys[TX] = x[place()];
  __syncthreads();
  for (int size = 2; size <= 128; size *= 2)
    for (int step = size / 2; step; step /= 2) {
      int other = TX ^ step;
      if (other > TX) {
        int a = keys[TX], b = keys[other];
        if ((a > b) == ((TX & size) == 0)) keys[TX] = b, keys[other] = a;
      }
      __syncthreads();
    }
  x[place()] = keys[TX];
}

KERNEL stencil(const float *x, float *y, int n) {
  int i = place(), row = i / n, column = i % n;
  if (row > 0 && column > 0 && row < n - 1 && column < n - 1)
    y[i] = .25f * (x[i - 1] + x[i + 1] + x[i - n] + x[i + n]) - x[i];
}

KERNEL sparse_product(const int *starts, const int *columns, const float *values, const float *x, float *y, int n) {
  int row = place();
  if (row >= n) return;
  float sum = 0.f;
  for (int k = starts[row]; k < starts[row + 1]; k++) sum += values[k] * x[columns[k]];
  y[row] = sum;
}

KERNEL collatz(const uint *x, uint *steps, int n) {
  int i = place();
  if (i >= n) return;
  uint value = x[i], count = 0;
  while (value != 1 && count < 200) {
    value = value & 1 ? 3 * value + 1 : value / 2;
    count++;
  }
  steps[i] = count;
}

KERNEL mandelbrot(int *steps, int n, float scale) {
  int i = place();
  float re = (i % n) * scale - 2.f, im = (i / n) * scale - 1.25f, a = 0.f, b = 0.f;
  int count = 0;
  for (; count < 32; count++) {
    float square = a * a - b * b + re;
    b = 2.f * a * b + im;
    a = square;
    if (a * a + b * b > 4.f) break;
  }
  steps[i] = count;
}

DEVICE __attribute__((noinline)) uint gcd(uint a, uint b) {
  while (b) {
    uint rest = a % b;
    a = b;
    b = rest;
  }
  return a;
}

DEVICE __attribute__((noinline)) double polynomial(const double *coefficients, double x, int degree) {
  double sum = 0;
  for (int k = degree; k >= 0; k--) sum = sum * x + coefficients[k];
  return sum;
}

KERNEL calls(const uint *a, const uint *b, uint *divisors, const double *coefficients, const double *x, double *y) {
  int i = place();
  divisors[i] = gcd(a[i], b[i]);
  y[i] = polynomial(coefficients, x[i], divisors[i] % 4) / polynomial(coefficients, 2 * x[i], 2);
}

KERNEL local_sort(const int *x, int *y) {
  int own[8], base = place() * 8;
  for (int k = 0; k < 8; k++) own[k] = x[base + k];
  for (int k = 1; k < 8; k++) {
    int value = own[k], at = k;
    for (; at > 0 && own[at - 1] > value; at--) own[at] = own[at - 1];
    own[at] = value;
  }
  for (int k = 0; k < 8; k++) y[base + k] = own[(k + (TX & 7)) & 7];
}

KERNEL batch_norm(const float *x, float *y, const float *gain, const float *bias, int rows, int columns) {
  int c = place();
  if (c >= columns) return;
  float mean = 0.f, variance = 0.f;
  for (int r = 0; r < rows; r++) mean += x[r * columns + c];
  mean /= rows;
  for (int r = 0; r < rows; r++) variance += (x[r * columns + c] - mean) * (x[r * columns + c] - mean);
  float scale = gain[c] * __nvvm_rsqrt_approx_f(variance / rows + 1e-5f);
  for (int r = 0; r < rows; r++) y[r * columns + c] = (x[r * columns + c] - mean) * scale + bias[c];
}

DEVICE inline float sigmoid(float x) { return 1.f / (1.f + __nvvm_ex2_approx_f(-1.44269504f * x)); }

// A step of an LSTM: gates[4][n] are sums before their functions, in the order input, forget, cell, output
KERNEL lstm_cell(const float *gates, const float *cell, float *new_cell, float *hidden, int n) {
  int i = place();
  if (i >= n) return;
  float next = sigmoid(gates[n + i]) * cell[i] + sigmoid(gates[i]) * (2.f * sigmoid(2.f * gates[2 * n + i]) - 1.f);
  new_cell[i] = next;
  hidden[i] = sigmoid(gates[3 * n + i]) * (2.f * sigmoid(2.f * next) - 1.f);
}

KERNEL checksum(const unsigned char *x, unsigned short *low, unsigned long long *wide, int n) {
  unsigned long long hash = 14695981039346656037ull;
  for (int k = 0; k < n; k++) hash = (hash ^ x[place() * n + k]) * 1099511628211ull;
  wide[place()] = hash;
  low[place()] = (unsigned short)(hash >> 23) + (signed char)x[place() * n];
}

KERNEL bodies(const float *positions, float *forces, int n) {
  int i = place();
  float x = positions[3 * i], y = positions[3 * i + 1], z = positions[3 * i + 2], fx = 0.f, fy = 0.f, fz = 0.f;
  for (int j = 0; j < n; j++) {
    float dx = positions[3 * j] - x, dy = positions[3 * j + 1] - y, dz = positions[3 * j + 2] - z;
    float inverse = __nvvm_rsqrt_approx_f(dx * dx + dy * dy + dz * dz + .01f), cube = inverse * inverse * inverse;
    fx += dx * cube, fy += dy * cube, fz += dz * cube;
  }
  forces[3 * i] = fx, forces[3 * i + 1] = fy, forces[3 * i + 2] = fz;
}

KERNEL product_double(const double *a, const double *b, double *c, int n) {
  int row = BY * 8 + TY, column = BX * 8 + TX;
  double sum = 0;
  for (int k = 0; k < n; k++) sum += a[row * n + k] * b[k * n + column];
  c[row * n + column] = sum;
}

KERNEL switches(const int *x, int *y) {
  int i = place(), value = x[i];
  switch (value & 7) {
    case 0: value += 3; break;
    case 1: value *= 5; break;
    case 2: value ^= 77; // falls through
    case 3: value -= 9; break;
    case 4: if (value > 50) { y[i] = -1; return; } value /= 3; break;
    case 5: while (value > 10) value -= 7; break;
    default: value = -value;
  }
  y[i] = value;
}
