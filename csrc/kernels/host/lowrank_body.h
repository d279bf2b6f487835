/* lowrank_body.h - the passes of PowerSGD over one matrix; compiled once per instruction set.
 *
 * A tile of four rows and many columns is brought into the L1 cache as v = gradient + (memory -
 * leftᵀ right), and all products read it there: a pass touches each matrix once. Factors are taken
 * four rows at a time, so that 16 accumulators stay in registers.
 *
 * The order of every sum is fixed. Over columns: 16 lanes (column mod 16), each in order, then
 * halves of the lanes are added. Over rows: four at a time as (a+b)+(c+d), then in order. Over the
 * rank: in order. The bits therefore depend neither on the instruction set nor on the tile. Rows
 * and columns beyond the end are zeros.
 *
 * The includer defines COMPRESS_VECTOR_BYTES.
 */
#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "kernels/compress_kernels.h"
#include "kernels/host/half_body.h"
#include "kernels/host/stream_body.h"

enum {
    LANES = SW_LOWRANK_LANES,
    WIDTH = COMPRESS_VECTOR_BYTES / 4,
    ROWS = 4,
    TILE = 512,
    TILE_STRIDE = TILE + LANES, /* not a power of two, or rows would share sets of the cache */
    RANKS = 4,                  /* factor rows at a time */
    PAIR = 2,                   /* vectors of a row at a time */
};

typedef float vector __attribute__((vector_size(COMPRESS_VECTOR_BYTES)));

#define LOWRANK_INLINE static inline __attribute__((always_inline))
#if defined(__clang__)
#define LOWRANK_UNROLL _Pragma("unroll")
#else
#define LOWRANK_UNROLL _Pragma("GCC unroll 16")
#endif

LOWRANK_INLINE vector vector_load(const float *from)
{
    vector value;
    memcpy(&value, from, sizeof value);
    return value;
}

LOWRANK_INLINE void vector_store(float *to, vector value)
{
    memcpy(to, &value, sizeof value);
}

/* Store past the caches. `to` is aligned to the vector. */
LOWRANK_INLINE void vector_stream(float *to, vector value)
{
#if defined(__x86_64__) && COMPRESS_VECTOR_BYTES == 64
    _mm512_stream_ps(to, (__m512)value);
#elif defined(__x86_64__) && COMPRESS_VECTOR_BYTES == 32
    _mm256_stream_ps(to, (__m256)value);
#elif defined(__x86_64__)
    _mm_stream_ps(to, (__m128)value);
#else
    vector_store(to, value);
#endif
}

LOWRANK_INLINE vector vector_of(float value)
{
    return value - (vector){0};
}

/* ---- memory: float32 or bfloat16 ---- */

typedef uint32_t word_vector __attribute__((vector_size(COMPRESS_VECTOR_BYTES)));
typedef uint16_t half_vector __attribute__((vector_size(COMPRESS_VECTOR_BYTES / 2)));

/* Round to bfloat16 and keep finite values finite: an infinite error would never be paid back. */
static inline uint16_t memory_narrow(float value)
{
    uint32_t bits = bits_from_float(value);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (uint16_t)(rounded - ((rounded & 0x7fffu) == 0x7f80u));
}

/* Load WIDTH elements of a memory from `place` on. */
LOWRANK_INLINE vector memory_load(const void *memory, size_t place, bool is_half)
{
    half_vector half;
    if (!is_half)
        return vector_load((const float *)memory + place);
    memcpy(&half, (const uint16_t *)memory + place, sizeof half);
    return (vector)(__builtin_convertvector(half, word_vector) << 16);
}

LOWRANK_INLINE void memory_store(void *memory, size_t place, vector value, bool is_half)
{
    if (!is_half) {
        vector_stream((float *)memory + place, value);
        return;
    }
    word_vector bits = (word_vector)value;
    word_vector rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    rounded += (word_vector)((rounded & 0x7fffu) == 0x7f80u); /* a true lane is -1 */
    half_vector half = __builtin_convertvector(rounded, half_vector);
    memcpy((uint16_t *)memory + place, &half, sizeof half);
}

