/* kernel_args.h - the one parameter of each device kernel: C for the host, CUDA for the device.
 *
 * The C compiler compiles this file, and it is the first part of the text that NVRTC compiles
 * (kernel_source.c), so both sides share one declaration. It therefore includes nothing and uses
 * only types that both compilers have. Kernels take these structures by value: device memory holds
 * the data alone. device_kernels.h says what each kernel does, reads and writes.
 *
 * The numbers of sw_dtype and sw_redop are repeated here; kernel_contracts.c asserts that they
 * agree. Thread rule: any.
 */
#ifndef SW_KERNELS_KERNEL_ARGS_H
#define SW_KERNELS_KERNEL_ARGS_H

typedef unsigned long long sw_u64;

enum {
    SW_ARG_FLOAT32 = 0,
    SW_ARG_FLOAT64,
    SW_ARG_FLOAT16,
    SW_ARG_BFLOAT16,
    SW_ARG_INT8,
    SW_ARG_UINT8,
    SW_ARG_INT16,
    SW_ARG_INT32,
    SW_ARG_INT64,
    SW_ARG_COMPLEX64,
    SW_ARG_COMPLEX128,

    SW_ARG_SUM = 0,
    SW_ARG_MEAN,
    SW_ARG_MIN,
    SW_ARG_MAX,

    SW_ARG_DIGIT_COUNT = 136, /* digits of sw_norm_sum; then infinite, nan, additions */
    SW_ARG_LOWEST_EXPONENT = -2176,

    SW_PACK_SEGMENT_MAX = 64,
    SW_RUNS_MAX = 48,
    SW_NORM_PARTS_MAX = 250,
    SW_BLOCK_PARTS_MAX = 100,
    SW_MATRICES_MAX = 46,
    SW_FACTORS_MAX = 64,
    SW_PUT_BYTES_MAX = 4080,

    SW_REFUSED = 1,      /* verdict: the round is refused and no state has changed */
    SW_REFUSED_LATE = 2, /* verdict: the round is refused after its state has changed */
};

typedef struct sw_cast_args {
    void *to;
    const void *from;
    sw_u64 numel;
    float scale;
    int to_dtype, from_dtype;
} sw_cast_args;

typedef struct sw_pack_segment {
    void *to;           /* with `converts` it may be `from` if the dtypes are equal */
    const void *from;   /* NULL: zeros */
    sw_u64 size_bytes;  /* size of `from`, without gaps between pieces */
    sw_u64 piece_count; /* 0: one range. Else it is piece_count pieces of piece_bytes, the last one
                         * perhaps shorter; piece k lies k * from_pitch after `from`, and is
                         * written k * to_pitch after `to` */
    sw_u64 piece_bytes, to_pitch, from_pitch;
} sw_pack_segment;

typedef struct sw_pack_args {
    sw_pack_segment segment[SW_PACK_SEGMENT_MAX];
    const void *verdict; /* int32: the kernel does nothing unless it is 0; or NULL */
    const void *factor;  /* float32, in place of `scale`; or NULL */
    float scale;
    int converts; /* 0: bytes are copied, and dtypes, scale and factor are unread */
    int to_dtype, from_dtype;
    int segment_count;
} sw_pack_args;

typedef struct sw_fold_args {
    void *to;           /* may be `own`, unless the fold widens */
    const void *own;    /* contribution `own_index` */
    const void *rest;   /* contribution k lies at rest + k * stride_bytes; own_index is not read */
    const void *addend; /* added to each contribution first, in the dtype; may be `to`, or NULL */
    sw_u64 numel, stride_bytes;
    double scale; /* the factor of SW_REDOP_MEAN */
    int dtype, op, own_index, source_count;
    int widens; /* `to` gets the sums as they are added: float32 for 16-bit dtypes */
} sw_fold_args;

typedef struct sw_run_args { /* sw_optim_run */
    void *p, *m, *v, *v_max;
    const void *g;
    void *copy;
    sw_u64 numel;
    int p_dtype, state_dtype, g_dtype, copy_dtype;
} sw_run_args;

typedef struct sw_adam_args {
    sw_run_args run[SW_RUNS_MAX];
    const void *clip; /* float32: multiplies gradients, which are written back; or NULL */
    float factor, decay, l2, lerp, beta2, square, correction, eps, negative_step;
    int amsgrad, run_count;
} sw_adam_args;

