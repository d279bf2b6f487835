/* reference_kernels.c - the engine's host kernels and references for simulations that Python runs,
 * linked with the objects of the build, whose symbols are hidden. */
#include "kernel_references.h"
#include "kernels/kernel_image.h"
#include "sim.h"

SIM_API const sw_kernel_reference *sim_kernel_references(void);
SIM_API int sim_kernel_count(void);
SIM_API unsigned long long sim_image_hash(void);

const sw_kernel_reference *sim_kernel_references(void)
{
    return sw_kernel_references();
}

int sim_kernel_count(void)
{
    return SW_KERNEL_COUNT;
}

unsigned long long sim_image_hash(void)
{
    return sw_image_hash();
}
