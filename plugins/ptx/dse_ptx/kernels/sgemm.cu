// Products of matrices and convolutions as implicit products, in fp32, by tiles of shared memory (two of each, so that
// one is fetched while the other is multiplied).
//
// C[i + j ldc] (+)= sum over k of A[i ai + k ak] B[j bj + k bk]: a matrix is transposed by its strides. blockIdx.z takes
// a part of `depth` of k, added atomically where there are several.

#define GLOBAL extern "C" __attribute__((global))
#define DEVICE __attribute__((device)) __attribute__((always_inline)) inline
#define SHARED __attribute__((shared)) __attribute__((aligned(16)))
#define BOUNDS(threads, blocks) __attribute__((launch_bounds(threads, blocks)))
#define CONSTANT static constexpr int

typedef float Four __attribute__((ext_vector_type(4)));
typedef int Pair __attribute__((ext_vector_type(2)));

CONSTANT STEP = 8;

// Where a thread's elements of a tile lie: of `WIDTH` rows by STEP of k, along rows or along k.
template <int WIDTH, int THREADS> struct Walk {
  int row, k, rows, ks;
  DEVICE Walk(bool alongRows, unsigned thread) {
    row = alongRows ? thread % WIDTH : thread / STEP;
    k = alongRows ? thread / WIDTH : thread % STEP;
    rows = alongRows ? 0 : THREADS / STEP;
    ks = alongRows ? THREADS / WIDTH : 0;
  }
};

struct Matrix {
  const float *at;
  int row, k;
};

// A tile's elements in registers, from a matrix; rows beyond the last are the last again.
template <int WIDTH, int THREADS> struct Fetch {
  CONSTANT COUNT = WIDTH * STEP / THREADS;
  const float *from[COUNT];
  float held[COUNT];
  int k, ks, step;
  DEVICE Fetch(Matrix m, Walk<WIDTH, THREADS> walk, int first, int size, int begin) : k(walk.k), ks(walk.ks) {
    step = STEP * m.k;
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      int row = first + walk.row + i * walk.rows;
      row = row < size ? row : size - 1;
      from[i] = m.at + (long)row * m.row + (long)(begin + walk.k + i * walk.ks) * m.k;
    }
  }
  DEVICE void load(int left) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      held[i] = k + i * ks < left ? __nvvm_ldg_f(from[i]) : 0.0f;
      from[i] += step;
    }
  }
};

// A tile's elements in registers, from the windows of an image (N C H W). table: for each k (c r s) its offset, and
// r << 16 | s.
struct Window {
  const float *at;
  const Pair *table;
  int images, channels, height, width, high, wide, down, across, padHigh, padWide;
};

template <int WIDTH, int THREADS> struct Gather {
  CONSTANT COUNT = WIDTH * STEP / THREADS;
  const float *from;
  const Pair *entry;
  float held[COUNT];
  int k, y, x, height, width;
  bool whole; // no window reaches into padding
  DEVICE Gather(Window w, unsigned thread, int first, int size, int begin)
      : k(thread / WIDTH), height(w.height), width(w.width), whole(!w.padHigh && !w.padWide) {
    int pixel = first + thread % WIDTH;
    pixel = pixel < size ? pixel : size - 1;
    int plane = w.high * w.wide, image = pixel / plane, rest = pixel - image * plane;
    int row = rest / w.wide;
    y = row * w.down - w.padHigh;
    x = (rest - row * w.wide) * w.across - w.padWide;
    from = w.at + (long)image * w.channels * w.height * w.width + y * w.width + x;
    entry = w.table + begin + k;
  }
  DEVICE void load(int left) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      int offset = i * (THREADS / WIDTH);
      held[i] = 0.0f;
      if (k + offset < left) {
        Pair of = __nvvm_ldg_i2(entry + offset);
        unsigned row = y + (of.y >> 16), column = x + (of.y & 0xffff);
        if (whole || (row < (unsigned)height && column < (unsigned)width))
          held[i] = __nvvm_ldg_f(from + of.x);
      }
    }
    entry += STEP;
  }
};


template <int WIDTH, int THREADS, class Source>
DEVICE void put(float (*tile)[WIDTH + 4], Source &source, Walk<WIDTH, THREADS> walk) {
#pragma unroll
  for (int i = 0; i < Source::COUNT; i++)
    tile[walk.k + i * walk.ks][walk.row + i * walk.rows] = source.held[i];
}

