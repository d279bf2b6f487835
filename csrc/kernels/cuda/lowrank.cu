/* lowrank.cu - PROJECT, ABSORB, EXPAND: host/lowrank_body.h's passes. All matrices of a launch are
 * cut into tiles that warps (PROJECT) or blocks of threads take in turns.
 *
 * Sums have the host's order: 16 lanes over columns, four rows at a time. The parallelism is what
 * this order leaves free. PROJECT: a thread has four of a row's 16 lanes and loads four vectors
 * ahead. ABSORB: all threads compute the terms of 128 rows, 16 elements each; one thread a column
 * and row of the factor adds them in order. EXPAND: a thread has four rows of four columns.
 */

enum {
    SW_LANES = 16,
    SW_RANKS = 8,        /* rows of a factor at a time */
    SW_PROJECT_ROWS = 8, /* rows of a warp, four threads each */
    SW_GROUP_ROWS = 4,
    SW_TILE_COLS = 32,
    SW_GROUPS = 32,      /* groups of rows at a time, in ABSORB */
    SW_GROUPS_AHEAD = 4, /* groups of a thread */
    SW_EXPAND_SIDE = 64,
};

/* Elements between two rows of a factor: compress_kernels.h's sw_lowrank_stride. */
SW_INLINE sw_u64 sw_factor_stride(sw_u64 count)
{
    const sw_u64 padded = (count + SW_LANES - 1) / SW_LANES * SW_LANES;
    return padded % 1024 == 0 ? padded + SW_LANES : padded;
}

/* Store v in the memory; finite values stay finite. */
SW_INLINE void sw_remember(const sw_matrix_args &m, sw_u64 at, float value)
{
    if (m.memory_dtype == SW_ARG_FLOAT32) {
        ((float *)m.memory)[at] = value;
        return;
    }
    const unsigned bits = __float_as_uint(value);
    const unsigned rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    ((unsigned short *)m.memory)[at] =
        (unsigned short)(rounded - ((rounded & 0x7fffu) == 0x7f80u ? 1u : 0u));
}

/* Four columns of a row, from `col` on: one access if WIDE (sw_matrix_is_wide), else one by one
 * up to `cols`. */
template <bool WIDE> struct sw_columns {
    sw_u64 row, col;

    SW_METHOD void load(sw_lane16 &raw, const void *matrix, int dtype, sw_u64 cols) const
    {
        const sw_u64 at = row * cols + col;
        raw = sw_four<WIDE>{at, 1, at + (cols - col)}.load(matrix, dtype);
    }
    SW_METHOD void store(float *matrix, const float *x, sw_u64 cols) const
    {
        const sw_u64 at = row * cols + col;
        sw_four<WIDE>{at, 1, at + (cols - col)}.store(matrix, x, SW_ARG_FLOAT32);
    }
};

/* Load four elements of a factor's row, which is padded with zeros. */
template <bool WIDE> SW_INLINE void sw_factor_four(float *x, const float *at)
{
    const sw_four<WIDE> four = {0, 1, 4};
    four.widen(x, four.load(at, SW_ARG_FLOAT32), SW_ARG_FLOAT32);
}

/* Report if four columns of a matrix and of its factors can be one access each. */
SW_INLINE bool sw_matrix_is_wide(const sw_matrix_args &m)
{
    return m.cols % 4 == 0 && sw_is_wide(m.gradient, SW_ARG_FLOAT32) &&
           sw_is_wide(m.memory, m.memory_dtype) && sw_is_wide(m.left, SW_ARG_FLOAT32) &&
           sw_is_wide(m.right, SW_ARG_FLOAT32) && sw_is_wide(m.basis, SW_ARG_FLOAT32);
}

SW_INLINE int sw_verdict_of(const void *verdict)
{
    return verdict ? *(const int *)verdict : 0;
}

/* ---- project ---- */

/* Compute v of the existing columns from `col` on, 16 apart; zeros elsewhere. At the first rows of
 * the basis, v overwrites the gradient. */
