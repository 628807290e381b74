// Layers of LeNet, forward and backward, single precision, NCHW. Convolutions have stride 1 and no padding.
// Compiled without CUDA's headers; see ../build.py for the command.
#define KERNEL extern "C" __attribute__((global)) void
#define DEVICE __attribute__((device)) static inline
#define SHARED __attribute__((shared))
#define TX __nvvm_read_ptx_sreg_tid_x()
#define TY __nvvm_read_ptx_sreg_tid_y()
#define BX __nvvm_read_ptx_sreg_ctaid_x()
#define BY __nvvm_read_ptx_sreg_ctaid_y()
#define BZ __nvvm_read_ptx_sreg_ctaid_z()
#define TILE 16

DEVICE int place() { return BX * __nvvm_read_ptx_sreg_ntid_x() + TX; }

// y[n,k,p,q] = b[k] + sum over c,r,s of x[n,c,p+r,q+s] w[k,c,r,s]; a thread for each y
KERNEL conv_direct(const float *x, const float *w, const float *b, float *y, int N, int C, int H, int K, int R) {
  int P = H - R + 1, i = place();
  if (i >= N * K * P * P) return;
  int q = i % P, p = i / P % P, k = i / (P * P) % K, n = i / (P * P * K);
  float sum = b ? b[k] : 0.f;
  for (int c = 0; c < C; c++) {
    float part = 0.f;  // sums of sums lose fewer digits than one long sum
    for (int r = 0; r < R; r++)
      for (int s = 0; s < R; s++)
        part += x[((n * C + c) * H + p + r) * H + q + s] * w[((k * C + c) * R + r) * R + s];
    sum += part;
  }
  y[i] = sum;
}

// The same as a product of w (K x CRR) and a matrix (CRR x NPP) whose elements are found in x; tiles in shared memory
KERNEL conv_implicit_gemm(const float *x, const float *w, const float *b, float *y, int N, int C, int H, int K, int R) {
  SHARED float a[TILE][TILE + 1], e[TILE][TILE + 1];
  int P = H - R + 1, depth = C * R * R, columns = N * P * P;
  int k = BY * TILE + TY, column = BX * TILE + TX;
  int q = column % P, p = column / P % P, n = column / (P * P);
  float sum = 0.f;
  for (int d0 = 0; d0 < depth; d0 += TILE) {
    int d = d0 + TX;
    a[TY][TX] = k < K && d < depth ? w[k * depth + d] : 0.f;
    d = d0 + TY;
    int s = d % R, r = d / R % R, c = d / (R * R);
    e[TY][TX] = column < columns && d < depth ? x[((n * C + c) * H + p + r) * H + q + s] : 0.f;
    __syncthreads();
    float part = 0.f;
    for (int t = 0; t < TILE; t++) part += a[TY][t] * e[t][TX];
    sum += part;
    __syncthreads();
  }
  if (k < K && column < columns) y[((n * K + k) * P + p) * P + q] = sum + (b ? b[k] : 0.f);
}

// out[z] (M x N) = a[z] b[z] + bias of each column; elements of a and b are as far apart as their strides say
KERNEL gemm(const float *a, const float *b, const float *bias, float *out, int M, int N, int K, int a_row, int a_column,
            int b_row, int b_column, int a_batch, int b_batch) {
  SHARED float ta[TILE][TILE + 1], tb[TILE][TILE + 1];
  int row = BY * TILE + TY, column = BX * TILE + TX;
  a += (long)BZ * a_batch;
  b += (long)BZ * b_batch;
  float sum = 0.f;
  for (int d = 0; d < K; d += TILE) {
    ta[TY][TX] = row < M && d + TX < K ? a[row * a_row + (d + TX) * a_column] : 0.f;
    tb[TY][TX] = d + TY < K && column < N ? b[(d + TY) * b_row + column * b_column] : 0.f;
    __syncthreads();
    float part = 0.f;
    for (int t = 0; t < TILE; t++) part += ta[TY][t] * tb[t][TX];
    sum += part;
    __syncthreads();
  }
  if (row < M && column < N) out[((long)BZ * M + row) * N + column] = sum + (bias ? bias[column] : 0.f);
}

// y = w (N x K) x + b, a product with one vector; a warp for each y
KERNEL gemv(const float *w, const float *x, const float *b, float *y, int N, int K) {
  int lane = TX % 32, row = place() / 32;
  if (row >= N) return;
  float sum = 0.f;
  for (int k = lane; k < K; k += 32) sum += w[row * K + k] * x[k];
  for (int step = 16; step; step /= 2) sum += __nvvm_shfl_sync_down_f32(-1, sum, step, 31);
  if (lane == 0) y[row] = sum + (b ? b[row] : 0.f);
}