// A thread has `EACH` of a tile's rows, in groups of four that lie EACH / 4 parts of the tile apart.
template <int WIDTH, int EACH> DEVICE void pick(float *held, const float *row, int place) {
#pragma unroll
  for (int i = 0; i < EACH; i += 4) {
    Four four = *(const Four *)(row + i * (WIDTH / EACH) + place * 4);
    held[i] = four.x, held[i + 1] = four.y, held[i + 2] = four.z, held[i + 3] = four.w;
  }
}

template <int ROWS, int COLS, int HIGH, int WIDE, class Left, class Top>
DEVICE void multiply(Left &left, Top &top, Walk<ROWS, (ROWS / HIGH) * (COLS / WIDE)> walkLeft,
                     Walk<COLS, (ROWS / HIGH) * (COLS / WIDE)> walkTop, int depth, float (*sums)[WIDE],
                     float (*a)[STEP][ROWS + 4], float (*b)[STEP][COLS + 4], unsigned down, unsigned across) {
  left.load(depth);
  top.load(depth);
  put<ROWS>(a[0], left, walkLeft);
  put<COLS>(b[0], top, walkTop);
  __syncthreads();
  int now = 0;
  for (int done = 0; done < depth; done += STEP) {
    bool more = done + STEP < depth;
    if (more) {
      left.load(depth - done - STEP);
      top.load(depth - done - STEP);
    }
#pragma unroll
    for (int k = 0; k < STEP; k++) {
      float column[HIGH], row[WIDE];
      pick<ROWS, HIGH>(column, a[now][k], down);
      pick<COLS, WIDE>(row, b[now][k], across);
#pragma unroll
      for (int i = 0; i < HIGH; i++)
#pragma unroll
        for (int j = 0; j < WIDE; j++)
          sums[i][j] = __builtin_fmaf(column[i], row[j], sums[i][j]);
    }
    now ^= 1;
    if (more) {
      put<ROWS>(a[now], left, walkLeft);
      put<COLS>(b[now], top, walkTop);
    }
    __syncthreads();
  }
}

template <int WIDTH, int EACH> DEVICE int place(unsigned thread, int i) {
  return (i / 4 * 4) * (WIDTH / EACH) + thread * 4 + i % 4;
}

#define SGEMM(ROWS, COLS, HIGH, WIDE, BLOCKS)                                                                          \
  GLOBAL BOUNDS((ROWS / HIGH) * (COLS / WIDE), BLOCKS) void sgemm_##ROWS##x##COLS(                                     \
      const float *a, const float *b, float *c, int m, int n, int k, int ai, int ak, int bj, int bk, int ldc,          \
      int depth) {                                                                                                     \
    CONSTANT threads = (ROWS / HIGH) * (COLS / WIDE);                                                                  \
    SHARED static float tileA[2][STEP][ROWS + 4], tileB[2][STEP][COLS + 4];                                            \
    unsigned thread = __nvvm_read_ptx_sreg_tid_x();                                                                    \
    int row = __nvvm_read_ptx_sreg_ctaid_x() * ROWS, col = __nvvm_read_ptx_sreg_ctaid_y() * COLS;                      \
    int begin = __nvvm_read_ptx_sreg_ctaid_z() * depth;                                                                \
    Walk<ROWS, threads> walkA(ai == 1, thread);                                                                        \
    Walk<COLS, threads> walkB(bj == 1, thread);                                                                        \
    Fetch<ROWS, threads> left(Matrix{a, ai, ak}, walkA, row, m, begin);                                                \
    Fetch<COLS, threads> top(Matrix{b, bj, bk}, walkB, col, n, begin);                                                 \
    float sums[HIGH][WIDE] = {};                                                                                       \
    multiply<ROWS, COLS, HIGH, WIDE>(left, top, walkA, walkB, k - begin < depth ? k - begin : depth, sums, tileA,      \
                                     tileB, thread % (ROWS / HIGH), thread / (ROWS / HIGH));                                                                   \
    bool parts = __nvvm_read_ptx_sreg_nctaid_z() > 1;                                                                  \
    if (!parts && ldc % 4 == 0 && row + ROWS <= m && col + COLS <= n) {                                                \
      _Pragma("unroll") for (int j = 0; j < WIDE; j++) _Pragma("unroll") for (int i = 0; i < HIGH; i += 4) {           \
        int y = row + place<ROWS, HIGH>(thread % (ROWS / HIGH), i);                                                    \
        int x = col + place<COLS, WIDE>(thread / (ROWS / HIGH), j);                                                    \
        *(Four *)(c + (long)x * ldc + y) = Four{sums[i][j], sums[i + 1][j], sums[i + 2][j], sums[i + 3][j]};           \
      }                                                                                                                \
      return;                                                                                                          \
    }                                                                                                                  \
    _Pragma("unroll") for (int i = 0; i < HIGH; i++) _Pragma("unroll") for (int j = 0; j < WIDE; j++) {                \
      int y = row + place<ROWS, HIGH>(thread % (ROWS / HIGH), i);                                                      \
      int x = col + place<COLS, WIDE>(thread / (ROWS / HIGH), j);                                                      \
      if (y < m && x < n) {                                                                                            \
        float *to = c + (long)x * ldc + y;                                                                             \
        if (parts)                                                                                                     \
          __nvvm_atom_add_gen_f(to, sums[i][j]);                                                                       \
        else                                                                                                           \
          *to = sums[i][j];                                                                                            \
      }                                                                                                                \
    }                                                                                                                  \
  }