static void memory_read(float *to, const void *memory, size_t place, size_t count, bool is_half)
{
    if (is_half)
        widen_bfloat16(to, (const uint16_t *)memory + place, count);
    else
        memcpy(to, (const float *)memory + place, count * sizeof *to);
}

static void memory_write(void *memory, size_t place, const float *from, size_t count, bool is_half)
{
    if (!is_half) {
        memcpy((float *)memory + place, from, count * sizeof *from);
        return;
    }
    for (size_t i = 0; i < count; ++i)
        ((uint16_t *)memory)[place + i] = memory_narrow(from[i]);
}

/* ---- on a tile: ROWS x TILE floats, of which `count` columns (a multiple of LANES) are used ----
 */

/* v += sign * coefficientᵀ factor, over `ranks` rows of the factor. */
LOWRANK_INLINE void tile_combine(float *v, float coefficient[][ROWS], const float *factor,
                                 size_t stride, size_t count, int ranks, bool subtract)
{
    vector c[RANKS][ROWS];
    LOWRANK_UNROLL
    for (int k = 0; k < ranks; ++k)
        LOWRANK_UNROLL
    for (int row = 0; row < ROWS; ++row)
        c[k][row] = vector_of(coefficient[k][row]);
    for (size_t j = 0; j < count; j += WIDTH) {
        vector f[RANKS];
        LOWRANK_UNROLL
        for (int k = 0; k < ranks; ++k)
            f[k] = vector_load(factor + (size_t)k * stride + j);
        LOWRANK_UNROLL
        for (int row = 0; row < ROWS; ++row) {
            vector value = vector_load(v + row * TILE_STRIDE + j);
            LOWRANK_UNROLL
            for (int k = 0; k < ranks; ++k)
                value = subtract ? value - c[k][row] * f[k] : value + c[k][row] * f[k];
            vector_store(v + row * TILE_STRIDE + j, value);
        }
    }
}

/* lanes[k][row] += v[row] * basis[k], lane by lane. */
LOWRANK_INLINE void tile_dot(const float *v, const float *basis, size_t stride, size_t count,
                             float lanes[][ROWS][LANES], int ranks)
{
    for (size_t part = 0; part < LANES; part += WIDTH) {
        vector sum[RANKS][ROWS];
        LOWRANK_UNROLL
        for (int k = 0; k < ranks; ++k)
            LOWRANK_UNROLL
        for (int row = 0; row < ROWS; ++row)
            sum[k][row] = vector_load(lanes[k][row] + part);
        for (size_t j = part; j < count; j += LANES) {
            vector value[ROWS];
            LOWRANK_UNROLL
            for (int row = 0; row < ROWS; ++row)
                value[row] = vector_load(v + row * TILE_STRIDE + j);
            LOWRANK_UNROLL
            for (int k = 0; k < ranks; ++k) {
                vector b = vector_load(basis + (size_t)k * stride + j);
                LOWRANK_UNROLL
                for (int row = 0; row < ROWS; ++row)
                    sum[k][row] += value[row] * b;
            }
        }
        LOWRANK_UNROLL
        for (int k = 0; k < ranks; ++k)
            LOWRANK_UNROLL
        for (int row = 0; row < ROWS; ++row)
            vector_store(lanes[k][row] + part, sum[k][row]);
    }
}