DEVICE int reversed(int i, int bits) {
  int r = 0;
  for (int k = 0; k < bits; k++) r |= (i >> k & 1) << (bits - 1 - k);
  return r;
}

// Transform n x n complex numbers in shared memory, in bit-reversed order, along rows, then along columns
DEVICE void transform(float *re, float *im, const float *roots, int bits, float sign) {
  int n = 1 << bits;
  for (int axis = 0; axis < 2; axis++) {
    int near = axis ? n : 1, far = axis ? 1 : n;
    for (int half = 1; half < n; half *= 2) {
      for (int i = TX; i < n * n / 2; i += __nvvm_read_ptx_sreg_ntid_x()) {
        int line = i / (n / 2), j = i % (n / 2), k = j % half;
        int u = line * far + (j / half * 2 * half + k) * near, v = u + half * near;
        float c = roots[2 * (k * (n / 2 / half))], s = sign * roots[2 * (k * (n / 2 / half)) + 1];
        float tr = re[v] * c - im[v] * s, ti = re[v] * s + im[v] * c;
        re[v] = re[u] - tr;
        im[v] = im[u] - ti;
        re[u] += tr;
        im[u] += ti;
      }
      __syncthreads();
    }
  }
}

// A block for each image of H x H, padded to n x n; out: n x n complex numbers of each
KERNEL fft_forward(const float *x, float *out, const float *roots, int H, int bits) {
  SHARED float re[1024], im[1024];
  int n = 1 << bits;
  for (int i = TX; i < n * n; i += __nvvm_read_ptx_sreg_ntid_x()) {
    int row = i / n, column = i % n, at = reversed(row, bits) * n + reversed(column, bits);
    re[at] = row < H && column < H ? x[(BX * H + row) * H + column] : 0.f;
    im[at] = 0.f;
  }
  __syncthreads();
  transform(re, im, roots, bits, -1.f);
  for (int i = TX; i < n * n; i += __nvvm_read_ptx_sreg_ntid_x()) {
    out[2 * (BX * n * n + i)] = re[i];
    out[2 * (BX * n * n + i) + 1] = im[i];
  }
}

// out[n,k,f] = sum over c of x[n,c,f] and the conjugate of w[k,c,f]; blocks: frequencies, k, n
KERNEL fft_product(const float *x, const float *w, float *out, int C, int K, int size) {
  int f = place(), k = BY, n = BZ;
  if (f >= size) return;
  float re = 0.f, im = 0.f;
  for (int c = 0; c < C; c++) {
    const float *a = x + 2 * ((n * C + c) * size + f), *b = w + 2 * ((k * C + c) * size + f);
    re += a[0] * b[0] + a[1] * b[1];
    im += a[1] * b[0] - a[0] * b[1];
  }
  out[2 * ((n * K + k) * size + f)] = re;
  out[2 * ((n * K + k) * size + f) + 1] = im;
}

// A block for each image: the inverse transform's first P x P real parts, plus the bias of its channel
KERNEL fft_inverse(const float *in, float *y, const float *roots, const float *b, int K, int P, int bits) {
  SHARED float re[1024], im[1024];
  int n = 1 << bits;
  for (int i = TX; i < n * n; i += __nvvm_read_ptx_sreg_ntid_x()) {
    int at = reversed(i / n, bits) * n + reversed(i % n, bits);
    re[at] = in[2 * (BX * n * n + i)];
    im[at] = in[2 * (BX * n * n + i) + 1];
  }
  __syncthreads();
  transform(re, im, roots, bits, 1.f);
  float bias = b ? b[BX % K] : 0.f;
  for (int i = TX; i < P * P; i += __nvvm_read_ptx_sreg_ntid_x())
    y[BX * P * P + i] = re[i / P * n + i % P] / (n * n) + bias;
}

// Winograd's F(2x2, 5x5): tiles of 6 x 6, points 0, 1, -1, 2, -2 and infinity (Lavin and Gray, arXiv 1509.09308)
DEVICE void filter_row(const float *g, int step, float *u, int out) {
  float even = g[0] + g[2 * step] + g[4 * step], odd = g[step] + g[3 * step];
  float even2 = g[0] + 4.f * g[2 * step] + 16.f * g[4 * step], odd2 = 2.f * g[step] + 8.f * g[3 * step];
  u[0] = g[0] * .25f;
  u[out] = (even + odd) * (-1.f / 6);
  u[2 * out] = (even - odd) * (-1.f / 6);
  u[3 * out] = (even2 + odd2) * (1.f / 24);
  u[4 * out] = (even2 - odd2) * (1.f / 24);
  u[5 * out] = g[4 * step];
}

