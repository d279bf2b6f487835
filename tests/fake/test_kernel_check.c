/* test_kernel_check.c - the comparison of kernels with their references waits for its device.
 *
 * Law: on simulated GPUs, whose kernels are the references, no case of any kernel differs, for any
 * schedule: a case is compared once all of its arena has come back, and the next one is made after
 * that.
 */
#include <stdlib.h>

#include "gpu_ranks.h"
#include "kernel_cases.h"
#include "kernel_check.h"

enum { CASES = 3 };
static const int64_t TIMEOUT_NS = 2000000000;

static void compare(gpu_rank *self, sw_kernel kernel, bool strict)
{
    size_t step = sw_kernel_case_count(kernel) / CASES;
    sw_kernel_check_config config = {
        .kernel = kernel, .step = step ? step : 1, .strict = strict, .timeout_ns = TIMEOUT_NS};
    sw_kernel_check_result result;
    sw_status status =
        sw_kernel_check(&self->kernels, &config, self->all->stream, &result, &self->err);
    check(status == SW_OK, "kernel %d: %s", (int)kernel, self->err.message);
    check(result.cases >= CASES && result.launches >= result.cases, "kernel %d: %zu cases",
          (int)kernel, result.cases);
    check(result.differences == 0, "kernel %d: %s", (int)kernel, result.sentence[0]);
}

/* The quick form takes the two strictnesses in turn, from kernel to kernel and from schedule to
 * schedule: each kernel has both, and so has each schedule. */
static bool compare_all(gpu_rank *self)
{
    bool is_long = getenv("SW_TEST_LONG") != NULL;
    int policy = *(const int *)self->context;
    sw_status status = gpu_rank_create(self);
    for (int kernel = 0; status == SW_OK && kernel < SW_KERNEL_COUNT; ++kernel)
        for (int strict = 0; strict < 2; ++strict)
            if (is_long || (kernel + policy + strict) % 2 == 0)
                compare(self, (sw_kernel)kernel, strict);
    gpu_rank_close(self);
    return check(status == SW_OK, "%s", self->err.message);
}

int main(int argc, char **argv)
{
    if (!gpu_ranks_init(argc, argv))
        return check_result();
    for (int policy = 0; policy < SIM_POLICY_COUNT; ++policy) {
        gpu_ranks_run(1, (sim_policy)policy, 1, compare_all, &policy);
        gpu_expect_clean("the comparison of kernels");
    }
    return check_result();
}