/* out[k] += sum over rows of coefficient[k][row] * v[row]. */
LOWRANK_INLINE void tile_gather(const float *v, float coefficient[][ROWS], float *out,
                                size_t stride, size_t count, int ranks)
{
    vector c[RANKS][ROWS];
    LOWRANK_UNROLL
    for (int k = 0; k < ranks; ++k)
        LOWRANK_UNROLL
    for (int row = 0; row < ROWS; ++row)
        c[k][row] = vector_of(coefficient[k][row]);
    for (size_t j = 0; j < count; j += WIDTH) {
        vector value[ROWS];
        LOWRANK_UNROLL
        for (int row = 0; row < ROWS; ++row)
            value[row] = vector_load(v + row * TILE_STRIDE + j);
        LOWRANK_UNROLL
        for (int k = 0; k < ranks; ++k) {
            float *at = out + (size_t)k * stride + j;
            vector sum = (value[0] * c[k][0] + value[1] * c[k][1]) +
                         (value[2] * c[k][2] + value[3] * c[k][3]);
            vector_store(at, vector_load(at) + sum);
        }
    }
}

/* Run `call` with the constant number of factor rows left from k on. */
#define LOWRANK_BY_RANKS(rank, call)           \
    for (size_t k = 0; k < (rank); k += RANKS) \
        switch ((rank) - k) {                  \
        case 1: {                              \
            enum { ranks = 1 };                \
            call;                              \
            break;                             \
        }                                      \
        case 2: {                              \
            enum { ranks = 2 };                \
            call;                              \
            break;                             \
        }                                      \
        case 3: {                              \
            enum { ranks = 3 };                \
            call;                              \
            break;                             \
        }                                      \
        default: {                             \
            enum { ranks = 4 };                \
            call;                              \
        }                                      \
        }

/* Read columns of four rows of a factor (rank x count), with zeros beyond the end. */
static void read_coefficients(float out[][ROWS], const float *factor, size_t stride, size_t first,
                              size_t rows, size_t rank)
{
    for (size_t k = 0; k < rank; ++k)
        for (size_t row = 0; row < ROWS; ++row)
            out[k][row] = row < rows ? factor[k * stride + first + row] : 0.0f;
}

typedef struct tile {
    size_t row, rows; /* rows <= ROWS from `row` on */
    size_t col, cols; /* cols <= TILE from `col` on */
} tile;

/* Read a tile into v with zeros around it; `from` NULL: all zeros. */
static void tile_read(float *v, const void *from, size_t width, tile at, bool is_half)
{
    size_t padded = sw_lowrank_stride(at.cols);
    for (size_t row = 0; row < ROWS; ++row) {
        float *to = v + row * TILE_STRIDE;
        size_t cols = from && row < at.rows ? at.cols : 0;
        if (cols)
            memory_read(to, from, (at.row + row) * width + at.col, cols, is_half);
        memset(to + cols, 0, (padded - cols) * sizeof *to);
    }
}

static void tile_write(void *to, const float *v, size_t width, tile at, bool is_half)
{
    for (size_t row = 0; row < at.rows; ++row)
        memory_write(to, (at.row + row) * width + at.col, v + row * TILE_STRIDE, at.cols, is_half);
}

static void tile_add(float *v, const float *from, size_t width, tile at)
{
    for (size_t row = 0; row < at.rows; ++row) {
        const float *restrict source = from + (at.row + row) * width + at.col;
        float *restrict to = v + row * TILE_STRIDE;
        for (size_t j = 0; j < at.cols; ++j)
            to[j] = source[j] + to[j];
    }
}

static bool memory_is_half(const sw_lowrank *m)
{
    return m->memory_dtype == SW_DTYPE_BFLOAT16;
}

static void tile_sub_product(float *v, float left[][ROWS], const sw_lowrank *m, tile at)
{
    size_t stride = sw_lowrank_stride(m->cols), count = sw_lowrank_stride(at.cols);
    LOWRANK_BY_RANKS(m->rank, tile_combine(v, left + k, m->right + k * stride + at.col, stride,
                                           count, ranks, true))
}

/* v = gradient + (memory - leftᵀ right) for a tile of whole vectors, in registers: two vectors of
 * each row at a time, over the whole rank. The next four rows are prefetched meanwhile: a row is
 * often a page, and the processor's prefetching stops at the end of a page. */