template <bool WIDE, int AHEAD>
SW_INLINE void sw_owed_values(const sw_matrix_args &m, sw_u64 row, sw_u64 col, bool is_first,
                              float v[AHEAD][4])
{
    const sw_u64 rows = sw_factor_stride(m.rows), stride = sw_factor_stride(m.cols);
    const bool owes = is_first && m.memory;
    sw_lane16 gradient[AHEAD], memory[AHEAD];
    float owed[AHEAD][4];
#pragma unroll
    for (int u = 0; u < AHEAD; ++u) {
        const sw_columns<WIDE> at = {row, col + u * SW_LANES};
        gradient[u] = memory[u] = {};
        if (at.col < m.cols)
            at.load(gradient[u], m.gradient, SW_ARG_FLOAT32, m.cols);
        if (at.col < m.cols && owes)
            at.load(memory[u], m.memory, m.memory_dtype, m.cols);
    }
#pragma unroll
    for (int u = 0; u < AHEAD; ++u) {
        const sw_four<WIDE> four = {};
        four.widen(owed[u], memory[u], m.memory_dtype);
        four.widen(v[u], gradient[u], SW_ARG_FLOAT32);
    }
    if (!owes)
        return;
#pragma unroll 1
    for (sw_u64 k = 0; k < m.rank; ++k) {
        const float left = ((const float *)m.left)[k * rows + row];
        const float *right = (const float *)m.right + k * stride + col;
#pragma unroll
        for (int u = 0; u < AHEAD; ++u) {
            float x[4] = {};
            if (col + u * SW_LANES < m.cols)
                sw_factor_four<WIDE>(x, right + u * SW_LANES);
#pragma unroll
            for (int c = 0; c < 4; ++c)
                owed[u][c] = owed[u][c] - left * x[c];
        }
    }
#pragma unroll
    for (int u = 0; u < AHEAD; ++u) {
        const sw_columns<WIDE> at = {row, col + u * SW_LANES};
#pragma unroll
        for (int c = 0; c < 4; ++c)
            v[u][c] = at.col + c < m.cols ? v[u][c] + owed[u][c] : 0.0f;
        if (at.col < m.cols)
            at.store((float *)m.gradient, v[u], m.cols);
    }
}

/* Project SW_PROJECT_ROWS rows by a warp, four threads a row. */
template <bool WIDE> SW_INLINE void sw_project_tile(const sw_matrix_args &m, sw_u64 tile)
{
    enum { AHEAD = WIDE ? 4 : 2 /* vectors, or four elements each */ };
    const unsigned lane = threadIdx.x & 31u, quarter = lane & 3u;
    const sw_u64 row = tile * SW_PROJECT_ROWS + lane / 4;
    const sw_u64 rows = sw_factor_stride(m.rows), stride = sw_factor_stride(m.cols);
#pragma unroll 1
    for (sw_u64 k = 0; k < m.rank; k += SW_RANKS) {
        float sum[SW_RANKS][4] = {};
#pragma unroll 1
        for (sw_u64 col = 4 * quarter; row < m.rows && col < m.cols; col += AHEAD * SW_LANES) {
            float v[AHEAD][4];
            sw_owed_values<WIDE, AHEAD>(m, row, col, k == 0, v);
#pragma unroll
            for (int r = 0; r < SW_RANKS; ++r) {
                const float *basis = (const float *)m.basis + (k + r) * stride + col;
#pragma unroll
                for (int u = 0; k + r < m.rank && u < AHEAD; ++u) {
                    float x[4] = {};
                    if (col + u * SW_LANES < m.cols)
                        sw_factor_four<WIDE>(x, basis + u * SW_LANES);
#pragma unroll
                    for (int c = 0; c < 4; ++c)
                        sum[r][c] = sum[r][c] + v[u][c] * x[c];
                }
            }
        }
        /* Add halves of the 16 lanes: 8, 4, 2, 1. */
#pragma unroll
        for (int r = 0; r < SW_RANKS; ++r)
            if (k + r < m.rank) {
#pragma unroll
                for (int c = 0; c < 4; ++c)
                    for (unsigned half = 2; half > 0; half /= 2)
                        sum[r][c] = sum[r][c] + __shfl_xor_sync(0xffffffffu, sum[r][c], half);
                if (quarter == 0 && row < rows)
                    ((float *)m.out)[(k + r) * rows + row] =
                        (sum[r][0] + sum[r][2]) + (sum[r][1] + sum[r][3]);
            }
    }
}

