// Layers as libraries have them, for any sizes: activation, pooling, softmax, batch normalisation, local response
// normalisation, recurrent cells, and products in fp64. Single precision otherwise, NCHW.
// Compiled without CUDA's headers; see ../build.py for the command.
#define KERNEL extern "C" __attribute__((global)) void
#define DEVICE __attribute__((device)) static inline
#define SHARED __attribute__((shared))
#define TX __nvvm_read_ptx_sreg_tid_x()
#define BX __nvvm_read_ptx_sreg_ctaid_x()
#define BY __nvvm_read_ptx_sreg_ctaid_y()
#define THREADS 256

DEVICE int place() { return BX * THREADS + TX; }
DEVICE float exponential(float x) { return __nvvm_ex2_approx_f(x * 1.44269504f); }
DEVICE float logistic(float x) { return 1.f / (1.f + exponential(-x)); }
DEVICE float tangent(float x) { return 2.f * logistic(2.f * x) - 1.f; }

typedef float Four __attribute__((ext_vector_type(4)));

// Rectifier: a thread for four elements
KERNEL relu(const Four *x, Four *y, int fours) {
  int i = place();
  if (i >= fours) return;
  Four v = x[i];
  y[i] = Four{v.x > 0.f ? v.x : 0.f, v.y > 0.f ? v.y : 0.f, v.z > 0.f ? v.z : 0.f, v.w > 0.f ? v.w : 0.f};
}

// Its gradient, which needs the inputs alone
KERNEL relu_backward(const Four *x, const Four *dy, Four *dx, int fours) {
  int i = place();
  if (i >= fours) return;
  Four v = x[i], d = dy[i];
  dx[i] = Four{v.x > 0.f ? d.x : 0.f, v.y > 0.f ? d.y : 0.f, v.z > 0.f ? d.z : 0.f, v.w > 0.f ? d.w : 0.f};
}

// Largest of 3 x 3 at a stride of 2, of images H x H, and which of the nine it was; a thread for each of P x P results
KERNEL max_pool(const float *x, float *y, int *mask, int images, int H, int P) {
  int i = place();
  if (i >= images * P * P) return;
  int row = i / P % P * 2, column = i % P * 2, which = 0;
  const float *image = x + (long)(i / (P * P)) * H * H;
  float most = -3.4e38f;
  for (int r = 0; r < 3; r++)
    for (int s = 0; s < 3; s++)
      if (row + r < H && column + s < H && image[(row + r) * H + column + s] > most)
        most = image[(row + r) * H + column + s], which = 3 * r + s;
  y[i] = most;
  mask[i] = which;
}

// A thread for each input, which looks at the windows that hold it
KERNEL max_pool_backward(const float *dy, const int *mask, float *dx, int images, int H, int P) {
  int i = place();
  if (i >= images * H * H) return;
  int row = i / H % H, column = i % H, first = i / (H * H) * P * P;
  float sum = 0.f;
  for (int p = row / 2; p >= 0 && 2 * p + 2 >= row; p--)
    for (int q = column / 2; q >= 0 && 2 * q + 2 >= column; q--)
      if (p < P && q < P && mask[first + p * P + q] == 3 * (row - 2 * p) + column - 2 * q) sum += dy[first + p * P + q];
  dx[i] = sum;
}

// Sum or maximum over the threads of a block
DEVICE float over_block(float value, bool largest) {
  SHARED static float parts[THREADS];
  __syncthreads();
  parts[TX] = value;
  __syncthreads();
  for (int half = THREADS / 2; half; half /= 2) {
    if (TX < half) {
      float other = parts[TX + half];
      parts[TX] = !largest ? parts[TX] + other : other > parts[TX] ? other : parts[TX];
    }
    __syncthreads();
  }
  return parts[0];
}