DEVICE void input_row(const float *d, int step, float *v, int out) {
  float a = d[0], b = d[step], c = d[2 * step], e = d[3 * step], f = d[4 * step], g = d[5 * step];
  v[0] = 4.f * a - 5.f * c + f;
  v[out] = f - 4.f * c + (e - 4.f * b);
  v[2 * out] = f - 4.f * c - (e - 4.f * b);
  v[3 * out] = f - c + 2.f * (e - b);
  v[4 * out] = f - c - 2.f * (e - b);
  v[5 * out] = 4.f * b - 5.f * e + g;
}

// u[36][K][C] of w[K][C][5][5]; a thread for each filter
KERNEL winograd_filter(const float *w, float *u, int K, int C) {
  int i = place();
  if (i >= K * C) return;
  float half[30], whole[36];
  for (int r = 0; r < 5; r++) filter_row(w + i * 25 + r * 5, 1, half + r * 6, 1);
  for (int s = 0; s < 6; s++) filter_row(half + s, 6, whole + s, 6);
  for (int t = 0; t < 36; t++) u[t * K * C + i] = whole[t];
}

// v[36][C][N * tiles] of x; a thread for each tile of 6 x 6
KERNEL winograd_input(const float *x, float *v, int N, int C, int H) {
  int tiles = (H - 4) / 2, i = place(), total = N * tiles * tiles;
  if (i >= C * total) return;
  int c = i / total, column = i % tiles, row = i / tiles % tiles, n = i % total / (tiles * tiles);
  const float *d = x + ((n * C + c) * H + 2 * row) * H + 2 * column;
  float half[36], whole[36];
  for (int r = 0; r < 6; r++) input_row(d + r * H, 1, half + r * 6, 1);
  for (int s = 0; s < 6; s++) input_row(half + s, 6, whole + s, 6);
  for (int t = 0; t < 36; t++) v[t * C * total + i] = whole[t];
}

// y of m[36][K][N * tiles]; a thread for each tile of 2 x 2
KERNEL winograd_output(const float *m, float *y, const float *b, int N, int K, int P) {
  int tiles = P / 2, i = place(), total = N * tiles * tiles;
  if (i >= K * total) return;
  int k = i / total, column = i % tiles, row = i / tiles % tiles, n = i % total / (tiles * tiles);
  float half[12], bias = b ? b[k] : 0.f;
  for (int s = 0; s < 6; s++) {
    float t[6];
    for (int r = 0; r < 6; r++) t[r] = m[(r * 6 + s) * K * total + i];
    half[s] = t[0] + t[1] + t[2] + t[3] + t[4];
    half[6 + s] = t[1] - t[2] + 2.f * (t[3] - t[4]) + t[5];
  }
  for (int r = 0; r < 2; r++) {
    float *t = half + 6 * r, *to = y + ((n * K + k) * P + 2 * row + r) * P + 2 * column;
    to[0] = t[0] + t[1] + t[2] + t[3] + t[4] + bias;
    to[1] = t[1] - t[2] + 2.f * (t[3] - t[4]) + t[5] + bias;
  }
}

// Largest of 2 x 2; P: rows and columns of y
KERNEL max_pool(const float *x, float *y, int count, int P) {
  int i = place();
  if (i >= count * P * P) return;
  const float *from = x + (i / (P * P) * 2 * P + i / P % P * 2) * 2 * P + i % P * 2;
  float best = from[0];
  if (from[1] > best) best = from[1];
  if (from[2 * P] > best) best = from[2 * P];
  if (from[2 * P + 1] > best) best = from[2 * P + 1];
  y[i] = best;
}

// The gradient goes to the first of the largest
KERNEL max_pool_backward(const float *x, const float *dy, float *dx, int count, int P) {
  int i = place();
  if (i >= count * P * P) return;
  int corner = (i / (P * P) * 2 * P + i / P % P * 2) * 2 * P + i % P * 2, best = 0;
  float most = x[corner];
  for (int k = 1; k < 4; k++) {
    float each = x[corner + k / 2 * 2 * P + k % 2];
    if (each > most) most = each, best = k;
  }
  for (int k = 0; k < 4; k++) dx[corner + k / 2 * 2 * P + k % 2] = k == best ? dy[i] : 0.f;
}

KERNEL relu(const float *x, float *y, int count) {
  int i = place();
  if (i < count) y[i] = x[i] > 0.f ? x[i] : 0.f;
}

KERNEL relu_backward(const float *x, const float *dy, float *dx, int count) {
  int i = place();
  if (i < count) dx[i] = x[i] > 0.f ? dy[i] : 0.f;
}

DEVICE float power(float a, float b) { return __nvvm_ex2_approx_f(b * __nvvm_lg2_approx_f(a)); }

