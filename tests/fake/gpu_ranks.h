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
    uint8_t **part; /* parts of the slots of this run; NULL: NCCL */
    sw_device_comm *all; /* made by gpu_rank_open; owns the next three */
    sw_device *device;
    sw_kernel_set kernels;
    sw_peers *comm;
    sw_error err;
    void *context;
} gpu_rank;

/* The transport of the next runs: slots, or NCCL if slot_bytes is 0. */
typedef struct gpu_slots {
    size_t slot_bytes;
    sw_slot_place place;
} gpu_slots;
extern gpu_slots gpu_ranks_slots;

/* Read the program's arguments: 1 and 2 are the libraries, 3 is a private folder. An image of the
 * kernels is written there; the fake driver does not look at its bytes. */
bool gpu_ranks_init(int argc, char **argv);
extern const sim_controls *gpu_sim;
extern const char *gpu_cuda_library, *gpu_nccl_library, *gpu_folder;

/* Reset the simulation and run `body` on world_size threads. Return false if a thread did. */
bool gpu_ranks_run(int world_size, sim_policy policy, uint64_t seed, bool (*body)(gpu_rank *self),
                   void *context);

/* Create device and kernels; after a failure, gpu_rank_close releases the rest. */
SW_MUST_USE sw_status gpu_rank_create(gpu_rank *self);
/* Create device, kernels and communicator. */
SW_MUST_USE sw_status gpu_rank_open(gpu_rank *self, int64_t timeout_ns);
void gpu_rank_close(gpu_rank *self);

/* Run one rank, for which no peer waits, again and again. Each counted call fails once; then
 * `attempt(nth, context)` must fail, with a sentence in `message`, and leave nothing. */
void gpu_check_failing_calls(bool (*attempt)(long nth, void *context), void *context,
                             const char *message);

/* Let every `stride`-th call of rank 0 of three fail. Rank 0 then ends its communicator, as the
 * caller of a failing call does. Its call or its deadline ends each other rank, which has its
 * error, if any, in messages[1] and [2]. */
void gpu_check_failing_rank(bool (*attempt)(long nth, void *context), void *context,
                            char (*messages)[SW_ERROR_MESSAGE_BYTES], const bool *failed,
                            long stride);

/* Expect no report, and nothing left allocated. */
void gpu_expect_clean(const char *subject);
/* Expect a report that contains `kind`, and, if asked for, two call sites (needs addr2line). */
void gpu_expect_report(const char *kind, bool both_sites);

#endif