// Softmax of a row of C: the maximum, the sum, then the result
KERNEL softmax(const float *x, float *y, int C) {
  const float *row = x + BX * C;
  float most = -3.4e38f, sum = 0.f;
  for (int c = TX; c < C; c += THREADS) most = row[c] > most ? row[c] : most;
  most = over_block(most, true);
  for (int c = TX; c < C; c += THREADS) sum += exponential(row[c] - most);
  sum = over_block(sum, false);
  for (int c = TX; c < C; c += THREADS) y[BX * C + c] = exponential(row[c] - most) / sum;
}

KERNEL softmax_backward(const float *y, const float *dy, float *dx, int C) {
  const float *of = y + BX * C, *gradient = dy + BX * C;
  float sum = 0.f;
  for (int c = TX; c < C; c += THREADS) sum += of[c] * gradient[c];
  sum = over_block(sum, false);
  for (int c = TX; c < C; c += THREADS) dx[BX * C + c] = of[c] * (gradient[c] - sum);
}

// Batch normalisation of each of C activations over N images: the mean, the variance, then the result
KERNEL batch_norm(const float *x, const float *scale, const float *shift, float *y, float *means, float *inverses,
                  int N, int C, float least) {
  int c = place();
  if (c >= C) return;
  float mean = 0.f, variance = 0.f;
  for (int n = 0; n < N; n++) mean += x[n * C + c];
  mean /= N;
  for (int n = 0; n < N; n++) variance += (x[n * C + c] - mean) * (x[n * C + c] - mean);
  float inverse = 1.f / __nvvm_sqrt_rn_f(variance / N + least);
  for (int n = 0; n < N; n++) y[n * C + c] = (x[n * C + c] - mean) * inverse * scale[c] + shift[c];
  means[c] = mean;
  inverses[c] = inverse;
}

KERNEL batch_norm_backward(const float *x, const float *dy, const float *scale, const float *means,
                           const float *inverses, float *dx, float *dscale, float *dshift, int N, int C) {
  int c = place();
  if (c >= C) return;
  float mean = means[c], inverse = inverses[c], sum = 0.f, product = 0.f;
  for (int n = 0; n < N; n++) sum += dy[n * C + c];
  for (int n = 0; n < N; n++) product += dy[n * C + c] * (x[n * C + c] - mean) * inverse;
  for (int n = 0; n < N; n++)
    dx[n * C + c] =
        scale[c] * inverse * (dy[n * C + c] - sum / N - (x[n * C + c] - mean) * inverse * product / N);
  dscale[c] = product;
  dshift[c] = sum;
}

// Local response normalisation over five channels: a thread for each pixel, from channel to channel of C; image: elements
KERNEL lrn(const float *x, float *y, float *scales, int C, int plane, int image, float alpha, float beta) {
  int pixel = place();
  if (pixel >= plane) return;
  long first = (long)BY * image + pixel;
  float a = 0.f, b = 0.f, now = x[first], next = C > 1 ? x[first + plane] : 0.f;
  for (int c = 0; c < C; c++) {
    float last = c + 2 < C ? x[first + (c + 2) * plane] : 0.f;
    float scale = 1.f + alpha / 5 * (a * a + b * b + now * now + next * next + last * last);
    scales[first + c * plane] = scale;
    y[first + c * plane] = now * __nvvm_ex2_approx_f(-beta * __nvvm_lg2_approx_f(scale));
    a = b, b = now, now = next, next = last;
  }
}

// A step of an LSTM of H units for N inputs: gates i, f, g, o of q + pre [N, 4 H]; a thread for each unit
KERNEL lstm(const float *q, const float *pre, float *c, float *h, int N, int H) {
  int i = place(), row = i / H * 4 * H + i % H;
  if (i >= N * H) return;
  float in = logistic(q[row] + pre[row]), forget = logistic(q[row + H] + pre[row + H]);
  float update = tangent(q[row + 2 * H] + pre[row + 2 * H]), out = logistic(q[row + 3 * H] + pre[row + 3 * H]);
  float state = forget * c[i] + in * update;
  c[i] = state;
  h[i] = out * tangent(state);
}

