/* star_messages.h - declarations private to the two files of the star: star.c has the part of every
 * rank, star_first.c the first rank's loop. Thread rule: as star.h. */
#ifndef SW_COMM_STAR_MESSAGES_H
#define SW_COMM_STAR_MESSAGES_H

#include "comm/star.h"
#include "comm/wait.h"

static const char SW_STAR_JOINING[] = "joining the ranks of this host";

typedef struct sw_star_answer_message { /* to a gift */
    uint32_t serial;
    int32_t status; /* sw_status: SW_OK if it was taken */
    char message[400];
} sw_star_answer_message;

/* A wait that ten times a second checks the clock, the program's signals and the linked peers. */
typedef struct sw_star_wait {
    const sw_star *star;
    sw_wait wait;
    int64_t looked_ns;
} sw_star_wait;

sw_star_wait sw_star_wait_begin(const sw_star *star, void *context,
                                void (*describe)(void *context, sw_wait_text *text));
/* *is_due: true if it checked. An interrupted wait ends the communicator. */
SW_MUST_USE sw_status sw_star_look(sw_star_wait *wait, bool *is_due, sw_error *err);

/* Return why a linked rank closed its connection; prefer a recorded reason. */
sw_status sw_star_name_lost(const sw_star *star, int rank, const char *label, sw_error *err);

#endif