// y[n, filter, pixel] = sum over c r s of w[filter, c r s] x of the window of a pixel
#define CONVOLUTION(ROWS, COLS, HIGH, WIDE, BLOCKS)                                                                    \
  GLOBAL BOUNDS((ROWS / HIGH) * (COLS / WIDE), BLOCKS) void convolution_##ROWS##x##COLS(                               \
      const float *w, Window window, float *y, int filters, int pixels, int k, int depth) {                            \
    CONSTANT threads = (ROWS / HIGH) * (COLS / WIDE);                                                                  \
    SHARED static float tileA[2][STEP][ROWS + 4], tileB[2][STEP][COLS + 4];                                            \
    unsigned thread = __nvvm_read_ptx_sreg_tid_x();                                                                    \
    int row = __nvvm_read_ptx_sreg_ctaid_x() * ROWS, col = __nvvm_read_ptx_sreg_ctaid_y() * COLS;                      \
    Walk<ROWS, threads> walkA(false, thread);                                                                          \
    Walk<COLS, threads> walkB(true, thread);                                                                           \
    int begin = __nvvm_read_ptx_sreg_ctaid_z() * depth;                                                                \
    bool parts = __nvvm_read_ptx_sreg_nctaid_z() > 1;                                                                  \
    Fetch<ROWS, threads> left(Matrix{w, k, 1}, walkA, row, filters, begin);                                            \
    Gather<COLS, threads> top(window, thread, col, pixels, begin);                                                     \
    float sums[HIGH][WIDE] = {};                                                                                       \
    multiply<ROWS, COLS, HIGH, WIDE>(left, top, walkA, walkB, k - begin < depth ? k - begin : depth, sums, tileA,      \
                                     tileB, thread / (COLS / WIDE), thread % (COLS / WIDE));                           \
    int plane = window.high * window.wide;                                                                             \
    bool fours = !parts && plane % 4 == 0; /* four pixels of a thread are of one image */                              \
    _Pragma("unroll") for (int j = 0; j < WIDE; j += 4) {                                                              \
      int first = col + place<COLS, WIDE>(thread % (COLS / WIDE), j);                                                  \
      _Pragma("unroll") for (int i = 0; i < HIGH; i++) {                                                               \
        int filter = row + place<ROWS, HIGH>(thread / (COLS / WIDE), i);                                               \
        if (fours && filter < filters && first < pixels) {                                                             \
          int image = first / plane;                                                                                   \
          float *to = y + ((long)image * filters + filter) * plane + (first - image * plane);                          \
          *(Four *)to = Four{sums[i][j], sums[i][j + 1], sums[i][j + 2], sums[i][j + 3]};                              \
        }                                                                                                              \
        _Pragma("unroll") for (int four = 0; four < 4; four++) {                                                       \
          int pixel = first + four, image = pixel / plane;                                                             \
          float *to = y + ((long)image * filters + filter) * plane + (pixel - image * plane);                          \
          if (!fours && filter < filters && pixel < pixels) {                                                          \
            if (parts)                                                                                                 \
              __nvvm_atom_add_gen_f(to, sums[i][j + four]);                                                            \
            else                                                                                                       \
              *to = sums[i][j + four];                                                                                 \
          }                                                                                                            \
        }                                                                                                              \
      }                                                                                                                \
    }                                                                                                                  \
  }

SGEMM(128, 128, 8, 8, 2)
SGEMM(128, 64, 8, 8, 4)
SGEMM(64, 64, 8, 4, 4)
SGEMM(128, 32, 8, 4, 4)
SGEMM(32, 32, 4, 4, 8)
SGEMM(64, 16, 4, 4, 8)
CONVOLUTION(128, 128, 8, 8, 2)
CONVOLUTION(64, 128, 8, 8, 4)
CONVOLUTION(32, 128, 8, 4, 4)
