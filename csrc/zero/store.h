/* store.h - where each parameter of a module lies on a host, and which rank owns which elements.
 *
 * Parameters lie in buckets, as their gradients do (tensor/layout.h), so that an optimizer steps on
 * a slice of parameters with the same slice of gradients. A form says what memory holds them:
 *
 *     PRIVATE  each rank has every bucket; publish gathers the slices that ranks have updated
 *     SHARED   a host (or a replica on it) has one copy of every bucket; publish is a barrier, and
 *              brings the slices of other hosts
 *     UNITS    each rank has its slice of every bucket, in memory that the host's ranks map, or,
 *              with ranks of a replica on several hosts, a host has one copy of every bucket. A
 *              unit (zero/unit.h) is whole only from gather to release
 *
 * The parts of UNITS may have their home on a disk, in one nameless file a host. Gathers then read
 * the file, and the next unit in the order of the last step ahead; publish writes it back.
 *
 * A parameter may also have a *cast*: the same elements in a 16-bit dtype, with which modules
 * compute. With records, slices also exist as 8-bit integers, from which units are gathered.
 *
 * Left out: when a unit is gathered, names, `parameter.data` (Python); parameters that stay in
 * memory of their own. docs/design/store.md has the idea.
 *
 * Thread rule: one at a time; collective calls as for the communicator.
 */
#pragma once

#include "zero/store_map.h"
#include "zero/store_plan.h"

typedef struct sw_store sw_store;

/* Create the memory, and populate what this rank writes first; slices as they are first handed out
 * or written, so that a load clears pages while the disk reads. Collective. `layout` is copied,
 * `comm` borrowed. SW_E_MEMORY on all ranks if there is no memory that ranks map; PRIVATE then
 * takes private pages, and sw_store_reason() says why. SW_E_INVALID for a unit with a member that
 * does not exist, a cast of a dtype that is not wider than 16 bits, or a folder in another form.
 * SW_E_OS, alike on all ranks: there is no place for the file. */
SW_MUST_USE sw_status sw_store_create(sw_comm *comm, const sw_layout *layout,
                                      const sw_store_options *options, sw_store **store,
                                      sw_error *err);
/* No pointer into its memory may be left. */
void sw_store_destroy(sw_store *store);

/* What it is. */
const sw_store_map *sw_store_get_map(const sw_store *store);
const char *sw_store_reason(const sw_store *store); /* "": slices are gathered */
/* The file of this host's parts; NULL: they lie in memory. */
const struct sw_file_memory *sw_store_file(const sw_store *store);
size_t sw_store_bytes_held(const sw_store *store); /* of parameters, on this rank or this host */
/* The memory of whole parameters that other processes map: bytes, and of those the buckets'. */
uint8_t *sw_store_mapped(const sw_store *store, size_t *size_bytes, size_t *bucket_bytes);
sw_units *sw_store_units(const sw_store *store);               /* NULL: another form */
const sw_store_plan *sw_store_get_plan(const sw_store *store); /* sizes of units */

/* sw_unit_gather. A file that cannot be read ends the communicator: the others would wait for this
 * rank's gradients. SW_E_COMM then. */
SW_MUST_USE sw_status sw_store_gather(sw_store *store, size_t unit, sw_unit_source source,
                                      sw_error *err);

/* Elements of one parameter. */
typedef struct sw_store_run {
    uint8_t *address; /* NULL: no elements, or none here */
    size_t begin, end;
    sw_dtype dtype;
} sw_store_run;

/* Where all of a parameter lies: in its bucket, or in its unit's pages, which are NaN while it is
 * released. `narrow`: its cast, or its place in the compute form. */
sw_store_run sw_store_whole(const sw_store *store, size_t index, bool narrow);
/* Where the elements of a slice lie, of this rank's replica. */
sw_store_run sw_store_slice(const sw_store *store, size_t index, size_t slice, bool narrow);
/* The elements of which this rank writes new values (a load): its own slice, or its part of the
 * host's copy, which the host's ranks divide, by rows in slices. Returns the number of pieces, at
 * most one a slice. */
size_t sw_store_pieces(const sw_store *store, size_t index, sw_store_run *piece);

typedef enum sw_store_share {
    SW_STORE_OWN,  /* this rank's slice */
    SW_STORE_MINE, /* the same; of the host's one copy its first rank writes all */
    SW_STORE_ALL,
} sw_store_share;

/* Copy all elements of a parameter, in memory order, from slices to `flat`, or a share of them
 * back. No rank may write them meanwhile. SW_E_OS: a file could not be read. */
SW_MUST_USE sw_status sw_store_read(const sw_store *store, size_t index, void *flat, sw_error *err);
void sw_store_write(const sw_store *store, size_t index, const void *flat, sw_store_share share);

/* A parameter trains from now on: a step includes its bucket. */
void sw_store_adopt(sw_store *store, size_t index);

typedef struct sw_store_update {
    bool failed, tells; /* this rank's outcome, if it is to travel */
    bool foreign;       /* ranks may have updated any slice of the host */
    bool all;           /* slices of frozen parameters too */
    uint8_t *outcomes;  /* out: world_size bytes */
    bool told;          /* out: they have every rank's outcome */
} sw_store_update;

/* Make slices that every rank has updated visible to all, with casts and records of them.
 * Collective. Units are released before, and gathered anew after it. Cost: PRIVATE, each rank
 * writes its slices world_size - 1 times; else one barrier (two with records, with casts over hosts
 * or of foreign updates); over hosts, slices once a host. */
SW_MUST_USE sw_status sw_store_publish(sw_store *store, sw_store_update *update, sw_error *err);
/* Refresh casts of a shared copy (`all`: of frozen parameters too), while no rank computes with
 * them. Collective; nothing without casts. */
SW_MUST_USE sw_status sw_store_cast(sw_store *store, bool all, sw_error *err);
/* Refresh casts and records of the slices that sw_store_write(MINE) wrote. Not collective. */
void sw_store_derive(sw_store *store);
/* With a home in a file: begin to write this rank's part back, and let its pages go from this
 * process. SW_E_OS: the disk refused some. */
SW_MUST_USE sw_status sw_store_settle(sw_store *store, sw_error *err);