LOWRANK_INLINE void tile_stage(float *v, float left[][ROWS], const sw_lowrank *m, tile at,
                               size_t rank, bool is_half)
{
    size_t stride = sw_lowrank_stride(m->cols), place = at.row * m->cols + at.col;
    size_t memory_bytes = is_half ? sizeof(uint16_t) : sizeof(float);
    const float *factor = m->right + at.col;
    const unsigned char *memory = (const unsigned char *)m->memory + place * memory_bytes;
    float *gradient = m->gradient + place;
    for (size_t j = 0; j < at.cols; j += PAIR * WIDTH) {
        vector value[ROWS][PAIR];
        LOWRANK_UNROLL
        for (size_t row = 0; row < ROWS; ++row) {
            size_t here = row * m->cols + j, ahead = here + ROWS * m->cols;
            uintptr_t next_memory = (uintptr_t)memory + ahead * memory_bytes;
            uintptr_t next_gradient = (uintptr_t)gradient + ahead * sizeof(float);
            __builtin_prefetch((const void *)next_memory, 0, 2);
            __builtin_prefetch((const void *)next_gradient, 0, 2);
            if (PAIR * WIDTH > LANES) {
                if (!is_half)
                    __builtin_prefetch((const void *)(next_memory + 64), 0, 2);
                __builtin_prefetch((const void *)(next_gradient + 64), 0, 2);
            }
            LOWRANK_UNROLL
            for (size_t part = 0; part < PAIR; ++part)
                value[row][part] = memory_load(memory, here + part * WIDTH, is_half);
        }
        for (size_t k = 0; k < rank; ++k) {
            vector f[PAIR];
            LOWRANK_UNROLL
            for (size_t part = 0; part < PAIR; ++part)
                f[part] = vector_load(factor + k * stride + j + part * WIDTH);
            LOWRANK_UNROLL
            for (size_t row = 0; row < ROWS; ++row) {
                vector c = vector_of(left[k][row]);
                LOWRANK_UNROLL
                for (size_t part = 0; part < PAIR; ++part)
                    value[row][part] -= c * f[part];
            }
        }
        LOWRANK_UNROLL
        for (size_t row = 0; row < ROWS; ++row) {
            LOWRANK_UNROLL
            for (size_t part = 0; part < PAIR; ++part) {
                size_t here = row * m->cols + j + part * WIDTH;
                value[row][part] = vector_load(gradient + here) + value[row][part];
                vector_store(gradient + here, value[row][part]);
                vector_store(v + row * TILE_STRIDE + j + part * WIDTH, value[row][part]);
            }
        }
    }
}

LOWRANK_INLINE void tile_stages(float *v, float left[][ROWS], const sw_lowrank *m, tile at,
                                bool is_half)
{
    switch (m->rank) {
    case 1:
        tile_stage(v, left, m, at, 1, is_half);
        break;
    case 2:
        tile_stage(v, left, m, at, 2, is_half);
        break;
    case 3:
        tile_stage(v, left, m, at, 3, is_half);
        break;
    case 4:
        tile_stage(v, left, m, at, 4, is_half);
        break;
    default:
        tile_stage(v, left, m, at, m->rank, is_half);
    }
}

/* v = gradient + (memory - leftᵀ right), and gradient = v. */
LOWRANK_INLINE void tile_value(float *v, float left[][ROWS], const sw_lowrank *m, tile at)
{
    if (m->memory && at.rows == ROWS && at.cols % (PAIR * WIDTH) == 0) {
        if (memory_is_half(m))
            tile_stages(v, left, m, at, true);
        else
            tile_stages(v, left, m, at, false);
        return;
    }
    if (!m->memory) {
        tile_read(v, m->gradient, m->cols, at, false);
        return;
    }
    tile_read(v, m->memory, m->cols, at, memory_is_half(m));
    tile_sub_product(v, left, m, at);
    tile_add(v, m->gradient, m->cols, at);
    tile_write(m->gradient, v, m->cols, at, false);
}

