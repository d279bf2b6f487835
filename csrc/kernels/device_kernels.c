/* device_kernels.c - load and launch the kernels of a device. */
#include "kernels/device_kernels.h"

#include <string.h>

enum { ARGS_BYTES_MAX = 4096 }; /* the limit of every GPU */

#define FITS(noun) _Static_assert(sizeof(sw_##noun##_args) <= ARGS_BYTES_MAX, "too many " #noun)
FITS(pack);
FITS(adam);
FITS(sgd);
FITS(norm);
FITS(quantize);
FITS(decode);
FITS(owe);
FITS(matrices);
FITS(orthonormalize);
FITS(put);

static sw_status find_functions(sw_kernel_set *set, sw_error *err)
{
    for (int k = 0; k < SW_KERNEL_COUNT; ++k)
        SW_TRY(set->device->ops->module_function(
            set->device, set->module, sw_kernel_contracts()[k].name, &set->function[k], err));
    return SW_OK;
}

static sw_status load_found(sw_kernel_set *set, const sw_image_places *places, sw_error *err)
{
    const sw_device_ops *ops = set->device->ops;
    sw_image image;
    set->origin = SW_IMAGE_NONE;
    SW_TRY(sw_image_find(&image, set->device->major, set->device->minor, places, err));
    set->origin = image.origin;
    sw_status status = ops->module_load(set->device, image.data, &set->module, err);
    sw_image_fini(&image);
    SW_TRY(status);
    return find_functions(set, err);
}

/* An image may come from a newer compiler than the driver's, and the driver then refuses it: try
 * again without packaged images, then with one compiled anew. */
static sw_status load(sw_kernel_set *set, const sw_image_places *places, sw_error *err)
{
    sw_image_places others = *places;
    sw_error refused = {0}, last;
    sw_image_origin first = SW_IMAGE_NONE;
    for (;;) {
        if (load_found(set, &others, &last) == SW_OK)
            return SW_OK;
        if (first == SW_IMAGE_NONE) {
            first = set->origin;
            refused = last;
        }
        if (set->origin != SW_IMAGE_PACKAGED && set->origin != SW_IMAGE_CACHED)
            break;
        others.replaces_cached = set->origin == SW_IMAGE_CACHED;
        others.packaged_folder = NULL;
        sw_kernel_set_fini(set);
    }
    if (first != SW_IMAGE_PACKAGED && first != SW_IMAGE_CACHED)
        return sw_error_pass(err, &last);
    return sw_error_set(err, refused.status, refused.detail,
                        "%s image of the kernels: %.200s; without it: %.220s",
                        sw_image_origin_name(first), refused.message, last.message);
}

sw_status sw_kernel_set_init(sw_kernel_set *set, sw_device *device, const sw_image_places *places,
                             sw_error *err)
{
    sw_kernel_set made = {.device = device};
    sw_status status =
        device->kind == SW_DEVICE_CUDA ? load(&made, places, err) : find_functions(&made, err);
    if (status == SW_OK)
        *set = made;
    else
        sw_kernel_set_fini(&made);
    return status;
}

void sw_kernel_set_fini(sw_kernel_set *set)
{
    if (set->module)
        set->device->ops->module_unload(set->device, set->module);
    set->module = NULL;
}

sw_status sw_kernel_launch(const sw_kernel_set *set, sw_kernel kernel, const void *args,
                           sw_stream *stream, sw_error *err)
{
    const sw_kernel_contract *contract = &sw_kernel_contracts()[kernel];
    union {
        unsigned char bytes[ARGS_BYTES_MAX];
        void *pointer; /* gives the union a pointer's alignment */
    } copy;
    SW_TRY(contract->check(args, err));
    memcpy(copy.bytes, args, contract->args_bytes);
    return set->device->ops->launch_async(set->device, set->function[kernel],
                                          contract->grid(args, set->device->processor_count),
                                          copy.bytes, stream, err);
}