SW_INLINE sw_u64 sw_project_tiles(const sw_project_args &a, int i)
{
    return sw_parts(sw_factor_stride(a.matrix[i].rows), SW_PROJECT_ROWS);
}

SW_KERNEL_OF(2) sw_project(const sw_project_args a)
{
    const unsigned warps = blockDim.x / 32;
    sw_u64 first = 0;
    int i = 0;
    for (sw_u64 at = (sw_u64)blockIdx.x * warps + threadIdx.x / 32;;
         at += (sw_u64)gridDim.x * warps) {
        i = sw_part_of<sw_project_args, sw_project_tiles>(a, a.matrix_count, i, first, at);
        if (i == a.matrix_count)
            return;
        if (sw_matrix_is_wide(a.matrix[i]))
            sw_project_tile<true>(a.matrix[i], at - first);
        else
            sw_project_tile<false>(a.matrix[i], at - first);
    }
}

/* ---- absorb ---- */

enum { SW_GROUPS_APART = SW_GROUPS / SW_GROUPS_AHEAD };

/* Return row i of group g of a thread's groups, counted from its first row. */
SW_INLINE unsigned sw_row_of(unsigned g, unsigned i)
{
    return g * SW_GROUPS_APART * SW_GROUP_ROWS + i;
}

/* Compute the terms of one column and SW_GROUPS_AHEAD groups of four rows, SW_GROUPS_APART groups
 * apart: one a row of the factor from k on. */
SW_INLINE void sw_absorb_terms(const sw_matrix_args &m, sw_u64 row, sw_u64 col, sw_u64 k,
                               float *term)
{
    const sw_u64 stride = sw_factor_stride(m.rows), ranks = sw_low(m.rank - k, SW_RANKS);
    const unsigned left_rows =
        row < m.rows ? (unsigned)sw_low(m.rows - row, SW_GROUPS * SW_GROUP_ROWS) : 0;
    const unsigned inside = col < m.cols ? left_rows : 0; /* no rows beyond the last column */
    const sw_u64 place = row * m.cols + col;
    const float *from = (const float *)m.gradient + place;
    float v[SW_GROUPS_AHEAD][SW_GROUP_ROWS];
#pragma unroll
    for (unsigned g = 0; g < SW_GROUPS_AHEAD; ++g)
#pragma unroll
        for (unsigned i = 0; i < SW_GROUP_ROWS; ++i)
            v[g][i] = sw_row_of(g, i) < inside ? from[sw_row_of(g, i) * m.cols] : 0.0f;
    const bool remembers = k == 0 && m.memory, is_plain = m.memory_dtype == SW_ARG_FLOAT32;
    float *memory = (float *)m.memory + place;
#pragma unroll
    for (unsigned n = 0; n < SW_GROUPS_AHEAD * SW_GROUP_ROWS; ++n) {
        const unsigned at = sw_row_of(n / SW_GROUP_ROWS, n % SW_GROUP_ROWS);
        if (remembers && is_plain && at < inside)
            memory[at * m.cols] = v[n / SW_GROUP_ROWS][n % SW_GROUP_ROWS];
    }
#pragma unroll
    for (unsigned n = 0; n < SW_GROUPS_AHEAD * SW_GROUP_ROWS; ++n) {
        const unsigned at = sw_row_of(n / SW_GROUP_ROWS, n % SW_GROUP_ROWS);
        if (remembers && !is_plain && at < inside)
            sw_remember(m, place + at * m.cols, v[n / SW_GROUP_ROWS][n % SW_GROUP_ROWS]);
    }
    for (sw_u64 r = 0; m.out && r < ranks; ++r) {
        const float *left = (const float *)m.left + (k + r) * stride + row;
#pragma unroll
        for (unsigned g = 0; g < SW_GROUPS_AHEAD; ++g) {
            float part[SW_GROUP_ROWS]; /* a factor's row is padded with zeros to whole groups */
            if (sw_row_of(g, 0) >= left_rows)
                break;
#pragma unroll
            for (unsigned i = 0; i < SW_GROUP_ROWS; ++i)
                part[i] = v[g][i] * left[sw_row_of(g, i)];
            term[(r * SW_GROUPS + g * SW_GROUPS_APART) * SW_TILE_COLS] =
                (part[0] + part[1]) + (part[2] + part[3]);
        }
    }
}