static tile tile_at(const sw_lowrank *m, size_t row, size_t col)
{
    return (tile){row, m->rows - row < ROWS ? m->rows - row : ROWS, col,
                  m->cols - col < TILE ? m->cols - col : TILE};
}

static float lanes_sum(const float *lanes)
{
    float sum[LANES];
    memcpy(sum, lanes, sizeof sum);
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; ++i)
            sum[i] += sum[i + half];
    return sum[0];
}

/* ---- the passes ---- */

static void lowrank_project(const sw_lowrank *m, const float *basis, float *out)
{
    size_t stride = sw_lowrank_stride(m->cols), out_stride = sw_lowrank_stride(m->rows);
    float v[ROWS * TILE_STRIDE], left[SW_LOWRANK_RANK_MAX][ROWS];
    float lanes[SW_LOWRANK_RANK_MAX][ROWS][LANES];
    memset(out, 0, m->rank * out_stride * sizeof *out);
    for (size_t row = 0; row < m->rows; row += ROWS) {
        size_t rows = tile_at(m, row, 0).rows;
        if (m->memory)
            read_coefficients(left, m->left, out_stride, row, rows, m->rank);
        memset(lanes, 0, m->rank * sizeof *lanes);
        for (size_t col = 0; col < m->cols; col += TILE) {
            tile at = tile_at(m, row, col);
            size_t count = sw_lowrank_stride(at.cols);
            tile_value(v, left, m, at);
            LOWRANK_BY_RANKS(m->rank,
                             tile_dot(v, basis + k * stride + col, stride, count, lanes + k, ranks))
        }
        for (size_t k = 0; k < m->rank; ++k)
            for (size_t i = 0; i < rows; ++i)
                out[k * out_stride + row + i] = lanes_sum(lanes[k][i]);
    }
}

/* out[k] += sum over rows of now[k][row] * v[row], and memory = v (float32: past the caches), for a
 * tile of whole vectors. */
LOWRANK_INLINE void tile_absorb(const sw_lowrank *m, float now[][ROWS], float *out, tile at,
                                size_t rank, bool is_half)
{
    size_t stride = sw_lowrank_stride(m->cols), place = at.row * m->cols + at.col;
    const float *v = m->gradient + place;
    out += at.col;
    for (size_t j = 0; j < at.cols; j += WIDTH) {
        vector value[ROWS];
        LOWRANK_UNROLL
        for (size_t row = 0; row < ROWS; ++row) {
            size_t here = row * m->cols + j, ahead = (here + ROWS * m->cols) * sizeof(float);
            __builtin_prefetch((const void *)((uintptr_t)v + ahead), 0, 2);
            value[row] = vector_load(v + here);
            memory_store(m->memory, place + here, value[row], is_half);
        }
        for (size_t k = 0; k < rank; ++k) {
            float *to = out + k * stride + j;
            vector sum = (value[0] * vector_of(now[k][0]) + value[1] * vector_of(now[k][1])) +
                         (value[2] * vector_of(now[k][2]) + value[3] * vector_of(now[k][3]));
            vector_store(to, vector_load(to) + sum);
        }
    }
}

static void lowrank_absorb(const sw_lowrank *m, const float *left_now, float *out)
{
    size_t stride = sw_lowrank_stride(m->cols), left_stride = sw_lowrank_stride(m->rows);
    bool stream = m->memory && m->cols % LANES == 0 && (uintptr_t)m->memory % 64 == 0;
    float v[ROWS * TILE_STRIDE], now[SW_LOWRANK_RANK_MAX][ROWS];
    memset(out, 0, m->rank * stride * sizeof *out);
    for (size_t row = 0; row < m->rows; row += ROWS) {
        size_t rows = tile_at(m, row, 0).rows;
        read_coefficients(now, left_now, left_stride, row, rows, m->rank);
        for (size_t col = 0; col < m->cols; col += TILE) {
            tile at = tile_at(m, row, col);
            size_t count = sw_lowrank_stride(at.cols);
            if (at.rows == ROWS && stream) {
                if (memory_is_half(m))
                    tile_absorb(m, now, out, at, m->rank, true);
                else
                    tile_absorb(m, now, out, at, m->rank, false);
                continue;
            }
            tile_read(v, m->gradient, m->cols, at, false);
            if (m->memory)
                tile_write(m->memory, v, m->cols, at, memory_is_half(m));
            LOWRANK_BY_RANKS(m->rank,
                             tile_gather(v, now + k, out + k * stride + col, stride, count, ranks))
        }
    }
    if (stream)
        stream_end();
}