// Gradients of the gates' sums, dq [N, 4 H], of dh, and of the state before, in place of dc; c: the state before
KERNEL lstm_backward(const float *q, const float *pre, const float *c, const float *dh, float *dc, float *dq, int N,
                     int H) {
  int i = place(), row = i / H * 4 * H + i % H;
  if (i >= N * H) return;
  float in = logistic(q[row] + pre[row]), forget = logistic(q[row + H] + pre[row + H]);
  float update = tangent(q[row + 2 * H] + pre[row + 2 * H]), out = logistic(q[row + 3 * H] + pre[row + 3 * H]);
  float bent = tangent(forget * c[i] + in * update), d = dc[i] + dh[i] * out * (1.f - bent * bent);
  dq[row] = d * update * in * (1.f - in);
  dq[row + H] = d * c[i] * forget * (1.f - forget);
  dq[row + 2 * H] = d * in * (1.f - update * update);
  dq[row + 3 * H] = dh[i] * bent * out * (1.f - out);
  dc[i] = d * forget;
}

// A step of a GRU (reset, update, candidate), whose reset gate takes the product of the state, as cuDNN has it
KERNEL gru(const float *q, const float *pre, float *h, int N, int H) {
  int i = place(), row = i / H * 3 * H + i % H;
  if (i >= N * H) return;
  float reset = logistic(q[row] + pre[row]), keep = logistic(q[row + H] + pre[row + H]);
  float candidate = tangent(pre[row + 2 * H] + reset * q[row + 2 * H]);
  h[i] = (1.f - keep) * candidate + keep * h[i];
}

// dq: of the product of the state; h: the state before; dh becomes the part that passes the product by
KERNEL gru_backward(const float *q, const float *pre, const float *h, float *dh, float *dq, int N, int H) {
  int i = place(), row = i / H * 3 * H + i % H;
  if (i >= N * H) return;
  float reset = logistic(q[row] + pre[row]), keep = logistic(q[row + H] + pre[row + H]), inner = q[row + 2 * H];
  float candidate = tangent(pre[row + 2 * H] + reset * inner), d = dh[i];
  float bent = d * (1.f - keep) * (1.f - candidate * candidate);
  dq[row] = bent * inner * reset * (1.f - reset);
  dq[row + H] = d * (h[i] - candidate) * keep * (1.f - keep);
  dq[row + 2 * H] = bent * reset;
  dh[i] = d * keep;
}

// C[i + j ldc] = sum over k of A[i ai + k ak] B[j bj + k bk] in fp64, by tiles of 64 x 64; a thread has 4 x 4
KERNEL dgemm(const double *a, const double *b, double *c, int m, int n, int k, int ai, int ak, int bj, int bk, int ldc) {
  SHARED static double left[8][64 + 1], top[8][64 + 1];
  int x = TX % 16, y = TX / 16, row = BX * 64, column = BY * 64;
  double sums[4][4] = {};
  for (int begin = 0; begin < k; begin += 8) {
    __syncthreads();
    for (int e = TX; e < 512; e += THREADS) {
      int i = ai == 1 ? e % 64 : e / 8, d = ai == 1 ? e / 64 : e % 8;
      left[d][i] = row + i < m && begin + d < k ? a[(long)(row + i) * ai + (long)(begin + d) * ak] : 0.;
      i = bj == 1 ? e % 64 : e / 8, d = bj == 1 ? e / 64 : e % 8;
      top[d][i] = column + i < n && begin + d < k ? b[(long)(column + i) * bj + (long)(begin + d) * bk] : 0.;
    }
    __syncthreads();
    for (int d = 0; d < 8; d++)
      for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) sums[i][j] = __builtin_fma(left[d][x + 16 * i], top[d][y + 16 * j], sums[i][j]);
  }
  for (int j = 0; j < 4; j++)
    for (int i = 0; i < 4; i++)
      if (row + x + 16 * i < m && column + y + 16 * j < n)
        c[row + x + 16 * i + (long)(column + y + 16 * j) * ldc] = sums[i][j];
}
