/* lowrank.cu - PROJECT, ABSORB, EXPAND: host/lowrank_body.h's passes, all matrices of a launch cut
 * into tiles that blocks of threads take in turns.
 *
 * Idea: the host's sums have one order (16 lanes over columns; four rows at a time), and so have
 * these. What is parallel is what that order leaves free: PROJECT has a thread a lane of a row; in
 * ABSORB all threads make the terms of 32 rows, and one a column adds them up in order. Tiles are
 * walked with strides of the block, so any number of threads will do.
 */

enum {
    SW_LANES = 16,
    SW_RANKS = 8, /* rows of a factor at a time */
    SW_TILE_ROWS = 16,
    SW_TILE_COLS = 32,
    SW_GROUP_ROWS = 4,
    SW_GROUPS = 8, /* of rows at a time */
    SW_WIDE_COLS = 64,
};

/* Elements of a factor's row: compress_kernels.h's sw_lowrank_stride. */
SW_INLINE sw_u64 sw_factor_stride(sw_u64 count)
{
    const sw_u64 padded = (count + SW_LANES - 1) / SW_LANES * SW_LANES;
    return padded % 1024 == 0 ? padded + SW_LANES : padded;
}

/* What is finite stays so. */
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

/* v, which takes the gradient's place. */
SW_INLINE float sw_owed_value(const sw_matrix_args &m, sw_u64 row, sw_u64 col)
{
    const sw_u64 at = row * m.cols + col;
    float *gradient = (float *)m.gradient;
    if (!m.memory)
        return gradient[at];
    const sw_u64 rows = sw_factor_stride(m.rows), cols = sw_factor_stride(m.cols);
    float value = sw_load(m.memory, at, m.memory_dtype);
    for (sw_u64 k = 0; k < m.rank; ++k)
        value = value -
                ((const float *)m.left)[k * rows + row] * ((const float *)m.right)[k * cols + col];
    return gradient[at] = gradient[at] + value;
}

/* One lane of a row: columns `lane`, `lane` + 16, ... by SW_RANKS rows of the basis from k on. */
SW_INLINE void sw_project_lane(const sw_matrix_args &m, sw_u64 row, unsigned lane, sw_u64 k,
                               float *sum)
{
    const sw_u64 stride = sw_factor_stride(m.cols), ranks = sw_low(m.rank - k, SW_RANKS);
    const float *basis = (const float *)m.basis + k * stride;
    for (sw_u64 j = lane; row < m.rows && j < m.cols; j += SW_LANES) {
        const float v =
            k == 0 ? sw_owed_value(m, row, j) : ((const float *)m.gradient)[row * m.cols + j];
        for (unsigned r = 0; r < SW_RANKS; ++r)
            if (r < ranks)
                sum[r] = sum[r] + v * basis[r * stride + j];
    }
}

/* Halves are added: 8, 4, 2, 1. */
SW_INLINE float sw_lanes_sum(float *lane)
{
    for (unsigned half = SW_LANES / 2; half > 0; half /= 2)
        for (unsigned i = 0; i < half; ++i)
            lane[i] = lane[i] + lane[i + half];
    return lane[0];
}

SW_INLINE void sw_project_tile(const sw_matrix_args &m, sw_u64 tile)
{
    __shared__ float lanes[SW_RANKS][SW_TILE_ROWS][SW_LANES];
    const sw_u64 first = tile * SW_TILE_ROWS, stride = sw_factor_stride(m.rows);
    for (sw_u64 k = 0; k < m.rank; k += SW_RANKS) {
        for (unsigned t = threadIdx.x; t < SW_TILE_ROWS * SW_LANES; t += blockDim.x) {
            float sum[SW_RANKS] = {};
            sw_project_lane(m, first + t / SW_LANES, t % SW_LANES, k, sum);
            for (unsigned r = 0; r < SW_RANKS; ++r)
                lanes[r][t / SW_LANES][t % SW_LANES] = sum[r];
        }
        __syncthreads();
        for (unsigned t = threadIdx.x; t < SW_RANKS * SW_TILE_ROWS; t += blockDim.x) {
            const sw_u64 r = t / SW_TILE_ROWS, row = first + t % SW_TILE_ROWS;
            if (k + r < m.rank && row < stride)
                ((float *)m.out)[(k + r) * stride + row] = sw_lanes_sum(lanes[r][t % SW_TILE_ROWS]);
        }
        __syncthreads();
    }
}