typedef struct sw_sgd_args {
    sw_run_args run[SW_RUNS_MAX];
    const void *clip; /* as in sw_adam_args */
    float factor, l2, momentum, undampening, negative_lr;
    int nesterov, first, run_count;
} sw_sgd_args;

typedef struct sw_norm_part {
    const void *data;
    sw_u64 numel;
} sw_norm_part;

typedef struct sw_norm_args {
    sw_norm_part part[SW_NORM_PARTS_MAX];
    void *sum; /* sw_norm_sum */
    int dtype, part_count;
} sw_norm_args;

typedef struct sw_clip_args {
    void *sum;       /* sw_norm_sum */
    void *norm;      /* float32; NULL: the sum is carried, and nothing else is done */
    void *factor;    /* float32 */
    double max_norm; /* at least 0 */
} sw_clip_args;

/* Elements of contiguous arrays and their contiguous records. */
typedef struct sw_quantize_part {
    void *records;
    const void *source, *error; /* float32; source NULL: zeros; error may be NULL */
    sw_u64 numel;
} sw_quantize_part;

typedef struct sw_quantize_args {
    sw_quantize_part part[SW_BLOCK_PARTS_MAX];
    sw_u64 block;
    int bits, part_count;
} sw_quantize_args;

typedef struct sw_fold_records_args {
    void *to;           /* records; not one of the contributions */
    const void *own;    /* contribution `own_index` */
    const void *others; /* contribution k lies at others + k * stride_bytes; own_index is unread */
    void *residual;     /* count * block float32; or NULL */
    sw_u64 count, block, stride_bytes; /* records; elements of a record */
    float scale;
    int bits, own_index, source_count;
} sw_fold_records_args;

/* Elements as in sw_quantize_part. */
typedef struct sw_decode_part {
    void *values;        /* float32 */
    void *error;         /* float32; or NULL */
    const void *records; /* NULL: values are not written */
    const void *own;     /* with an error: the records that QUANTIZE made of values and error */
    sw_u64 numel;
} sw_decode_part;

typedef struct sw_decode_args {
    sw_decode_part part[SW_BLOCK_PARTS_MAX];
    const void *verdict; /* int32: errors are written only if it is 0; or NULL */
    sw_u64 block;
    int bits, part_count;
} sw_decode_args;

typedef struct sw_verdict_args {
    void *verdict; /* int32 */
    const void *records;
    sw_u64 count, block; /* records; elements of a record */
    int bits;
} sw_verdict_args;

typedef struct sw_owe_part {
    void *error;      /* float32 */
    const void *rest; /* float32 */
    sw_u64 numel;
} sw_owe_part;

typedef struct sw_owe_args {
    sw_owe_part part[SW_BLOCK_PARTS_MAX];
    const void *verdict; /* int32: the kernel does nothing unless it is 0 */
    float scale;
    int part_count;
} sw_owe_args;

/* One matrix of compress_kernels.h's sw_lowrank, float32 except for the memory. */
typedef struct sw_matrix_args {
    void *gradient;            /* rows x cols */
    void *memory;              /* rows x cols of memory_dtype; or NULL */
    const void *left;          /* rank x rows */
    const void *right, *basis; /* rank x cols */
    void *out, *copy;          /* factors, by kernel */
    sw_u64 rows, cols, rank;
    int memory_dtype; /* float32 or bfloat16 */
} sw_matrix_args;

typedef struct sw_matrices_args {
    sw_matrix_args matrix[SW_MATRICES_MAX];
    const void *verdict; /* int32; NULL stands for 0 */
    int matrix_count;
} sw_matrices_args;

typedef sw_matrices_args sw_project_args, sw_absorb_args, sw_expand_args;

typedef struct sw_factor_args {
    void *to;         /* rank x count, float32; may be `from` */
    const void *from; /* rank x count, float32 */
    sw_u64 count, rank, seed;
} sw_factor_args;

typedef struct sw_orthonormalize_args {
    sw_factor_args factor[SW_FACTORS_MAX];
    const void *verdict; /* int32: the kernel does nothing unless it is 0; or NULL */
    int factor_count;
} sw_orthonormalize_args;

typedef struct sw_finite_args {
    void *verdict;      /* int32 */
    const void *values; /* float32 */
    sw_u64 numel;
    int refusal; /* the new verdict */
} sw_finite_args;

typedef struct sw_put_args {
    void *to;
    int size_bytes;
    unsigned char byte[SW_PUT_BYTES_MAX];
} sw_put_args;

#endif
