/* gpu_ranks.h - ranks as threads, each with a simulated GPU. See gpu_ranks.c. */
#ifndef SW_TEST_GPU_RANKS_H
#define SW_TEST_GPU_RANKS_H

#include "check.h"
#include "comm/device_comm.h"
#include "device/device.h"
#include "kernels/device_kernels.h"
#include "sim.h"

enum { GPU_RANKS_MAX = SIM_DEVICE_MAX };

typedef struct gpu_rank {
    int rank, world_size;
    const char *cuda, *nccl; /* paths of the fakes */
    const sim_controls *sim;
    sw_nccl_id id;
    uint8_t **part; /* of the slots of this run; NULL: NCCL */
    sw_device_comm *all; /* made by gpu_rank_open; the next three are its own */
    sw_device *device;
    sw_kernel_set kernels;
    sw_peers *comm;
    sw_error err;
    void *context;
} gpu_rank;

/* What ranks reach one another through from the next run on: NCCL, unless slot_bytes is not 0. */
typedef struct gpu_slots {
    size_t slot_bytes;
    sw_slot_place place;
} gpu_slots;
extern gpu_slots gpu_ranks_slots;

/* The libraries are the program's arguments 1 and 2, a folder of its own is 3: an image of the
 * kernels is put there, whose bytes the fake driver takes for granted. */
bool gpu_ranks_init(int argc, char **argv);
extern const sim_controls *gpu_sim;
extern const char *gpu_cuda_library, *gpu_nccl_library, *gpu_folder;

/* Runs `body` on world_size threads; the simulation is reset before. False if a thread said so. */
bool gpu_ranks_run(int world_size, sim_policy policy, uint64_t seed, bool (*body)(gpu_rank *self),
                   void *context);

/* Device and kernels; what was made before a failure is left for gpu_rank_close. */
SW_MUST_USE sw_status gpu_rank_create(gpu_rank *self);
/* And a communicator. */
SW_MUST_USE sw_status gpu_rank_open(gpu_rank *self, int64_t timeout_ns);
void gpu_rank_close(gpu_rank *self);

/* One rank, so that nobody waits for it, again and again: each counted call fails once, and each
 * time `attempt(nth, context)` is to fail, with a sentence in `message`, and to leave nothing. */
void gpu_check_failing_calls(bool (*attempt)(long nth, void *context), void *context,
                             const char *message);

/* The same of rank 0 of three, which ends its communicator then, as the caller of a failing call
 * does: every `stride`-th call fails. What the others say, if they fail, is in messages[1] and [2];
 * their call or their deadline ends them. */
void gpu_check_failing_rank(bool (*attempt)(long nth, void *context), void *context,
                            char (*messages)[SW_ERROR_MESSAGE_BYTES], const bool *failed,
                            long stride);

/* Expects no report, and nothing left allocated. */
void gpu_expect_clean(const char *what);
/* Expects a report that holds `kind`, and, if asked for, two call sites (addr2line must exist). */
void gpu_expect_report(const char *kind, bool both_sites);

#endif