/* The matrix that tile number `tile` of all is of; `tile` becomes its number there. matrix_count
 * beyond the last. */
template <sw_u64 TILES(const sw_matrix_args &)>
SW_INLINE int sw_matrix_of(const sw_matrices_args &a, sw_u64 &tile)
{
    int i = 0;
    for (sw_u64 tiles; i < a.matrix_count && tile >= (tiles = TILES(a.matrix[i])); ++i)
        tile -= tiles;
    return i;
}

SW_INLINE int sw_verdict_of(const void *verdict)
{
    return verdict ? *(const int *)verdict : 0;
}

SW_INLINE sw_u64 sw_project_tiles(const sw_matrix_args &m)
{
    return sw_parts(sw_factor_stride(m.rows), SW_TILE_ROWS);
}

SW_KERNEL sw_project(const sw_project_args a)
{
    for (sw_u64 at = blockIdx.x;; at += gridDim.x) {
        sw_u64 tile = at;
        const int i = sw_matrix_of<sw_project_tiles>(a, tile);
        if (i == a.matrix_count)
            return;
        sw_project_tile(a.matrix[i], tile);
    }
}

/* The terms of one column and four rows, one a row of the factor from k on. */
SW_INLINE void sw_absorb_terms(const sw_matrix_args &m, sw_u64 row, sw_u64 col, sw_u64 k,
                               float *term, sw_u64 step)
{
    const sw_u64 stride = sw_factor_stride(m.rows), ranks = sw_low(m.rank - k, SW_RANKS);
    const float *left = (const float *)m.left + k * stride + row;
    float v[SW_GROUP_ROWS];
    for (unsigned i = 0; i < SW_GROUP_ROWS; ++i) {
        const bool inside = row + i < m.rows && col < m.cols;
        v[i] = inside ? ((const float *)m.gradient)[(row + i) * m.cols + col] : 0.0f;
        if (inside && k == 0 && m.memory)
            sw_remember(m, (row + i) * m.cols + col, v[i]);
    }
    for (sw_u64 r = 0; m.out && r < ranks; ++r) {
        float part[SW_GROUP_ROWS];
        for (unsigned i = 0; i < SW_GROUP_ROWS; ++i)
            part[i] = v[i] * (row + i < m.rows ? left[r * stride + i] : 0.0f);
        term[r * step] = (part[0] + part[1]) + (part[2] + part[3]);
    }
}

SW_INLINE void sw_absorb_tile(const sw_matrix_args &m, sw_u64 tile)
{
    __shared__ float term[SW_RANKS][SW_GROUPS][SW_TILE_COLS], total[SW_RANKS][SW_TILE_COLS];
    const sw_u64 first = tile * SW_TILE_COLS, stride = sw_factor_stride(m.cols);
    const unsigned cells = SW_RANKS * SW_TILE_COLS;
    for (sw_u64 k = 0; k < (m.out ? m.rank : 1); k += SW_RANKS) {
        for (unsigned t = threadIdx.x; t < cells; t += blockDim.x)
            total[t / SW_TILE_COLS][t % SW_TILE_COLS] = 0.0f;
        for (sw_u64 row = 0; row < m.rows; row += SW_GROUPS * SW_GROUP_ROWS) {
            for (unsigned t = threadIdx.x; t < SW_GROUPS * SW_TILE_COLS; t += blockDim.x) {
                const unsigned g = t / SW_TILE_COLS, c = t % SW_TILE_COLS;
                sw_absorb_terms(m, row + g * SW_GROUP_ROWS, first + c, k, &term[0][g][c],
                                SW_GROUPS * SW_TILE_COLS);
            }
            __syncthreads();
            for (unsigned t = threadIdx.x; t < cells; t += blockDim.x) {
                const unsigned r = t / SW_TILE_COLS, c = t % SW_TILE_COLS;
                float sum = total[r][c];
                for (unsigned g = 0;
                     m.out && k + r < m.rank && g < SW_GROUPS && row + g * SW_GROUP_ROWS < m.rows;
                     ++g)
                    sum = sum + term[r][g][c];
                total[r][c] = sum;
            }
            __syncthreads();
        }
        for (unsigned t = threadIdx.x; m.out && t < cells; t += blockDim.x) {
            const sw_u64 r = k + t / SW_TILE_COLS, col = first + t % SW_TILE_COLS;
            if (r >= m.rank || col >= stride)
                continue;
            const float sum = total[t / SW_TILE_COLS][t % SW_TILE_COLS];
            ((float *)m.out)[r * stride + col] = sum;
            if (m.copy)
                ((float *)m.copy)[r * stride + col] = sum;
        }
        __syncthreads();
    }
}

