/* powersgd.c - the passes of PowerSGD over the host's kernels; see powersgd.h. */
#include "compress/powersgd.h"

#include <string.h>

#include "kernels/compress_kernels.h"
#include "kernels/kernels.h"

size_t sw_powersgd_stride(size_t count)
{
    return sw_lowrank_stride(count);
}

sw_status sw_powersgd_check(const sw_powersgd *m, sw_error *err)
{
    size_t most = m->rows < m->cols ? m->rows : m->cols;
    most = most < SW_LOWRANK_RANK_MAX ? most : SW_LOWRANK_RANK_MAX;
    if (m->rank < 1 || m->rank > most)
        SW_FAIL(err, SW_E_INVALID,
                "powersgd: rank of a matrix of %zu x %zu must be in [1, %zu], not %zu", m->rows,
                m->cols, most, m->rank);
    if (m->memory_dtype != SW_DTYPE_FLOAT32 && m->memory_dtype != SW_DTYPE_BFLOAT16)
        SW_FAIL(err, SW_E_INVALID, "powersgd: memory must be float32 or bfloat16, not %s",
                sw_dtype_name(m->memory_dtype));
    return SW_OK;
}

static sw_lowrank kernel_view(const sw_powersgd *m)
{
    return (sw_lowrank){.gradient = m->gradient,
                        .memory = m->memory,
                        .left = m->left,
                        .right = m->right,
                        .rows = m->rows,
                        .cols = m->cols,
                        .rank = m->rank,
                        .memory_dtype = m->memory_dtype};
}

void sw_powersgd_orthonormalize(float *factor, size_t count, size_t rank, uint64_t seed)
{
    sw_kernels()->compress->lowrank_orthonormalize(factor, count, rank, seed);
}

void sw_powersgd_init_basis(const sw_powersgd *m)
{
    memset(m->basis, 0, m->rank * sw_lowrank_stride(m->cols) * sizeof *m->basis);
    sw_powersgd_orthonormalize(m->basis, m->cols, m->rank, m->seed); /* replaces the zeros */
}

void sw_powersgd_project(const sw_powersgd *m, float *p)
{
    const sw_lowrank view = kernel_view(m);
    sw_kernels()->compress->lowrank_project(&view, m->basis, p);
}

void sw_powersgd_absorb(const sw_powersgd *m, float *p, float *q)
{
    const sw_lowrank view = kernel_view(m);
    sw_powersgd_orthonormalize(p, m->rows, m->rank, m->seed + 1);
    sw_kernels()->compress->lowrank_absorb(&view, p, q);
    memcpy(m->left, p, m->rank * sw_lowrank_stride(m->rows) * sizeof *p);
    memcpy(m->right, q, m->rank * sw_lowrank_stride(m->cols) * sizeof *q);
}

void sw_powersgd_decompress(const sw_powersgd *m, const float *q)
{
    sw_kernels()->compress->lowrank_expand(m->gradient, m->left, q, m->rows, m->cols, m->rank);
    memcpy(m->basis, q, m->rank * sw_lowrank_stride(m->cols) * sizeof *q);
    sw_powersgd_orthonormalize(m->basis, m->cols, m->rank, m->seed);
}

bool sw_powersgd_is_finite(const float *values, size_t numel)
{
    unsigned most = 0;
    for (size_t i = 0; i < numel; ++i) {
        unsigned bits;
        memcpy(&bits, values + i, sizeof bits);
        bits &= 0x7fffffffu;
        most = bits > most ? bits : most;
    }
    return most < 0x7f800000u;
}
