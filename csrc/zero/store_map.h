/* store_map.h - where parameters, their slices and their casts lie in the parts of a store, and
 * which ranks own and share them. Arithmetic only.
 *
 * A part has buckets, each whole or this rank's slice of it, then casts in the same order, then two
 * sets of one outcome a rank.
 *
 * Thread rule: any, once made.
 */
#pragma once

#include "comm/comm.h"
#include "tensor/layout.h"

typedef enum sw_store_form { SW_STORE_PRIVATE, SW_STORE_SHARED, SW_STORE_UNITS } sw_store_form;

typedef struct sw_store_unit {
    const char *name;      /* borrowed: copied */
    const size_t *members; /* borrowed: the parameters that it releases */
    size_t count;
    bool stays; /* its pages are not given back between uses */
} sw_store_unit;

typedef struct sw_store_options {
    sw_store_form form;
    const sw_slices *slices;    /* copied; NULL: rank r owns slice r */
    const int *host_of;         /* copied: the host of each rank */
    const sw_dtype *narrow;     /* copied: each parameter's cast, or SW_DTYPE_COUNT for none */
    const sw_store_unit *units; /* UNITS only; the first is the outermost */
    size_t unit_count;
    bool coded;         /* UNITS inside one host only: gather() decodes records */
    const char *folder; /* borrowed; UNITS only: parts lie in a file of this folder. NULL: memory */
    const char *label;  /* copied; equal on all ranks */
} sw_store_options;

enum { SW_STORE_NARROW_BYTES = 2 }; /* of an element of a cast */

typedef struct sw_store_map {
    sw_store_form form;
    size_t world_size, rank;
    sw_layout layout; /* owned copies of the places and buckets; no order */
    /* One table, owned by slice_of: of each rank its slice, replica and host; of each slice its
     * owner in this rank's replica; the ranks that share this host's copy. */
    int *slice_of, *replica_of, *host_of, *owner, *beside;
    size_t slice_count, beside_count, place; /* place: of this rank among them */
    int home, outcome_home; /* the ranks whose parts have the buckets and the outcomes */
    bool is_replicated, has_whole, is_apart, is_one_host, has_casts;
    sw_dtype *narrow;       /* owned; SW_DTYPE_COUNT: no cast */
    bool *stepped;          /* owned; by bucket: it trains, or has trained */
    size_t *at, *narrow_at; /* owned; by bucket: its first byte, and its casts'. SIZE_MAX: none */
    size_t bucket_bytes, part_bytes, size_bytes; /* before the casts, before the outcomes, all */
} sw_store_map;

SW_MUST_USE sw_status sw_store_map_init(sw_store_map *map, int rank, int world_size,
                                        const sw_layout *layout, const sw_store_options *options,
                                        sw_error *err);
void sw_store_map_fini(sw_store_map *map);

/* Return true if this rank writes first values: into memory of its own, or into the host's copy. */
bool sw_store_is_home(const sw_store_map *map);
/* Return true if ranks share whole buckets. */
bool sw_store_has_one_copy(const sw_store_map *map);
/* Return true for a parameter that is whole in units alone: each slice has a chunk of its rows. */
bool sw_store_is_by_rows(const sw_store_map *map, size_t index);
bool sw_store_is_stepped(const sw_store_map *map, size_t index);
bool sw_store_is_narrowed(const sw_store_map *map, size_t index);
/* The dtype of a parameter, or of its cast if it has one. */
sw_dtype sw_store_dtype(const sw_store_map *map, size_t index, bool narrow);
size_t sw_store_item_bytes(const sw_store_map *map, size_t bucket, bool narrow);
size_t sw_store_width(const sw_store_map *map, size_t bucket);        /* elements of a slice */
size_t sw_store_bucket_bytes(const sw_store_map *map, size_t bucket); /* of all of it */

/* The elements of a parameter in one slice, and where they lie. */
typedef struct sw_store_source {
    sw_layout_run run;
    int part; /* the rank whose part has them */
    size_t offset_bytes, item_bytes;
} sw_store_source;
sw_store_source sw_store_source_of(const sw_store_map *map, size_t index, size_t slice,
                                   bool narrow);
/* Where the whole parameter begins in the one copy of its bucket; not by rows. */
size_t sw_store_copy_bytes(const sw_store_map *map, size_t index, bool narrow);