// Local response normalisation over `size` channels: y = x (1 + alpha / size * sum of squares) ^ -beta
KERNEL lrn(const float *x, float *y, float *scales, int N, int C, int size, float alpha, float beta) {
  int i = place(), c = i % C;
  if (i >= N * C) return;
  float sum = 0.f;
  for (int k = c - size / 2; k <= c + size / 2; k++)
    if (k >= 0 && k < C) sum += x[i - c + k] * x[i - c + k];
  float scale = 1.f + alpha / size * sum;
  scales[i] = scale;
  y[i] = x[i] * power(scale, -beta);
}

KERNEL lrn_backward(const float *x, const float *scales, const float *dy, float *dx, int N, int C, int size, float alpha,
                    float beta) {
  int i = place(), c = i % C;
  if (i >= N * C) return;
  float sum = 0.f;
  for (int k = c - size / 2; k <= c + size / 2; k++)
    if (k >= 0 && k < C) {
      int j = i - c + k;
      sum += dy[j] * x[j] * power(scales[j], -beta - 1.f);
    }
  dx[i] = dy[i] * power(scales[i], -beta) - 2.f * alpha * beta / size * x[i] * sum;
}

// Softmax of rows of at most 32, a warp for each; and the gradient of the mean cross entropy of `labels`, or null
KERNEL softmax(const float *x, float *y, float *dx, const int *labels, float *losses, int N, int C) {
  int lane = TX % 32, row = place() / 32;
  if (row >= N) return;
  float value = lane < C ? x[row * C + lane] : -3.4e38f, most = value;
  for (int k = 16; k; k /= 2) {
    float other = __nvvm_shfl_sync_bfly_f32(-1, most, k, 31);
    most = other > most ? other : most;
  }
  float part = lane < C ? __nvvm_ex2_approx_f((value - most) * 1.44269504f) : 0.f, sum = part;
  for (int k = 16; k; k /= 2) sum += __nvvm_shfl_sync_bfly_f32(-1, sum, k, 31);
  if (lane >= C) return;
  y[row * C + lane] = part / sum;
  if (labels) {
    dx[row * C + lane] = (part / sum - (labels[row] == lane ? 1.f : 0.f)) / N;
    if (labels[row] == lane) losses[row] = most - value + __nvvm_lg2_approx_f(sum) * 0.693147181f;
  }
}

// dw[k,c,r,s] = sum over n,p,q of dy[n,k,p,q] x[n,c,p+r,q+s]; a warp for each, db[k] by those of c,r,s = 0
KERNEL conv_backward_filter(const float *x, const float *dy, float *dw, float *db, int N, int C, int H, int K, int R) {
  int P = H - R + 1, i = place() / 32, lane = TX % 32;
  if (i >= K * C * R * R) return;
  int s = i % R, r = i / R % R, c = i / (R * R) % C, k = i / (R * R * C);
  float sum = 0.f, total = 0.f;
  for (int j = lane; j < N * P * P; j += 32) {
    int q = j % P, p = j / P % P, n = j / (P * P);
    float grad = dy[((n * K + k) * P + p) * P + q];
    sum += grad * x[((n * C + c) * H + p + r) * H + q + s];
    total += grad;
  }
  for (int step = 16; step; step /= 2) {
    sum += __nvvm_shfl_sync_down_f32(-1, sum, step, 31);
    total += __nvvm_shfl_sync_down_f32(-1, total, step, 31);
  }
  if (lane) return;
  dw[i] = sum;
  if (i % (C * R * R) == 0) db[k] = total;
}

// dx[n,c,h,w] = sum over k,r,s of dy[n,k,h-r,w-s] w[k,c,r,s]; a thread for each
KERNEL conv_backward_data(const float *dy, const float *w, float *dx, int N, int C, int H, int K, int R) {
  int P = H - R + 1, i = place();
  if (i >= N * C * H * H) return;
  int column = i % H, row = i / H % H, c = i / (H * H) % C, n = i / (H * H * C);
  float sum = 0.f;
  for (int k = 0; k < K; k++)
    for (int r = 0; r < R; r++)
      for (int s = 0; s < R; s++) {
        int p = row - r, q = column - s;
        if (p >= 0 && p < P && q >= 0 && q < P)
          sum += dy[((n * K + k) * P + p) * P + q] * w[((k * C + c) * R + r) * R + s];
      }
  dx[i] = sum;
}

// Sums of columns of an M x N matrix, a thread for each
KERNEL column_sums(const float *x, float *sums, int M, int N) {
  int i = place();
  if (i >= N) return;
  float sum = 0.f;
  for (int row = 0; row < M; row++) sum += x[row * N + i];
  sums[i] = sum;
}

KERNEL sgd(float *w, const float *dw, float rate, int count) {
  int i = place();
  if (i < count) w[i] -= rate * dw[i];
}
