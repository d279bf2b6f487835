/* plain_pass.c - read and write the arrays of an optimizer's step with next to no arithmetic, as
 * fast as memory lets one thread. A step cannot be faster than this pass over the same arrays.
 * Built by bench_adamw. */
#include <stddef.h>
#include <stdint.h>

enum { CHUNK = 64, AHEAD = 512 };

static void ask(const float *x)
{
    for (size_t i = 0; i < CHUNK; i += 16)
        __builtin_prefetch(x + AHEAD + i);
}

/* Four arrays read, three written, as Adam does. `copy`, if any, takes half of each parameter's
 * bits. */
void plain_adam(float *p, float *m, float *v, const float *g, uint32_t *copy, size_t numel)
{
    for (size_t at = 0; at + CHUNK <= numel; at += CHUNK) {
        ask(p + at);
        ask(m + at);
        ask(v + at);
        ask(g + at);
        for (size_t i = at; i < at + CHUNK; ++i) {
            float sum = p[i] + m[i] + v[i] + g[i];
            p[i] = sum;
            m[i] = sum;
            v[i] = sum;
        }
        for (size_t i = 0; copy && i < CHUNK / 2; ++i)
            copy[at / 2 + i] = (uint32_t)p[at + i];
    }
}

/* Three arrays read, two written, as SGD with momentum does. */
void plain_sgd(float *p, float *m, const float *g, size_t numel)
{
    for (size_t at = 0; at + CHUNK <= numel; at += CHUNK) {
        ask(p + at);
        ask(m + at);
        ask(g + at);
        for (size_t i = at; i < at + CHUNK; ++i) {
            float sum = p[i] + m[i] + g[i];
            p[i] = sum;
            m[i] = sum;
        }
    }
}