/* out = leftᵀ right for a tile of whole vectors. */
LOWRANK_INLINE void expand_whole(float *out, float left[][ROWS], const float *right,
                                 const sw_lowrank *m, tile at, size_t rank, bool stream)
{
    size_t stride = sw_lowrank_stride(m->cols);
    out += at.row * m->cols + at.col;
    right += at.col;
    for (size_t j = 0; j < at.cols; j += PAIR * WIDTH) {
        vector value[ROWS][PAIR] = {{{0}}};
        for (size_t k = 0; k < rank; ++k) {
            vector f[PAIR];
            LOWRANK_UNROLL
            for (size_t part = 0; part < PAIR; ++part)
                f[part] = vector_load(right + k * stride + j + part * WIDTH);
            LOWRANK_UNROLL
            for (size_t row = 0; row < ROWS; ++row) {
                vector c = vector_of(left[k][row]);
                LOWRANK_UNROLL
                for (size_t part = 0; part < PAIR; ++part)
                    value[row][part] += c * f[part];
            }
        }
        LOWRANK_UNROLL
        for (size_t row = 0; row < ROWS; ++row) {
            LOWRANK_UNROLL
            for (size_t part = 0; part < PAIR; ++part) {
                float *to = out + row * m->cols + j + part * WIDTH;
                if (stream)
                    vector_stream(to, value[row][part]);
                else
                    vector_store(to, value[row][part]);
            }
        }
    }
}

static void lowrank_expand(float *out, const float *left, const float *right, size_t rows,
                           size_t cols, size_t rank)
{
    const sw_lowrank m = {.rows = rows, .cols = cols, .rank = rank};
    size_t stride = sw_lowrank_stride(cols), left_stride = sw_lowrank_stride(rows);
    bool stream = cols % LANES == 0 && stream_pays(out, rows * cols * sizeof *out);
    float v[ROWS * TILE_STRIDE], coefficient[SW_LOWRANK_RANK_MAX][ROWS];
    for (size_t row = 0; row < rows; row += ROWS) {
        read_coefficients(coefficient, left, left_stride, row, tile_at(&m, row, 0).rows, rank);
        for (size_t col = 0; col < cols; col += TILE) {
            tile at = tile_at(&m, row, col);
            size_t count = sw_lowrank_stride(at.cols);
            if (at.rows == ROWS && at.cols % (PAIR * WIDTH) == 0) {
                if (stream)
                    expand_whole(out, coefficient, right, &m, at, rank, true);
                else
                    expand_whole(out, coefficient, right, &m, at, rank, false);
                continue;
            }
            tile_read(v, NULL, cols, at, false);
            LOWRANK_BY_RANKS(rank, tile_combine(v, coefficient + k, right + k * stride + col,
                                                stride, count, ranks, false))
            tile_write(out, v, cols, at, false);
        }
    }
    if (stream)
        stream_end();
}

/* ---- orthonormal rows ---- */

static float row_dot(const float *a, const float *b, size_t stride)
{
    float lanes[LANES];
    vector sum[LANES / WIDTH] = {{0}};
    for (size_t j = 0; j < stride; j += LANES)
        LOWRANK_UNROLL
    for (size_t part = 0; part < LANES / WIDTH; ++part)
        sum[part] += vector_load(a + j + part * WIDTH) * vector_load(b + j + part * WIDTH);
    memcpy(lanes, sum, sizeof lanes);
    return lanes_sum(lanes);
}