SW_INLINE sw_u64 sw_absorb_tiles(const sw_matrix_args &m)
{
    return sw_parts(sw_factor_stride(m.cols), SW_TILE_COLS);
}

SW_KERNEL sw_absorb(const sw_absorb_args a)
{
    if (sw_verdict_of(a.verdict) != 0)
        return;
    for (sw_u64 at = blockIdx.x;; at += gridDim.x) {
        sw_u64 tile = at;
        const int i = sw_matrix_of<sw_absorb_tiles>(a, tile);
        if (i == a.matrix_count)
            return;
        sw_absorb_tile(a.matrix[i], tile);
    }
}

/* Four rows of one column of leftᵀ right. */
SW_INLINE void sw_expand_column(const sw_matrix_args &m, sw_u64 row, sw_u64 col, int verdict)
{
    const sw_u64 rows = sw_factor_stride(m.rows), cols = sw_factor_stride(m.cols);
    float value[SW_GROUP_ROWS] = {};
    for (sw_u64 k = 0; verdict == 0 && k < m.rank; ++k) {
        const float right = ((const float *)m.right)[k * cols + col];
        for (unsigned i = 0; i < SW_GROUP_ROWS; ++i)
            if (row + i < m.rows)
                value[i] = value[i] + ((const float *)m.left)[k * rows + row + i] * right;
    }
    for (unsigned i = 0; i < SW_GROUP_ROWS && row + i < m.rows; ++i) {
        const sw_u64 at = (row + i) * m.cols + col;
        ((float *)m.gradient)[at] = verdict == 0 ? value[i] : __uint_as_float(0x7fc00000u);
        if (verdict == SW_REFUSED_LATE && m.memory)
            sw_remember(m, at, 0.0f);
    }
}

SW_INLINE void sw_expand_tile(const sw_matrix_args &m, sw_u64 tile, int verdict)
{
    const sw_u64 across = sw_parts(m.cols, SW_WIDE_COLS), stride = sw_factor_stride(m.cols);
    const sw_u64 row = tile / across * SW_TILE_ROWS, col = tile % across * SW_WIDE_COLS;
    const unsigned cells = SW_WIDE_COLS * SW_TILE_ROWS / SW_GROUP_ROWS;
    for (unsigned t = threadIdx.x; t < cells; t += blockDim.x)
        if (col + t % SW_WIDE_COLS < m.cols)
            sw_expand_column(m, row + t / SW_WIDE_COLS * SW_GROUP_ROWS, col + t % SW_WIDE_COLS,
                             verdict);
    if (verdict == SW_REFUSED_LATE && tile == 0 && m.out)
        for (sw_u64 i = threadIdx.x; i < m.rank * stride; i += blockDim.x)
            ((float *)m.out)[i] = 0.0f;
}

SW_INLINE sw_u64 sw_expand_tiles(const sw_matrix_args &m)
{
    return sw_parts(m.rows, SW_TILE_ROWS) * sw_parts(m.cols, SW_WIDE_COLS);
}

SW_KERNEL sw_expand(const sw_expand_args a)
{
    const int verdict = sw_verdict_of(a.verdict);
    for (sw_u64 at = blockIdx.x;; at += gridDim.x) {
        sw_u64 tile = at;
        const int i = sw_matrix_of<sw_expand_tiles>(a, tile);
        if (i == a.matrix_count)
            return;
        sw_expand_tile(a.matrix[i], tile, verdict);
    }
}
