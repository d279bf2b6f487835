/* device_home.c - see the header. */
#include "zero/device_home.h"

#include <string.h>

sw_status sw_device_home_init(sw_device_home *home, sw_device_comm *comm, size_t size_bytes,
                              sw_error *err)
{
    const sw_device_ops *ops = comm->device->ops;
    *home = (sw_device_home){.comm = comm};
    SW_TRY(ops->event_create(comm->device, &home->left, err));
    SW_TRY(ops->pinned_alloc(comm->device, size_bytes, &home->memory, err));
    memset(home->memory, 0, size_bytes);
    return SW_OK;
}

void sw_device_home_fini(sw_device_home *home, sw_stream *user)
{
    sw_device *device = home->comm->device;
    if (home->memory && device->ops->event_record(device, home->left, user, NULL) == SW_OK)
        sw_device_comm_await(home->comm, home->left, "the last use of parameters in host memory");
    device->ops->pinned_free(device, home->memory);
    device->ops->event_destroy(device, home->left);
}