SW_INLINE void sw_absorb_tile(const sw_matrix_args &m, sw_u64 tile)
{
    __shared__ float term[SW_RANKS][SW_GROUPS][SW_TILE_COLS], total[SW_RANKS][SW_TILE_COLS];
    const sw_u64 first = tile * SW_TILE_COLS, stride = sw_factor_stride(m.cols);
    for (sw_u64 k = 0; k < (m.out ? m.rank : 1); k += SW_RANKS) {
        const unsigned cells = m.out ? (unsigned)sw_low(m.rank - k, SW_RANKS) * SW_TILE_COLS : 0;
        for (unsigned t = threadIdx.x; t < cells; t += blockDim.x)
            total[t / SW_TILE_COLS][t % SW_TILE_COLS] = 0.0f;
        for (sw_u64 row = 0; row < m.rows; row += SW_GROUPS * SW_GROUP_ROWS) {
            const unsigned groups =
                (unsigned)sw_low(sw_parts(m.rows - row, SW_GROUP_ROWS), SW_GROUPS);
            for (unsigned t = threadIdx.x; t < SW_GROUPS_APART * SW_TILE_COLS; t += blockDim.x) {
                const unsigned g = t / SW_TILE_COLS, c = t % SW_TILE_COLS;
                sw_absorb_terms(m, row + g * SW_GROUP_ROWS, first + c, k, &term[0][g][c]);
            }
            __syncthreads();
            for (unsigned t = threadIdx.x; t < cells; t += blockDim.x) {
                const unsigned r = t / SW_TILE_COLS, c = t % SW_TILE_COLS;
                float sum = total[r][c];
#pragma unroll 4
                for (unsigned g = 0; g < groups; ++g)
                    sum = sum + term[r][g][c];
                total[r][c] = sum;
            }
            __syncthreads();
        }
        for (unsigned t = threadIdx.x; t < cells; t += blockDim.x) {
            const sw_u64 r = k + t / SW_TILE_COLS, col = first + t % SW_TILE_COLS;
            if (col >= stride)
                continue;
            const float sum = total[t / SW_TILE_COLS][t % SW_TILE_COLS];
            ((float *)m.out)[r * stride + col] = sum;
            if (m.copy)
                ((float *)m.copy)[r * stride + col] = sum;
        }
        __syncthreads();
    }
}

SW_INLINE sw_u64 sw_absorb_tiles(const sw_absorb_args &a, int i)
{
    return sw_parts(sw_factor_stride(a.matrix[i].cols), SW_TILE_COLS);
}

SW_KERNEL_OF(3) sw_absorb(const sw_absorb_args a)
{
    sw_u64 first = 0;
    int i = 0;
    if (sw_verdict_of(a.verdict) != 0)
        return;
    for (sw_u64 at = blockIdx.x;; at += gridDim.x) {
        i = sw_part_of<sw_absorb_args, sw_absorb_tiles>(a, a.matrix_count, i, first, at);
        if (i == a.matrix_count)
            return;
        sw_absorb_tile(a.matrix[i], at - first);
    }
}

/* ---- expand ---- */