static void row_sub(float *a, const float *b, float factor, size_t stride)
{
    vector f = vector_of(factor);
    for (size_t j = 0; j < stride; j += WIDTH)
        vector_store(a + j, vector_load(a + j) - f * vector_load(b + j));
}

static void row_scale(float *a, float factor, size_t stride)
{
    for (size_t j = 0; j < stride; ++j)
        a[j] *= factor;
}

/* Return the bits of the greatest magnitude; bits order as magnitudes do. */
static uint32_t row_most(const float *a, size_t stride)
{
    uint32_t most = 0;
    for (size_t j = 0; j < stride; ++j) {
        uint32_t magnitude;
        memcpy(&magnitude, a + j, sizeof magnitude);
        magnitude &= 0x7fffffffu;
        most = magnitude > most ? magnitude : most;
    }
    return most;
}

/* Scale by powers of two to a greatest magnitude in [1, 2), so that no square overflows or
 * underflows. Return false if that magnitude is zero or not finite. */
static bool row_normalize_range(float *a, size_t stride)
{
    uint32_t most = row_most(a, stride), bits;
    if (most == 0 || most >= 0x7f800000u)
        return false;
    for (; most >> 23 < 64; most = row_most(a, stride)) /* subnormals: three times at most */
        row_scale(a, 0x1p64f, stride);
    for (; most >> 23 > 190; most = row_most(a, stride))
        row_scale(a, 0x1p-64f, stride);
    float factor;
    bits = (254u - (most >> 23)) << 23;
    memcpy(&factor, &bits, sizeof factor);
    row_scale(a, factor, stride);
    return true;
}

/* splitmix64 (Steele, Lea, Flood 2014) as a function of the place alone. */
static float random_at(uint64_t seed, uint64_t place)
{
    uint64_t z = seed + (place + 1) * 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return (float)(int32_t)((z ^ (z >> 31)) >> 32) * 0x1p-31f;
}

/* Write replacement number `attempt` of row k: random rows first, then unit vectors. One of these
 * keeps at least 1 / sqrt(count) of its length for any k < count rows before it. */
static void row_reseed(float *a, size_t count, size_t stride, uint64_t seed, size_t k,
                       size_t attempt)
{
    enum { RANDOM_ATTEMPTS = 4 };
    memset(a, 0, stride * sizeof *a);
    if (attempt >= RANDOM_ATTEMPTS) {
        a[(attempt - RANDOM_ATTEMPTS) % count] = 1.0f;
        return;
    }
    for (size_t j = 0; j < count; ++j)
        a[j] = random_at(seed + k * 4u + attempt, j);
}

/* Subtract the projections on the k rows before. Return false if only rounding is left. */
static bool row_orthogonalize(float *factor, size_t k, size_t stride)
{
    const float negligible = 4e-6f; /* 32 units in the last place */
    float *row = factor + k * stride;
    float before = sqrtf(row_dot(row, row, stride)), first = before;
    for (int sweep = 0; sweep < 5; ++sweep) {
        for (size_t l = 0; l < k; ++l)
            row_sub(row, factor + l * stride, row_dot(row, factor + l * stride, stride), stride);
        float after = sqrtf(row_dot(row, row, stride));
        if (!(after > negligible * first))
            return false;
        if (sweep >= 1 && after > 0.7f * before)
            break;
        before = after;
    }
    row_scale(row, 1.0f / sqrtf(row_dot(row, row, stride)), stride);
    return true;
}

static void lowrank_orthonormalize(float *factor, size_t count, size_t rank, uint64_t seed)
{
    size_t stride = sw_lowrank_stride(count);
    for (size_t k = 0; k < rank; ++k) {
        float *row = factor + k * stride;
        bool done = row_normalize_range(row, stride) && row_orthogonalize(factor, k, stride);
        for (size_t attempt = 0; !done; ++attempt) {
            row_reseed(row, count, stride, seed, k, attempt);
            done = row_orthogonalize(factor, k, stride);
        }
    }
}