/* Compute four rows of four columns of leftᵀ right. */
template <bool WIDE>
SW_INLINE void sw_expand_square(const sw_matrix_args &m, sw_u64 row, sw_u64 col)
{
    const sw_u64 rows = sw_factor_stride(m.rows), cols = sw_factor_stride(m.cols);
    float value[SW_GROUP_ROWS][4] = {};
#pragma unroll 2
    for (sw_u64 k = 0; k < m.rank; ++k) {
        float left[4], right[4];
        sw_factor_four<WIDE>(left, (const float *)m.left + k * rows + row);
        sw_factor_four<WIDE>(right, (const float *)m.right + k * cols + col);
#pragma unroll
        for (int i = 0; i < SW_GROUP_ROWS; ++i)
#pragma unroll
            for (int c = 0; c < 4; ++c)
                value[i][c] = value[i][c] + left[i] * right[c];
    }
#pragma unroll
    for (int i = 0; i < SW_GROUP_ROWS; ++i)
        if (row + i < m.rows)
            sw_columns<WIDE>{row + i, col}.store((float *)m.gradient, value[i], m.cols);
}

/* Fill the refused square of a tile from its first row and column, row by row. */
SW_RARELY void sw_refuse_tile(const sw_matrix_args &m, sw_u64 top, sw_u64 side, bool forgets)
{
    const sw_u64 stride = sw_factor_stride(m.cols);
    for (unsigned t = threadIdx.x; t < SW_EXPAND_SIDE * SW_EXPAND_SIDE; t += blockDim.x) {
        const sw_u64 row = top + t / SW_EXPAND_SIDE, col = side + t % SW_EXPAND_SIDE;
        if (row >= m.rows || col >= m.cols)
            continue;
        ((float *)m.gradient)[row * m.cols + col] = __uint_as_float(0x7fc00000u);
        if (forgets && m.memory)
            sw_remember(m, row * m.cols + col, 0.0f);
    }
    if (forgets && top == 0 && side == 0 && m.out)
        for (sw_u64 i = threadIdx.x; i < m.rank * stride; i += blockDim.x)
            ((float *)m.out)[i] = 0.0f;
}

template <bool WIDE> SW_INLINE void sw_expand_tile(const sw_matrix_args &m, sw_u64 top, sw_u64 side)
{
    enum { ACROSS = SW_EXPAND_SIDE / 4, SQUARES = ACROSS * SW_EXPAND_SIDE / SW_GROUP_ROWS };
    for (unsigned t = threadIdx.x; t < SQUARES; t += blockDim.x) {
        const sw_u64 row = top + t / ACROSS * SW_GROUP_ROWS, col = side + t % ACROSS * 4;
        if (row < m.rows && col < m.cols)
            sw_expand_square<WIDE>(m, row, col);
    }
}

SW_INLINE sw_u64 sw_expand_tiles(const sw_expand_args &a, int i)
{
    return sw_parts(a.matrix[i].rows, SW_EXPAND_SIDE) * sw_parts(a.matrix[i].cols, SW_EXPAND_SIDE);
}

SW_KERNEL_OF(3) sw_expand(const sw_expand_args a)
{
    const int verdict = sw_verdict_of(a.verdict);
    sw_u64 first = 0;
    int i = 0;
    for (sw_u64 at = blockIdx.x;; at += gridDim.x) {
        i = sw_part_of<sw_expand_args, sw_expand_tiles>(a, a.matrix_count, i, first, at);
        if (i == a.matrix_count)
            return;
        const sw_matrix_args &m = a.matrix[i];
        const sw_u64 tile = at - first, across = sw_parts(m.cols, SW_EXPAND_SIDE);
        const sw_u64 top = tile / across * SW_EXPAND_SIDE, side = tile % across * SW_EXPAND_SIDE;
        if (verdict != 0)
            sw_refuse_tile(m, top, side, verdict == SW_REFUSED_LATE);
        else if (sw_matrix_is_wide(m))
            sw_expand_tile<true>(m, top, side);
        else
            sw_expand_tile<false>(m, top, side);
    }
}
